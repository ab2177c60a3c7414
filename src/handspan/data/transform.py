"""How features are scaled, kept as plain numbers so that new rows are treated in the same way.

Images are divided by their largest value and share one mean and deviation, columns of tables have
their own, counts and tokens are left alone. Means and deviations come from training rows only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from handspan.core.data import Csr
from handspan.core.errors import HandspanError, nearest
from handspan.data.inputs import as_rows, check_finite, chunks, is_sparse

KINDS = ["image", "table", "counts", "tokens"]
_FLOATS: dict[Any, str] = {torch.float32: "float32", torch.float64: "float64"}


def kind_of(x: Any, *, has_labels: bool, is_regression: bool) -> str:
    """Guess what features are: ``image``, ``table``, ``counts`` or ``tokens``.

    Whole numbers that are not negative are counts, except beside real-valued targets, where they
    are columns of a table (ages, percentages) like others.
    """
    if is_sparse(x):
        return "counts"
    if x.ndim >= 3:
        return "image"
    if x.dtype == np.int64 and has_labels and not is_regression:
        return "tokens"
    if is_regression:
        return "table"
    return "counts" if _counts_only(x) else "table"


def _counts_only(x: np.ndarray) -> bool:
    if x.dtype.kind in "bu":
        return True
    for start, stop in chunks(x):
        piece = x[start:stop]
        if (piece < 0).any() or (x.dtype.kind == "f" and (piece != np.rint(piece)).any()):
            return False
    return True


def float_name(x: Any, dtype: Any) -> str:
    """Name of the floating point type that features are kept in."""
    if dtype is None:
        return "float64" if x.dtype == np.float64 else "float32"
    name = _FLOATS.get(dtype)
    if name is None and not isinstance(dtype, torch.dtype):
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = None
    if name not in _FLOATS.values():
        raise HandspanError(f"dtype {dtype} is not possible; choose float32 or float64")
    return name


def fit(
    x: Any,
    train_rows: np.ndarray,
    *,
    kind: str,
    divide: float | None,
    standardize: bool | str,
    dtype: str,
) -> dict[str, Any]:
    """Choose the transformation of features from the training rows."""
    if kind not in KINDS:
        raise HandspanError(f"unknown kind of data {kind!r}{nearest(kind, KINDS)}")
    if standardize not in (True, False, "auto"):
        raise HandspanError(f"standardize is {standardize!r}; choose 'auto', True or False")
    fixed = is_sparse(x) or kind == "tokens"
    if standardize is True and fixed:
        raise HandspanError(
            "sparse rows and tokens cannot be standardised; choose standardize='auto' or False"
        )
    if kind == "tokens" and x.dtype.kind == "f":
        raise HandspanError("tokens must be whole numbers of an integer type")
    if kind == "image" and divide is None and x.dtype == np.uint8:
        divide = 255.0
    transform: dict[str, Any] = {
        "kind": kind,
        "sparse": is_sparse(x),
        "row_shape": [int(size) for size in x.shape[1:]],
        "dtype": "int64" if kind == "tokens" else dtype,
        "divide": divide,
        "mean": None,
        "std": None,
    }
    scaled = kind in ("image", "table") if standardize == "auto" else standardize
    if scaled and not fixed:
        mean, std = _moments(x, train_rows, pooled=kind == "image", divide=divide)
        transform["mean"], transform["std"] = mean.tolist(), std.tolist()
    return transform


def _moments(
    x: np.ndarray, rows: np.ndarray, *, pooled: bool, divide: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation in one pass (Chan et al.'s update, chunk by chunk, in float64)."""
    count, mean, squares = 0, np.zeros(()), np.zeros(())
    step = max(1, (1 << 21) // max(1, int(np.prod(x.shape[1:]))))
    for start in range(0, len(rows), step):
        piece = x[rows[start : start + step]].astype(np.float64)
        if divide is not None:
            piece /= divide
        if pooled:
            piece = piece.reshape(-1)
        more = len(piece)
        piece_mean = piece.mean(axis=0)
        piece -= piece_mean
        delta = piece_mean - mean
        squares = (
            squares + np.square(piece).sum(axis=0) + delta**2 * (count * more / (count + more))
        )
        mean = mean + delta * (more / (count + more))
        count += more
    std = np.sqrt(squares / max(1, count))
    # A constant column has only rounding errors as its deviation; dividing by them explodes.
    constant = std <= 1e-9 * np.maximum(1e-300, np.abs(mean))
    return mean, np.where(constant, 1.0, std)


def transform_rows(transform: Mapping[str, Any], piece: np.ndarray) -> np.ndarray:
    """Apply a transformation to some dense rows."""
    if transform["divide"] is None and transform["mean"] is None:
        return piece.astype(transform["dtype"])
    values = piece.astype(np.float64)
    if transform["divide"] is not None:
        values /= transform["divide"]
    if transform["mean"] is not None:
        values -= np.asarray(transform["mean"])
        values /= np.asarray(transform["std"])
    return values.astype(transform["dtype"])


def to_csr(x: Any, dtype: str) -> Csr:
    """Wrap sparse rows in the library's record."""
    return Csr(
        indptr=torch.from_numpy(x.indptr.astype(np.int64)),
        indices=torch.from_numpy(x.indices.astype(np.int64)),
        values=torch.from_numpy(x.data.astype(dtype)),
        num_columns=torch.tensor(x.shape[1]),
    )


def apply_transform(info: Mapping[str, Any], x: Any) -> Tensor | Csr:
    """Treat new rows as the rows of a federation were treated.

    Parameters
    ----------
    info
        ``data.info`` of the federation, or its ``transform`` entry.
    x
        New rows, dense or sparse.

    Examples
    --------
    >>> from handspan.data import from_arrays
    >>> data = from_arrays([[1.5], [2.5], [3.5], [9.0]], [0, 1, 1, 0], groups=[0, 0, 1, 1])
    >>> apply_transform(data.info, [[data.info["transform"]["mean"][0]]]).tolist()
    [[0.0]]
    """
    transform = info.get("transform", info)
    rows = as_rows(x)
    check_finite(rows, "x")
    expected = tuple(transform["row_shape"])
    if tuple(rows.shape[1:]) != expected:
        raise HandspanError(
            f"new rows have shape {tuple(rows.shape[1:])}, but the federation's have {expected}"
        )
    if transform["sparse"]:
        return to_csr(sparse.csr_array(rows), transform["dtype"])
    if is_sparse(rows):
        rows = rows.toarray()
    if transform["kind"] == "tokens" and rows.dtype.kind == "f":
        raise HandspanError("tokens must be whole numbers of an integer type")
    return torch.from_numpy(transform_rows(transform, rows))
