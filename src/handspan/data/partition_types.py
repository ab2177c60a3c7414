"""What a partition is: whose row is whose, and what it did to the rows of groups of clients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from handspan.core.errors import HandspanError
from handspan.data.inputs import as_labels, encode_ids
from handspan.data.source import Source


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """Clients of rows, and what else the partition did to them.

    Parameters
    ----------
    client
        (rows,) client id of every row.
    groups
        (n,) planted groups of the clients in sorted order, or None.
    relabel
        (groups, classes) permutation of the labels in each group, or None.
    turn
        (groups, 2) degrees by which each group's images are turned clockwise and then sheared.
    side
        (n, s) side information that the partition attaches to its clients, or None.
    x, y
        Rows and labels that replace the source's, or None; made of ``turn`` and ``relabel`` where
        those are given.
    is_natural
        Whether clients are the source's own, so that its side information belongs to them.
    remarks
        What the user should know.
    """

    client: np.ndarray
    groups: np.ndarray | None = None
    relabel: np.ndarray | None = None
    turn: np.ndarray | None = None
    side: np.ndarray | None = None
    x: Any = None
    y: np.ndarray | None = None
    is_natural: bool = False
    remarks: tuple[str, ...] = ()

    def original_labels(self, labels: np.ndarray, client: np.ndarray) -> np.ndarray:
        """Undo the permutation of the labels of rows that belong to the given clients."""
        if self.relabel is None or self.groups is None:
            return labels
        return np.argsort(self.relabel, axis=1)[self.groups[client], labels]

    def codes(self) -> np.ndarray:
        """Return the position of each row's client among the sorted ids."""
        return encode_ids(self.client, len(self.client)).codes

    def fingerprint(self) -> str:
        """Hash of whose row is whose and of all that was done to rows."""
        digest = hashlib.sha256()
        whole = (self.codes(), self.groups, self.relabel)
        parts = [None if part is None else np.asarray(part).astype("<i8") for part in whole]
        real = (self.turn, self.side)
        parts += [None if part is None else np.asarray(part).astype("<f8") for part in real]
        if self.relabel is None:
            parts.append(self.y)
        if self.turn is None and isinstance(self.x, np.ndarray):
            parts.append(self.x)
        for part in parts:
            digest.update(b"none" if part is None else str(part.shape).encode())
            if part is not None:
                digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class PartitionKind:
    """An entry of the registry: how it is written, its arguments read, and the function.

    Parameters
    ----------
    usage
        How it is written.
    parse
        Reads the texts between the colons into arguments.
    make
        ``(source, num_clients, rng, *arguments) -> Partition``; of a shift, with a further
        argument ``client``, the client of every row where another partition has dealt them.
    is_shift
        Whether it changes what groups of clients see, and may stand behind a plus sign.
    brings_clients
        Whether it has its own number of clients, whatever was asked for.
    """

    usage: str
    parse: Callable[[list[str]], tuple[Any, ...]]
    make: Callable[..., Partition]
    is_shift: bool = False
    brings_clients: bool = False


def labels_of(source: Source, name: str) -> tuple[np.ndarray, int]:
    """Return class numbers and how many classes there are, or say why there are none."""
    if source.y is None:
        raise HandspanError(
            f"the partition {name} needs labels, but {source.name} has none; choose iid or natural"
        )
    if source.y.dtype.kind == "f":
        raise HandspanError(
            f"the partition {name} needs classes, but the labels of {source.name} are real "
            "numbers; choose iid or natural"
        )
    labels, num_classes = as_labels(source.y, source.num_rows, "classification", source.num_classes)
    if labels is None or num_classes is None:  # pragma: no cover
        raise HandspanError(f"the partition {name} needs labels")
    return labels, num_classes
