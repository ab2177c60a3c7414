"""The stacked engine: a block of clients in one tensor operation, by ``vmap``.

Clients of a block are sorted by length, so that finished ones drop out; what remains is rounded up
to a few block sizes, each of whose steps is recorded once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from handspan.core.algorithm import Phase, Stage
from handspan.core.data import ClientData, Csr, FederatedData
from handspan.core.records import concatenate, map_tensors, take
from handspan.simulation.batching import (
    expand,
    fit_rows,
    flatten,
    gather,
    in_order,
    select_axis,
)
from handspan.simulation.captured import CapturedClients, Stations
from handspan.simulation.graphs import CudaGraphs
from handspan.simulation.loop import LoopExecutor
from handspan.simulation.plans import Block, Blocks, StagePlan, groups
from handspan.simulation.steps import Batches, BlockStep, Clients, batch_names
from handspan.simulation.tracing import Recorder

# A captured step costs a tenth of one that runs as it is written: there recording pays sooner.
_CALLS_BEFORE_CAPTURE = 16


class StackedExecutor:
    """Runs a block of clients by ``vmap`` over the functions written for one."""

    name = "stacked"
    is_stacked = True

    def __init__(self, data: FederatedData, per_row: frozenset[str], block_size: int) -> None:
        self.data = data
        self.per_row = per_row
        self.block_size = block_size
        self.recorder = Recorder()
        self.stations: Stations | None = None
        if data.device.type == "cuda":
            self.stations = Stations(data, CudaGraphs())
            self.recorder = Recorder(_CALLS_BEFORE_CAPTURE)
        self._structures: dict[Any, Any] = {}  # of what functions return
        self._one_by_one = LoopExecutor(data, per_row, block_size)

    def blocks(self, phase: Phase, ids: Tensor, k: Tensor) -> Blocks:
        """Blocks of a phase's clients, in canonical order; planned where the rows are."""
        return Blocks(
            phase,
            ids,
            self.data,
            k,
            self.block_size,
            device=self.data.device,
            few_shapes=self.stations is not None,
        )

    def run(
        self, phase: Phase, broadcast: Any, clients: Any, about: ClientData, block: Block
    ) -> tuple[Any, Any]:
        """New private records and uploads of a block, with a leading client axis."""
        if isinstance(self.data.x, Csr) and any(stage.sparse for stage in phase.stages):
            # Compressed rows cannot be stacked; phases with much work on them have a flat twin.
            return self._one_by_one.run(phase, broadcast, clients, about, block)
        size = len(block.ids)
        if size == 1 and not block.is_alone:
            # Some kernels take another path for a single client: run it twice, for equal bits.
            pair = self._select(phase, broadcast, clients, about, block, torch.tensor([0, 0]))
            states, uploads = self._run(*pair)
            return take(states, slice(1)), None if uploads is None else take(uploads, slice(1))
        try:
            return self._run(phase, broadcast, clients, about, block)
        except torch.OutOfMemoryError:
            if size < 4:
                raise
        self.block_size = (size + 1) // 2
        if self.stations is not None:
            self.stations.clear()
        halves = torch.arange(size).split(self.block_size)
        parts = [
            self.run(*self._select(phase, broadcast, clients, about, block, half))
            for half in halves
        ]
        states, uploads = zip(*parts, strict=True)
        return concatenate(list(states)), None if uploads[0] is None else concatenate(list(uploads))

    @staticmethod
    def _select(
        phase: Phase, broadcast: Any, clients: Any, about: ClientData, block: Block, index: Tensor
    ) -> tuple[Phase, Any, Any, ClientData, Block]:
        """Arguments of ``run`` for some clients of a block."""
        received = select_axis(broadcast, phase.per_client, index)
        return phase, received, take(clients, index), take(about, index), block.select(index)

    def _run(
        self, phase: Phase, broadcast: Any, clients: Any, about: ClientData, block: Block
    ) -> tuple[Any, Any]:
        size = len(block.ids)
        about = map_tensors(lambda t: t.to(self.data.device, non_blocking=True), about)
        broadcast = expand(broadcast, phase.unbatched | phase.per_client, size)
        clients = fit_rows(clients, self.per_row, block.longest)
        shared = phase.unbatched
        working = self._map(phase.begin, shared, broadcast, clients, about)
        for index, stage in enumerate(phase.stages):
            working = self._stage(phase, stage, index, broadcast, working, about, block)
            if stage.finish is not None:
                working = self._map(stage.finish, shared, broadcast, working)
        return self._map(phase.end, shared, broadcast, working, about)

    def _map(
        self,
        function: Callable[..., Any],
        unbatched: frozenset[str],
        broadcast: Any,
        *rest: Any,
        is_kept: bool = True,
    ) -> Any:
        """``vmap`` of a function of records, which is kept if it comes again."""
        leaves, dims, spec = flatten(broadcast, unbatched, rest)
        structure: list[Any] = []

        def flat(*leaves: Tensor) -> list[Tensor]:
            outputs, out = pytree.tree_flatten(function(*pytree.tree_unflatten(leaves, spec)))
            structure.append((out, [isinstance(o, Tensor) for o in outputs]))
            return [o for o in outputs if isinstance(o, Tensor)]

        mapped = torch.vmap(flat, in_dims=dims, randomness="error")
        if self.stations is not None and function in self._structures:
            # Where steps are captured, what comes before and after them should cost little too.
            mapped = self.recorder.find(("map", function), mapped, leaves) or mapped
            structure.append(self._structures[function])
        values = iter(mapped(*leaves))
        out, is_tensor = structure[0]
        if is_kept:
            self._structures[function] = structure[0]
        return pytree.tree_unflatten([next(values) if t else None for t in is_tensor], out)

    def _stage(
        self,
        phase: Phase,
        stage: Stage,
        index: int,
        broadcast: Any,
        working: Any,
        about: ClientData,
        block: Block,
    ) -> Any:
        """Run the steps of one stage; clients that have finished drop out."""
        plan, ids = block.plans[index], block.ids
        order = plan.num_steps.argsort(descending=True, stable=True)
        is_sorted = bool((order == torch.arange(len(order))).all())
        if not is_sorted:
            plan, ids = plan.select(order), ids[order]
            there = order.to(self.data.device, non_blocking=True)
            working, about = take(working, there), take(about, there)
            broadcast = select_axis(broadcast, None, there, phase.unbatched)
        names = batch_names(self.data, about)
        step = BlockStep(phase, stage, index, broadcast, working, names)
        clients = self._clients(stage, step, plan, ids, about)
        counts = plan.num_steps.tolist()
        active = len(counts)
        for t in range(plan.steps):
            while counts[active - 1] <= t:
                active -= 1
            clients.step(t, active)
        working = clients.working()
        if is_sorted:
            return working
        return take(working, order.argsort().to(self.data.device, non_blocking=True))

    def _clients(
        self, stage: Stage, step: BlockStep, plan: StagePlan, ids: Tensor, about: ClientData
    ) -> Clients | CapturedClients:
        if self.stations is not None:
            found = self.stations.clients(stage, step, plan, ids, about, self.recorder)
            if found is not None:
                return found
        batches = Batches(self.data, stage, plan, ids, about)
        return Clients(step, batches, self.recorder, len(ids))

    def predict(
        self,
        function: Callable[[Any, Any, Any, Any], Tensor],
        broadcast: Any,
        clients: Any,
        about: ClientData,
        ids: Tensor,
        rows: Any,
        unbatched: frozenset[str],
        per_client: frozenset[str] = frozenset(),
    ) -> Tensor:
        """Outputs of ``function(B, C, x, side)`` for a split's rows of each client, joined."""
        first, count = (part[ids] for part in self.data.span(rows))
        begin = self.data.offsets[ids] + first
        parts: list[tuple[Tensor, Tensor]] = []
        for group in groups(count):
            members = group if len(group) > 1 else group.repeat(2)
            width = int(count[members].max())
            place = torch.arange(width)
            real = place < count[members].unsqueeze(1)
            index = begin[members].unsqueeze(1) + torch.where(real, place, 0)
            x, _ = gather(self.data, index)
            expanded = expand(
                select_axis(broadcast, per_client, members), unbatched | per_client, len(members)
            )
            mine, side = take(clients, members), None
            if about.side is not None:
                side = about.side[members]
            outputs = self._map(function, unbatched, expanded, mine, x, side, is_kept=False)
            kept = real[: len(group)].to(outputs.device)
            parts.append((group, outputs[: len(group)][kept]))
        return in_order(parts, count)
