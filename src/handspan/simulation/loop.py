"""The loop engine: one client after the other. The reference, and the debugger's friend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from handspan.core.algorithm import Phase, Stage, client_update
from handspan.core.data import Batch, ClientData, Csr, FederatedData
from handspan.core.records import Record, field_names, from_named, stack, take, to_named
from handspan.simulation.plans import Block, StagePlan
from handspan.simulation.tracing import Recorder


def select_fields(broadcast: Any, names: frozenset[str], change: Callable[[Any], Any]) -> Any:
    """Replace the named fields of a record by ``change(field)``."""
    if not names:
        return broadcast
    values = {name: getattr(broadcast, name) for name in field_names(type(broadcast))}
    for name in names:
        values[name] = change(values[name])
    return type(broadcast)(**values)


class LoopExecutor:
    """Runs ``client_update`` for each client of a block."""

    name = "loop"

    def __init__(self, data: FederatedData, per_row: frozenset[str], block_size: int = 32) -> None:
        self.data = data
        self.per_row = per_row
        self.block_size = block_size
        self._record = Recorder()

    def run(
        self, phase: Phase, broadcast: Any, clients: Any, about: ClientData, block: Block
    ) -> tuple[Any, Any]:
        """New private records and uploads of a block, with a leading client axis."""
        results = [
            self._run_client(
                phase,
                self.select(phase, broadcast, j),
                self._trim(take(clients, j), int(block.num[j])),
                take(about, j),
                block,
                j,
            )
            for j in range(len(block.ids))
        ]
        states = [self._pad(state, int(block.num.max())) for state, _ in results]
        uploads = [upload for _, upload in results]
        return stack(states), None if uploads[0] is None else stack(uploads)

    def select(self, phase: Phase, broadcast: Any, j: int) -> Any:
        """Return what client j of the block receives."""
        return select_fields(broadcast, phase.per_client, lambda field: take(field, j))

    def _run_client(
        self, phase: Phase, broadcast: Any, client: Any, about: ClientData, block: Block, j: int
    ) -> tuple[Any, Any]:
        def batches(index: int, stage: Stage) -> Iterator[Batch]:
            return self._batches(stage, block, j, index, about)

        recorded = tuple(
            _with_step(stage, self._recorded(stage, (phase.name, index)))
            for index, stage in enumerate(phase.stages)
        )
        return client_update(_with_stages(phase, recorded), broadcast, client, about, batches)

    def _recorded(self, stage: Stage, name: Any) -> Callable[[Any, Any, Batch], Any]:
        """Return the step, replayed from a recording of its operations where it pays."""
        structure: dict[str, Any] = {}

        def step(broadcast: Any, working: Any, batch: Batch) -> Any:
            leaves, spec = pytree.tree_flatten((broadcast, working, batch))

            def flat(*leaves: Tensor) -> list[Tensor]:
                outputs, structure["out"] = pytree.tree_flatten(
                    stage.step(*pytree.tree_unflatten(leaves, spec))
                )
                return outputs

            outputs = self._record((name, stage.step, str(spec)), flat, leaves)
            # A step keeps the structure of its working state.
            return pytree.tree_unflatten(outputs, pytree.tree_structure(working))

        return stage.step if stage.sparse else step

    def _batches(
        self, stage: Stage, block: Block, j: int, index: int, about: ClientData
    ) -> Iterator[Batch]:
        plan = block.plans[index]
        start = int(self.data.offsets[block.ids[j]])
        base = int(self.data.span(stage.rows)[0][block.ids[j]])
        fixed: Batch | None = None
        for t in range(int(plan.num_steps[j])):
            if fixed is None or not plan.is_constant:
                fixed = self._gather(stage, plan, j, t, start, base, about)
            yield take_key(fixed, plan.keys[j, t])

    def _gather(
        self,
        stage: Stage,
        plan: StagePlan,
        j: int,
        t: int,
        start: int,
        base: int,
        about: ClientData,
    ) -> Batch:
        turn = 0 if plan.is_constant else t
        rows = plan.rows[j, turn][plan.weight[j, turn]]
        if plan.is_constant:  # consecutive rows: a view instead of a copy
            place: Any = slice(start + base, start + base + len(rows))
        else:
            place = (rows + start).to(self.data.offsets.device)
        return make_batch(self.data, place, rows - base, stage.sparse, about.side)

    def _trim(self, client: Any, num: int) -> Any:
        return select_fields(client, self.per_row, lambda field: field[:num])

    def _pad(self, client: Any, num: int) -> Any:
        def grow(rows: Tensor) -> Tensor:
            return torch.cat([rows, rows.new_zeros(num - len(rows), *rows.shape[1:])])

        return select_fields(client, self.per_row, grow)

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
        outputs: list[Tensor] = []
        for j, start in enumerate((self.data.offsets[ids] + first).tolist()):
            mine = select_fields(broadcast, per_client, lambda field, j=j: take(field, j))
            x = self.data.x[start : start + int(count[j])]  # type: ignore[index]
            side = None if about.side is None else about.side[j]
            outputs.append(function(mine, take(clients, j), x, side))
        return torch.cat(outputs)


def make_batch(
    data: FederatedData, place: Any, rows: Tensor, keep_sparse: bool, side: Tensor | None
) -> Batch:
    """Gather one client's rows into a batch."""
    if isinstance(data.x, Csr):
        if isinstance(place, slice):
            place = torch.arange(place.start, place.stop)
        x: Any = data.x.select(place)
        x = x if keep_sparse else x.to_dense()
    else:
        x = data.x[place]
    weight = torch.ones(
        len(rows),
        dtype=_float_type(data),
        device=x.values.device if isinstance(x, Csr) else x.device,
    )
    y = None if data.y is None else data.y[place]
    return Batch(x=x, y=y, weight=weight, key=torch.tensor(0), rows=rows, side=side)


def _float_type(data: FederatedData) -> torch.dtype:
    for part in (data.x.values if isinstance(data.x, Csr) else data.x, data.side, data.y):
        if part is not None and part.is_floating_point():
            return part.dtype
    return torch.float32


def take_key(batch: Batch, k: Tensor) -> Batch:
    """Return the same rows with the key of another step."""
    return Batch(x=batch.x, y=batch.y, weight=batch.weight, key=k, rows=batch.rows, side=batch.side)


def _with_step(stage: Stage, step: Callable[[Any, Any, Any], Any]) -> Stage:
    import dataclasses

    return dataclasses.replace(stage, step=step)


def _with_stages(phase: Phase, stages: tuple[Stage, ...]) -> Phase:
    import dataclasses

    return dataclasses.replace(phase, stages=stages)


class WireExecutor(LoopExecutor):
    """The loop engine with every message sent through safetensors bytes, for tests."""

    name = "wire"

    def select(self, phase: Phase, broadcast: Any, j: int) -> Any:
        """Return what client j receives, after a trip over the wire."""
        return through_bytes(super().select(phase, broadcast, j))

    def run(
        self, phase: Phase, broadcast: Any, clients: Any, about: ClientData, block: Block
    ) -> tuple[Any, Any]:
        """Run the block; each upload comes back through bytes."""
        states, uploads = super().run(phase, broadcast, clients, about, block)
        if uploads is not None:
            uploads = stack([through_bytes(take(uploads, j)) for j in range(len(block.ids))])
        return states, uploads


def through_bytes(record: Record) -> Any:
    """Serialise and parse a record."""
    from safetensors.torch import load, save

    named = {name: tensor.contiguous() for name, tensor in to_named(record).items()}
    return from_named(record, load(save(named)))
