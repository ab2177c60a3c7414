"""One entry per client, joined into flat arrays: pairs of arrays or ``torch`` data sets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch.utils.data import Dataset, TensorDataset

from handspan.core.errors import HandspanError
from handspan.data import inputs
from handspan.data.storage import collect


def join_entries(
    clients: Sequence[Any],
    *,
    max_memory: int | None,
    scratch: str | os.PathLike[str] | None,
) -> tuple[Any, np.ndarray | None, np.ndarray]:
    """Return all rows, all labels (or None) and the number of rows of each client."""
    xs: list[Any] = []
    ys: list[Any] = []
    for client, entry in enumerate(clients):
        x, y = _pair(entry, client)
        xs.append(inputs.as_rows(x, f"x of client {client}"))
        if y is not None:
            ys.append(_labels(y, xs[-1].shape[0], client))
    if not xs:
        raise HandspanError("there are no clients: give one (x, y) pair per client")
    if ys and len(ys) != len(xs):
        raise HandspanError("some clients have labels y and some have none; give them to all")
    if len({y.shape[1:] for y in ys}) > 1:
        raise HandspanError("the labels y of the clients have different shapes; make them alike")
    sizes = np.fromiter((x.shape[0] for x in xs), dtype=np.int64, count=len(xs))
    return _join_rows(xs, max_memory, scratch), np.concatenate(ys) if ys else None, sizes


def _pair(entry: Any, client: int) -> tuple[Any, Any]:
    if isinstance(entry, TensorDataset):
        entry = entry.tensors if len(entry.tensors) > 1 else (entry.tensors[0], None)
    elif isinstance(entry, Dataset):
        entry = _read_dataset(entry, client)
    if not isinstance(entry, tuple | list) or len(entry) != 2:
        raise HandspanError(
            f"client {client} is no pair: give (x, y), (x, None) or a torch Dataset for each client"
        )
    return entry[0], entry[1]


def _read_dataset(dataset: Any, client: int) -> tuple[Any, Any]:
    try:
        rows = [dataset[index] for index in range(len(dataset))]
    except (TypeError, NotImplementedError):
        rows = list(dataset)
    if not rows:
        raise HandspanError(f"the data set of client {client} is empty; leave the client out")
    has_labels = isinstance(rows[0], tuple | list) and len(rows[0]) == 2
    features = [row[0] for row in rows] if has_labels else rows
    try:
        x = np.stack([_cell(value) for value in features])
        y = np.stack([_cell(row[1]) for row in rows]) if has_labels else None
    except (ValueError, TypeError, IndexError):
        raise HandspanError(
            f"the rows of client {client} have different shapes; a Dataset must give (x, y) with "
            "x of one shape"
        ) from None
    return x, y


def _cell(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _labels(y: Any, num_rows: int, client: int) -> np.ndarray:
    labels = inputs.as_array(y, f"y of client {client}")
    if labels.ndim == 0 or len(labels) != num_rows:
        count = len(labels) if labels.ndim else 1
        raise HandspanError(f"client {client} has {num_rows} rows x but {count} labels y")
    return labels


def _join_rows(
    xs: list[Any], max_memory: int | None, scratch: str | os.PathLike[str] | None
) -> Any:
    first = xs[0]
    for client, x in enumerate(xs):
        if x.shape[1:] != first.shape[1:] or inputs.is_sparse(x) != inputs.is_sparse(first):
            raise HandspanError(
                f"rows of client {client} have shape {tuple(x.shape[1:])}, those of client 0 "
                f"{tuple(first.shape[1:])}; all must be alike, and all sparse or all dense"
            )
    if inputs.is_sparse(first):
        return sparse.csr_array(sparse.vstack(xs, format="csr"))
    if len(xs) == 1:
        return first
    dtype = np.result_type(*{x.dtype for x in xs})
    shape = (sum(len(x) for x in xs), *first.shape[1:])

    def pieces() -> Iterator[np.ndarray]:
        for x in xs:
            for start, stop in inputs.chunks(x):
                yield x[start:stop]

    return collect(pieces(), shape, dtype.str, max_memory=max_memory, scratch=scratch)
