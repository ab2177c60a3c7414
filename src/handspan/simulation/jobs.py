"""What workers are given to do: exchanges and predictions, of which they run any part.

Whoever has one can run any block of it, here or in a worker, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Phase
from handspan.core.data import ClientData, FederatedData
from handspan.core.records import num_bytes, take
from handspan.simulation.about import client_data
from handspan.simulation.batching import select_axis
from handspan.simulation.loop import LoopExecutor
from handspan.simulation.plans import Blocks, groups
from handspan.simulation.reduction import CHUNK, Reduction
from handspan.simulation.stacked import StackedExecutor
from handspan.simulation.tracing import Recorder


@dataclass(frozen=True, eq=False)
class Job:
    """What a worker needs for all exchanges of a run."""

    algorithm: Algorithm
    data: FederatedData
    seed: int
    block_size: int
    recorder: Recorder

    @cached_property
    def executor(self) -> LoopExecutor | StackedExecutor:
        """The engine inside."""
        kind = LoopExecutor if self.block_size == 1 else StackedExecutor
        made = kind(self.data, self.algorithm.per_row, self.block_size)
        made.recorder = self.recorder
        return made

    def about(self, ids: Tensor) -> ClientData:
        """What the clients' functions know of them."""
        return client_data(self.algorithm, self.data, self.seed, ids)


@dataclass(frozen=True, eq=False)
class Exchange:
    """A phase for a cohort; runs any of its blocks, here or in a worker."""

    job: Job
    phase: Phase
    broadcast: Any
    ids: Tensor
    key: Tensor
    block_size: int
    weights: Tensor | None  # where chunks of uploads are to be summed

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel without what has been computed from the fields."""
        return Exchange, tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def ends(self) -> list[int]:
        """Clients, in canonical order, behind which a chunk of uploads is complete."""
        if self.weights is None:
            return []
        order = torch.cat(groups(self.job.data.num_train[self.ids]))
        count = (self.weights[order] > 0).cumsum(0)
        marks = torch.arange(CHUNK, max(CHUNK, int(count[-1])), CHUNK)
        return [*(torch.searchsorted(count, marks) + 1).tolist(), len(self.ids)]

    @cached_property
    def blocks(self) -> Blocks:
        """Blocks of the cohort, cut where chunks end."""
        data = self.job.data
        return Blocks(self.phase, self.ids, data, self.key, self.block_size, self.ends)

    @cached_property
    def tasks(self) -> list[tuple[int, int]]:
        """First and last block of each task: a block, or those of a chunk."""
        if self.weights is None:
            return list(pairwise(range(len(self.blocks) + 1)))
        reached = torch.tensor([len(part.ids) for part in self.blocks.parts]).cumsum(0)
        cuts = torch.searchsorted(reached, torch.tensor(self.ends)) + 1
        return list(pairwise([0, *cuts.tolist()]))

    def members(self, task: tuple[int, int]) -> Tensor:
        """Clients of a task."""
        return torch.cat([part.ids for part in self.blocks.parts[slice(*task)]])

    def run(self, first: int, last: int, clients: Any) -> tuple[list[Any], Any, int]:
        """New records and uploads of each block; or no uploads, but their sum and size."""
        results, at = list[Any](), 0
        for index in range(first, last):
            block = self.blocks[index]
            mine = take(clients, slice(at, at + len(block.ids)))
            at += len(block.ids)
            place = torch.searchsorted(self.ids, block.ids)
            received = select_axis(self.broadcast, self.phase.per_client, place)
            about = self.job.about(block.ids)
            results.append(self.job.executor.run(self.phase, received, mine, about, block))
        if self.weights is None:
            return results, None, 0
        reduction, size = Reduction(self.phase, self.ids, self.weights), 0
        for part, (_, uploads) in zip(self.blocks.parts[first:last], results, strict=True):
            reduction.add(part.ids, uploads)
            size = upload_bytes(self.phase, uploads)
        return [(states, None) for states, _ in results], reduction.total(), size


@dataclass(frozen=True, eq=False)
class Prediction:
    """Outputs of served models; computes those of any clients, here or in a worker."""

    job: Job
    function: Callable[[Any, Any, Any, Any], Tensor]
    broadcast: Any
    rows: Any
    unbatched: frozenset[str]
    per_client: frozenset[str]

    def run(self, ids: Tensor, place: Tensor, clients: Any) -> Tensor:
        """Outputs for some clients; ``place`` is where they stand among all that are served."""
        with torch.no_grad():
            return self.job.executor.predict(
                self.function,
                select_axis(self.broadcast, self.per_client, place),
                clients,
                self.job.about(ids),
                ids,
                self.rows,
                self.unbatched,
                self.per_client,
            )


def upload_bytes(phase: Phase, uploads: Any) -> int:
    """Bytes that one client of a block sends."""
    one = take(uploads, 0)
    return num_bytes(one if phase.wire is None else phase.wire(one))
