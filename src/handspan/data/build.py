"""From users' arrays to one flat store: clients, their splits, the scaling of features.

``from_clients`` takes one entry per client, ``from_arrays`` all rows and whose they are. Both check
what they get, split every client by its own key and scale features by the training rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.data import inputs, transform
from handspan.data.entries import join_entries
from handspan.data.inputs import ClientIds, Where
from handspan.data.split import Split, split_rows
from handspan.data.storage import collect, open_saved, save
from handspan.data.transform import apply_transform

__all__ = ["apply_transform", "from_arrays", "from_clients", "open_saved", "save"]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The settings of ``from_arrays``, handed on as one."""

    seed: int
    names: Sequence[str]
    test_fraction: float
    validation_fraction: float
    task: str
    standardize: bool | str
    dtype: Any
    max_memory: int | None
    scratch: str | os.PathLike[str] | None
    kind: str = "auto"
    divide: float | None = None
    num_classes: int | None = None
    is_test: Any = None
    held_out: np.ndarray | None = None


def from_clients(
    clients: Sequence[Any],
    *,
    side: Any = None,
    seed: int = 0,
    names: Sequence[str] = (),
    test_fraction: float = 0.25,
    validation_fraction: float = 0.2,
    task: str = "auto",
    standardize: bool | str = "auto",
    dtype: Any = None,
    max_memory: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    kind: str = "auto",
    num_classes: int | None = None,
) -> FederatedData:
    """Build a federation from one entry per client.

    Parameters
    ----------
    clients
        For each client ``(x, y)``, ``(x, None)`` or a ``torch`` Dataset of such rows; x may be a
        scipy CSR matrix.
    names
        Names of the clients, for tables and messages.
    side, seed, test_fraction, validation_fraction, task, standardize, dtype, max_memory, scratch
        As in ``from_arrays``.
    kind, num_classes
        As in ``from_arrays``.

    Examples
    --------
    >>> data = from_clients([([[0.0], [1.0]], [0, 1]), ([[2.0], [3.0]], [1, 1])])
    >>> data.num_train.tolist(), data.num_classes
    ([1, 1], 2)
    """
    x, y, sizes = join_entries(clients, max_memory=max_memory, scratch=scratch)
    options = _Options(
        seed=seed,
        names=names,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        task=task,
        standardize=standardize,
        dtype=dtype,
        max_memory=max_memory,
        scratch=scratch,
        kind=kind,
        num_classes=num_classes,
    )
    ends = np.cumsum(sizes)

    def where(row: int) -> str:
        client = int(np.searchsorted(ends, row, side="right"))
        return f"row {row - int(ends[client] - sizes[client])} of client {client}"

    numbers = np.arange(len(sizes))
    ids = ClientIds(codes=np.repeat(numbers.astype(np.int32), sizes), keys=numbers)
    return _build(x, y, ids, side, options, where)


def from_arrays(
    x: Any,
    y: Any = None,
    *,
    groups: Iterable[Any],
    side: Any = None,
    seed: int = 0,
    names: Sequence[str] = (),
    is_test: Any = None,
    test_fraction: float = 0.25,
    validation_fraction: float = 0.2,
    task: str = "auto",
    standardize: bool | str = "auto",
    kind: str = "auto",
    divide: float | None = None,
    num_classes: int | None = None,
    dtype: Any = None,
    max_memory: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    held_out: np.ndarray | None = None,
) -> FederatedData:
    """Build a federation from all rows at once and a client id for each.

    Parameters
    ----------
    x, y
        Rows (NumPy, torch, memory-mapped, or scipy CSR) and labels: whole numbers are classes,
        floating point numbers are targets of regression, None means a matrix problem.
    groups
        Client id of every row; clients stand in the sorted order of their ids.
    side
        Side information: one row per client, or one per data row, constant within a client.
    seed
        A client's split is drawn from the seed and its id, whoever the other clients are.
    names
        Names of the clients in sorted order; the ids themselves by default.
    is_test
        Marks the source's own test rows, to keep that split.
    test_fraction, validation_fraction
        Part of a client's rows for test, and of the rest for validation.
    task
        ``auto``, ``classification``, ``regression`` or ``matrix`` (labels are dropped).
    standardize
        ``auto`` (images and tables, never counts nor tokens), True or False.
    kind
        ``auto``, ``image``, ``table``, ``counts`` or ``tokens``.
    divide
        Largest value of an image; 255 for bytes.
    num_classes
        Number of classes, where labels need not show all of them.
    dtype
        ``float32`` or ``float64``; by default float64 features stay so.
    max_memory, scratch
        Dense rows that take more bytes (half of the machine's memory by default) are kept in a
        memory-mapped file in this folder (a temporary one by default).
    held_out
        Marks clients (in sorted order) whose rows are not looked at when features are scaled.

    Examples
    --------
    >>> data = from_arrays([[0.5], [1.0], [2.0], [3.0]], [0, 1, 1, 0], groups=["b", "b", "a", "a"])
    >>> data.names, data.num_test.tolist()
    (('a', 'b'), [1, 1])
    """
    options = _Options(
        seed=seed,
        names=names,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        task=task,
        standardize=standardize,
        dtype=dtype,
        max_memory=max_memory,
        scratch=scratch,
        kind=kind,
        divide=divide,
        num_classes=num_classes,
        is_test=is_test,
        held_out=held_out,
    )
    rows = inputs.as_rows(x)
    ids = inputs.encode_ids(groups, rows.shape[0])
    return _build(rows, y, ids, side, options, inputs.plain_row)


def _build(
    x: Any, y: Any, ids: ClientIds, side: Any, options: _Options, where: Where
) -> FederatedData:
    inputs.check_finite(x, "x", where)
    num_rows = x.shape[0]
    labels, num_classes = inputs.as_labels(y, num_rows, options.task, options.num_classes, where)
    is_regression = labels is not None and num_classes is None
    kind, has_labels = options.kind, labels is not None
    if kind == "auto":
        kind = transform.kind_of(x, has_labels=has_labels, is_regression=is_regression)
    x = x.reshape(-1, 1) if x.ndim == 1 and kind != "tokens" else x
    split = split_rows(
        ids,
        seed=options.seed,
        test_fraction=options.test_fraction,
        validation_fraction=options.validation_fraction,
        is_test=_test_mask(options.is_test, num_rows),
    )
    real = transform.float_name(x, options.dtype)
    counted = None if options.held_out is None else ~options.held_out
    fitted = split.order[split.is_train(counted)]
    scaling = transform.fit(
        x, fitted, kind=kind, divide=options.divide, standardize=options.standardize, dtype=real
    )
    if labels is not None:
        labels = labels[split.order].astype(real if is_regression else np.int64, copy=False)
    return FederatedData(
        x=_arrange(x, split, scaling, options),
        y=None if labels is None else torch.from_numpy(labels),
        offsets=torch.from_numpy(split.offsets),
        num_train=torch.from_numpy(split.num_train),
        num_validation=torch.from_numpy(split.num_validation),
        num_test=torch.from_numpy(split.num_test),
        side=None if side is None else torch.from_numpy(inputs.as_side(side, ids, real)),
        num_classes=num_classes,
        names=_names(options.names, ids),
        info={"seed": options.seed, "transform": scaling, "remarks": list(split.remarks)},
    )


def _arrange(x: Any, split: Split, scaling: dict[str, Any], options: _Options) -> Any:
    """Bring rows into the order of the split, scaled, in memory or on disk."""
    if inputs.is_sparse(x):
        return transform.to_csr(x[split.order], scaling["dtype"])

    def pieces() -> Iterator[np.ndarray]:
        for start, stop in inputs.chunks(x):
            yield transform.transform_rows(scaling, x[split.order[start:stop]])

    rows = collect(
        pieces(),
        x.shape,
        scaling["dtype"],
        max_memory=options.max_memory,
        scratch=options.scratch,
    )
    return torch.from_numpy(rows)


def _test_mask(is_test: Any, num_rows: int) -> np.ndarray | None:
    if is_test is None:
        return None
    mask = np.asarray(is_test)
    if mask.shape != (num_rows,) or mask.dtype != bool:
        raise HandspanError(
            f"is_test must hold True or False for each of the {num_rows} rows, but it has shape "
            f"{mask.shape} and type {mask.dtype}"
        )
    return mask


def _names(names: Sequence[str], ids: ClientIds) -> tuple[str, ...]:
    if not len(names):
        return ids.names
    if len(names) != ids.num_clients:
        raise HandspanError(
            f"there are {len(names)} names for {ids.num_clients} clients; give one each"
        )
    return tuple(str(name) for name in names)
