"""What users hand over, brought into one form and checked: rows, labels, client ids.

Every complaint names the first offending row as the user counts it, which is what ``where`` is for:
a function from a row's position to words (``row 7``, ``row 2 of client 5``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from handspan.core import keys
from handspan.core.data import Csr
from handspan.core.errors import HandspanError, nearest

Where = Callable[[int], str]
TASKS = ["auto", "classification", "regression", "matrix"]
CHUNK_BYTES = 1 << 24
MOST_CLASSES = 1 << 16
_LARGEST = float(np.finfo(np.float32).max)


def plain_row(row: int) -> str:
    """Name a row by its position."""
    return f"row {row} (counted from 0)"


def is_sparse(x: Any) -> bool:
    """Whether rows are in compressed form."""
    return sparse.issparse(x)


def chunks(x: Any) -> Iterator[tuple[int, int]]:
    """Cut rows into pieces of about 16 MiB of float64, so that temporaries stay small."""
    count = x.shape[0]
    width = 8 * max(1, int(np.prod(x.shape[1:])))
    step = max(1, CHUNK_BYTES // width)
    for start in range(0, count, step):
        yield start, min(count, start + step)


def as_array(value: Any, what: str) -> Any:
    """Turn tensors, sparse matrices and nested lists into a NumPy array or ``csr_array``."""
    if isinstance(value, Csr):
        shape = (len(value), int(value.num_columns))
        parts = (value.values.numpy(), value.indices.numpy(), value.indptr.numpy())
        return sparse.csr_array(parts, shape=shape)
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.layout is torch.sparse_csr:
            parts = (value.values(), value.col_indices(), value.crow_indices())
            return sparse.csr_array(tuple(p.numpy() for p in parts), shape=tuple(value.shape))
        if value.layout is not torch.strided:
            raise HandspanError(f"{what} is a sparse tensor; pass it as a scipy CSR matrix")
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    if sparse.issparse(value):
        return sparse.csr_array(value)
    try:
        return value if isinstance(value, np.ndarray) else np.asarray(value)
    except (ValueError, TypeError):
        raise HandspanError(
            f"{what} is not an array: all rows must have one shape and hold numbers"
        ) from None


def as_rows(x: Any, what: str = "x") -> Any:
    """Bring features into an array (rows, ...) of numbers, or a ``csr_array``."""
    rows = as_array(x, what)
    if not is_sparse(rows) and rows.dtype.kind not in "biuf":
        raise HandspanError(f"{what} must hold numbers, but its type is {rows.dtype}")
    if rows.ndim == 0 or (is_sparse(rows) and rows.ndim != 2):
        raise HandspanError(f"{what} must be an array with one entry per row")
    if 0 in rows.shape:
        raise HandspanError(
            f"{what} is empty (shape {tuple(rows.shape)}): give rows with at least one value"
        )
    if not is_sparse(rows) and rows.ndim == 1 and rows.dtype.kind == "f":
        return rows.reshape(-1, 1)
    return rows


def check_finite(rows: Any, what: str, where: Where = plain_row) -> None:
    """Refuse NaN and what is infinite in float32, naming the first row that has one."""
    if is_sparse(rows):
        bad = np.flatnonzero(~_is_finite(rows.data))
        if len(bad):
            row = int(np.searchsorted(rows.indptr, bad[0], side="right")) - 1
            raise HandspanError(_not_finite(what, where(row), rows.data[bad[:1]]))
        return
    if rows.dtype.kind != "f":
        return
    for start, stop in chunks(rows):
        finite = _is_finite(rows[start:stop])
        if not finite.all():
            good = finite.reshape(stop - start, -1).all(axis=1)
            row = start + int(np.argmin(good))
            raise HandspanError(_not_finite(what, where(row), rows[row]))


def _is_finite(values: np.ndarray) -> np.ndarray:
    """Whether numbers are finite, in float32 as well: runs compute in it by default."""
    return np.abs(values) <= _LARGEST


def _not_finite(what: str, row: str, values: np.ndarray) -> str:
    if np.isfinite(values).all():
        return f"{what} has a number too large for float32 in {row}; scale such values first"
    return f"{what} has NaN or infinity in {row}; remove or fill such values first"


def _check_classes(labels: np.ndarray, num_classes: int | None, where: Where) -> int:
    negative = np.flatnonzero(labels < 0)
    if len(negative):
        row = int(negative[0])
        raise HandspanError(
            f"label {labels[row]} in {where(row)} is negative; number the classes from 0"
        )
    limit = num_classes or max(MOST_CLASSES, len(labels))
    if int(labels.max()) >= limit:
        row = int(np.flatnonzero(labels >= limit)[0])
        raise HandspanError(
            f"label {labels[row]} in {where(row)} is out of range; classes go from 0 to {limit - 1}"
        )
    return num_classes or int(labels.max()) + 1


def _as_integers(labels: np.ndarray, where: Where) -> np.ndarray:
    if labels.dtype.kind in "biu":
        return labels.astype(np.int64, copy=False)
    whole = labels.astype(np.int64)
    wrong = np.flatnonzero(whole != labels)
    if len(wrong):
        row = int(wrong[0])
        raise HandspanError(
            f"label {labels[row]} in {where(row)} is not a whole number; number the classes "
            "from 0, or choose task 'regression'"
        )
    return whole


def as_labels(
    y: Any,
    num_rows: int,
    task: str = "auto",
    num_classes: int | None = None,
    where: Where = plain_row,
) -> tuple[np.ndarray | None, int | None]:
    """Check labels and tell classes (int64) from targets (floating point).

    Returns the labels and the number of classes; both are None for matrix problems.
    """
    if task not in TASKS:
        raise HandspanError(f"unknown task {task!r}{nearest(task, TASKS)}")
    if y is None:
        if task not in ("auto", "matrix"):
            raise HandspanError(f"there are no labels y, but task {task!r} needs them")
        return None, None
    labels = cast("np.ndarray", as_array(y, "y"))
    if is_sparse(labels) or labels.dtype.kind not in "biuf":
        raise HandspanError(
            f"y must hold numbers, but its type is {labels.dtype}; number the classes from 0"
        )
    if labels.ndim == 0 or len(labels) != num_rows:
        count = len(labels) if labels.ndim else 1
        raise HandspanError(f"x has {num_rows} rows but y has {count}; they must match")
    if task == "matrix":
        return None, None
    check_finite(labels, "y", where)
    if task == "regression" or (task == "auto" and labels.dtype.kind == "f"):
        return labels, None
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise HandspanError(
            f"y has shape {tuple(labels.shape)}; classification needs one class number per row"
        )
    labels = _as_integers(labels, where)
    return labels, _check_classes(labels, num_classes, where)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientIds:
    """Whose row is whose, without a Python object per client unless ids are names."""

    codes: np.ndarray  # (rows,) int32: position of the row's client among the sorted ids
    keys: np.ndarray  # (n,) int64: what a client's draws hang on, whoever else is there
    names: tuple[str, ...] = ()  # empty when the ids are simply 0 .. n-1

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return len(self.keys)

    def name(self, client: int) -> str:
        """Name of a client for a message."""
        return repr(self.names[client]) if self.names else str(client)


def encode_ids(ids: Iterable[Any], num_rows: int) -> ClientIds:
    """Number clients in the sorted order of their ids (integers, texts or any hashable)."""
    array = _id_array(ids)
    if array.ndim != 1 or len(array) != num_rows:
        shape = tuple(array.shape)
        raise HandspanError(
            f"x has {num_rows} rows but the client ids have shape {shape}: give one id per row"
        )
    if array.dtype.kind in "biu":
        unique, codes = _encode_integers(array.astype(np.uint8) if array.dtype == bool else array)
        numbers = unique.astype(np.int64)
        simple = numbers[0] == 0 and numbers[-1] == len(numbers) - 1
        names = () if simple else tuple(map(str, unique.tolist()))
        return ClientIds(codes=codes, keys=numbers, names=names)
    if array.dtype.kind == "O":
        unique, codes = _encode_objects(array)
    else:
        if array.dtype.kind == "f":
            check_finite(array, "the array of client ids")
        unique, codes = np.unique(array, return_inverse=True)
    names = tuple(str(entry) for entry in unique.tolist())
    return ClientIds(codes=codes.astype(np.int32), keys=_text_keys(names), names=names)


def _id_array(ids: Iterable[Any]) -> np.ndarray:
    if isinstance(ids, Tensor):
        return ids.detach().cpu().numpy()
    if not isinstance(ids, np.ndarray):
        listed = list(ids)
        # NumPy would turn 1 and "1" into one id, and tuples into a second axis.
        uniform = len({type(entry) for entry in listed}) <= 1
        if uniform and listed and isinstance(listed[0], int | float | str | np.generic):
            return np.asarray(listed)
        return np.fromiter(listed, dtype=object, count=len(listed))
    if ids.dtype.kind == "S":
        return np.char.decode(ids, "utf-8", "replace")
    return ids


def _encode_integers(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if bool(np.all(array[1:] >= array[:-1])):
        starts = np.concatenate([[0], np.flatnonzero(array[1:] != array[:-1]) + 1])
        lengths = np.diff(np.append(starts, len(array)))
        return array[starts], np.repeat(np.arange(len(starts), dtype=np.int32), lengths)
    low, high = int(array.min()), int(array.max())
    if high - low <= 4 * len(array) and high < 2**63:
        # A table of which ids occur is far cheaper than sorting the rows.
        shifted = array.astype(np.int64) - low
        present = np.bincount(shifted, minlength=high - low + 1) > 0
        table = np.cumsum(present, dtype=np.int32) - np.int32(1)
        unique = np.flatnonzero(present).astype(np.int64) + low
        return unique, table[shifted]
    unique, codes = np.unique(array, return_inverse=True)
    return unique, codes.astype(np.int32)


def _encode_objects(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    try:
        known = set(array.tolist())
    except TypeError:
        raise HandspanError("client ids must be numbers, texts or other hashable values") from None
    try:
        ordered = sorted(known)
    except TypeError:
        ordered = sorted(known, key=lambda entry: (type(entry).__name__, repr(entry)))
    position = {entry: index for index, entry in enumerate(ordered)}
    codes = np.fromiter(map(position.__getitem__, array.tolist()), np.int32, count=len(array))
    return np.fromiter(ordered, dtype=object, count=len(ordered)), codes


def _text_keys(names: tuple[str, ...]) -> np.ndarray:
    """Hash names, character by character for all at once; padding changes nothing."""
    array = np.ascontiguousarray(np.asarray(names, dtype=np.str_))
    letters = torch.from_numpy(array.view(np.uint32).reshape(len(names), -1).astype(np.int64))
    hashed = keys.key(0, "name").expand(len(names))
    for column in letters.unbind(1):
        hashed = torch.where(column > 0, keys.fold(hashed, column), hashed)
    return hashed.numpy()


def as_side(side: Any, ids: ClientIds, dtype: str) -> np.ndarray:
    """Bring side information to one row per client, in the sorted order of their ids."""
    rows = as_rows(side, "side")
    if is_sparse(rows):
        rows = rows.toarray()
    check_finite(rows, "side")
    rows = rows.reshape(len(rows), -1)
    if len(rows) == len(ids.codes) != ids.num_clients:
        first = np.unique(ids.codes, return_index=True)[1]
        changed = np.flatnonzero((rows != rows[first[ids.codes]]).any(axis=1))
        if len(changed):
            row = int(changed[0])
            raise HandspanError(
                f"side changes within client {ids.name(int(ids.codes[row]))} at "
                f"{plain_row(row)}; it must be constant within a client"
            )
        rows = rows[first]
    if len(rows) != ids.num_clients:
        raise HandspanError(
            f"side has {len(rows)} rows for {ids.num_clients} clients; give one per client, in "
            "the sorted order of their ids, or one per data row"
        )
    return rows.astype(dtype)
