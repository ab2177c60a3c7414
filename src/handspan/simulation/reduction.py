"""Sums of uploads in float64 and in an order that no block size can change.

Uploads arrive block by block in canonical order; they are added in chunks of a fixed size, so
that the same additions happen whatever the size of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from handspan.core.algorithm import Phase, Reduced, Stacked
from handspan.core.data import Round
from handspan.core.records import concatenate, take, tensors

CHUNK = 32  # uploads that are added at once
_MANY = 1 << 14  # numbers of an upload from which on copies cost more than operations


@dataclass(frozen=True)
class PartialSum:
    """The sum of a whole chunk of uploads, made where they were.

    Attributes
    ----------
    total
        As ``Reduction`` would have made it; None where none of the clients sends.
    num_bytes
        Size of one upload on the wire.
    """

    total: Any
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Postprocessor:
    """A change of what is sent or received that methods know nothing of (clip, noise, compress).

    Attributes
    ----------
    upload
        (U block, ids, Round) -> U block, before the reduction.
    reduction
        (R, Round) -> R, after it.
    """

    upload: Callable[[Any, Tensor, Round], Any] = lambda upload, ids, round: upload
    reduction: Callable[[Any, Round], Any] = lambda reduction, round: reduction


class Reduction:
    """Collects the uploads of one exchange."""

    def __init__(self, phase: Phase, ids: Tensor, weights: Tensor) -> None:
        self._phase = phase
        self._ids = ids
        self._weights = weights
        self._total: Any = None
        self._pending: list[Any] = []
        self._pending_weights: list[Tensor] = []
        self._pending_count = 0
        self._all: list[tuple[Tensor, Any]] = []

    def add(self, ids: Tensor, uploads: Any) -> None:
        """Take the uploads of a block; those of weight 0 were never sent."""
        weights = self._weights[torch.searchsorted(self._ids, ids)]
        sent = weights > 0
        if not bool(sent.all()):
            uploads, ids, weights = take(uploads, sent), ids[sent], weights[sent]
        if not len(ids):
            return
        if self._phase.reduce == "stack":
            self._all.append((ids, uploads))
            return
        if leaves := tensors(uploads):
            weights = weights.to(leaves[0].device, non_blocking=True)
        self._pending.append(uploads)
        self._pending_weights.append(weights)
        self._pending_count += len(ids)
        while self._pending_count >= CHUNK:
            self._reduce_chunk(CHUNK)

    def _reduce_chunk(self, size: int) -> None:
        self._pending_count -= size
        blocks, weights = self._pending, self._pending_weights
        left = size - sum(map(len, weights[:-1]))  # of the last block
        self._pending, self._pending_weights = [], []
        if left < len(weights[-1]):
            self._pending = [take(blocks[-1], slice(left, None))]
            self._pending_weights = [weights[-1][left:]]
            blocks = [*blocks[:-1], take(blocks[-1], slice(left))]
            weights = [*weights[:-1], weights[-1][:left]]
        self._add_total(_sum(self._phase, blocks, weights))

    def _add_total(self, part: Any) -> None:
        if self._total is None:
            self._total = part
        else:
            for total, new in zip(tensors(self._total), tensors(part), strict=True):
                total.add_(new)

    def add_sum(self, chunk: PartialSum) -> None:
        """Take a chunk of uploads that has been summed already."""
        if chunk.total is not None:
            self._add_total(chunk.total)

    def total(self) -> Any:
        """Return the sum so far."""
        if self._pending_count:
            self._reduce_chunk(self._pending_count)
        return self._total

    def result(self) -> Any:
        """Return the reduction of all uploads."""
        sent = self._weights > 0
        if self._phase.reduce == "stack":
            order = torch.cat([ids for ids, _ in self._all]).argsort()
            uploads = take(concatenate([uploads for _, uploads in self._all]), order)
            return Stacked(uploads=uploads, ids=self._ids[sent], weights=self._weights[sent])
        total = self.total()
        if self._phase.reduce != "sum":
            return total
        return Reduced(
            total=total,
            weight=self._weights[sent].sum(),
            count=sent.sum().to(torch.float64),
        )


def _sum(phase: Phase, blocks: list[Any], weights: list[Tensor]) -> Any:
    leaves, spec = pytree.tree_flatten(blocks[0])
    if callable(phase.reduce):
        return phase.reduce(concatenate(blocks), torch.cat(weights))
    if not leaves:
        return blocks[0]
    shapes = [leaf.shape[1:] for leaf in leaves]
    many = sum(shape.numel() for shape in shapes) >= _MANY and leaves[0].device.type == "cpu"
    totals = (_one_by_one if many else _as_product)(blocks, weights, shapes)
    return pytree.tree_unflatten(totals, spec)


def _one_by_one(blocks: list[Any], weights: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
    """Add one upload after the other: nothing is copied."""
    totals = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for block, part in zip(blocks, weights, strict=True):
        for total, leaf in zip(totals, tensors(block), strict=True):
            for upload, weight in zip(leaf.unbind(), part.tolist(), strict=True):
                total.add_(upload, alpha=weight)
    return totals


def _as_product(blocks: list[Any], weights: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
    """All leaves side by side: one product instead of one for each."""
    weight = torch.cat(weights)
    sizes = [shape.numel() for shape in shapes]
    flat = weight.new_empty(len(weight), sum(sizes))
    for place, leaf in zip(flat.split(sizes, 1), tensors(concatenate(blocks)), strict=True):
        place.copy_(leaf.reshape(len(weight), -1))
    totals = (weight @ flat).split(sizes)
    return [total.view(shape) for total, shape in zip(totals, shapes, strict=True)]
