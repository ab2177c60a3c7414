"""Whose row is whose: partitions of a source, each a pure function of the seed.

A partition is written ``name`` or ``name:argument:...``. A new one is a function
``(source, num_clients, rng, *arguments) -> Partition`` with an entry in ``registry``; it may also
replace the rows' features or labels, client by client, and plant groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from handspan.core import keys
from handspan.core.errors import HandspanError, nearest
from handspan.data import label_skew
from handspan.data.inputs import as_labels
from handspan.data.sources import Source

SMALL_ALPHABET = 8  # up to 8! = 40320 permutations are listed rather than drawn


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
    x, y
        Rows and labels that replace the source's, or None.
    is_natural
        Whether clients are the source's own, so that its side information belongs to them.
    remarks
        What the user should know.
    """

    client: np.ndarray
    groups: np.ndarray | None = None
    relabel: np.ndarray | None = None
    x: Any = None
    y: np.ndarray | None = None
    is_natural: bool = False
    remarks: tuple[str, ...] = ()

    def original_labels(self, labels: np.ndarray, client: np.ndarray) -> np.ndarray:
        """Undo the permutation of the labels of rows that belong to the given clients."""
        if self.relabel is None or self.groups is None:
            return labels
        return np.argsort(self.relabel, axis=1)[self.groups[client], labels]


@dataclass(frozen=True, kw_only=True)
class PartitionKind:
    """An entry of the registry: how it is written, its arguments read, and the function."""

    usage: str
    parse: Callable[[list[str]], tuple[Any, ...]]
    make: Callable[..., Partition]


def iid(source: Source, num_clients: int, rng: np.random.Generator) -> Partition:
    """Deal shuffled rows to clients of equal sizes (up to one row)."""
    return Partition(client=_deal(source.num_rows, num_clients, rng))


def dirichlet(
    source: Source, num_clients: int, rng: np.random.Generator, alpha: float, least: int
) -> Partition:
    """Let a Dirichlet(alpha) distribution over clients share out every class."""
    labels, num_classes = _labels(source, "dirichlet")
    client, remarks = label_skew.dirichlet(labels, num_classes, num_clients, rng, alpha, least)
    return Partition(client=client, remarks=remarks)


def shards(
    source: Source, num_clients: int, rng: np.random.Generator, count: int, exact: bool
) -> Partition:
    """Cut classes into shards of one class each and give every client the same number of them."""
    labels, num_classes = _labels(source, "shards")
    return Partition(client=label_skew.shards(labels, num_classes, num_clients, rng, count, exact))


def permuted(
    source: Source, num_clients: int, rng: np.random.Generator, num_groups: int
) -> Partition:
    """Deal rows evenly; each group of clients calls the classes by other names."""
    labels, num_classes = _labels(source, "permuted")
    if num_groups > num_clients:
        raise HandspanError(
            f"permuted:{num_groups} makes more groups than the {num_clients} clients; ask for fewer"
        )
    relabel = _permutations(num_groups, num_classes, rng)
    client = _deal(source.num_rows, num_clients, rng)
    groups = rng.permutation(np.arange(num_clients) % num_groups)
    y = relabel[groups[client], labels]
    return Partition(client=client, groups=groups, relabel=relabel, y=y)


def natural(
    source: Source, num_clients: int, rng: np.random.Generator, field: str | None
) -> Partition:
    """Keep the source's own clients, or those that another of its arrays tells apart."""
    if field is None:
        if source.client is None:
            raise HandspanError(
                f"{source.name} has no client ids; choose another partition, or natural:FIELD "
                f"with an array of one id per row ({_list(source)})"
            )
        return Partition(client=source.client, is_natural=True)
    ids = source.fields.get(field)
    if ids is None and field == "y":
        ids = source.y
    if ids is None:
        raise HandspanError(
            f"{source.name} has no array {field!r} with one id per row ({_list(source)})"
        )
    if ids.ndim != 1:
        raise HandspanError(f"{field!r} of {source.name} must hold a single id per row")
    return Partition(client=ids, is_natural=field == "client")


def _list(source: Source) -> str:
    return f"it has: {', '.join(sorted(source.fields)) or 'none'}"


def _deal(num_rows: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(np.arange(num_rows, dtype=np.int32) % np.int32(num_clients))


def _labels(source: Source, name: str) -> tuple[np.ndarray, int]:
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


def _permutations(count: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw distinct permutations, none of them privileged."""
    if size <= 20 and count > math.factorial(size):
        raise HandspanError(
            f"{size} classes have only {math.factorial(size)} permutations; permuted:{count} "
            "cannot give each group its own"
        )
    if size <= SMALL_ALPHABET:
        every = np.array(list(itertools.permutations(range(size))), dtype=np.int64)
        return every[rng.choice(len(every), size=count, replace=False)]
    drawn = np.empty((0, size), dtype=np.int64)
    while len(drawn) < count:
        more = rng.permuted(np.tile(np.arange(size), (count, 1)), axis=1)
        drawn = np.concatenate([drawn, more])
        _, first = np.unique(drawn, axis=0, return_index=True)
        drawn = drawn[np.sort(first)]
    return drawn[:count]


def _whole(text: str, what: str, usage: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 2**31:
        raise HandspanError(f"{what} in {usage} must be a whole number of at least 1, not {text!r}")
    return int(text)


def _parse_dirichlet(arguments: list[str]) -> tuple[float, int]:
    usage = "dirichlet:ALPHA[:MIN]"
    if len(arguments) not in (1, 2):
        raise HandspanError(f"write the partition as {usage}, for example dirichlet:0.5")
    try:
        alpha = float(arguments[0])
    except ValueError:
        alpha = math.nan
    if not 0.0 < alpha < math.inf:
        raise HandspanError(f"ALPHA in {usage} must be a positive number, not {arguments[0]!r}")
    least = _whole(arguments[1], "MIN", usage) if len(arguments) == 2 else 2
    if least < 2:
        raise HandspanError(
            f"MIN in {usage} must be at least 2: every client needs a training and a test row"
        )
    return alpha, least


def _parse_shards(arguments: list[str]) -> tuple[int, bool]:
    usage = "shards:S[:exact]"
    if len(arguments) not in (1, 2) or arguments[1:] not in ([], ["exact"]):
        raise HandspanError(
            f"write the partition as {usage}, for example shards:2 or shards:2:exact"
        )
    return _whole(arguments[0], "S", usage), len(arguments) == 2


def _parse_permuted(arguments: list[str]) -> tuple[int]:
    if len(arguments) != 1:
        raise HandspanError("write the partition as permuted:G, for example permuted:5")
    return (_whole(arguments[0], "G", "permuted:G"),)


def _parse_iid(arguments: list[str]) -> tuple[()]:
    if arguments:
        raise HandspanError("the partition iid has no arguments; write iid")
    return ()


def _parse_natural(arguments: list[str]) -> tuple[str | None]:
    if len(arguments) > 1 or arguments == [""]:
        raise HandspanError("write the partition as natural or natural:FIELD")
    return (arguments[0] if arguments else None,)


registry: dict[str, PartitionKind] = {
    "iid": PartitionKind(usage="iid", parse=_parse_iid, make=iid),
    "dirichlet": PartitionKind(
        usage="dirichlet:ALPHA[:MIN]", parse=_parse_dirichlet, make=dirichlet
    ),
    "shards": PartitionKind(usage="shards:S[:exact]", parse=_parse_shards, make=shards),
    "permuted": PartitionKind(usage="permuted:G", parse=_parse_permuted, make=permuted),
    "natural": PartitionKind(usage="natural[:FIELD]", parse=_parse_natural, make=natural),
}


def parse_partition(text: str) -> tuple[str, tuple[Any, ...]]:
    """Read a partition's text into its name and arguments, without looking at any data.

    Examples
    --------
    >>> parse_partition("dirichlet:0.5")
    ('dirichlet', (0.5, 2))
    """
    name, *arguments = text.split(":")
    if name not in registry:
        raise HandspanError(f"unknown partition {name!r}{nearest(name, list(registry))}")
    return name, registry[name].parse(arguments)


def partition(source: Source, spec: str, num_clients: int, seed: int) -> Partition:
    """Divide a source among clients.

    Parameters
    ----------
    source
        The rows.
    spec
        The partition as text: ``iid``, ``dirichlet:0.5``, ``shards:2:exact``, ...
    num_clients
        How many clients; ``natural`` takes the source's own instead.
    seed
        Same seed, same partition.
    """
    name, arguments = parse_partition(spec)
    if name != "natural":
        if isinstance(num_clients, bool) or int(num_clients) != num_clients or num_clients < 1:
            raise HandspanError(f"the number of clients must be at least 1, not {num_clients}")
        if 2 * num_clients > source.num_rows:
            raise HandspanError(
                f"{num_clients} clients are too many for {source.num_rows} rows: every client "
                f"needs two, so ask for at most {source.num_rows // 2}"
            )
    rng = keys.generator(keys.key(seed, "partition", name))
    return registry[name].make(source, int(num_clients), rng, *arguments)
