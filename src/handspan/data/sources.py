"""Where rows come from: every source by its name, or a file by its ending.

A new source is a function ``(argument, task) -> Source`` with an entry in ``SOURCES``, where the
argument is what stands behind the colon (None without one); a new kind of file is a function
``(text, task) -> Source`` with an entry in ``READERS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from handspan.core.errors import HandspanError, nearest
from handspan.data import cifar, idx
from handspan.data.image_folder import load_folder
from handspan.data.npz import read_npz
from handspan.data.source import Source
from handspan.data.table_text import split_columns
from handspan.data.tables import read_table

__all__ = ["READERS", "SOURCES", "Source", "load_digits", "load_source"]


def load_digits(argument: str | None = None, task: str = "auto") -> Source:
    """scikit-learn's bundled 1797 digits of 8x8 pixels: nothing to download."""
    from sklearn.datasets import load_digits as bundled

    if argument is not None:
        raise HandspanError(f"digits are bundled and take nothing behind the colon ({argument!r})")
    digits: Any = bundled()
    return Source(
        x=digits.images.astype(np.uint8),
        y=digits.target.astype(np.int64),
        name="digits",
        kind="image",
        divide=16.0,
        num_classes=10,
    )


SOURCES: dict[str, Callable[[str | None, str], Source]] = {
    "digits": load_digits,
    "mnist": idx.load_mnist,
    "fashion_mnist": idx.load_fashion_mnist,
    "cifar10": cifar.load_cifar10,
    "cifar100": cifar.load_cifar100,
    "folder": load_folder,
}

READERS: dict[str, Callable[[str, str], Source]] = {
    ".npz": read_npz,
    ".csv": read_table,
    ".parquet": read_table,
}


def load_source(name: str | os.PathLike[str], *, task: str = "auto") -> Source:
    """Read a source by its name, or a file by its path.

    Parameters
    ----------
    name
        ``digits``, ``mnist[:FOLDER]``, ``fashion_mnist[:FOLDER]``, ``cifar10[:FOLDER]``,
        ``cifar100[:FOLDER]``, ``folder:PATH``, or the path of a ``.npz``, ``.csv`` or
        ``.parquet`` file; the columns of a table may follow
        (``beds.csv:client=ward:label=died``).
    task
        As in ``from_arrays``: how labels are to be understood.

    Examples
    --------
    >>> load_source("digits").x.shape
    (1797, 8, 8)
    """
    text = os.fspath(name)
    head, colon, argument = text.partition(":")
    if head in SOURCES:
        return SOURCES[head](argument if colon else None, task)
    path, _ = split_columns(text)
    reader = READERS.get(Path(path).suffix.lower())
    if reader is not None:
        return reader(text, task)
    *most, last = READERS
    endings = f"{', '.join(most)} or {last}"
    if "/" in path or os.sep in path or os.path.exists(path):
        raise HandspanError(f"cannot read {path}: only files whose name ends in {endings} are read")
    raise HandspanError(
        f"unknown source {text!r}{nearest(head, list(SOURCES))}; or give the path of a file whose "
        f"name ends in {endings}"
    )
