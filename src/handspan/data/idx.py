"""MNIST and Fashion-MNIST: four idx files, plain or packed by gzip.

An idx file is a magic number (two zeros, a code of the type, the number of axes), the lengths of
the axes as big-endian integers, and the values.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from handspan.core.errors import HandspanError
from handspan.data.download import Remote, locate
from handspan.data.source import Source

STEMS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_FILES = tuple(stem for pair in STEMS.values() for stem in pair)
_MNIST = (
    "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
_FASHION = (
    "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "md5:25c81989df183df01b3e8a0aad5dffbe",
    "md5:bef4ecab320f06d8554ea6380940ec79",
    "md5:bb300cfdad3c16e7a12a480ee83cd310",
)
_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION_URL = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
)
_UNSIGNED_BYTE = 8
_MOST_BYTES = 1 << 33


def load_mnist(folder: str | None = None, task: str = "auto") -> Source:
    """70,000 handwritten digits of 28x28 pixels; the last 10,000 are its test rows."""
    return _load("mnist", folder, _MNIST_URL, _MNIST)


def load_fashion_mnist(folder: str | None = None, task: str = "auto") -> Source:
    """70,000 pieces of clothing of 28x28 pixels; the last 10,000 are its test rows."""
    return _load("fashion_mnist", folder, _FASHION_URL, _FASHION)


def _load(name: str, folder: str | None, url: str, checksums: tuple[str, ...]) -> Source:
    remotes = [
        Remote(file=f"{stem}.gz", url=f"{url}{stem}.gz", checksum=checksum)
        for stem, checksum in zip(_FILES, checksums, strict=True)
    ]
    where = locate(name, folder, remotes, lambda path: all(_find(path, stem) for stem in _FILES))
    images, labels = [], []
    for part, (image_stem, label_stem) in STEMS.items():
        image_path, label_path = _find(where, image_stem), _find(where, label_stem)
        assert image_path is not None and label_path is not None
        images.append(read_idx(image_path, num_axes=3))
        labels.append(read_idx(label_path, num_axes=1))
        if len(images[-1]) != len(labels[-1]):
            raise HandspanError(
                f"the {part} files of {name} in {where} hold {len(images[-1])} images but "
                f"{len(labels[-1])} labels: they do not belong together"
            )
    if images[0].shape[1:] != images[1].shape[1:]:
        raise HandspanError(f"the training and test images of {name} in {where} differ in size")
    return Source(
        x=np.concatenate(images),
        y=np.concatenate(labels).astype(np.int64),
        name=name if folder is None else f"{name}:{folder}",
        kind="image",
        is_test=np.repeat([False, True], [len(part) for part in labels]),
        num_classes=10,
    )


def _find(folder: Path, stem: str) -> Path | None:
    """Find a file under one of the names that are in use for it."""
    for name in (stem, stem.replace("-idx", ".idx")):
        for ending in ("", ".gz"):
            if (folder / f"{name}{ending}").is_file():
                return folder / f"{name}{ending}"
    return None


def read_idx(path: Path, num_axes: int) -> np.ndarray:
    """Read an idx file of unsigned bytes, packed or not, and check its length."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not packed:
                return _values(raw, path, num_axes)
            with gzip.open(raw, "rb") as file:
                return _values(file, path, num_axes)
    except PermissionError:
        raise HandspanError(f"{path} cannot be read: you lack the permission") from None
    except (EOFError, OSError, zlib.error):
        raise HandspanError(f"{path} is damaged or cut off: fetch it again") from None


def _values(file: IO[bytes] | gzip.GzipFile, path: Path, num_axes: int) -> np.ndarray:
    magic = file.read(4)
    if magic != bytes([0, 0, _UNSIGNED_BYTE, num_axes]):
        what = "images" if num_axes == 3 else "labels"
        raise HandspanError(
            f"{path} is no idx file of {what}: it begins with {magic.hex() or 'nothing'}, not with "
            f"0000080{num_axes}"
        )
    header = file.read(4 * num_axes)
    if len(header) < 4 * num_axes:
        raise HandspanError(f"{path} is cut off inside its header: fetch it again")
    shape = struct.unpack(f">{num_axes}I", header)
    size = math.prod(shape)
    if not 0 < size <= _MOST_BYTES:
        raise HandspanError(f"{path} claims the shape {shape}: fetch it again")
    values = file.read(size + 1)
    if len(values) != size:
        more = "more" if len(values) > size else f"only {len(values)}"
        raise HandspanError(
            f"{path} should hold {size} values, but there are {more}: fetch it again"
        )
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)
