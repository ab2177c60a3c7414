"""Steps of blocks as captured graphs: on memory that stays in place, launched as one.

A *station* is fixed memory for a stage of blocks of one shape. A block's numbers are put into it,
its steps are replayed there, and the results are copied out. Between two steps nothing is launched
but a copy of which rows come next; the rows themselves are gathered inside the graph.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Stage
from handspan.core.data import ClientData, Csr, FederatedData
from handspan.simulation import profile
from handspan.simulation.batching import gather
from handspan.simulation.graphs import Graphs, Work
from handspan.simulation.loop import float_type
from handspan.simulation.plans import StagePlan, rounded_up
from handspan.simulation.replay import Replay
from handspan.simulation.steps import BlockStep, places
from handspan.simulation.tracing import Recorder

_MOST_STATIONS = 32
_SHARE_OF_MEMORY = 0.3  # of a GPU may be taken by stations
_MANY = 1 << 20  # calls of a step that is common beyond doubt
_FEW_SIZES = 6  # of blocks: so many run as they are, more are rounded up
# A smaller size costs a recording, as much as some dozens of steps: so many must be saved by it.
_STEPS_BEFORE_NARROWING = 50


class Stations:
    """Stations by shape; those that were not used for the longest time go first."""

    def __init__(self, data: FederatedData, graphs: Graphs) -> None:
        self._data, self._graphs = data, graphs
        self._stations: OrderedDict[Any, Station] = OrderedDict()
        self._sizes: dict[Any, set[int]] = {}
        self._room = 1 << 60
        if data.device.type == "cuda":
            total = torch.cuda.get_device_properties(data.device).total_memory
            self._room = int(_SHARE_OF_MEMORY * total)

    def clear(self) -> None:
        """Give back all memory."""
        self._stations.clear()
        if self._data.device.type == "cuda":
            torch.cuda.empty_cache()

    def clients(
        self,
        stage: Stage,
        step: BlockStep,
        plan: StagePlan,
        ids: Tensor,
        about: ClientData,
        recorder: Recorder,
    ) -> CapturedClients | None:
        """Put a block into a station; None as long as its shape is not recorded."""
        if not plan.steps:
            return None
        shape = _Shape(plan.rows.shape[2], plan.is_constant, bool(plan.is_full.all()))
        key = (step.name, shape, *_shapes(step))
        size = self._size(key, len(ids))
        station = self._stations.get(key)
        if station is None or station.capacity < size:
            memory = _Memory(self._data, step, shape, size, about)
            is_common = shape.width == stage.batch_size
            station = Station(self._graphs, memory, step.without_leaves(), recorder, is_common)
            if not station.find(size, plan.steps):
                return None
            self._stations[key] = station
            self._make_room()
        elif not station.find(size, plan.steps):
            larger = [known for known in station.sizes if known > size]
            if not larger:
                return None
            size = min(larger)  # padding costs less than steps that are not recorded
        self._stations.move_to_end(key)
        return CapturedClients(station, step, plan, ids, about, size)

    def _size(self, key: Any, count: int) -> int:
        known = self._sizes.setdefault(key, set())
        if len(known) < _FEW_SIZES:
            known.add(count)
        return count if count in known or count == 1 else padded(count)

    def _make_room(self) -> None:
        taken = sum(station.memory.num_bytes for station in self._stations.values())
        while len(self._stations) > 1 and (
            len(self._stations) > _MOST_STATIONS or taken > self._room
        ):
            _, oldest = self._stations.popitem(last=False)
            taken -= oldest.memory.num_bytes


@dataclass(frozen=True)
class _Shape:
    """What distinguishes the batches of stations."""

    width: int
    is_constant: bool  # all steps see the same rows
    is_full: bool  # no row is padding


def _shapes(step: BlockStep) -> tuple[Any, ...]:
    """Shapes and types of what a step holds, but for the number of clients."""
    dims = (*step.dims, *[0] * len(step.state))
    return tuple(
        (leaf.shape if dim is None else leaf.shape[1:], leaf.dtype)
        for leaf, dim in zip((*step.shared, *step.state), dims, strict=True)
    )


class _Memory:
    """Tensors of a station, with room for ``capacity`` clients.

    What a step sees of its batch comes from ``now``: for each client the rows of the store, their
    weights and the step's key. Where all steps see the same rows, they are gathered beforehand.
    """

    def __init__(
        self,
        data: FederatedData,
        step: BlockStep,
        shape: _Shape,
        capacity: int,
        about: ClientData,
    ) -> None:
        self._data, self.shape, self.capacity = data, shape, capacity
        self._is_gathered = shape.is_constant or isinstance(data.x, Csr)
        width, device = shape.width, data.device

        def like(leaf: Tensor, dim: int | None = 0) -> Tensor:
            return leaf.new_zeros(leaf.shape if dim is None else (capacity, *leaf.shape[1:]))

        self.shared = [like(leaf, dim) for leaf, dim in zip(step.shared, step.dims, strict=True)]
        self.state = [like(leaf) for leaf in step.state]
        self.now = torch.zeros(capacity, 2 * width + 1, dtype=torch.int64, device=device)
        self._start = torch.zeros(capacity, 1, dtype=torch.int64, device=device)
        self._weight = torch.ones(capacity, width, dtype=float_type(data), device=device)
        self._side = None if about.side is None else like(about.side)
        self._x: Tensor | None = None
        self._y: Tensor | None = None
        if self._is_gathered:
            self._x, self._y = gather(data, self.now[:, :width])

    @property
    def num_bytes(self) -> int:
        """Bytes of the large ones."""
        known = [*self.shared, *self.state, self._x, self.now]
        return sum(t.untyped_storage().nbytes() for t in known if t is not None)

    def given(self, step: BlockStep, size: int, used: frozenset[int] | None) -> list[Any]:
        """Batch fields of the first clients; None for what a step does not look at."""
        now, width = self.now[:size], self.shape.width

        def field(name: str) -> Tensor | None:
            if name == "weight":
                if self.shape.is_full:
                    return self._weight[:size]
                return now[:, width : 2 * width].to(self._weight.dtype)
            if name == "key":
                return now[:, -1]
            if name == "rows":
                return now[:, :width] - self._start[:size]
            return None if self._side is None else self._side[:size]

        found: dict[str, Tensor | None] = {}
        if self._x is not None:
            found = {"x": self._x[:size], "y": None if self._y is None else self._y[:size]}
        elif used is None or used & {0, 1}:
            found = dict(zip(("x", "y"), gather(self._data, now[:, :width]), strict=True))
        return [
            (found[name] if name in found else field(name)) if used is None or j in used else None
            for j, name in enumerate(step.names)
        ]

    def load(
        self, step: BlockStep, plan: StagePlan, ids: Tensor, about: ClientData
    ) -> list[Tensor]:
        """Put a block in; returns what ``now`` has to be at each step."""
        size = len(ids)
        dims = (*step.dims, *[0] * len(step.state))
        leaves = zip((*self.shared, *self.state), (*step.shared, *step.state), dims, strict=True)
        pairs = [
            (place if dim is None else place[:size], leaf)
            for place, leaf, dim in leaves
            if place.untyped_storage().nbytes() >= place.nbytes  # else it is not looked at
        ]
        if self._side is not None and about.side is not None:
            pairs.append((self._side[:size], about.side))
        if pairs:
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
        where = places(self._data, plan, ids)
        self._start[:size].copy_(where[:, 0, :1] - plan.rows[:, 0, :1])
        turns = torch.cat([where, plan.weight.to(where)], 2).transpose(0, 1)
        step_keys = plan.keys.T.unsqueeze(2)
        if self.shape.is_constant:
            self._gather_rows(turns[0])
            self.now[:size, :-1].copy_(turns[0])
            return list(step_keys.unbind(0))
        return list(torch.cat([turns, step_keys], 2).unbind(0))

    def _gather_rows(self, turn: Tensor) -> None:
        """Fetch the rows of a step beforehand, where a graph cannot."""
        x, y = gather(self._data, turn[:, : self.shape.width])
        assert self._x is not None
        self._x[: len(x)].copy_(x)
        if self._y is not None and y is not None:
            self._y[: len(y)].copy_(y)

    def advance(self, turn: Tensor, size: int) -> None:
        """Let ``now`` be this step."""
        turn = turn[:size]
        if self._is_gathered and not self.shape.is_constant:
            self._gather_rows(turn)
        self.now[: len(turn), -turn.shape[1] :].copy_(turn)


class Station:
    """Fixed memory for a stage of blocks of one shape, and the graphs of its steps, by size."""

    def __init__(
        self,
        graphs: Graphs,
        memory: _Memory,
        step: BlockStep,
        recorder: Recorder,
        is_common: bool,
    ) -> None:
        self.memory, self.capacity = memory, memory.capacity
        self._graphs, self._step, self._recorder = graphs, step, recorder
        self._is_common = is_common
        self._replays: dict[int, Replay] = {}
        self.works: dict[int, Work] = {}
        self._warm: set[int] = set()
        self._saved: dict[int, float] = {}  # steps that a smaller size would have saved

    @property
    def sizes(self) -> list[int]:
        """Numbers of clients for which the step is recorded."""
        return list(self._replays)

    def find(self, size: int, calls: int) -> bool:
        """Whether the step is recorded for the first ``size`` clients, by now."""
        if size in self._replays:
            return True
        memory, step = self.memory, self._step
        first, second = len(memory.shared), len(memory.shared) + len(memory.state)
        given = memory.given(step, size, None)
        weight = second + step.names.index("weight")
        replay = self._recorder.find(
            (step.name, "full" if memory.shape.is_full else "padded"),
            step.function,
            [*self._shared(size), *[leaf[:size] for leaf in memory.state], *given],
            state=range(first, second),
            constants={weight: given[weight - second]} if memory.shape.is_full else None,
            is_common=self._is_common,
            calls=calls,
        )
        if replay is None:
            return False
        self._replays[size] = replay
        if len(self._replays) == 1:  # what no step looks at needs no memory
            for j, leaf in enumerate(memory.shared):
                if j not in replay.used:
                    memory.shared[j] = leaf.new_zeros(()).expand(leaf.shape)
        return True

    def fit(self, active: int, size: int) -> int:
        """Size at which to make the next step with so many active clients."""
        needed = padded(active)
        if needed >= size:
            return size
        self._saved[needed] = self._saved.get(needed, 0) + 1 - needed / size
        is_worth_it = self._saved[needed] >= _STEPS_BEFORE_NARROWING
        return needed if is_worth_it and self.find(needed, _MANY) else size

    def run(self, turn: Tensor, size: int) -> None:
        """Make one step with the first clients."""
        self.memory.advance(turn, size)
        work = self.works.get(size)
        if work is None:
            work = partial(self._make, size)
            if size not in self._warm:  # libraries set themselves up in a first, plain step
                self._warm.add(size)
                self._graphs.warm_up(work)
                return
            work = self.works[size] = self._captured(work)
        work()

    def _captured(self, work: Work) -> Work:
        try:
            return self._graphs.capture(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operation that waits for the GPU: go on without a graph
            return work

    def _shared(self, size: int) -> list[Tensor]:
        return [
            leaf if dim is None else leaf[:size]
            for leaf, dim in zip(self.memory.shared, self._step.dims, strict=True)
        ]

    def _make(self, size: int) -> None:
        """The step itself: reads the memory, and leaves the new state in it."""
        memory, replay = self.memory, self._replays[size]
        state = [leaf[:size] for leaf in memory.state]
        first = len(memory.shared) + len(state)
        used = frozenset(j - first for j in replay.used if j >= first)
        given = memory.given(self._step, size, used)
        settle(state, replay.moving(*self._shared(size), *state, *given))


class CapturedClients:
    """A block's clients in one stage, in a station."""

    def __init__(
        self,
        station: Station,
        step: BlockStep,
        plan: StagePlan,
        ids: Tensor,
        about: ClientData,
        size: int,
    ) -> None:
        self._station, self._step = station, step
        with profile.part("gather"):
            self._turns = station.memory.load(step, plan, ids, about)
        self._active, self._size = len(ids), size
        self._final = [torch.empty_like(leaf) for leaf in step.state]

    def step(self, t: int, active: int) -> None:
        """Step t; clients behind the first ``active`` keep their state."""
        if active < self._active:
            self._save(active)
        self._size = self._station.fit(active, self._size)
        self._station.run(self._turns[t], self._size)

    def _save(self, active: int) -> None:
        """Copy out what clients that have finished have reached."""
        done = slice(active, self._active)
        if self._final and active < self._active:
            state = [leaf[done] for leaf in self._station.memory.state]
            torch._foreach_copy_([leaf[done] for leaf in self._final], state)
        self._active = active

    def working(self) -> Any:
        """Return the working record."""
        self._save(0)
        return self._step.working(self._final)


def padded(active: int) -> int:
    """Clients that a graph runs where so many are left: two at least, for equal bits."""
    return max(2, rounded_up(active))


def settle(places: list[Tensor], values: list[Tensor]) -> None:
    """Write values into their places; a value may lie in the place of another."""
    taken = {place.untyped_storage().data_ptr() for place in places}
    moved = [
        (place, value.clone() if value.untyped_storage().data_ptr() in taken else value)
        for place, value in zip(places, values, strict=True)
        if not _is_same(place, value)
    ]
    for place, value in moved:
        place.copy_(value)


def _is_same(place: Tensor, value: Tensor) -> bool:
    return place is value or (
        place.data_ptr() == value.data_ptr()
        and place.shape == value.shape
        and place.stride() == value.stride()
    )
