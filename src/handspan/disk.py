"""How files are written and read: whole or not at all, never a part of one.

A file is replaced by one rename, after its content has reached the disk. What cannot be what was
written is refused by name.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from handspan.core.errors import HandspanError
from handspan.core.records import Params

_ABOUT = "handspan"  # the entry of a file's metadata that is ours


def write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file by one rename, after its content has reached the disk."""
    if path.is_dir():
        raise HandspanError(f"cannot write {path}: it is a folder; give the name of a file")
    partial = path.with_name(path.name + ".partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        partial.unlink(missing_ok=True) if partial.parent.is_dir() else None
        raise HandspanError(
            f"cannot write {path}: {error.strerror}; what was there before is unchanged, make room "
            "or choose another place"
        ) from None


def make(folder: Path) -> None:
    """Make a folder, or say why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HandspanError(
            f"cannot create {folder}: {error.strerror}; choose another --out"
        ) from None


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Have a run's folder for oneself; where another process has it, say so.

    A folder is held by an advisory lock on itself, which ends with the process, however it ends.
    File systems that know no locks go without.
    """
    with _locked(folder, wait=False):
        yield


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Have a folder for oneself as soon as it is free."""
    with _locked(folder, wait=True):
        yield


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[None]:
    import fcntl

    make(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise HandspanError(
            f"another process is running {folder}: wait for it, choose another --out, or divide a "
            "comparison by --shard"
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def as_json(value: Any) -> bytes:
    """Readable JSON, the same bytes for the same value; not-a-number becomes null."""
    return (json.dumps(plain(value), indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def as_json_lines(rows: list[dict[str, Any]]) -> bytes:
    """One JSON object a line."""
    return "".join(json.dumps(plain(row), allow_nan=False) + "\n" for row in rows).encode()


def plain(value: Any) -> Any:
    """Return what JSON can hold: texts as keys, lists, and null for what is no number."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file of a run folder."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise HandspanError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise damaged(path) from None


def damaged(path: Path) -> HandspanError:
    """Complain about a file that cannot be what was written."""
    return HandspanError(f"{path} is missing or damaged: restore it, or remove {path.parent}")


def pack(named: Params, progress: dict[str, Any]) -> bytes:
    """Tensors and progress as safetensors bytes, with a checksum over both.

    One entry of metadata holds everything: safetensors writes several in no order of its own.
    """
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in named.items()}
    about = json.dumps(plain(progress))
    return save(tensors, metadata={_ABOUT: f"{_checksum(tensors, about)} {about}"})


def unpack(path: Path) -> tuple[Params, dict[str, Any]]:
    """Read what ``pack`` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            named = {name: file.get_tensor(name) for name in file.keys()}
            checksum, about = file.metadata()[_ABOUT].split(" ", 1)
            if checksum != _checksum(named, about):
                raise ValueError
            return named, json.loads(about)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        raise HandspanError(
            f"{path} is damaged or no checkpoint of handspan: restore it, or remove it to start "
            "again"
        ) from None


def _checksum(named: Params, about: str) -> str:
    total = zlib.crc32(about.encode())
    for name in sorted(named):
        flat = named[name].reshape(-1)
        if flat.stride(0) != 1:  # a single number, cut out of a larger tensor
            flat = flat.clone(memory_format=torch.contiguous_format)
        total = zlib.crc32(flat.view(torch.uint8).numpy(), total)
    return f"{total:08x}"
