"""The loop engine: one client after the other. The reference, and the debugger's friend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from handspan.core.algorithm import Phase, Stage, client_update
from handspan.core.data import Batch, ClientData, Csr, FederatedData
from handspan.core.records import Record, field_names, from_named, stack, take, to_named
from handspan.simulation.plans import Block
from handspan.simulation.tracing import Recorder

_BUFFER = 1 << 24  # bytes of rows gathered at once for one client


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
        self.recorder = Recorder()

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

        stages = tuple(
            stage if stage.sparse else _replayed(stage, (phase.name, index), self.recorder)
            for index, stage in enumerate(phase.stages)
        )
        phase = dataclasses.replace(phase, stages=stages)
        return client_update(phase, broadcast, client, about, batches)

    def _batches(
        self, stage: Stage, block: Block, j: int, index: int, about: ClientData
    ) -> Iterator[Batch]:
        """Batches of one client, gathered for as many steps at once as fit a small buffer."""
        plan, client = block.plans[index], block.ids[j]
        start = int(self.data.offsets[client])
        base = int(self.data.span(stage.rows)[0][client])
        steps = int(plan.num_steps[j])
        step_keys = plan.keys[j].unbind()
        if plan.is_constant:  # consecutive rows: a view instead of a copy
            count = int(plan.weight[j, 0].sum())
            place = slice(start + base, start + base + count)
            batch = make_batch(self.data, place, torch.arange(count), stage.sparse, about.side)
            for t in range(steps):
                yield _with_key(batch, step_keys[t])
            return
        lengths = plan.weight[j].sum(1).tolist()
        width = max(1, self.data.num_bytes_of_rows(plan.rows.shape[2]))
        together = max(1, _BUFFER // width)
        for first in range(0, steps, together):
            last = min(steps, first + together)
            real = plan.weight[j, first:last]
            rows = plan.rows[j, first:last][real]
            joined = make_batch(self.data, rows + start, rows - base, stage.sparse, about.side)
            at = 0
            for t in range(first, last):
                yield _part(joined, at, at + lengths[t], step_keys[t])
                at += lengths[t]

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


def _with_key(batch: Batch, k: Tensor) -> Batch:
    """Return the same rows with the key of another step."""
    return dataclasses.replace(batch, key=k)


def _part(batch: Batch, first: int, last: int, k: Tensor) -> Batch:
    """Rows first to last of a gathered batch."""
    if isinstance(batch.x, Csr):
        x: Any = batch.x.select(torch.arange(first, last))
    else:
        x = batch.x[first:last]
    return Batch(
        x=x,
        y=None if batch.y is None else batch.y[first:last],
        weight=batch.weight[first:last],
        key=k,
        rows=batch.rows[first:last],
        side=batch.side,
    )


class _Flat:
    """A working record kept as flat tensors while a stage's steps are replayed."""

    def __init__(self, leaves: list[Tensor], spec: Any) -> None:
        self.leaves = leaves
        self.spec = spec

    def record(self) -> Any:
        return pytree.tree_unflatten(self.leaves, self.spec)


def _replayed(stage: Stage, name: Any, recorder: Recorder) -> Stage:
    """Return the stage with its step replayed from a recording where that pays."""
    shared: list[Any] = []  # the broadcast is the same in all steps: flattened once

    def step(broadcast: Any, working: Any, batch: Batch) -> _Flat:
        if not isinstance(working, _Flat):
            working = _Flat(*pytree.tree_flatten(working))
            shared[:] = pytree.tree_flatten(broadcast)
        fields = [batch.x, batch.y, batch.weight, batch.key, batch.rows, batch.side]
        given = [field for field in fields if field is not None]
        first = len(shared[0])
        second = first + len(working.leaves)

        def flat(*leaves: Tensor) -> list[Tensor]:
            new = stage.step(
                pytree.tree_unflatten(leaves[:first], shared[1]),
                pytree.tree_unflatten(leaves[first:second], working.spec),
                pytree.tree_unflatten(leaves[second:], pytree.tree_structure(batch)),
            )
            return pytree.tree_flatten(new)[0]

        leaves = [*shared[0], *working.leaves, *given]
        return _Flat(recorder((name, stage.step), flat, leaves), working.spec)

    def finish(broadcast: Any, working: Any) -> Any:
        working = working.record() if isinstance(working, _Flat) else working
        return working if stage.finish is None else stage.finish(broadcast, working)

    return dataclasses.replace(stage, step=step, finish=finish)


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

    # Copies, for fields that are one tensor: safetensors takes no two names for one memory.
    named = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in to_named(record).items()
    }
    return from_named(record, load(save(named)))
