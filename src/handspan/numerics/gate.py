"""+gate, do no harm: a Local model is trained beside the method, and each client keeps the best.

In every round the cohort also trains a model of its own, exactly as ``local`` alone would: same
start, same local work, same batches. Its rows count. When it is served a client measures the local
model, the shared one (where there is one) and the personal one on its validation rows, which nobody
trains on, and serves the one of least loss; ties go to local, then to shared. So a client that has
too few rows to set some aside keeps its local model. The choice stays with the client. A new client
without any rows has no local model, and is served the personal one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Model, Phase, Stage
from handspan.core.data import Batch, ClientData, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Setting
from handspan.core.records import Empty, Record, map_tensors
from handspan.numerics.averaging import no_client
from handspan.numerics.carrying import carrying, on_field, rounded

_VALIDATION_BATCH = 512


class Both(Record):
    """What concerns the method, and the same of Local: records, messages, working states."""

    own: Any
    local: Any


class GateBroadcast(Record):
    """What the method serves with, and the shared model where it competes."""

    serving: Any
    shared: Model | None


class GateChoosing(Record):
    """Losses of the candidates on the validation rows seen so far."""

    clients: Both
    losses: Tensor  # (candidates,) float64, sums
    weight: Tensor  # () float64, rows


class GateServed(Record):
    """The candidates and the choice, a position among them; never stored."""

    clients: Both
    choice: Tensor  # () int64


def with_gate(algorithm: Algorithm, local: Algorithm, setting: Setting) -> Algorithm:
    """Return the method behind a gate.

    Parameters
    ----------
    algorithm
        What competes.
    local
        What it falls back to: an algorithm of one phase whose server keeps nothing.
    setting
        Of both.
    """
    _, _, per_client = algorithm.serving
    if per_client or algorithm.per_row:
        raise HandspanError(f"+gate does not compose with {algorithm.name}")
    gate = _Gate(algorithm, local, setting)
    is_mixture = algorithm.predict is not None
    cluster = algorithm.cluster
    return dataclasses.replace(
        algorithm,
        name=f"{algorithm.name}+gate",
        init_client=lambda key, data: Both(
            own=algorithm.init_client(key, data), local=local.init_client(key, data)
        ),
        setup=tuple(map(_for_method, algorithm.setup)),
        rounds=(*map(_for_method, algorithm.rounds), _for_local(algorithm, local)),
        adapt=_adapt(algorithm.adapt, local.adapt),
        personal=(*map(_for_method, algorithm.personal), gate.phase()),
        model=None if is_mixture else gate.model,
        predict=gate.predict if is_mixture else None,
        cluster=None if cluster is None else lambda c: cluster(c.clients.own),
        deploy=gate.broadcast,
        deploy_unbatched=gate.unbatched,
        deploy_per_client=frozenset(),
    )


class _Gate:
    """The candidates of a method, how they are measured and which one is served."""

    def __init__(self, algorithm: Algorithm, local: Algorithm, setting: Setting) -> None:
        self._task, self._device = setting.model, setting.device
        self._deploy, unbatched, _ = algorithm.serving
        self._model, self._predict = algorithm.model, algorithm.predict
        assert local.model is not None
        self._local = local.model
        # Where clients keep and fit nothing the shared model is the personal one.
        is_personal = bool(algorithm.personal) or algorithm.init_client is not no_client
        self._shared = algorithm.shared_model if is_personal else None
        self._count = 2 if self._shared is None else 3
        self.unbatched = frozenset({"serving", "shared"}) if unbatched else frozenset({"shared"})

    def broadcast(self, server: Any, round: Round) -> GateBroadcast:
        """Return all that the candidates need."""
        shared = None if self._shared is None else self._shared(server)
        return GateBroadcast(serving=self._deploy(server, round), shared=shared)

    def phase(self) -> Phase:
        """Return the personal phase in which a client chooses."""
        stage = Stage(
            step=self._measure,
            rows="validation",
            batch_size=_VALIDATION_BATCH,
            epochs=1,
            forward_only=True,
            models=self._count,
        )
        return Phase(
            name="gate",
            broadcast=self.broadcast,
            begin=self._begin,
            stages=(stage,),
            end=self._end,
            unbatched=self.unbatched,
        )

    def model(self, b: GateBroadcast, c: GateServed) -> Model:
        """Return the chosen model."""
        return _pick(c.choice, self._models(b, c.clients))

    def predict(self, b: GateBroadcast, c: GateServed, x: Any, side: Any) -> Tensor:
        """Outputs of the chosen candidate, for methods that serve no single model."""
        return _pick(c.choice, self._outputs(b, c.clients, x, side))

    def _begin(self, b: GateBroadcast, c: Both, data: ClientData) -> GateChoosing:
        losses = torch.zeros(self._count, dtype=torch.float64, device=self._device)
        return GateChoosing(clients=c, losses=losses, weight=losses.sum())

    def _measure(self, b: GateBroadcast, k: GateChoosing, batch: Batch) -> GateChoosing:
        assert batch.y is not None
        losses = [
            (self._task.row_loss(outputs, batch.y) * batch.weight).double().sum()
            for outputs in self._outputs(b, k.clients, batch.x, batch.side)
        ]
        return dataclasses.replace(
            k,
            losses=k.losses + torch.stack(losses),
            weight=k.weight + batch.weight.double().sum(),
        )

    def _end(self, b: GateBroadcast, k: GateChoosing, data: ClientData) -> tuple[GateServed, None]:
        choice = rounded(k.losses / k.weight.clamp_min(1)).argmin()  # the first of equals
        choice = torch.where(data.num > 0, choice, self._count - 1)
        return GateServed(clients=k.clients, choice=choice), None

    def _models(self, b: GateBroadcast, c: Both) -> list[Model]:
        """Single models among the candidates, in the order of ties."""
        found = [self._local(Empty(), c.local)]
        if b.shared is not None:
            found.append(b.shared)
        if self._predict is None:
            assert self._model is not None
            found.append(self._model(b.serving, c.own))
        return found

    def _outputs(self, b: GateBroadcast, c: Both, x: Any, side: Any) -> list[Tensor]:
        found = [
            self._task.predict(model.params, model.buffers, x, side) for model in self._models(b, c)
        ]
        if self._predict is not None:
            found.append(self._predict(b.serving, c.own, x, side))
        return found


def _pick(choice: Tensor, candidates: list[Any]) -> Any:
    chosen = candidates[0]
    for position, candidate in enumerate(candidates[1:], 1):
        chosen = map_tensors(
            lambda new, old, p=position: torch.where(choice == p, new, old), candidate, chosen
        )
    return chosen


def _for_method(phase: Phase) -> Phase:
    """Run a phase of the method; the record of Local is carried along."""
    return carrying(
        phase,
        enter=lambda c, data: (c.own, c.local),
        leave=lambda own, local: Both(own=own, local=local),
    )


def _for_local(algorithm: Algorithm, local: Algorithm) -> Phase:
    """Train Local in the same round; the record of the method is carried along."""
    (phase,) = local.rounds
    taken = {phase.name for phase in (*algorithm.setup, *algorithm.rounds)}
    beside = carrying(
        phase,
        enter=lambda c, data: (c.local, c.own),
        leave=lambda local, own: Both(own=own, local=local),
    )
    return dataclasses.replace(
        beside,
        name=f"gate_{phase.name}" if phase.name in taken else phase.name,
        broadcast=lambda server, round: phase.broadcast(Empty(), round),
        combine=lambda server, reduction, round: server,
    )


def _adapt(own: Phase | None, local: Phase | None) -> Phase:
    """Fit the private part of a new client as the method does, then a Local model for it."""
    assert local is not None
    if own is not None and own.per_client:
        raise HandspanError("+gate does not compose with phases that send to single clients")

    def broadcast(server: Any, round: Round) -> Both:
        return Both(
            own=None if own is None else own.broadcast(server, round),
            local=local.broadcast(Empty(), round),
        )

    def begin(b: Both, c: Both, data: ClientData) -> Both:
        return Both(
            own=c.own if own is None else own.begin(b.own, c.own, data),
            local=local.begin(b.local, c.local, data),
        )

    def end(b: Both, k: Both, data: ClientData) -> tuple[Both, None]:
        client = k.own if own is None else own.end(b.own, k.own, data)[0]
        return Both(own=client, local=local.end(b.local, k.local, data)[0]), None

    stages = () if own is None else own.stages
    return Phase(
        name="gate_adapt" if own is None else own.name,
        broadcast=broadcast,
        begin=begin,
        stages=(
            *(on_field(stage, "own", lambda b: b.own) for stage in stages),
            *(on_field(stage, "local", lambda b: b.local) for stage in local.stages),
        ),
        end=end,
        unbatched=frozenset({"own"}) if own is not None and own.unbatched else frozenset(),
    )
