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
        uploads = concatenate(self._pending)
        weights = torch.cat(self._pending_weights)
        self._add_total(_sum(self._phase, take(uploads, slice(size)), weights[:size]))
        self._pending = [take(uploads, slice(size, None))] if len(weights) > size else []
        self._pending_weights = [weights[size:]] if len(weights) > size else []
        self._pending_count = len(weights) - size

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


def _sum(phase: Phase, uploads: Any, weights: Tensor) -> Any:
    if callable(phase.reduce):
        return phase.reduce(uploads, weights)

    # All leaves side by side: one product instead of one for each.
    leaves, spec = pytree.tree_flatten(uploads)
    if not leaves:
        return uploads
    shapes = [leaf.shape[1:] for leaf in leaves]
    sizes = [shape.numel() for shape in shapes]
    flat = weights.new_empty(len(weights), sum(sizes))
    for place, leaf in zip(flat.split(sizes, 1), leaves, strict=True):
        place.copy_(leaf.reshape(len(weights), -1))
    totals = (weights @ flat).split(sizes)
    return pytree.tree_unflatten(
        [total.view(shape) for total, shape in zip(totals, shapes, strict=True)], spec
    )
