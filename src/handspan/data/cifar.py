"""CIFAR-10 and CIFAR-100: the python archives, packed or unpacked.

Their pickles are read by ``load_plain``, which runs nothing. Archives are read in place, never
unpacked to disk.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from handspan.core.errors import HandspanError
from handspan.data.download import Remote, locate
from handspan.data.plain_pickle import load_plain
from handspan.data.source import Source

_URL = "https://www.cs.toronto.edu/~kriz/"
_MOST_BYTES = 1 << 30
_SHAPE = (3, 32, 32)


@dataclass(frozen=True, kw_only=True)
class _Archive:
    """How one of the two archives is laid out."""

    name: str
    file: str
    checksum: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str
    meta: str
    class_names: str
    num_classes: int
    coarse: str | None = None


_CIFAR10 = _Archive(
    name="cifar10",
    file="cifar-10-python.tar.gz",
    checksum="md5:c58f30108f718f92721af3b95e74349a",
    folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test=("test_batch",),
    labels="labels",
    meta="batches.meta",
    class_names="label_names",
    num_classes=10,
)
_CIFAR100 = _Archive(
    name="cifar100",
    file="cifar-100-python.tar.gz",
    checksum="md5:eb9058c3a382ffc7106e4002c42a8d85",
    folder="cifar-100-python",
    train=("train",),
    test=("test",),
    labels="fine_labels",
    meta="meta",
    class_names="fine_label_names",
    num_classes=100,
    coarse="coarse_labels",
)


def load_cifar10(folder: str | None = None, task: str = "auto") -> Source:
    """60,000 photographs of 3x32x32 pixels in 10 classes; the last 10,000 are its test rows."""
    return _load(_CIFAR10, folder)


def load_cifar100(folder: str | None = None, task: str = "auto") -> Source:
    """60,000 photographs in 100 classes; ``natural:coarse`` tells the 20 kinds of classes apart."""
    return _load(_CIFAR100, folder)


def _load(archive: _Archive, given: str | None) -> Source:
    remote = Remote(file=archive.file, url=f"{_URL}{archive.file}", checksum=archive.checksum)
    path = locate(archive.name, given, [remote], lambda path: _place(archive, path) is not None)
    place = _place(archive, path)
    assert place is not None
    members = _packed(archive, place) if place.is_file() else _unpacked(archive, place)
    batches = [_batch(archive, members, member) for member in archive.train + archive.test]
    sizes = [sum(len(y) for _, y, _ in part) for part in _parts(archive, batches)]
    fields = {}
    if archive.coarse is not None:
        fields["coarse"] = np.concatenate([coarse for _, _, coarse in batches])
    return Source(
        x=np.concatenate([x for x, _, _ in batches]),
        y=np.concatenate([y for _, y, _ in batches]),
        name=archive.name if given is None else f"{archive.name}:{given}",
        kind="image",
        is_test=np.repeat([False, True], sizes),
        fields=fields,
        num_classes=archive.num_classes,
        classes=_class_names(archive, members),
    )


def _parts(archive: _Archive, batches: list[Any]) -> tuple[list[Any], list[Any]]:
    return batches[: len(archive.train)], batches[len(archive.train) :]


def _place(archive: _Archive, path: Path) -> Path | None:
    """The archive or the unpacked folder: in the given folder, or the given path itself."""
    if path.is_file():
        return path if path.name.endswith((".tar.gz", ".tgz", ".tar")) else None
    for place in (path, path / archive.folder):
        if (place / archive.test[0]).is_file():
            return place
    return path / archive.file if (path / archive.file).is_file() else None


def _unpacked(archive: _Archive, folder: Path) -> Callable[[str], tuple[bytes, str]]:
    def member(name: str) -> tuple[bytes, str]:
        path = folder / name
        if not path.is_file():
            raise HandspanError(f"{folder} lacks the file {name} of {archive.name}")
        return path.read_bytes(), str(path)

    return member


def _packed(archive: _Archive, path: Path) -> Callable[[str], tuple[bytes, str]]:
    """Read the members that are wanted, in one pass over the archive."""
    wanted = {*archive.train, *archive.test, archive.meta}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as tar:
            for entry in tar:
                name = Path(entry.name).name
                if entry.isfile() and name in wanted and entry.size <= _MOST_BYTES:
                    file = tar.extractfile(entry)
                    found[name] = b"" if file is None else file.read()
    except PermissionError:
        raise HandspanError(f"{path} cannot be read: you lack the permission") from None
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError):
        raise HandspanError(
            f"{path} is damaged, cut off or no tar archive: fetch it again"
        ) from None

    def member(name: str) -> tuple[bytes, str]:
        if name not in found:
            raise HandspanError(f"{path} lacks the file {name} of {archive.name}")
        return found.pop(name), f"{name} in {path}"

    return member


def _batch(
    archive: _Archive, members: Callable[[str], tuple[bytes, str]], name: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    content, where = members(name)
    batch = _texts(load_plain(content, where))
    pixels = batch.get("data")
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.ndim != 2
        or pixels.shape[1] != np.prod(_SHAPE)
    ):
        raise HandspanError(f"{where} holds no images of {archive.name} under 'data'")
    labels = _labels(batch, archive.labels, len(pixels), where)
    coarse = None if archive.coarse is None else _labels(batch, archive.coarse, len(pixels), where)
    return pixels.reshape(-1, *_SHAPE), labels, coarse


def _labels(batch: dict[str, Any], key: str, count: int, where: str) -> np.ndarray:
    labels = batch.get(key)
    if not isinstance(labels, list) or len(labels) != count:
        raise HandspanError(f"{where} must hold one label per image under {key!r}")
    if not all(type(label) is int and 0 <= label < 1 << 16 for label in labels):
        raise HandspanError(f"{where} has labels under {key!r} that are no class numbers")
    return np.array(labels, dtype=np.int64)


def _class_names(archive: _Archive, members: Callable[[str], tuple[bytes, str]]) -> tuple[str, ...]:
    try:
        content, where = members(archive.meta)
    except HandspanError:  # the names are a courtesy
        return ()
    names = _texts(load_plain(content, where)).get(archive.class_names, [])
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


def _texts(batch: dict[Any, Any]) -> dict[str, Any]:
    """Keys are texts or bytes, depending on who wrote the pickle."""
    return {key.decode() if isinstance(key, bytes) else str(key): v for key, v in batch.items()}
