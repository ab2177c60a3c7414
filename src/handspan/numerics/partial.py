"""Models of two parts: one that all clients share, one that each client keeps.

A ``Split`` says which parameters are whose. A method is a split and a schedule: the stages in which
the parts move, at once or one after the other. Running statistics belong to whom the parameters of
their layer belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Setting
from handspan.core.records import Params, Record, stack
from handspan.core.task import Task, value_and_grad
from handspan.numerics.averaging import Training, chosen_names, copies, parts
from handspan.numerics.local_work import LocalWork

Part = Literal["personal", "shared"]
PERSONAL: tuple[Part, ...] = ("personal",)
SHARED: tuple[Part, ...] = ("shared",)
BOTH: tuple[Part, ...] = ("personal", "shared")
STARTS = ("common", "independent")
Step = Callable[[Any, Training, Batch], Training]


class SharedPart(Record):
    """What the server keeps, and what a client sends."""

    shared: Params
    buffers: Params


class PartialBroadcast(Record):
    """The shared part, and the round's step sizes."""

    shared: Params
    buffers: Params
    learning_rate: Tensor
    personal_learning_rate: Tensor


class PersonalPart(Record):
    """What a client keeps."""

    personal: Params
    buffers: Params


def split_names(task: Task, which: str, setting: str) -> frozenset[str]:
    """Names that a setting means; refused where they are all there are.

    ``which`` is as in ``chosen_names``. A split that leaves one side nothing is a mistake.
    """
    names = frozenset(chosen_names(task, which, setting))
    if not names or names == frozenset(task.names):
        chosen = "all parameters" if names else "no parameter"
        raise HandspanError(
            f"{setting}={which!r} means {chosen}, and a method of two parts needs both: choose "
            f"some of {', '.join(task.names)}, or run fedavg or local"
        )
    return names


def layer(name: str) -> str:
    """Layer of a parameter or buffer."""
    return name.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which parameters are personal, and the pieces from which methods are put together.

    Attributes
    ----------
    setting
        The run.
    personal
        Names of the personal parameters.
    layers
        Layers whose buffers are personal; by default those of the personal parameters.
    personal_rate
        Step size of the personal part; the run's by default.
    start
        First personal parts: ``common`` to all clients, or ``independent`` draws.
    """

    setting: Setting
    personal: frozenset[str]
    layers: frozenset[str] | None = None
    personal_rate: float | None = None
    start: str = "common"

    @property
    def work(self) -> LocalWork:
        """Local work of the run."""
        return self.setting.work

    def names(self, *which: Part) -> frozenset[str]:
        """Names of the parameters of the given parts."""
        shared = frozenset(self.setting.model.names) - self.personal
        chosen = {"personal": self.personal, "shared": shared}
        return frozenset[str]().union(*(chosen[part] for part in which))

    def divided(self, params: Params, buffers: Params) -> tuple[PersonalPart, SharedPart]:
        """Return the two parts of a model."""
        layers = {layer(name) for name in self.personal} if self.layers is None else self.layers
        kept = frozenset(name for name in buffers if layer(name) in layers)
        own, common = parts(params, self.personal)
        own_buffers, common_buffers = parts(buffers, kept)
        return (
            PersonalPart(personal=own, buffers=own_buffers),
            SharedPart(shared=common, buffers=common_buffers),
        )

    # -- functions of the phases -------------------------------------------------------------

    def init_server(self, key: Tensor, population: Population) -> SharedPart:
        """Shared part of a fresh model."""
        return self.divided(*self.setting.model.init(key))[1]

    def init_client(self, key: Tensor, data: ClientData) -> PersonalPart:
        """Personal parts of the server's model, or of a fresh one for each client."""

        def fresh(key: Tensor) -> PersonalPart:
            return self.divided(*self.setting.model.init(key))[0]

        if self.start == "independent":
            return stack([fresh(keys.fold(own, "personal")) for own in data.key])
        first, count = fresh(key), len(data.num)
        return PersonalPart(
            personal=copies(first.personal, count), buffers=copies(first.buffers, count)
        )

    def broadcast(self, server: SharedPart, round: Round) -> PartialBroadcast:
        """Send the shared part."""
        rounds, like = self.setting.rounds, self.setting.scalar
        return PartialBroadcast(
            shared=server.shared,
            buffers=server.buffers,
            learning_rate=self.work.rate(round, rounds, like),
            personal_learning_rate=self.work.rate(round, rounds, like, self.personal_rate),
        )

    def begin(self, b: PartialBroadcast, client: PersonalPart, data: ClientData) -> Training:
        """Put the two parts together; no momentum is left of earlier rounds."""
        model = self.model(b, client)
        velocity = self.work.sgd.start(model.params)
        return Training(params=model.params, buffers=model.buffers, velocity=velocity)

    def step(self, *moving: Part) -> Step:
        """One SGD step on the given parts, from one gradient at the OLD pair."""
        task, sgd = self.setting.model, self.work.sgd
        rates = {"personal": "personal_learning_rate", "shared": "learning_rate"}

        def step(b: PartialBroadcast, k: Training, batch: Batch) -> Training:
            free, fixed = parts(k.params, self.names(*moving))
            _, buffers, gradient = value_and_grad(
                lambda free: task.loss({**fixed, **free}, k.buffers, batch), free
            )
            params, velocity = dict(fixed), dict(k.velocity)
            for part in moving:
                own, slope, speed = (
                    parts(whole, self.names(part))[0] for whole in (free, gradient, velocity)
                )
                own, speed = sgd.step(own, slope, speed, getattr(b, rates[part]))
                params.update(own)
                velocity.update(speed)
            buffers = self._moved(k.buffers, buffers, moving)
            return Training(params=params, buffers=buffers, velocity=velocity)

        return step

    def _moved(self, old: Params, new: Params, moving: Sequence[Part]) -> Params:
        """Take new running statistics of the parts that move alone."""
        both = zip(self.divided({}, old), self.divided({}, new), strict=True)
        kept = [
            (after if part in moving else before).buffers
            for part, (before, after) in zip(("personal", "shared"), both, strict=True)
        ]
        return {**kept[0], **kept[1]}

    def end(
        self, b: PartialBroadcast, k: Training, data: ClientData
    ) -> tuple[PersonalPart, SharedPart]:
        """Keep one part, send the other."""
        return self.divided(k.params, k.buffers)

    def combine(self, server: SharedPart, reduction: Reduced, round: Round) -> SharedPart:
        """Mean of the shared parts."""
        return reduction.mean(like=server)

    def model(self, b: PartialBroadcast, client: PersonalPart) -> Model:
        """Return the client's model: its own part, and the latest shared one."""
        return Model(
            params={**b.shared, **client.personal}, buffers={**b.buffers, **client.buffers}
        )

    # -- phases ------------------------------------------------------------------------------

    def private_phase(self, name: str, **work: Any) -> Phase:
        """Return a phase in which the personal part alone moves and nothing is sent."""
        return Phase(
            name=name,
            broadcast=self.broadcast,
            begin=self.begin,
            stages=(Stage(step=self.step("personal"), **work),),
            end=lambda b, k, data: (self.end(b, k, data)[0], None),
        )

    def algorithm(
        self,
        name: str,
        schedule: Sequence[tuple[tuple[Part, ...], dict[str, Any]]],
        *,
        weights: str,
        last_pass: dict[str, Any] | None = None,
    ) -> Algorithm:
        """Put the pieces together.

        Parameters
        ----------
        name
            Of the method.
        schedule
            Stages of a round: which parts move, and for how long (options of ``Stage``). A stage
            in which nothing could move is left out.
        weights
            Of the server's mean: ``uniform`` or ``examples``.
        last_pass
            How long the personal part moves once more before a client is served.
        """
        stages = tuple(
            Stage(step=self.step(*moving), **work)
            for moving, work in schedule
            if self.names(*moving)
        )
        phase = Phase(
            name="train",
            broadcast=self.broadcast,
            begin=self.begin,
            stages=stages,
            end=self.end,
            combine=self.combine,
            weight=WEIGHTS[weights],
            infers="gradients of the shared part: inversion attacks apply",
        )
        last_pass = last_pass if self.personal else None
        return Algorithm(
            name=name,
            init_server=self.init_server,
            init_client=self.init_client,
            rounds=(phase,),
            adapt=self.private_phase("adapt", **self.work.adapting()) if self.personal else None,
            personal=(self.private_phase("last_pass", **last_pass),) if last_pass else (),
            model=self.model,
        )
