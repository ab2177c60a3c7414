"""What ``handspan partition`` tells of a partition, and what it stores."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from handspan.core.errors import HandspanError
from handspan.data.partition import partition
from handspan.data.partition_file import pack_partition
from handspan.data.partition_types import Partition, labels_of
from handspan.data.source import Source
from handspan.data.sources import load_source


def report_partition(
    name: str, spec: str, num_clients: int, seed: int, *, task: str = "auto", pack: bool = True
) -> tuple[list[str], bytes | None]:
    """Divide a source; returns lines to print, and the content of a file to store (if asked).

    Examples
    --------
    >>> lines, content = report_partition("digits", "permuted:3", 10, 0)
    >>> lines[1], lines[4]
    ('10 clients, 1797 rows', 'planted groups: 3')
    """
    source = load_source(name, task=task)
    part = partition(source, spec, num_clients, seed)
    lines = [f"{source.name}, {spec}, seed {seed}", *describe(source, part)]
    lines += [f"note: {remark}" for remark in part.remarks]
    return lines, pack_partition(source, part, spec, seed) if pack else None


def describe(source: Source, part: Partition) -> list[str]:
    """Tell sizes, classes, groups and the hash, a line each."""
    codes = part.codes()
    sizes = np.bincount(codes)
    lines = [f"{len(sizes)} clients, {len(codes)} rows", f"rows of a client: {_range(sizes)}"]
    y = source.y if part.y is None else part.y
    if y is not None and y.ndim == 1 and y.dtype.kind in "biu":
        pairs = np.unique(np.stack([codes, y.astype(np.int64)]), axis=1)
        lines.append(f"classes of a client: {_range(np.bincount(pairs[0]))}")
    if part.groups is not None:
        lines.append(f"planted groups: {int(part.groups.max()) + 1}")
    return [*lines, f"hash: {part.fingerprint()}"]


class LabelTable(NamedTuple):
    """Rows by client and class.

    Attributes
    ----------
    counts, original
        (n, classes) rows of each client by the labels it sees, and by the source's where a
        partition has renamed them (else None).
    part
        The partition.
    classes
        Names of the classes, where the source has them.
    """

    counts: np.ndarray
    original: np.ndarray | None
    part: Partition
    classes: tuple[str, ...]


def label_table(
    name: str, spec: str, num_clients: int, seed: int, *, task: str = "auto"
) -> LabelTable:
    """Count who has how many rows of which class.

    Examples
    --------
    >>> table = label_table("digits", "permuted:3", 10, 0)
    >>> table.counts.shape, bool((table.counts.sum(1) == table.original.sum(1)).all())
    ((10, 10), True)
    """
    source = load_source(name, task=task)
    if source.y is None or source.y.dtype.kind == "f":
        raise HandspanError(f"the labels of {source.name} are no classes")
    labels, num_classes = labels_of(source, spec)
    part = partition(source, spec, num_clients, seed)
    codes = part.codes()

    def count(y: np.ndarray) -> np.ndarray:
        cells = codes.astype(np.int64) * num_classes + y
        return np.bincount(cells, minlength=num_classes * (int(codes.max()) + 1)).reshape(
            -1, num_classes
        )

    original = count(labels)
    classes = tuple(str(name) for name in source.classes or ())
    if part.y is None:
        return LabelTable(original, None, part, classes)
    return LabelTable(count(part.y), original, part, classes)


def _range(counts: np.ndarray) -> str:
    return f"min {counts.min()}, median {np.median(counts):g}, max {counts.max()}"
