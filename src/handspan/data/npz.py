"""Rows of ``.npz`` files.

A file holds ``x`` and ``y``, or ``x_train, y_train, x_test, y_test``, or sparse rows as
``data, indices, indptr, shape``; besides, if it likes, ``client`` (an id per row), ``side``,
``is_test``, ``names`` of the clients, ``classes`` or ``num_classes``, and any other array with one
entry per row, by which ``natural:FIELD`` can make clients.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from handspan.core.errors import HandspanError
from handspan.data import inputs
from handspan.data.source import Source
from handspan.data.transform import kind_of

_CSR = ("data", "indices", "indptr", "shape")
_LAYOUTS = "x, or x_train and x_test, or data, indices, indptr and shape"


def read_npz(name: str, task: str) -> Source:
    """Read the arrays of a file."""
    return _from_fields(name, read_arrays(Path(name)), task)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a file; arrays of Python objects are refused, never unpickled."""
    if not path.exists():
        raise HandspanError(f"there is no file {path}: check its name")
    if path.is_dir():
        raise HandspanError(f"{path} is a folder: give the .npz file itself")
    damaged = HandspanError(
        f"{path} is damaged, cut off or no .npz file: make it again with numpy.savez"
    )
    arrays: dict[str, np.ndarray] = {}
    try:
        if not zipfile.is_zipfile(path):
            raise damaged
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                arrays[name] = _member(path, archive, name)
    except PermissionError:
        raise HandspanError(f"{path} cannot be read: you lack the permission") from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        ValueError,
        KeyError,
        NotImplementedError,
    ):
        raise damaged from None
    if any(not isinstance(array, np.ndarray) for array in arrays.values()):
        raise damaged
    return arrays


def _member(path: Path, archive: Any, name: str) -> np.ndarray:
    try:
        return archive[name]
    except ValueError as error:
        if "bject" in str(error):
            raise HandspanError(
                f"{name} in {path} is an array of Python objects: save it as numbers or texts"
            ) from None
        raise


def _from_fields(name: str, arrays: dict[str, np.ndarray], task: str) -> Source:
    def where(row: int) -> str:
        return f"row {row} (counted from 0) of {name}"

    x, fields, is_test = _rows(name, arrays)
    inputs.check_finite(x, "x", where)
    y = fields.pop("y", None)
    known = _num_classes(name, arrays)
    labels, num_classes = inputs.as_labels(y, x.shape[0], task, known, where)
    # For a matrix problem labels are dropped later on; a partition may still need them.
    y = y if labels is None else labels
    side = arrays.get("side", fields.get("side"))
    is_regression = labels is not None and num_classes is None
    return Source(
        x=x,
        y=y,
        name=name,
        kind=kind_of(x, has_labels=labels is not None, is_regression=is_regression),
        client=fields.get("client"),
        side=None if side is None else _side(name, side),
        is_test=is_test,
        fields=fields,
        names=tuple(str(entry) for entry in arrays.get("names", np.empty(0)).ravel()),
        num_classes=known,
    )


def _rows(
    name: str, arrays: dict[str, np.ndarray]
) -> tuple[Any, dict[str, np.ndarray], np.ndarray | None]:
    """Find the rows, every array that goes along with them, and the source's test rows."""
    if "x" not in arrays and "x_train" in arrays:
        return _pooled(name, arrays)
    if "x" in arrays:
        x, used = inputs.as_rows(arrays["x"], f"x of {name}"), {"x"}
    else:
        x, used = _csr(name, arrays), set(_CSR)
    count = x.shape[0]
    fields = {key: array for key, array in arrays.items() if key not in used}
    for key in ("y", "client", "is_test"):
        if key in fields and (fields[key].ndim == 0 or len(fields[key]) != count):
            raise HandspanError(
                f"{key} of {name} has shape {fields[key].shape}, but there are {count} rows"
            )
    fields = {key: array for key, array in fields.items() if array.ndim and len(array) == count}
    is_test = fields.pop("is_test", None)
    if is_test is not None and (is_test.ndim != 1 or not np.isin(is_test, (0, 1)).all()):
        raise HandspanError(f"is_test of {name} must hold one True or False per row")
    return x, fields, None if is_test is None else is_test.astype(bool)


def _pooled(
    name: str, arrays: dict[str, np.ndarray]
) -> tuple[Any, dict[str, np.ndarray], np.ndarray | None]:
    """Join the train and test parts of a source; NAME_train and NAME_test become NAME."""
    counts = {}
    for part in ("train", "test"):
        if f"x_{part}" in arrays:
            counts[part] = len(inputs.as_rows(arrays[f"x_{part}"], f"x_{part} of {name}"))
    joined: dict[str, np.ndarray] = {}
    for stem in [key.removesuffix("_train") for key in arrays if key.endswith("_train")]:
        pieces = [arrays.get(f"{stem}_{part}") for part in counts]
        lengths = [None if p is None or not p.ndim else len(p) for p in pieces]
        if lengths == list(counts.values()):
            if len({p.shape[1:] for p in pieces}) > 1:  # type: ignore[union-attr]
                raise HandspanError(
                    f"{stem}_train and {stem}_test of {name} have rows of different shapes"
                )
            joined[stem] = np.concatenate(pieces)  # type: ignore[arg-type]
        elif stem in ("y", "client"):
            raise HandspanError(
                f"{stem}_train and {stem}_test of {name} must have one entry per row of x_train "
                f"and x_test ({', '.join(map(str, counts.values()))})"
            )
    x = inputs.as_rows(joined.pop("x"), f"x of {name}")
    is_test = (
        np.repeat([False, True], [counts["train"], counts["test"]]) if len(counts) > 1 else None
    )
    return x, joined, is_test


def _csr(name: str, arrays: dict[str, np.ndarray]) -> Any:
    missing = [key for key in _CSR if key not in arrays]
    if missing:
        found = ", ".join(sorted(arrays)) or "nothing"
        raise HandspanError(f"{name} must hold {_LAYOUTS}; it holds {found}")
    data, indices, indptr, shape = (arrays[key] for key in _CSR)
    wrong = HandspanError(
        f"data, indices, indptr and shape of {name} do not make a sparse matrix: save the parts "
        "of a scipy csr_matrix"
    )
    if shape.shape != (2,) or any(a.dtype.kind not in "iu" for a in (indices, indptr, shape)):
        raise wrong
    rows, columns = (int(size) for size in shape)
    narrow = np.int32 if max(columns, len(data)) < 2**31 else np.int64
    try:
        parts = (data, indices.astype(narrow), indptr.astype(narrow))
        matrix = sparse.csr_array(parts, shape=(rows, columns))
        matrix.check_format(full_check=True)
    except (ValueError, TypeError):
        raise wrong from None
    return inputs.as_rows(matrix, f"the matrix of {name}")


def _num_classes(name: str, arrays: Mapping[str, np.ndarray]) -> int | None:
    if "num_classes" in arrays:
        given = arrays["num_classes"]
        if given.size != 1 or given.dtype.kind not in "iu" or given.item() < 1:
            raise HandspanError(
                f"num_classes of {name} must be one whole number of at least 1, not {given!s}"
            )
        return int(given.item())
    classes = arrays.get("classes")
    return len(classes) if classes is not None and classes.ndim == 1 and len(classes) else None


def _side(name: str, side: np.ndarray) -> np.ndarray:
    rows = inputs.as_rows(side, f"side of {name}")
    inputs.check_finite(rows, f"side of {name}")
    return rows
