"""Steps of a block of clients in one stage, one after the other."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from handspan.core.algorithm import Phase, Stage
from handspan.core.data import Batch, ClientData, Csr, FederatedData
from handspan.simulation import profile
from handspan.simulation.batching import flatten, gather
from handspan.simulation.loop import float_type
from handspan.simulation.plans import StagePlan
from handspan.simulation.tracing import Recorder, Steps


def batch_names(data: FederatedData, about: ClientData) -> tuple[str, ...]:
    """Fields of a batch that these data have, in their order."""
    absent = {"y"} if data.y is None else set[str]()
    absent |= {"side"} if about.side is None else set()
    names = ("x", "y", "weight", "key", "rows", "side")
    return tuple(name for name in names if name not in absent)


class BlockStep:
    """A step of a whole block on flat tensors: ``function(*shared, *state, *batch) -> state``.

    Attributes
    ----------
    shared, state
        Leaves of the broadcast and of the working record.
    dims
        Client axes of ``shared``, None where all clients share one tensor.
    names
        Fields of the batch.
    """

    def __init__(
        self,
        phase: Phase,
        stage: Stage,
        index: int,
        broadcast: Any,
        working: Any,
        names: tuple[str, ...],
    ) -> None:
        self._phase, self._stage, self.names = phase, stage, names
        self.name = (phase.name, index, stage.step)
        self.shared, self.dims, self._broadcast_spec = flatten(broadcast, phase.unbatched, ())
        self.state, self._working_spec = pytree.tree_flatten(working)
        self._first, self._second = len(self.shared), len(self.shared) + len(self.state)
        self._all_dims = (*self.dims, *[0] * (len(self.state) + len(names)))
        self.function = torch.vmap(self._step, in_dims=self._all_dims, randomness="error")

    def without_leaves(self) -> BlockStep:
        """Return the step alone, which holds no tensors."""
        other = copy.copy(self)
        other.shared, other.state = [], []
        other.function = torch.vmap(other._step, in_dims=self._all_dims, randomness="error")
        return other

    def _step(self, *leaves: Tensor) -> list[Tensor]:
        fields = dict(zip(self.names, leaves[self._second :], strict=True))
        working = self._stage.step(
            pytree.tree_unflatten(leaves[: self._first], self._broadcast_spec)[0],
            pytree.tree_unflatten(leaves[self._first : self._second], self._working_spec),
            Batch(**{"y": None, **fields}),
        )
        outputs, spec = pytree.tree_flatten(working)
        if spec != self._working_spec:
            raise TypeError(f"a step of phase {self._phase.name!r} changed its working record")
        return outputs

    def working(self, leaves: list[Tensor]) -> Any:
        """Working record with these leaves."""
        return pytree.tree_unflatten(leaves, self._working_spec)


def places(data: FederatedData, plan: StagePlan, ids: Tensor) -> Tensor:
    """Rows of the store that a plan names, (c, steps or 1, width)."""
    # A client without rows of this kind may begin behind the last row of all.
    begin = torch.stack([data.offsets[ids], plan.num_steps > 0])
    start, is_there = begin.to(plan.rows.device, non_blocking=True)
    start = torch.where(is_there > 0, start, -plan.rows[:, 0, 0])
    return plan.rows + start.view(-1, 1, 1)


class Batches:
    """Batches of a block's stage, as bare fields."""

    def __init__(
        self, data: FederatedData, stage: Stage, plan: StagePlan, ids: Tensor, about: ClientData
    ) -> None:
        self._data, self._side, self._is_constant = data, about.side, plan.is_constant
        self._place = places(data, plan, ids).unbind(1)
        self._rows = plan.rows.unbind(1)
        device = data.x.values.device if isinstance(data.x, Csr) else data.x.device
        self._weight = plan.weight.to(device, float_type(data)).unbind(1)
        self._keys = plan.keys.to(device).unbind(1)
        self._is_full = plan.is_full.tolist()
        self.is_common = plan.rows.shape[2] == stage.batch_size
        self.names = batch_names(data, about)
        self._last: tuple[int, list[Tensor]] | None = None

    def get(self, t: int, size: int) -> tuple[list[Tensor], bool]:
        """Fields of step t for the first clients, and whether no row is padding."""
        key, turn = self._keys[t][:size], 0 if self._is_constant else t
        if not self._is_constant or self._last is None or self._last[0] != size:
            with profile.part("gather"):
                x, y = gather(self._data, self._place[turn][:size])
            side = None if self._side is None else self._side[:size]
            fields = (x, y, self._weight[turn][:size], key, self._rows[turn][:size], side)
            self._last = size, [field for field in fields if field is not None]
        given = self._last[1]
        given[self.names.index("key")] = key
        return given, self._is_full[turn]


class Clients:
    """A block's clients in one stage, their working state kept as flat tensors between steps."""

    def __init__(self, step: BlockStep, batches: Batches, recorder: Recorder, size: int) -> None:
        self._step, self._batches = step, batches
        self._size = self._whole = size
        self._steps = Steps(recorder, step.name, step.function, step.shared, step.state)
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

    def _narrow(self, size: int) -> None:
        """Go on with the first clients only."""
        self._size = size
        self._done.append([leaf[size:] for leaf in self._steps.state])
        self._steps.state = [leaf[:size] for leaf in self._steps.state]
        self._steps.shared = [
            leaf if dim is None else leaf[:size]
            for leaf, dim in zip(self._steps.shared, self._step.dims, strict=True)
        ]

    def working(self) -> Any:
        """Return the working record, finished clients included."""
        leaves = self._steps.state
        for finished in reversed(self._done):
            leaves = [torch.cat(pair) for pair in zip(leaves, finished, strict=True)]
        return self._step.working(leaves)


def _round_up(active: int, size: int) -> int:
    """Block size for so many active clients: few different ones, so that recordings are reused."""
    needed = 2
    while needed < active:
        needed *= 2
    return min(needed, size)
