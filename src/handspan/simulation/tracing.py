"""Record the tensor operations of a step once and replay them without Python's overhead.

Running a step through ``vmap`` or autograd costs about a millisecond of bookkeeping, often more
than its arithmetic. The operations themselves depend on shapes alone (a step may not branch on
values), so they are written down once, rewritten, and replayed.

Steps on full batches are recorded when they first occur. Odd shapes (a last, short batch; all rows
of a client) must prove that they are common, and their replays keep every bit, so that it makes no
difference when the recording was made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from handspan.simulation.recording import operations
from handspan.simulation.replay import Replay
from handspan.simulation.rewriting import rewrite

Flat = Callable[..., list[Tensor]]
# Recording costs as much as a dozen plain calls, so a shape must prove that it is common.
_CALLS_BEFORE_RECORDING = 16
# A step of more operations (an unrolled recurrent network) is slow to record and gains little.
_MOST_OPERATIONS = 1500


class Recorder:
    """Recordings of steps, by name and shapes; ``patience`` is what odd shapes must outlast."""

    def __init__(self, patience: int = _CALLS_BEFORE_RECORDING) -> None:
        self._calls: dict[Any, int] = {}
        self._recordings: dict[Any, Replay] = {}
        self._long: set[Any] = set()
        self._patience = patience

    @property
    def num_recordings(self) -> int:
        """How many there are."""
        return len(self._recordings)

    def fresh(self) -> Recorder:
        """Return a recorder of this kind that has no recordings yet."""
        made = type(self)()
        made._patience = self._patience
        return made

    def record_at_once(self) -> None:
        """Record on the first call of a shape: for timing what a long run will replay."""
        self._patience = 0

    def find(
        self,
        name: Any,
        function: Flat,
        leaves: list[Tensor],
        *,
        state: range = range(0),
        constants: Mapping[int, Tensor] | None = None,
        is_common: bool = False,
        calls: int = 1,
    ) -> Replay | None:
        """Return a recording of ``function(*leaves)``, or None as long as plain calls do.

        Parameters
        ----------
        name
            Tells functions apart.
        state
            Which leaves are the working state; the function returns their new values.
        constants
            Leaves that are the same in all calls of such shapes, by position.
        is_common
            Whether the shapes are known to come again and again.
        calls
            How many calls of the function this stands for.
        """
        signature = (name, tuple([(leaf.shape, leaf.dtype) for leaf in leaves]))
        recording = self._recordings.get(signature)
        if recording is not None:
            return recording
        is_common = is_common and name not in self._long
        calls = self._calls[signature] = self._calls.get(signature, 0) + calls
        if calls <= self._patience and not is_common:
            return None
        recording = record(function, leaves, state=state, constants=constants, fuse=is_common)
        if recording.num_operations > _MOST_OPERATIONS:
            self._long.add(name)
        self._recordings[signature] = recording
        return recording


class Unrecorded(Recorder):
    """Records nothing: every step runs as it is written."""

    def find(self, *arguments: Any, **options: Any) -> None:
        """Return no recording."""


def record(
    function: Flat,
    leaves: list[Tensor],
    *,
    state: range = range(0),
    constants: Mapping[int, Tensor] | None = None,
    fuse: bool = False,
) -> Replay:
    """Return a replay of the tensor operations that the function performs on such leaves.

    Parameters
    ----------
    state, constants
        As in ``Recorder.find``.
    fuse
        Whether rewriting may change the last bits.
    """
    with torch.no_grad():
        # A tensor that is two leaves (v and the v that stays fixed) must be told apart: replays
        # are given two.
        recording = operations(function, [leaf.detach() for leaf in leaves])
    is_long = len(recording.graph.nodes) > _MOST_OPERATIONS
    rewrite(recording, dict(constants or {}), fuse and not is_long)
    return Replay(recording, state)


class Steps:
    """A working state on its way through the steps of a stage.

    Parameters
    ----------
    recorder, name
        Where recordings of these steps are kept.
    function
        (*shared, *state, *given) -> new state, all as flat tensors.
    shared, state
        Tensors that stay, and those that each step replaces.
    """

    def __init__(
        self,
        recorder: Recorder,
        name: Any,
        function: Flat,
        shared: list[Tensor],
        state: list[Tensor],
    ) -> None:
        self.shared, self.state = shared, state
        self._recorder, self._name, self._function = recorder, name, function
        self._known: dict[Hashable, Replay] = {}
        self._owned: frozenset[int] = frozenset()

    def run(
        self,
        given: list[Tensor],
        shape: Hashable,
        *,
        weight: int | None = None,
        is_common: bool = False,
        keep: bool = False,
    ) -> None:
        """Make one step.

        Parameters
        ----------
        given
            Tensors of the batch.
        shape
            What distinguishes shapes of ``given`` and of the state within this stage.
        weight
            Position in ``given`` of weights that are all one.
        is_common
            As in ``Recorder.find``.
        keep
            Whether the old state is still needed.
        """
        leaves = [*self.shared, *self.state, *given]
        replay = self._known.get(shape)
        if replay is None:
            first = len(self.shared)
            second = first + len(self.state)
            replay = self._recorder.find(
                (self._name, weight),
                self._function,
                leaves,
                state=range(first, second),
                constants=None if weight is None else {second + weight: given[weight]},
                is_common=is_common,
            )
            if replay is None:
                self.state, self._owned = self._function(*leaves), frozenset()
                return
            self._known[shape] = replay
        is_mine = not keep and replay.owned <= self._owned
        if replay.turned and not is_mine and not keep:
            self.state, is_mine = replay.laid_out(self.state), True
            leaves = [*self.shared, *self.state, *given]
        self.state = replay.moving(*leaves) if is_mine else replay.fresh(*leaves)
        self._owned = replay.owned

    def replace(self, state: list[Tensor]) -> None:
        """Go on with tensors that nobody else holds."""
        self.state = state
