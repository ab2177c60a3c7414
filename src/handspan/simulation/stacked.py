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
from handspan.core.data import Batch, ClientData, Csr, FederatedData
from handspan.core.records import take
from handspan.simulation.batching import (
    expand,
    fit_rows,
    flatten,
    gather,
    in_order,
    select_axis,
)
from handspan.simulation.loop import LoopExecutor, float_type
from handspan.simulation.plans import Block, StagePlan, groups
from handspan.simulation.tracing import Recorder, Steps


class StackedExecutor:
    """Runs a block of clients by ``vmap`` over the functions written for one."""

    name = "stacked"
    is_stacked = True

    def __init__(self, data: FederatedData, per_row: frozenset[str], block_size: int) -> None:
        self.data = data
        self.per_row = per_row
        self.block_size = block_size
        self.recorder = Recorder()
        self._one_by_one = LoopExecutor(data, per_row, block_size)

    def run(
        self, phase: Phase, broadcast: Any, clients: Any, about: ClientData, block: Block
    ) -> tuple[Any, Any]:
        """New private records and uploads of a block, with a leading client axis."""
        if isinstance(self.data.x, Csr) and any(stage.sparse for stage in phase.stages):
            # Compressed rows cannot be stacked; phases with much work on them have a flat twin.
            return self._one_by_one.run(phase, broadcast, clients, about, block)
        size = len(block.ids)
        if size == 1:  # some kernels take another path for a single client: run it twice
            pair = torch.tensor([0, 0])
            plans = tuple(map(_twice, block.plans))
            twice = Block(block.ids[pair], block.num[pair], plans, block.longest)
            copies = (select_axis(broadcast, phase.per_client, pair), take(clients, pair))
            states, uploads = self.run(phase, *copies, take(about, pair), twice)
            return take(states, slice(1)), None if uploads is None else take(uploads, slice(1))
        broadcast = expand(broadcast, phase.unbatched | phase.per_client, size)
        clients = fit_rows(clients, self.per_row, block.longest)
        mapped = self._mapper(phase.unbatched)
        working = mapped(phase.begin, broadcast, clients, about)
        for index, stage in enumerate(phase.stages):
            working = self._stage(phase, stage, index, broadcast, working, about, block)
            if stage.finish is not None:
                working = mapped(stage.finish, broadcast, working)
        result = mapped(lambda *args: phase.end(*args), broadcast, working, about)
        return result

    def _mapper(self, unbatched: frozenset[str]) -> Callable[..., Any]:
        def mapped(function: Callable[..., Any], broadcast: Any, *arguments: Any) -> Any:
            leaves, dims, spec = flatten(broadcast, unbatched, arguments)
            structure: list[Any] = []

            def flat(*leaves: Tensor) -> list[Tensor]:
                outputs, out = pytree.tree_flatten(function(*pytree.tree_unflatten(leaves, spec)))
                structure.append((out, [isinstance(o, Tensor) for o in outputs]))
                return [o for o in outputs if isinstance(o, Tensor)]

            values = iter(torch.vmap(flat, in_dims=dims, randomness="error")(*leaves))
            out, is_tensor = structure[0]
            return pytree.tree_unflatten([next(values) if t else None for t in is_tensor], out)

        return mapped

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
        plan = block.plans[index]
        order = plan.num_steps.argsort(descending=True, stable=True)
        is_sorted = bool((order == torch.arange(len(order))).all())
        if not is_sorted:
            working, plan = take(working, order), _reorder(plan, order)
            broadcast = select_axis(broadcast, None, order, phase.unbatched)
            about = take(about, order)
        start = self.data.offsets[block.ids[order]]
        batches = _Batches(self.data, stage, plan, start, about)
        clients = _Clients(phase, stage, index, broadcast, working, batches, self.recorder)
        counts = plan.num_steps.tolist()
        active = len(counts)
        for t in range(plan.steps):
            while counts[active - 1] <= t:
                active -= 1
            clients.step(t, active)
        working = clients.working()
        return working if is_sorted else take(working, order.argsort())

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
            mapped = self._mapper(unbatched)
            outputs = mapped(function, expanded, mine, x, side)
            kept = real[: len(group)].to(outputs.device)
            parts.append((group, outputs[: len(group)][kept]))
        return in_order(parts, count)


class _Batches:
    """Batches of a block's stage, as bare fields."""

    def __init__(
        self, data: FederatedData, stage: Stage, plan: StagePlan, start: Tensor, about: ClientData
    ) -> None:
        self._data, self._side, self._is_constant = data, about.side, plan.is_constant
        # A client without rows of this kind may begin behind the last row of all.
        start = torch.where(plan.num_steps > 0, start, -plan.rows[:, 0, 0])
        self._place = (plan.rows + start.view(-1, 1, 1)).unbind(1)
        self._rows = plan.rows.unbind(1)
        x = data.x.values if isinstance(data.x, Csr) else data.x
        real = plan.weight.to(x.device, float_type(data))
        self._weight = real.unbind(1)
        self._keys = plan.keys.to(x.device).unbind(1)
        self.is_full = plan.weight.all(2).all(0).tolist()  # of each step: no padding
        self.is_common = plan.rows.shape[2] == stage.batch_size
        self.names = ("x", "y", "weight", "key", "rows", "side")
        absent = {"y"} if data.y is None else set()
        absent |= {"side"} if about.side is None else set()
        self.names = tuple(name for name in self.names if name not in absent)
        self._last: tuple[int, list[Tensor]] | None = None

    def get(self, t: int, size: int) -> tuple[list[Tensor], bool]:
        """Fields of step t for the first clients, and whether no row is padding."""
        key, turn = self._keys[t][:size], 0 if self._is_constant else t
        if not self._is_constant or self._last is None or self._last[0] != size:
            x, y = gather(self._data, self._place[turn][:size])
            side = None if self._side is None else self._side[:size]
            fields = (x, y, self._weight[turn][:size], key, self._rows[turn][:size], side)
            self._last = size, [field for field in fields if field is not None]
        given = self._last[1]
        given[self.names.index("key")] = key
        return given, self.is_full[turn]


class _Clients:
    """A block's clients in one stage, their working state kept as flat tensors between steps."""

    def __init__(
        self,
        phase: Phase,
        stage: Stage,
        index: int,
        broadcast: Any,
        working: Any,
        batches: _Batches,
        recorder: Recorder,
    ) -> None:
        shared, self._dims, self._broadcast_spec = flatten(broadcast, phase.unbatched, ())
        state, self._working_spec = pytree.tree_flatten(working)
        self._first, self._second = len(shared), len(shared) + len(state)
        self._phase, self._stage, self._batches = phase, stage, batches
        self._size = self._whole = len(batches.get(0, 1 << 60)[0][0])
        dims = (*self._dims, *[0] * (len(state) + len(batches.names)))
        mapped = torch.vmap(self._flat, in_dims=dims, randomness="error")
        name = (phase.name, index, stage.step)
        self._steps = Steps(recorder, name, mapped, shared, state)
        self._done: list[list[Tensor]] = []

    def step(self, t: int, active: int) -> None:
        """Step t; clients behind the first ``active`` keep their state."""
        needed = _round_up(active, self._whole)
        if needed < self._size:
            self._narrow(needed)
        given, is_full = self._batches.get(t, needed)
        is_partial = active < needed
        old = self._steps.state
        self._steps.run(
            given,
            (needed, is_full),
            weight=self._batches.names.index("weight") if is_full else None,
            is_common=self._batches.is_common,
            keep=is_partial,
        )
        if is_partial:
            pairs = zip(self._steps.state, old, strict=True)
            self._steps.replace([torch.cat([a[:active], b[active:]]) for a, b in pairs])

    def _flat(self, *leaves: Tensor) -> list[Tensor]:
        fields = dict(zip(self._batches.names, leaves[self._second :], strict=True))
        batch = Batch(**{"y": None, **fields})
        working = self._stage.step(
            pytree.tree_unflatten(leaves[: self._first], self._broadcast_spec)[0],
            pytree.tree_unflatten(leaves[self._first : self._second], self._working_spec),
            batch,
        )
        outputs, spec = pytree.tree_flatten(working)
        if spec != self._working_spec:
            raise TypeError(f"a step of phase {self._phase.name!r} changed its working record")
        return outputs

    def _narrow(self, size: int) -> None:
        """Go on with the first clients only."""
        self._size = size
        self._done.append([leaf[size:] for leaf in self._steps.state])
        self._steps.state = [leaf[:size] for leaf in self._steps.state]
        self._steps.shared = [
            leaf if dim is None else leaf[:size]
            for leaf, dim in zip(self._steps.shared, self._dims, strict=True)
        ]

    def working(self) -> Any:
        """Return the working record, finished clients included."""
        leaves = self._steps.state
        for finished in reversed(self._done):
            leaves = [torch.cat(pair) for pair in zip(leaves, finished, strict=True)]
        return pytree.tree_unflatten(leaves, self._working_spec)


def _round_up(active: int, size: int) -> int:
    """Block size for so many active clients: few different ones, so that recordings are reused."""
    needed = 2
    while needed < active:
        needed *= 2
    return min(needed, size)


def _twice(plan: StagePlan) -> StagePlan:
    return _reorder(plan, torch.tensor([0, 0]))


def _reorder(plan: StagePlan, order: Tensor) -> StagePlan:
    return StagePlan(
        plan.rows[order],
        plan.weight[order],
        plan.keys[order],
        plan.num_steps[order],
        plan.is_constant,
    )
