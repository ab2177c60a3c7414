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
from handspan.core.records import field_names, map_tensors, take
from handspan.simulation.loop import LoopExecutor
from handspan.simulation.plans import Block, StagePlan, groups
from handspan.simulation.tracing import Recorder


class StackedExecutor:
    """Runs a block of clients by ``vmap`` over the functions written for one."""

    name = "stacked"

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
        clients = _fit_rows(clients, self.per_row, block.longest)
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
            leaves, dims, spec = _flatten(broadcast, unbatched, arguments)
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
        in_order = bool((order == torch.arange(len(order))).all())
        if not in_order:
            working, plan = take(working, order), _reorder(plan, order)
            broadcast = select_axis(broadcast, None, order, phase.unbatched)
            about = take(about, order)
        start = self.data.offsets[block.ids[order]]
        counts = plan.num_steps.tolist()
        step = _Step(phase, stage, index, broadcast, working, self.recorder)
        done: list[list[Tensor]] = []
        batch: Batch | None = None
        size = len(counts)
        for t in range(plan.steps):
            active = sum(count > t for count in counts)
            needed = _round_up(active, len(counts))
            if needed < size:
                done.append(step.narrow(needed))
                size, batch = needed, None
            if batch is None or not plan.is_constant:
                batch = self._gather(plan, t, start, size, about)
            step.run(batch, plan.keys[:size, t].to(batch.weight.device), active)
        for finished in reversed(done):
            step.leaves = [torch.cat(pair) for pair in zip(step.leaves, finished, strict=True)]
        working = step.working()
        return working if in_order else take(working, order.argsort())

    def _gather(
        self, plan: StagePlan, t: int, start: Tensor, size: int, about: ClientData
    ) -> Batch:
        turn = 0 if plan.is_constant else t
        rows, real = plan.rows[:size, turn], plan.weight[:size, turn]
        x, y = gather(self.data, (rows + start[:size].unsqueeze(1)))
        side = None if about.side is None else about.side[:size]
        weight = real.to(x.device, _weight_type(self.data, x))
        return Batch(
            x=x, y=y, weight=weight, key=torch.zeros(size, dtype=torch.int64), rows=rows, side=side
        )

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
        return _in_order(parts, count)


class _Step:
    """A stage's step on a block, with the working state kept as flat tensors between steps."""

    def __init__(
        self,
        phase: Phase,
        stage: Stage,
        index: int,
        broadcast: Any,
        working: Any,
        recorder: Recorder,
    ) -> None:
        shared, dims, self._broadcast_spec = _flatten(broadcast, phase.unbatched, ())
        self._shared, self._shared_dims = shared, dims
        self.leaves, self._working_spec = pytree.tree_flatten(working)
        self._batch_spec: Any = None
        self._stage, self._recorder = stage, recorder
        self._name = (phase.name, index, stage.step)

    def run(self, batch: Batch, key: Tensor, active: int) -> None:
        """Step all clients; those behind the first ``active`` keep their state."""
        fields = [batch.x, batch.y, batch.weight, key, batch.rows, batch.side]
        given = [field for field in fields if field is not None]
        if self._batch_spec is None:
            self._batch_spec = pytree.tree_structure(batch)
            dims = (*self._shared_dims, *[0] * (len(self.leaves) + len(given)))
            self._mapped = torch.vmap(self._flat, in_dims=dims, randomness="error")
        new = self._recorder(self._name, self._mapped, [*self._shared, *self.leaves, *given])
        if active < len(key):
            new = [
                torch.cat([a[:active], b[active:]]) for a, b in zip(new, self.leaves, strict=True)
            ]
        self.leaves = new

    def _flat(self, *leaves: Tensor) -> list[Tensor]:
        first, second = len(self._shared), len(self._shared) + len(self.leaves)
        working = self._stage.step(
            pytree.tree_unflatten(leaves[:first], self._broadcast_spec)[0],
            pytree.tree_unflatten(leaves[first:second], self._working_spec),
            pytree.tree_unflatten(leaves[second:], self._batch_spec),
        )
        outputs, spec = pytree.tree_flatten(working)
        if spec != self._working_spec:
            raise TypeError(f"a step of phase {self._name[0]!r} changed its working record")
        return outputs

    def narrow(self, size: int) -> list[Tensor]:
        """Go on with the first clients only; returns the state of the others."""
        rest = [leaf[size:] for leaf in self.leaves]
        self.leaves = [leaf[:size] for leaf in self.leaves]
        self._shared = [
            leaf if dim is None else leaf[:size]
            for leaf, dim in zip(self._shared, self._shared_dims, strict=True)
        ]
        return rest

    def working(self) -> Any:
        """Return the working record."""
        return pytree.tree_unflatten(self.leaves, self._working_spec)


def gather(data: FederatedData, index: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows of the store at ``index`` (c, width), dense."""
    flat = index.flatten()
    if isinstance(data.x, Csr):
        x = data.x.select(flat.to(data.x.indptr.device)).to_dense()
    else:
        x = data.x.index_select(0, flat.to(data.x.device))
    x = x.view(*index.shape, *x.shape[1:])
    if data.y is None:
        return x, None
    y = data.y.index_select(0, flat.to(data.y.device))
    return x, y.view(*index.shape, *y.shape[1:])


def expand(broadcast: Any, shared: frozenset[str], size: int) -> Any:
    """Copy the broadcast for each client of a block, large shared fields excepted."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).expand(size, *tensor.shape).contiguous()

    return _change(
        broadcast, lambda name, value: value if name in shared else map_tensors(copy, value)
    )


def select_axis(
    broadcast: Any, names: frozenset[str] | None, index: Any, without: frozenset[str] = frozenset()
) -> Any:
    """Rows ``index`` of the fields with a client axis (None: of all fields but ``without``)."""
    return _change(
        broadcast,
        lambda name, value: (
            take(value, index)
            if (names is None or name in names) and name not in without
            else value
        ),
    )


def _change(broadcast: Any, change: Callable[[str, Any], Any]) -> Any:
    values = {name: getattr(broadcast, name) for name in field_names(type(broadcast))}
    return type(broadcast)(
        **{name: None if value is None else change(name, value) for name, value in values.items()}
    )


def _fit_rows(clients: Any, per_row: frozenset[str], longest: int) -> Any:
    """Give per-row fields the padded width that the plans of their block have."""

    def fit(rows: Tensor) -> Tensor:
        missing = longest - rows.shape[1]
        if missing <= 0:
            return rows[:, :longest]
        return torch.cat([rows, rows.new_zeros(len(rows), missing, *rows.shape[2:])], dim=1)

    named = per_row & set(field_names(type(clients)))
    if not named:
        return clients
    return _change(clients, lambda name, value: fit(value) if name in named else value)


def _flatten(
    broadcast: Any, unbatched: frozenset[str], arguments: tuple[Any, ...]
) -> tuple[list[Any], tuple[int | None, ...], Any]:
    """Leaves of all arguments, their client axes (None where unbatched), and the structure."""
    marked = _change(
        broadcast,
        lambda name, value: map_tensors(
            lambda t: torch.empty(0 if name in unbatched else 1), value
        ),
    )
    leaves, spec = pytree.tree_flatten((broadcast, *arguments))
    flags = [len(leaf) == 1 for leaf in pytree.tree_leaves(marked)]
    dims = [0 if batched else None for batched in flags]
    dims += [0 if isinstance(leaf, Tensor) else None for leaf in leaves[len(flags) :]]
    return leaves, tuple(dims), spec


def _round_up(active: int, size: int) -> int:
    """Block size for so many active clients: few different ones, so that recordings are reused."""
    needed = 2
    while needed < active:
        needed *= 2
    return min(needed, size)


def _weight_type(data: FederatedData, x: Tensor) -> torch.dtype:
    from handspan.simulation.loop import _float_type

    return x.dtype if x.is_floating_point() else _float_type(data)


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


def _in_order(parts: list[tuple[Tensor, Tensor]], count: Tensor) -> Tensor:
    """Put outputs of grouped clients back into the clients' order."""
    start = count.cumsum(0) - count
    index = torch.cat(
        [
            torch.arange(int(count[group].sum()))
            + torch.repeat_interleave(
                start[group] - (count[group].cumsum(0) - count[group]), count[group]
            )
            for group, _ in parts
        ]
    )
    outputs = torch.cat([values for _, values in parts])
    result = torch.empty_like(outputs)
    result[index.to(outputs.device)] = outputs
    return result
