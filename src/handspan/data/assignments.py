"""Partitions that say whose row is whose: iid, by label, by size, or the source's own clients."""

from __future__ import annotations

import numpy as np

from handspan.core.errors import HandspanError
from handspan.data import label_skew
from handspan.data.partition_types import Partition, labels_of
from handspan.data.source import Source

LEAST_ROWS = 2  # one for training, one for test


def deal(num_rows: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Deal shuffled rows round: sizes differ by one row at most."""
    return rng.permutation(np.arange(num_rows, dtype=np.int32) % np.int32(num_clients))


def iid(source: Source, num_clients: int, rng: np.random.Generator) -> Partition:
    """Deal shuffled rows to clients of equal sizes (up to one row)."""
    return Partition(client=deal(source.num_rows, num_clients, rng))


def dirichlet(
    source: Source, num_clients: int, rng: np.random.Generator, alpha: float, least: int
) -> Partition:
    """Let a Dirichlet(alpha) distribution over clients share out every class."""
    labels, num_classes = labels_of(source, "dirichlet")
    client, remarks = label_skew.dirichlet(labels, num_classes, num_clients, rng, alpha, least)
    return Partition(client=client, remarks=remarks)


def shards(
    source: Source, num_clients: int, rng: np.random.Generator, count: int, exact: bool
) -> Partition:
    """Cut classes into shards of one class each and give every client the same number of them."""
    labels, num_classes = labels_of(source, "shards")
    return Partition(client=label_skew.shards(labels, num_classes, num_clients, rng, count, exact))


def groups(
    source: Source, num_clients: int, rng: np.random.Generator, num_groups: int
) -> Partition:
    """Divide labels and clients into groups; a client has rows of its group's labels only."""
    labels, num_classes = labels_of(source, "groups")
    sizes = np.bincount(labels, minlength=num_classes)
    present = np.flatnonzero(sizes)
    if num_groups > min(num_clients, len(present)):
        raise HandspanError(
            f"groups:{num_groups} makes more groups than there are clients ({num_clients}) or "
            f"classes ({len(present)}); ask for fewer"
        )
    group_of = np.full(num_classes, -1)
    group_of[rng.permutation(present)] = np.arange(len(present)) % num_groups
    planted = rng.permutation(np.arange(num_clients) % num_groups)
    client = np.empty(source.num_rows, dtype=np.int32)
    row_group = group_of[labels]
    for group in range(num_groups):
        rows, members = np.flatnonzero(row_group == group), np.flatnonzero(planted == group)
        if len(rows) < LEAST_ROWS * len(members):
            raise HandspanError(
                f"the labels {np.flatnonzero(group_of == group).tolist()} of one group have only "
                f"{len(rows)} rows for its {len(members)} clients, and every client needs two: ask "
                "for fewer clients or groups"
            )
        client[rows] = members[deal(len(rows), len(members), rng)]
    return Partition(client=client, groups=planted)


def quantity(source: Source, num_clients: int, rng: np.random.Generator, sigma: float) -> Partition:
    """Deal shuffled rows to clients of log-normal sizes, two rows at least."""
    sizes = lognormal_sizes(source.num_rows, num_clients, rng, sigma)
    client = np.repeat(np.arange(num_clients, dtype=np.int32), sizes)
    return Partition(client=rng.permutation(client))


def lognormal_sizes(
    num_rows: int, num_clients: int, rng: np.random.Generator, sigma: float
) -> np.ndarray:
    """Return sizes in proportion to exp(sigma z), z ~ N(0, 1), that use every row."""
    exponent = sigma * rng.standard_normal(num_clients)
    weights = np.exp(exponent - exponent.max())
    small = np.zeros(num_clients, dtype=bool)
    while True:  # those who would fall below the least number get it, the others share the rest
        rest = num_rows - LEAST_ROWS * int(small.sum())
        wanted = np.where(small, LEAST_ROWS, weights / weights[~small].sum() * rest)
        falling = ~small & (wanted < LEAST_ROWS)
        if not falling.any():
            break
        small |= falling
        if small.all():  # only rounding can bring this about: everyone has two rows
            return np.full(num_clients, LEAST_ROWS)
    sizes = np.maximum(np.floor(wanted), LEAST_ROWS).astype(np.int64)
    largest_rest = np.argsort(sizes - wanted, kind="stable")
    missing = num_rows - int(sizes.sum())
    sizes[largest_rest[: max(missing, 0)]] += 1
    return sizes


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
        _check_several(source, "client", source.client)
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
    _check_several(source, field, ids)
    return Partition(client=ids, is_natural=ids is source.client)


def _check_several(source: Source, field: str, ids: np.ndarray) -> None:
    if (ids == ids[0]).all():
        raise HandspanError(
            f"all rows of {source.name} belong to one client, {ids[0]!s} in {field!r}: a "
            "federation needs several; choose another partition or another field"
        )


def _list(source: Source) -> str:
    return f"it has: {', '.join(sorted(source.fields)) or 'none'}"
