"""+gate, do no harm: Local is trained beside the method, and a rival must prove that it is better.

In every round the cohort trains two models of its own, as ``local`` alone would, with the same
start, batches and steps: one on all its rows, to the last bit what ``local`` gives, and one on the
training rows, to be measured. All rows count. When a client is served it measures that second
model, the shared model (where there is one) and the personal one on its validation rows, on which
neither was trained. A rival j is eligible if these rows are much likelier under it:

    log L_j - log L_local > log e        e: the evidence asked for, 20 by default

and the likeliest eligible one is served; where there is none, the Local model of all rows is. Ties
go to local, then to shared. L is the likelihood at the candidate's best scale, that is for class
labels at the temperature, of a few, that suits it best, and for targets at the variance that
does: a model that was trained to certainty on ten rows is wrong with great confidence, and would
lose to one that knows nothing. If Local were right, a rival would have e times its likelihood with
probability 1/e at most (Markov), however few the rows are; so the gate opens with their number.

A client without validation rows keeps its Local model; the choice stays with the client. A new
client without any rows has no Local model, and is served the personal one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Model, Phase, Stage
from handspan.core.data import Batch, ClientData, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Setting
from handspan.core.records import Empty, Record, map_tensors
from handspan.numerics.averaging import no_client
from handspan.numerics.carrying import carrying, on_field, rounded, serve

_VALIDATION_BATCH = 512
_SCALES = (1.0, 4.0, 2.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 0.0)
"""Factors of the logits: inverse temperatures; 0 is to know nothing."""


class Beside(Record):
    """What concerns the method, and the two models of Local: private records, working states."""

    own: Any
    kept: Any  # of Local on all rows
    tried: Any  # of Local on the training rows


class BesideBroadcast(Record):
    """What the method sends, and what Local does: a step size."""

    own: Any
    local: Any


class GateBroadcast(Record):
    """The shared model where it competes, and what a mixture of models is served with."""

    shared: Model | None
    serving: Any


class Choosing(Record):
    """The candidates, and their losses on the validation rows seen so far."""

    clients: Beside
    losses: Tensor  # (candidates, scales) float64, sums
    weight: Tensor  # () float64, rows


class GateServed(Record):
    """The choice, a position among the candidates, and the model chosen; never stored.

    Where the method serves a mixture of models there is no single one: the candidates stay.
    """

    model: Model | None
    clients: Beside | None
    choice: Tensor  # () int64
    group: Tensor | None


def with_gate(
    algorithm: Algorithm, local: Algorithm, setting: Setting, *, evidence: float = 20.0
) -> Algorithm:
    """Return the method behind a gate.

    Parameters
    ----------
    algorithm
        What competes.
    local
        What it falls back to: an algorithm of one phase with one stage, whose server keeps nothing.
    setting
        Of both.
    evidence
        How many times likelier a rival must make the validation rows; 1 takes the likeliest.
    """
    gate = _Gate(algorithm, local, setting, evidence)
    return dataclasses.replace(
        algorithm,
        name=f"{algorithm.name}+gate",
        init_client=lambda key, data: Beside(
            own=algorithm.init_client(key, data),
            kept=local.init_client(key, data),
            tried=local.init_client(key, data),
        ),
        setup=tuple(map(_for_method, algorithm.setup)),
        rounds=(*map(_for_method, algorithm.rounds), _for_local(algorithm, local)),
        adapt=_adapt(algorithm.adapt, local.adapt),
        personal=(*map(_for_method, algorithm.personal), *gate.phases()),
        **gate.served(),
    )


class _Gate:
    """The candidates of a method, how they are measured and which one is served."""

    def __init__(
        self, algorithm: Algorithm, local: Algorithm, setting: Setting, evidence: float
    ) -> None:
        assert local.model is not None
        self._algorithm, self._local = algorithm, local.model
        self._task, self._device = setting.model, setting.device
        self._is_class = self._task.kind == "classification"
        self._least = math.log(evidence)
        # Where clients keep and fit nothing the shared model is the personal one.
        is_personal = bool(algorithm.personal) or algorithm.init_client is not no_client
        self._shared = algorithm.shared_model if is_personal else None
        self._count = 2 if self._shared is None else 3
        self._deploy, self._unbatched, self._per_client = algorithm.serving
        self._predict = algorithm.predict
        if self._predict is not None and self._per_client:
            raise HandspanError(f"+gate does not compose with {algorithm.name}")

    def phases(self) -> tuple[Phase, ...]:
        """Return the personal phases in which a client makes its model, and chooses."""
        stage = Stage(
            step=self._measure,
            rows="validation",
            batch_size=_VALIDATION_BATCH,
            epochs=1,
            forward_only=True,
            models=self._count,
        )
        choice = Phase(
            name="gate",
            broadcast=self._broadcast,
            begin=self._begin,
            stages=(stage,),
            end=self._end,
            unbatched=self._large,
        )
        return (choice,) if self._predict is not None else (self._making(), choice)

    def served(self) -> dict[str, Any]:
        """Return the fields of the algorithm that say what is served."""
        is_mixture, has_groups = self._predict is not None, self._algorithm.cluster is not None
        return {
            "model": None if is_mixture else lambda b, c: c.model,
            "predict": self._chosen_outputs if is_mixture else None,
            "cluster": (lambda c: c.group) if has_groups else None,
            "deploy": self._broadcast if is_mixture else lambda server, round: Empty(),
            "deploy_unbatched": self._large if is_mixture else frozenset[str](),
            "deploy_per_client": frozenset[str](),
        }

    @property
    def _large(self) -> frozenset[str]:
        return frozenset({"serving", "shared"}) if self._unbatched else frozenset({"shared"})

    def _broadcast(self, server: Any, round: Round) -> GateBroadcast:
        """Return what the candidates need that a client does not have."""
        return GateBroadcast(
            shared=None if self._shared is None else self._shared(server),
            serving=None if self._predict is None else self._deploy(server, round),
        )

    def _making(self) -> Phase:
        """Let a client make the model that the method would serve it."""

        def end(b: Any, c: Beside, data: ClientData) -> tuple[Beside, None]:
            return dataclasses.replace(c, own=serve(self._algorithm, b, c.own)), None

        return Phase(
            name="gate_model",
            broadcast=self._deploy,
            begin=lambda b, c, data: c,
            end=end,
            unbatched=self._unbatched,
            per_client=self._per_client,
        )

    def _begin(self, b: GateBroadcast, c: Beside, data: ClientData) -> Choosing:
        scales = len(_SCALES) if self._is_class else 1
        losses = torch.zeros(self._count, scales, dtype=torch.float64, device=self._device)
        return Choosing(clients=c, losses=losses, weight=losses[0, 0])

    def _measure(self, b: GateBroadcast, k: Choosing, batch: Batch) -> Choosing:
        y = batch.y
        assert y is not None
        found = self._outputs(b, k.clients, k.clients.tried, batch.x, batch.side)
        scales = _SCALES if self._is_class else (1.0,)
        losses = [
            [(self._task.row_loss(scale * o, y) * batch.weight).double().sum() for scale in scales]
            for o in found
        ]
        return dataclasses.replace(
            k,
            losses=k.losses + torch.stack([torch.stack(each) for each in losses]),
            weight=k.weight + batch.weight.double().sum(),
        )

    def _end(self, b: GateBroadcast, k: Choosing, data: ClientData) -> tuple[GateServed, None]:
        choice = self._choice(k)
        has_rows = (data.num > 0).to(choice.device)  # counts stay on the CPU
        choice = torch.where(has_rows, choice, self._count - 1)
        own = k.clients.own
        if self._predict is not None:
            cluster = self._algorithm.cluster
            group = None if cluster is None else cluster(own)
            return GateServed(model=None, clients=k.clients, choice=choice, group=group), None
        models = [self._local(Empty(), k.clients.kept), b.shared, own.model]
        model = _pick(choice, [model for model in models if model is not None])
        return GateServed(model=model, clients=None, choice=choice, group=own.group), None

    def _choice(self, k: Choosing) -> Tensor:
        """Position of the likeliest candidate that has proved itself, the first of equals."""
        if self._is_class:
            loss = k.losses.amin(1)
        else:  # squared errors: the variance that suits a candidate best is their mean
            mean = (k.losses[:, 0] / k.weight.clamp_min(1)).clamp_min(1e-300)
            loss = 0.5 * k.weight * mean.log()
        loss = rounded(loss)
        is_proved = loss[0] - loss[1:] > rounded(self._least + 0 * k.weight)
        rivals = torch.where(is_proved, loss[1:], float("inf"))
        return torch.where(is_proved.any(), 1 + rivals.argmin(), 0)

    def _outputs(self, b: GateBroadcast, c: Beside, local: Any, x: Any, side: Any) -> list[Tensor]:
        """Outputs of local, shared and personal model, in the order of ties."""
        models = [self._local(Empty(), local), b.shared]
        if self._predict is None:
            models.append(c.own.model)
        found = [
            self._task.predict(model.params, model.buffers, x, side)
            for model in models
            if model is not None
        ]
        if self._predict is not None:
            found.append(self._predict(b.serving, c.own, x, side))
        return found

    def _chosen_outputs(self, b: GateBroadcast, c: GateServed, x: Any, side: Any) -> Tensor:
        assert c.clients is not None
        return _pick(c.choice, self._outputs(b, c.clients, c.clients.kept, x, side))


def _pick(choice: Tensor, candidates: list[Any]) -> Any:
    chosen = candidates[0]
    for position, candidate in enumerate(candidates[1:], 1):
        chosen = map_tensors(
            lambda new, old, p=position: torch.where(choice == p, new, old), candidate, chosen
        )
    return chosen


def _for_method(phase: Phase) -> Phase:
    """Run a phase of the method; the records of Local are carried along."""
    return carrying(
        phase,
        enter=lambda c, data: (c.own, dataclasses.replace(c, own=None)),
        leave=lambda own, c: dataclasses.replace(c, own=own),
    )


def _doubled(local: Phase) -> tuple[Stage, Stage]:
    """Return the stage of Local twice: on all rows, and on the training rows alone."""
    (stage,) = local.stages
    return (
        on_field(dataclasses.replace(stage, rows="all"), "kept", lambda b: b.local),
        on_field(stage, "tried", lambda b: b.local),
    )


def _for_local(algorithm: Algorithm, local: Algorithm) -> Phase:
    """Train Local in the same round, twice; the record of the method is carried along."""
    (phase,) = local.rounds
    taken = {phase.name for phase in (*algorithm.setup, *algorithm.rounds)}
    return dataclasses.replace(
        _beside(None, phase),
        name=f"gate_{phase.name}" if phase.name in taken else phase.name,
        combine=lambda server, reduction, round: server,
    )


def _beside(own: Phase | None, local: Phase) -> Phase:
    """Return a phase in which clients work for the method, and then on both models of Local."""

    def broadcast(server: Any, round: Round) -> BesideBroadcast:
        return BesideBroadcast(
            own=None if own is None else own.broadcast(server, round),
            local=local.broadcast(Empty(), round),
        )

    def begin(b: BesideBroadcast, c: Beside, data: ClientData) -> Beside:
        return Beside(
            own=c.own if own is None else own.begin(b.own, c.own, data),
            kept=local.begin(b.local, c.kept, data),
            tried=local.begin(b.local, c.tried, data),
        )

    def end(b: BesideBroadcast, k: Beside, data: ClientData) -> tuple[Beside, Empty]:
        done = Beside(
            own=k.own if own is None else own.end(b.own, k.own, data)[0],
            kept=local.end(b.local, k.kept, data)[0],
            tried=local.end(b.local, k.tried, data)[0],
        )
        return done, Empty()

    stages = () if own is None else own.stages
    return dataclasses.replace(
        local,
        broadcast=broadcast,
        begin=begin,
        stages=(*(on_field(stage, "own", lambda b: b.own) for stage in stages), *_doubled(local)),
        end=end,
        unbatched=frozenset({"own"}) if own is not None and own.unbatched else frozenset(),
    )


def _adapt(own: Phase | None, local: Phase | None) -> Phase:
    """Fit the private part of a new client as the method does, then Local models for it."""
    assert local is not None
    if own is not None and own.per_client:
        raise HandspanError("+gate does not compose with phases that send to single clients")
    return dataclasses.replace(
        _beside(own, local), name="gate_adapt" if own is None else own.name, combine=None
    )
