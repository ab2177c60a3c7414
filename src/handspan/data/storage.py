"""Where rows live: in memory, or in memory-mapped files when they do not fit; saved federations."""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from handspan.core.data import Csr, FederatedData
from handspan.core.errors import HandspanError

FORMAT = "handspan-data"
VERSION = 1
_COUNTS = ("offsets", "num_train", "num_validation", "num_test")
_OPTIONAL = ("y", "side", "groups")
_SPARSE = ("indptr", "indices", "values", "num_columns")


def machine_memory() -> int:
    """Bytes of memory of this machine; 8 GiB where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 8 << 30


def collect(
    pieces: Iterator[np.ndarray],
    shape: tuple[int, ...],
    dtype: str,
    *,
    max_memory: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
) -> np.ndarray:
    """Put pieces of rows below one another, in memory or in a file that vanishes with the array."""
    limit = machine_memory() // 2 if max_memory is None else max_memory
    if int(np.prod(shape)) * np.dtype(dtype).itemsize <= limit:
        rows = np.empty(shape, dtype)
        start = 0
        for piece in pieces:
            rows[start : start + len(piece)] = piece
            start += len(piece)
        return rows
    return _collect_on_disk(pieces, shape, dtype, scratch)


def _collect_on_disk(
    pieces: Iterator[np.ndarray],
    shape: tuple[int, ...],
    dtype: str,
    scratch: str | os.PathLike[str] | None,
) -> np.ndarray:
    path = None
    try:
        if scratch is not None:
            Path(scratch).mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix="handspan-rows-", suffix=".npy", dir=scratch)
        # Written, not mapped: a full disk is then an error instead of a killed process.
        with os.fdopen(handle, "wb") as file:
            header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for piece in pieces:
                file.write(memoryview(np.ascontiguousarray(piece, dtype)).cast("B"))
        rows = np.load(path, mmap_mode="c")
    except OSError as error:
        _remove(path)
        folder = scratch or tempfile.gettempdir()
        raise HandspanError(
            f"cannot keep the rows in {folder} ({error.strerror or error}): choose a scratch "
            "folder with more room, or raise max_memory"
        ) from None
    except BaseException:
        _remove(path)
        raise
    weakref.finalize(rows, _remove, path)
    return rows


def _remove(path: str | None) -> None:
    if path is not None and os.path.exists(path):
        os.unlink(path)


def save(data: FederatedData, folder: str | os.PathLike[str]) -> None:
    """Write a federation to a new folder: one ``.npy`` per array, and ``meta.json`` last.

    Parameters
    ----------
    data
        What to write.
    folder
        A folder that does not exist yet or is empty.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise HandspanError(f"{target} is not empty: save to a new folder")
        arrays = _arrays(data)
        for name, tensor in arrays.items():
            np.save(target / f"{name}.npy", tensor.detach().cpu().numpy())
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "arrays": sorted(arrays),
            "num_classes": data.num_classes,
            "names": list(data.names),
            "info": dict(data.info),
        }
        (target / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    except OSError as error:
        raise HandspanError(
            f"cannot save the data to {target} ({error.strerror or error}): choose another folder"
        ) from None


def _arrays(data: FederatedData) -> dict[str, Tensor]:
    arrays: dict[str, Tensor] = {name: getattr(data, name) for name in _COUNTS}
    for name in _OPTIONAL:
        if getattr(data, name) is not None:
            arrays[name] = getattr(data, name)
    if isinstance(data.x, Csr):
        arrays.update({f"x_{name}": getattr(data.x, name) for name in _SPARSE})
    else:
        arrays["x"] = data.x
    return arrays


def open_saved(folder: str | os.PathLike[str]) -> FederatedData:
    """Open a saved federation; its arrays stay on disk until they are read.

    Parameters
    ----------
    folder
        Where ``save`` wrote it.

    Returns
    -------
    FederatedData
        Its arrays are mapped copy-on-write: changing them never changes the files.
    """
    source = Path(folder)
    meta = _read_meta(source)
    try:
        arrays = {name: _open_array(source / f"{name}.npy") for name in meta["arrays"]}
        x: Any = arrays.get("x")
        if x is None:
            x = Csr(**{name: arrays[f"x_{name}"] for name in _SPARSE})
        return FederatedData(
            x=x,
            y=arrays.get("y"),
            side=arrays.get("side"),
            groups=arrays.get("groups"),
            num_classes=meta["num_classes"],
            names=tuple(meta["names"]),
            info=meta["info"],
            **{name: arrays[name] for name in _COUNTS},
        )
    except (OSError, ValueError, KeyError, EOFError, HandspanError) as error:
        raise HandspanError(
            f"the data saved in {source} are damaged ({error}): save them again"
        ) from None


def _read_meta(source: Path) -> dict[str, Any]:
    try:
        meta = json.loads((source / "meta.json").read_text(encoding="utf-8"))
    except OSError:
        raise HandspanError(
            f"{source} holds no saved data (there is no meta.json): check the folder's name"
        ) from None
    except ValueError:
        raise HandspanError(f"{source / 'meta.json'} is damaged: save the data again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise HandspanError(f"{source} was not written by handspan's save: check the folder's name")
    if meta.get("version") != VERSION:
        raise HandspanError(
            f"the data in {source} have format version {meta.get('version')}, but this handspan "
            f"reads version {VERSION}: open them with the version that saved them"
        )
    return meta


def _open_array(path: Path) -> Tensor:
    # Scalars and empty arrays cannot be mapped, and mapping does not pay for small files.
    small = path.stat().st_size < 1 << 16
    return torch.from_numpy(np.load(path, mmap_mode=None if small else "c", allow_pickle=False))
