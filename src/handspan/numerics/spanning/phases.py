"""The phases of span: what clients do, what the server makes of it, and when."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Phase, Stage
from handspan.core.data import Batch, ClientData, Rows
from handspan.core.method import Setting
from handspan.core.records import Record
from handspan.numerics.averaging import begin_training, end_training, sgd_step
from handspan.numerics.carrying import on_field
from handspan.numerics.mixture import nearest
from handspan.numerics.spanning.canonical import CANDIDATES
from handspan.numerics.spanning.clients import Clients, Fitting, Parts, mapped
from handspan.numerics.spanning.records import (
    Candidates,
    CutBroadcast,
    JudgeBroadcast,
    ServeBroadcast,
    SpanClient,
    SpanServer,
    WeighBroadcast,
)
from handspan.numerics.spanning.schedule import PERSONAL, Schedule
from handspan.numerics.spanning.server import APART, OWN, SpanDecisions
from handspan.numerics.trials import Trial, measuring, trial, uploaded

__all__ = ["Parts", "compose_phases"]
_UNBATCHED = frozenset({"basis"})
_REFIT_STEPS = 5
_SERVED_BATCH = 512


def compose_phases(setting: Setting, made: Parts, schedule: Schedule) -> Algorithm:
    """Return the algorithm of these parts."""
    phases = _Phases(setting, made, schedule)
    server, clients = phases.server, phases.clients
    final = setting.final_rows
    return Algorithm(
        name="span",
        init_server=server.init,
        init_client=clients.init,
        rounds=(
            phases.judge(),
            phases.cut(),
            phases.weigh(),
            phases.common("race", "train", schedule.races_common),
            phases.common("common", final, schedule.is_common),
            phases.personal("explore", "train", schedule.explores, phases.work),
            # Once the centres are found, most steps go to what they share.
            phases.personal("train", final, schedule.is_personal, phases.work[::-1]),
        ),
        adapt=phases.adapt(final),
        personal=(phases.choose(final), phases.serve(final)),
        model=clients.model,
        deploy=server.serve,
        deploy_unbatched=frozenset({"inner", "share"}),
        shared_model=server.shared_model,
        cluster=lambda c: c.centre,
        needs_label_counts=made.bias is not None,
        describe=server.describe,
    )


class _Keeping(Record):
    """A working record, and the private record that stays as it is."""

    inner: Any
    kept: Any


def _inside(stage: Stage, received: Any = lambda b: b) -> Stage:
    """Return the stage for trials: their candidates are made by it."""
    return on_field(on_field(stage, "inner", received), "inner")


class _Phases:
    """Makes the phases."""

    def __init__(self, setting: Setting, made: Parts, schedule: Schedule) -> None:
        self.setting, self.made, self.schedule = setting, made, schedule
        self.clients = Clients(setting, made)
        self.server = SpanDecisions(setting, made, schedule)
        self.work = setting.work.split()
        self.device = setting.device

    # -- training ----------------------------------------------------------------------------

    def common(self, name: str, rows: Rows, when: Any) -> Phase:
        """One model for all, as FedAvg trains it."""
        sgd, work = self.setting.work.sgd, self.setting.work.whole()

        def end(b: Any, k: Any, data: ClientData) -> tuple[Any, Any]:
            return k.kept, end_training(b, k.inner, data)[1]

        step = Stage(step=sgd_step(self.made.task, sgd), rows=rows, **work)
        begin = begin_training(sgd)
        return Phase(
            name=name,
            when=when,
            broadcast=self.server.common,
            begin=lambda b, client, data: _Keeping(inner=begin(b, client, data), kept=client),
            stages=(on_field(step, "inner"),),
            end=end,
            combine=self.server.combine_common,
            weight=self.made.weight,
            infers="gradients of the whole model",
        )

    def personal(self, name: str, rows: Rows, when: Any, work: tuple[dict[str, Any], ...]) -> Phase:
        """Personal heads: v first, then body and basis; ``work`` of both."""
        clients, (personal, shared) = self.clients, work
        return Phase(
            name=name,
            when=when,
            broadcast=self.server.personal,
            begin=clients.begin,
            stages=(
                self._coordinates(rows, personal),
                Stage(step=clients.shared_step, rows=rows, **shared),
            ),
            end=clients.end,
            combine=self.server.combine_personal,
            unbatched=_UNBATCHED,
            reduce=clients.reduce,
            wire=clients.wire,
            weight=self.made.weight,
            infers="v_i and its centre; gradients",
        )

    def _coordinates(self, rows: Rows, work: dict[str, Any]) -> Stage:
        clients = self.clients
        return Stage(step=clients.coordinate_step, finish=clients.shrink, rows=rows, **work)

    # -- decisions ---------------------------------------------------------------------------

    def judge(self) -> Phase:
        """Both branches on held-out rows."""
        clients, has_prior = self.clients, self.made.bias is not None
        task, count = self.made.task, 3 if self.made.bias is not None else 2

        def begin(b: JudgeBroadcast, client: SpanClient, data: ClientData) -> Trial:
            return trial(
                _Keeping(inner=clients.begin(b.inner, client, data), kept=client),
                count,
                self.device,
            )

        def outputs(b: JudgeBroadcast, k: Any, batch: Batch) -> list[Tensor]:
            plain, working = b.common.params, k.inner
            variants = [plain]
            if has_prior:
                one = torch.ones_like(b.inner.temperature)
                variants.append(clients.told(plain, working.shift, one))
            shared = [
                task.predict(params, b.common.buffers, batch.x, batch.side) for params in variants
            ]
            own = working.coordinates.unsqueeze(0)
            return [*shared, *clients.outputs(b.inner, working, own, batch)]

        return self._deciding(
            "judge",
            self.schedule.judges,
            self.server.judge,
            begin,
            (
                _inside(self._coordinates("train", self.work[0]), lambda b: b.inner),
                (outputs, count),
            ),
            self.server.combine_judge,
            unbatched=frozenset({"common", "inner"}),
        )

    def cut(self) -> Phase:
        """Numbers of directions on held-out rows; coordinates are refitted for each."""
        clients = self.clients

        def begin(b: CutBroadcast, client: SpanClient, data: ClientData) -> Trial:
            v = mapped(client, b.inner) * b.masks
            candidates = Candidates(coordinates=v, shift=clients.label_shift(data))
            return trial(_Keeping(inner=candidates, kept=client), CANDIDATES, self.device)

        def outputs(b: CutBroadcast, k: Any, batch: Batch) -> list[Tensor]:
            return clients.outputs(b.inner, k.inner, k.inner.coordinates, batch)

        refit = Stage(
            step=clients.refit,
            steps=_REFIT_STEPS,
            batch_size=self.setting.work.batch_size,
            models=CANDIDATES,
        )
        return self._deciding(
            "cut",
            self.schedule.cuts_now,
            self.server.cut,
            begin,
            (_inside(refit), (outputs, CANDIDATES)),
            self.server.combine_cut,
            unbatched=frozenset({"inner"}),
        )

    def weigh(self) -> Phase:
        """Centres and weights of the own v against them, on held-out rows."""
        clients, count = self.clients, len(APART) * len(OWN)

        def begin(b: WeighBroadcast, client: SpanClient, data: ClientData) -> Trial:
            working = clients.begin(b.inner, client, data)
            return trial(_Keeping(inner=working, kept=client), count, self.device)

        def outputs(b: WeighBroadcast, k: Any, batch: Batch) -> list[Tensor]:
            v, inner = k.inner.coordinates, b.inner
            candidates: list[Tensor] = []
            for level in range(len(APART)):
                means, is_there = b.means[level], b.is_there[level] > 0
                centre = nearest(v, means, is_there, inner.gram) @ means
                candidates += [centre + own * (v - centre) for own in OWN]
            return clients.outputs(inner, k.inner, torch.stack(candidates), batch)

        return self._deciding(
            "weigh",
            self.schedule.weighs,
            self.server.weigh,
            begin,
            (
                _inside(self._coordinates("train", self.work[0]), lambda b: b.inner),
                (outputs, count),
            ),
            self.server.combine_weigh,
            unbatched=frozenset({"inner"}),
        )

    def _deciding(
        self,
        name: str,
        when: Any,
        broadcast: Any,
        begin: Any,
        work: tuple[Stage, tuple[Any, int]],
        combine: Any,
        unbatched: frozenset[str],
    ) -> Phase:
        """Phase of a decision: refit on training rows, score on validation rows, keep nothing."""
        fitting, (outputs, count) = work
        like = self.setting.scalar

        def end(b: Any, k: Trial, data: ClientData) -> tuple[Any, Any]:
            return k.inner.kept, uploaded(k, like)

        return Phase(
            name=name,
            when=when,
            broadcast=broadcast,
            begin=begin,
            stages=(fitting, measuring(self.made.task, outputs, count)),
            end=end,
            combine=combine,
            unbatched=unbatched,
            infers="losses of the candidates",
        )

    # -- serving -----------------------------------------------------------------------------

    def choose(self, rows: Rows) -> Phase:
        """Choose the centre that fits the client's rows, and shrink v to it."""
        clients, schedule = self.clients, self.schedule

        def begin(b: ServeBroadcast, client: SpanClient, data: ClientData) -> Fitting:
            return clients.start_fitting(b, mapped(client, b.inner), clients.label_shift(data))

        def when(server: SpanServer, round: Any) -> bool:
            return schedule.shrink is not None and int(server.mode) == PERSONAL

        return Phase(
            name="choose",
            when=when,
            broadcast=self.server.serve,
            begin=begin,
            stages=(self._fit_centres(rows),),
            end=clients.settle,
            unbatched=frozenset({"inner", "share"}),
        )

    def _fit_centres(self, rows: Rows) -> Stage:
        return Stage(
            step=self.clients.fit_centres,
            rows=rows,
            batch_size=_SERVED_BATCH,
            epochs=1,
            forward_only=True,
            models=self.made.groups,
        )

    def serve(self, rows: Rows) -> Phase:
        """Tell the model the client's label frequencies."""
        clients = self.clients
        counting = Stage(
            step=clients.count_labels,
            rows=rows,
            batch_size=_SERVED_BATCH,
            epochs=1,
            forward_only=True,
            models=0,
        )

        def begin(b: ServeBroadcast, client: SpanClient, data: ClientData) -> Fitting:
            k = clients.start_fitting(b, mapped(client, b.inner), None)
            groups = torch.arange(len(b.share), device=b.share.device)
            choice = (groups == client.centre) * b.inner.is_there  # of one model for all: the first
            return dataclasses.replace(k, inner=dataclasses.replace(k.inner, choice=choice))

        return Phase(
            name="serve",
            broadcast=self.server.serve,
            begin=begin,
            stages=(counting,) if self.made.bias is not None else (),
            end=clients.served,
            unbatched=frozenset({"inner", "share"}),
        )

    def adapt(self, rows: Rows) -> Phase:
        """A new client: the centre that fits its rows first, then steps on v from there."""
        clients = self.clients

        def begin(b: ServeBroadcast, client: SpanClient, data: ClientData) -> Fitting:
            zero = torch.zeros_like(client.coordinates)
            return clients.start_fitting(b, zero, clients.label_shift(data))

        def start(b: ServeBroadcast, k: Fitting) -> Fitting:
            choice, centre = clients.chosen(b, k)
            inner = dataclasses.replace(k.inner, coordinates=centre, choice=choice)
            return dataclasses.replace(k, inner=inner)

        def end(b: ServeBroadcast, k: Fitting, data: ClientData) -> tuple[SpanClient, None]:
            # Without any rows nothing speaks for a centre: the mean of all of them.
            mean = b.share.exp() @ b.inner.means
            v = torch.where((data.num > 0).to(mean.device), k.inner.coordinates, mean)
            return clients.kept(b.inner, dataclasses.replace(k.inner, coordinates=v)), None

        steps = Stage(step=clients.coordinate_step, rows=rows, **self.setting.work.adapting())
        fit = dataclasses.replace(self._fit_centres(rows), finish=start)
        return Phase(
            name="adapt",
            broadcast=self.server.serve,
            begin=begin,
            stages=(fit, on_field(steps, "inner", lambda b: b.inner)),
            end=end,
            unbatched=frozenset({"inner", "share"}),
        )
