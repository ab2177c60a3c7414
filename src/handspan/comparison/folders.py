"""Folders that several processes may work in: the shards of one comparison, side by side.

A folder is held by an advisory lock on itself, which ends with the process, however it ends. File
systems that know no locks go without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from handspan.core.errors import HandspanError

_BEGUN = {"comparison.json", "tuning.json", "commands.txt"}  # written before plan.json


def make(folder: Path) -> None:
    """Make a folder, or say why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HandspanError(
            f"cannot create {folder}: {error.strerror}; choose another --out"
        ) from None


def refuse_other(folder: Path) -> None:
    """Refuse a folder with files that are no comparison's; a new one has folders of runs alone."""
    if not folder.is_dir() or (folder / "plan.json").exists():
        return
    for entry in folder.iterdir():
        if entry.is_file() and entry.name not in _BEGUN and entry.suffix != ".partial":
            raise HandspanError(
                f"{folder} exists already and is no comparison (it holds {entry.name}): choose "
                "another --out"
            )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Have a run's folder for oneself; where another process has it, say so."""
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
            f"another process is running {folder}: wait for it, or divide the work by --shard"
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(descriptor)
