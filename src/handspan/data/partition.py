"""Whose row is whose: partitions of a source, each a pure function of the seed.

A partition is written ``name`` or ``name:argument:...``; one that deals rows and one that shifts
what groups of clients see can be joined, as in ``quantity:1.5+permuted:3``. A new one is a
function ``(source, num_clients, rng, *arguments) -> Partition`` with an entry in ``registry``; it
may also replace the rows' features or labels, client by client, and plant groups.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from handspan.core import keys
from handspan.core.errors import HandspanError, nearest
from handspan.data import assignments, partition_text, shifts
from handspan.data.inputs import encode_ids
from handspan.data.partition_file import stored
from handspan.data.partition_types import Partition, PartitionKind
from handspan.data.source import Source

__all__ = ["Partition", "PartitionKind", "parse_partition", "partition", "registry"]

registry: dict[str, PartitionKind] = {
    "iid": PartitionKind(usage="iid", parse=partition_text.parse_iid, make=assignments.iid),
    "dirichlet": PartitionKind(
        usage="dirichlet:ALPHA[:MIN]",
        parse=partition_text.parse_dirichlet,
        make=assignments.dirichlet,
    ),
    "shards": PartitionKind(
        usage="shards:S[:exact]", parse=partition_text.parse_shards, make=assignments.shards
    ),
    "groups": PartitionKind(
        usage="groups:G", parse=partition_text.parse_groups("groups", 5), make=assignments.groups
    ),
    "quantity": PartitionKind(
        usage="quantity:SIGMA", parse=partition_text.parse_quantity, make=assignments.quantity
    ),
    "permuted": PartitionKind(
        usage="permuted:G",
        parse=partition_text.parse_groups("permuted", 5),
        make=shifts.permuted,
        is_shift=True,
    ),
    "rotated": PartitionKind(
        usage="rotated:G",
        parse=partition_text.parse_groups("rotated", 4),
        make=shifts.rotated,
        is_shift=True,
    ),
    "affine": PartitionKind(
        usage="affine:G",
        parse=partition_text.parse_groups("affine", 4, len(shifts.AFFINE)),
        make=shifts.affine,
        is_shift=True,
    ),
    "natural": PartitionKind(
        usage="natural[:FIELD]",
        parse=partition_text.parse_natural,
        make=assignments.natural,
        brings_clients=True,
    ),
    "file": PartitionKind(
        usage="file:P.npz", parse=partition_text.parse_file, make=stored, brings_clients=True
    ),
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


def _parse_joined(spec: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Read one partition, or one that deals rows and one that shifts them."""
    # A plus before a letter joins; that of 1e+3 does not, nor one in the name of a file.
    texts = [spec] if spec.startswith("file:") else re.split(r"\+(?=[a-z])", spec)
    parsed = [parse_partition(text) for text in texts]
    is_shift = [registry[name].is_shift for name, _ in parsed]
    if len(parsed) > 1 and is_shift != [False, True]:
        deals = [name for name, kind in registry.items() if not kind.is_shift]
        first = ", ".join(name for name in deals if name not in ("file", "groups"))
        second = ", ".join(n for n, kind in registry.items() if kind.is_shift)
        raise HandspanError(
            f"{spec!r} cannot be joined: write A+B, A one of {first}, and B one of {second}"
        )
    return parsed


def partition(source: Source, spec: str, num_clients: int, seed: int) -> Partition:
    """Divide a source among clients.

    Parameters
    ----------
    source
        The rows.
    spec
        The partition as text: ``iid``, ``dirichlet:0.5``, ``quantity:1.5+permuted:3``, ...
    num_clients
        How many clients; ``natural`` and ``file`` bring their own instead.
    seed
        Same seed, same partition.
    """
    (name, arguments), *more = _parse_joined(spec)
    if not registry[name].brings_clients:
        _check_count(source, num_clients)
    rng = keys.generator(keys.key(seed, "partition", name))
    part = registry[name].make(source, int(num_clients), rng, *arguments)
    for shift, its_arguments in more:
        rng = keys.generator(keys.key(seed, "partition", shift))
        part = _join(source, part, spec, shift, its_arguments, rng)
    return shifts.apply(source, part)


def _check_count(source: Source, num_clients: int) -> None:
    if isinstance(num_clients, bool) or int(num_clients) != num_clients or num_clients < 1:
        raise HandspanError(f"the number of clients must be at least 1, not {num_clients}")
    if 2 * num_clients > source.num_rows:
        raise HandspanError(
            f"{num_clients} clients are too many for {source.num_rows} rows: every client "
            f"needs two, so ask for at most {source.num_rows // 2}"
        )


def _join(
    source: Source,
    part: Partition,
    spec: str,
    shift: str,
    arguments: tuple[Any, ...],
    rng: np.random.Generator,
) -> Partition:
    """Shift the clients that another partition has made."""
    if part.groups is not None:
        raise HandspanError(f"{spec!r} cannot be joined: both plant groups; choose one of the two")
    ids = encode_ids(part.client, source.num_rows)
    shifted = registry[shift].make(source, ids.num_clients, rng, *arguments, client=ids.codes)
    return dataclasses.replace(
        part,
        groups=shifted.groups,
        relabel=shifted.relabel,
        turn=shifted.turn,
        side=shifted.side,
        x=shifted.x if part.x is None else part.x,
        y=shifted.y if part.y is None else part.y,
        remarks=part.remarks + shifted.remarks,
    )
