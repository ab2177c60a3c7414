"""Partitions that plant groups of clients and change what each group sees.

A shift deals rows evenly, or takes clients that another partition has made
(``quantity:1.5+permuted:3``). It says what is to be done to each group; ``apply`` does it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from handspan.core.errors import HandspanError
from handspan.data.assignments import deal
from handspan.data.inputs import is_sparse
from handspan.data.partition_types import Partition, labels_of
from handspan.data.source import Source
from handspan.data.warp import warp_images

SMALL_ALPHABET = 8  # up to 8! = 40320 permutations are listed rather than drawn
# Degrees of the clockwise turn and of the clockwise shear after it (PerFedSI, appendix).
AFFINE = np.array([[0.0, 0.0], [90.0, 3.0], [180.0, 6.0], [270.0, 9.0]])


def permuted(
    source: Source,
    num_clients: int,
    rng: np.random.Generator,
    num_groups: int,
    client: np.ndarray | None = None,
) -> Partition:
    """Each group of clients calls the classes by other names."""
    _, num_classes = labels_of(source, "permuted")
    _check_groups("permuted", num_groups, num_clients)
    relabel = _permutations(num_groups, num_classes, rng)
    client, groups = _plant(source, num_clients, rng, num_groups, client)
    return Partition(client=client, groups=groups, relabel=relabel)


def rotated(
    source: Source,
    num_clients: int,
    rng: np.random.Generator,
    num_groups: int,
    client: np.ndarray | None = None,
) -> Partition:
    """Group g sees its images turned clockwise by 360 g / G degrees."""
    _check_images(source, "rotated")
    _check_groups("rotated", num_groups, num_clients)
    client, groups = _plant(source, num_clients, rng, num_groups, client)
    turn = np.stack([360.0 * np.arange(num_groups) / num_groups, np.zeros(num_groups)], axis=1)
    return Partition(client=client, groups=groups, turn=turn)


def affine(
    source: Source,
    num_clients: int,
    rng: np.random.Generator,
    num_groups: int,
    client: np.ndarray | None = None,
) -> Partition:
    """Groups see images turned and sheared by PerFedSI's shifts; the group is side information."""
    _check_images(source, "affine")
    _check_groups("affine", num_groups, num_clients)
    client, groups = _plant(source, num_clients, rng, num_groups, client)
    side = np.eye(num_groups, dtype=np.float32)[groups]
    return Partition(client=client, groups=groups, turn=AFFINE[:num_groups], side=side)


def apply(source: Source, part: Partition) -> Partition:
    """Do to the rows what the partition says; what it has replaced itself stays."""
    if part.groups is None or (part.relabel is None and part.turn is None):
        return part
    group = part.groups[part.codes()]
    y, x = part.y, part.x
    if part.relabel is not None and y is None:
        labels, _ = labels_of(source, "permuted")
        y = part.relabel[group, labels]
    if part.turn is not None and x is None:
        x = np.array(source.x)
        for number, turn in enumerate(part.turn):
            if turn.any():
                warp_images(source.x, np.flatnonzero(group == number), x, turn)
    return dataclasses.replace(part, x=x, y=y)


def _plant(
    source: Source,
    num_clients: int,
    rng: np.random.Generator,
    num_groups: int,
    client: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Deal rows where nobody has, and draw groups of equal sizes (up to one client)."""
    if client is None:
        client = deal(source.num_rows, num_clients, rng)
    return client, rng.permutation(np.arange(num_clients) % num_groups)


def _check_groups(name: str, num_groups: int, num_clients: int) -> None:
    if num_groups > num_clients:
        raise HandspanError(
            f"{name}:{num_groups} makes more groups than the {num_clients} clients; ask for fewer"
        )


def _check_images(source: Source, name: str) -> None:
    if source.kind != "image" or is_sparse(source.x) or source.x.ndim not in (3, 4):
        raise HandspanError(
            f"the partition {name} turns images, but rows of {source.name} have shape "
            f"{tuple(source.x.shape[1:])} and are of kind {source.kind}; choose another partition"
        )


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
