"""The loop engine: one client after the other. The reference, and the debugger's friend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from handspan.core.algorithm import Phase, Stage, client_update
from handspan.core.data import Batch, ClientData, Csr, FederatedData
from handspan.core.records import (
    Record,
    field_names,
    from_named,
    map_tensors,
    stack,
    take,
    to_named,
)
from handspan.simulation import profile
from handspan.simulation.plans import Block, Blocks
from handspan.simulation.tracing import Recorder, Steps

_BUFFER = 1 << 20  # bytes of rows gathered at once for one client: they should stay in the cache


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
    is_stacked = False

    def __init__(self, data: FederatedData, per_row: frozenset[str], block_size: int = 32) -> None:
        self.data = data
        self.per_row = per_row
        self.block_size = block_size
        self.recorder = Recorder()
        self._flat: tuple[Any, list[Tensor], Any] | None = None

    def blocks(self, phase: Phase, ids: Tensor, k: Tensor) -> Blocks:
        """Blocks of a phase's clients, in canonical order."""
        return Blocks(phase, ids, self.data, k, self.block_size)

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
        self._flat = None
        return _together(states), None if uploads[0] is None else _together(uploads)

    def select(self, phase: Phase, broadcast: Any, j: int) -> Any:
        """Return what client j of the block receives."""
        return select_fields(broadcast, phase.per_client, lambda field: take(field, j))

    def _run_client(
        self, phase: Phase, broadcast: Any, client: Any, about: ClientData, block: Block, j: int
    ) -> tuple[Any, Any]:
        def batches(index: int, stage: Stage) -> Iterator[Any]:
            return self._batches(stage, block, j, index, about)

        stages = tuple(
            stage if stage.sparse else _Replayed(stage, (phase.name, index), self).stage
            for index, stage in enumerate(phase.stages)
        )
        phase = dataclasses.replace(phase, stages=stages)
        return client_update(phase, broadcast, client, about, batches)

    def _batches(
        self, stage: Stage, block: Block, j: int, index: int, about: ClientData
    ) -> Iterator[Any]:
        """Batches of one client, gathered for as many steps at once as fit a small buffer.

        Sparse stages are given records, others the fields as they are.
        """
        plan, client = block.plans[index], block.ids[j]
        start = int(self.data.offsets[client])
        base = int(self.data.span(stage.rows)[0][client])
        steps = int(plan.num_steps[j])
        step_keys = plan.keys[j].to(self.data.device).unbind()
        part = _record_part if stage.sparse else _parts
        if plan.is_constant:  # consecutive rows: a view instead of a copy
            count = int(plan.weight[j, 0].sum())
            place = slice(start + base, start + base + count)
            rows = torch.arange(base, base + count)
            batch = make_batch(self.data, place, rows, stage.sparse, about.side)
            yield from part(batch, None, step_keys[:steps])
            return
        lengths = plan.weight[j].sum(1).tolist()
        width = max(1, self.data.num_bytes_of_rows(plan.rows.shape[2]))
        together = max(1, _BUFFER // width)
        for first in range(0, steps, together):
            span = slice(first, min(steps, first + together))
            rows = plan.rows[j, span][plan.weight[j, span]]
            joined = make_batch(self.data, rows + start, rows, stage.sparse, about.side)
            yield from part(joined, lengths[span], step_keys[span])

    def flatten(self, broadcast: Any) -> tuple[list[Tensor], Any]:
        """Leaves and structure of a broadcast, which clients of a block share."""
        if self._flat is None or self._flat[0] is not broadcast:
            self._flat = (broadcast, *pytree.tree_flatten(broadcast))
        return self._flat[1], self._flat[2]

    def _trim(self, client: Any, num: int) -> Any:
        return select_fields(client, self.per_row, lambda field: field[:num])

    def _pad(self, client: Any, num: int) -> Any:
        def grow(rows: Tensor) -> Tensor:
            return torch.cat([rows, rows.new_zeros(num - len(rows), *rows.shape[1:])])

        return select_fields(client, self.per_row, grow)

    def _rows(self, start: int, stop: int) -> Tensor:
        x = self.data.x
        if isinstance(x, Csr):
            return x.select(torch.arange(start, stop)).to_dense()
        return x[start:stop]

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
            x = self._rows(start, start + int(count[j]))
            side = None if about.side is None else about.side[j]
            outputs.append(function(mine, take(clients, j), x, side))
        return torch.cat(outputs)


def _together(records: list[Any]) -> Any:
    """Records side by side; a single one is not copied."""
    if len(records) > 1:
        return stack(records)
    return map_tensors(lambda tensor: tensor.unsqueeze(0), records[0])


def make_batch(
    data: FederatedData, place: Any, rows: Tensor, keep_sparse: bool, side: Tensor | None
) -> Batch:
    """Gather one client's rows into a batch."""
    with profile.part("gather"):
        return _gathered(data, place, rows, keep_sparse, side)


def _gathered(
    data: FederatedData, place: Any, rows: Tensor, keep_sparse: bool, side: Tensor | None
) -> Batch:
    if isinstance(data.x, Csr):
        if isinstance(place, slice):
            place = torch.arange(place.start, place.stop)
        x: Any = data.x.select(place)
        x = x if keep_sparse else x.to_dense()
    else:
        x = _rows_at(data.x, place)
    weight = torch.ones(
        len(rows),
        dtype=float_type(data),
        device=x.values.device if isinstance(x, Csr) else x.device,
    )
    y = None if data.y is None else data.y[place]
    key = torch.tensor(0)  # each step gets its own
    return Batch(x=x, y=y, weight=weight, key=key, rows=rows.to(weight.device), side=side)


def _rows_at(x: Tensor, place: Any) -> Tensor:
    """Rows at a slice, or copies of rows anywhere (in a third of the time that x[place] takes)."""
    return x[place] if isinstance(place, slice) else x.index_select(0, place)


def float_type(data: FederatedData) -> torch.dtype:
    """Type in which a federation computes."""
    for part in (data.x.values if isinstance(data.x, Csr) else data.x, data.side, data.y):
        if part is not None and part.is_floating_point():
            return part.dtype
    return torch.float32


def _parts(batch: Batch, lengths: list[int] | None, step_keys: Any) -> Iterator[list[Tensor]]:
    """Cut gathered rows into the batches of single steps, as bare fields in their order.

    Without ``lengths`` every step has them all.
    """
    fields = [batch.x, batch.y, batch.weight, batch.rows]
    cut: list[Any] = [repeat(field, len(step_keys)) for field in fields]
    if lengths is not None:
        cut = [c if f is None else f.split(lengths) for c, f in zip(cut, fields, strict=True)]
    for x, y, weight, rows, key in zip(*cut, step_keys, strict=True):
        batch_fields = (x, y, weight, key, rows, batch.side)
        yield [field for field in batch_fields if field is not None]


def _record_part(batch: Batch, lengths: list[int] | None, step_keys: Any) -> Iterator[Batch]:
    """Cut gathered compressed rows into the batches of single steps; without ``lengths``, don't."""
    at = 0
    if lengths is None:
        yield from (dataclasses.replace(batch, key=key) for key in step_keys)
        return
    for count, key in zip(lengths, step_keys, strict=True):
        span = slice(at, at + count)
        at += count
        yield Batch(
            x=batch.x.select(torch.arange(span.start, at))
            if isinstance(batch.x, Csr)
            else batch.x[span],
            y=None if batch.y is None else batch.y[span],
            weight=batch.weight[span],
            key=key,
            rows=batch.rows[span],
            side=batch.side,
        )


class _Replayed:
    """A stage whose steps are replayed from recordings, on flat tensors."""

    def __init__(self, stage: Stage, name: Any, executor: LoopExecutor) -> None:
        self._stage, self._name, self._executor = stage, name, executor
        self._steps: Steps | None = None
        data = executor.data
        absent = ["y"] * (data.y is None) + ["side"] * (data.side is None)
        self._given = [name for name in field_names(Batch) if name not in absent]

    @property
    def stage(self) -> Stage:
        """The stage; not kept here, since it holds this object."""
        return dataclasses.replace(self._stage, step=self.step, finish=self.finish)

    def step(self, broadcast: Any, working: Any, given: list[Tensor]) -> Steps:
        """Make a step; between steps the working record is flat."""
        if self._steps is None:
            self._steps = self._start(broadcast, working)
        count = given[0].shape[0]  # len() of a tensor takes long
        self._steps.run(
            given,
            count,
            weight=self._given.index("weight"),
            is_common=count == self._stage.batch_size,
        )
        return self._steps

    def finish(self, broadcast: Any, working: Any) -> Any:
        """Return to records, and finish as the stage does."""
        if isinstance(working, Steps):
            working = pytree.tree_unflatten(working.state, self._spec)
        return working if self._stage.finish is None else self._stage.finish(broadcast, working)

    def _start(self, broadcast: Any, working: Any) -> Steps:
        state, self._spec = pytree.tree_flatten(working)
        shared, shared_spec = self._executor.flatten(broadcast)
        first, second = len(shared), len(shared) + len(state)

        def function(*leaves: Tensor) -> list[Tensor]:
            fields = dict(zip(self._given, leaves[second:], strict=True))
            batch = Batch(**{"y": None, **fields})
            new = self._stage.step(
                pytree.tree_unflatten(leaves[:first], shared_spec),
                pytree.tree_unflatten(leaves[first:second], self._spec),
                batch,
            )
            return pytree.tree_flatten(new)[0]

        name = (self._name, self._stage.step)
        return Steps(self._executor.recorder, name, function, shared, state)


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
