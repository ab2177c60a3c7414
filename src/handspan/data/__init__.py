"""Data of many clients: sources, partitions, splits, and the one door to all of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from handspan.core import keys
from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.data.build import apply_transform, from_arrays, from_clients, open_saved, save
from handspan.data.inputs import encode_ids
from handspan.data.partition import partition as divide
from handspan.data.partition_types import Partition
from handspan.data.side import mean_embedding, side_of_clients
from handspan.data.sources import Source, load_source
from handspan.data.table_text import with_columns

__all__ = [
    "Source",
    "apply_transform",
    "from_arrays",
    "from_clients",
    "load_data",
    "load_source",
    "mean_embedding",
    "open_saved",
    "save",
    "split_holdout",
]


def load_data(
    name: str | os.PathLike[str],
    *,
    partition: str = "iid",
    num_clients: int = 100,
    seed: int = 0,
    client_column: str | None = None,
    label_column: str | None = None,
    side_columns: Iterable[str] = (),
    keep_test: bool = False,
    holdout_clients: int = 0,
    task: str = "auto",
    test_fraction: float = 0.25,
    validation_fraction: float = 0.2,
    standardize: bool | str = "auto",
    dtype: Any = None,
    max_memory: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
) -> FederatedData:
    """Read a source, divide it among clients, split every client and scale the features.

    Parameters
    ----------
    name
        ``digits``, ``mnist[:FOLDER]``, ``fashion_mnist[:FOLDER]``, ``cifar10[:FOLDER]``,
        ``cifar100[:FOLDER]``, ``folder:PATH``, or the path of a ``.npz``, ``.csv`` or
        ``.parquet`` file.
    partition
        ``iid``, ``dirichlet:ALPHA[:MIN]``, ``shards:S[:exact]``, ``groups:G``,
        ``quantity:SIGMA``, ``natural[:FIELD]``, ``file:P.npz``; ``permuted:G``, ``rotated:G``,
        ``affine:G``, also behind one of the former (``quantity:1.5+permuted:3``).
    num_clients
        How many clients; ``natural`` and ``file`` bring their own.
    seed
        Of the partition, the split and the choice of held-out clients.
    client_column, label_column, side_columns
        Columns of a table, where they are not called ``client`` and ``label`` (or ``y``); they
        may stand behind its path instead (``beds.csv:client=ward:label=died:side=age,beds``).
    keep_test
        Keep the source's own test rows instead of drawing new ones.
    holdout_clients
        How many clients ``split_holdout`` will set aside: features are scaled without them.
    task, test_fraction, validation_fraction, standardize, dtype, max_memory, scratch
        As in ``from_arrays``.

    Examples
    --------
    >>> data = load_data("digits", partition="permuted:5", num_clients=20)
    >>> data.num_clients, data.row_shape, data.num_classes, len(set(data.groups.tolist()))
    (20, (8, 8), 10, 5)
    """
    columns = {"client": client_column, "label": label_column, "side": side_columns}
    source = load_source(with_columns(os.fspath(name), **columns), task=task)  # type: ignore[arg-type]
    if keep_test and source.is_test is None:
        raise HandspanError(f"{source.name} has no test rows of its own to keep; drop keep_test")
    part = divide(source, partition, num_clients, seed)
    held_out = None
    if holdout_clients:
        found = encode_ids(part.client, source.num_rows).num_clients
        held_out = np.zeros(found, dtype=bool)
        held_out[_held_out(found, holdout_clients, seed)] = True
    side, told, remarks = _side(source, part, partition, held_out)
    data = from_arrays(
        source.x if part.x is None else part.x,
        source.y if part.y is None else part.y,
        groups=part.client,
        side=side,
        seed=seed,
        names=source.names if part.is_natural else (),
        is_test=source.is_test if keep_test else None,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        task=task,
        standardize=standardize,
        kind=source.kind,
        divide=source.divide,
        num_classes=source.num_classes,
        dtype=dtype,
        max_memory=max_memory,
        scratch=scratch,
        held_out=held_out,
    )
    info = {
        **data.info,
        **told,
        "source": source.name,
        "partition": partition,
        "partition_hash": part.fingerprint(),
        "num_clients": data.num_clients,
        "keep_test": keep_test,
        "holdout_clients": holdout_clients,
        "remarks": remarks + list(data.info["remarks"]),
    }
    if source.classes:
        info["classes"] = list(source.classes)
    groups = None if part.groups is None else torch.from_numpy(part.groups.astype(np.int64))
    return dataclasses.replace(data, groups=groups, info=info)


def _side(
    source: Source, part: Partition, spec: str, held_out: np.ndarray | None
) -> tuple[Any, dict[str, Any], list[str]]:
    """Side information of the clients: the partition's, or the source's if these are its own.

    Returns it with what the data's ``info`` should know of it, and remarks.
    """
    remarks = list(part.remarks)
    if source.side is None and not source.side_columns:
        return part.side, {}, remarks
    if part.is_natural and part.side is None:
        if not source.side_columns:
            return source.side, {}, remarks
        ids = encode_ids(part.client, source.num_rows)
        side, recipe, more = side_of_clients(source.side_columns, ids, held_out)
        return side, {"side": recipe}, remarks + more
    because = "belongs to its own clients" if not part.is_natural else "gives way to the group"
    remarks.append(
        f"side information of {source.name} {because} and is left out under the partition {spec}"
    )
    return part.side, {}, remarks


def split_holdout(
    data: FederatedData, count: int, seed: int
) -> tuple[FederatedData, FederatedData | None]:
    """Set clients aside that take no part in training.

    Parameters
    ----------
    data
        All clients.
    count
        How many to hold out; with the same seed, fewer are always among more.
    seed
        The seed that ``load_data`` was given.

    Returns
    -------
    tuple
        The federation to train on, and the held-out clients (None if ``count`` is 0). Both list
        the positions of the held-out clients under ``info["held_out"]``.
    """
    chosen = _held_out(data.num_clients, count, seed)
    if not count:
        return data, None
    info = {**data.info, "held_out": chosen.tolist()}
    data = dataclasses.replace(data, info=info)
    kept = np.setdiff1d(np.arange(data.num_clients), chosen)
    return data.subset(torch.from_numpy(kept)), data.subset(torch.from_numpy(chosen))


def _held_out(num_clients: int, count: int, seed: int) -> np.ndarray:
    if count < 0 or count >= num_clients:
        raise HandspanError(
            f"cannot hold out {count} of {num_clients} clients; choose 0 to {num_clients - 1}"
        )
    score = keys.uniform(keys.fold(keys.key(seed, "holdout"), torch.arange(num_clients)))
    return np.sort(torch.argsort(score)[:count].numpy())
