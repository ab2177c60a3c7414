"""Does side information help? One model reads it, another does not; held-out rows decide.

For the first half of the rounds both are trained, on training rows alone and on the same cohorts.
Then every client scores both on its validation rows, the sums of their losses are compared, and
side information is kept where it lowers the mean loss by more than the standard error of that.
The winner goes on by itself, on all rows. Only sums are needed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Population, Round, Rows
from handspan.core.errors import HandspanError
from handspan.core.method import Setting
from handspan.core.records import Empty, Record
from handspan.numerics.averaging import (
    ModelBroadcast,
    ModelState,
    averaged,
    begin_training,
    end_training,
    no_client,
    sgd_step,
)
from handspan.numerics.trials import TrialUpload, measuring, trial, uploaded, verdict

GATE = "side_gate"  # buffer of the model: 1 reads side information, 0 ignores it
OPEN, SIDE, PLAIN = 0, 1, 2


class RaceServer(Record):
    """Both models, and which of them has won."""

    side: ModelState
    plain: ModelState
    mode: Tensor  # () int64: OPEN, SIDE or PLAIN


class RaceBroadcast(Record):
    """Both models, to be scored."""

    side: ModelState
    plain: ModelState


def race(setting: Setting, weights: str, infers: str) -> Algorithm:
    """Compose FedAvg on a model with side information, raced against one without.

    Parameters
    ----------
    setting
        The run; its model has the buffer ``side_gate``.
    weights
        Of the means: ``uniform`` or ``examples``.
    infers
        As in ``Phase``.
    """
    task, work = setting.model, setting.work
    half = max(1, setting.rounds // 2)

    def init_server(key: Tensor, population: Population) -> RaceServer:
        params, buffers = task.init(key)
        if GATE not in buffers:
            raise HandspanError("gate=true needs a model that can ignore its side information")
        shut = {**buffers, GATE: torch.zeros_like(buffers[GATE])}
        return RaceServer(
            side=ModelState(params=params, buffers=buffers),
            plain=ModelState(params=params, buffers=shut),
            mode=torch.tensor(OPEN),
        )

    def name_of(server: RaceServer) -> str:
        """Until it has proved itself, side information is not served."""
        return "side" if int(server.mode) == SIDE else "plain"

    def sent(model: ModelState, round: Round) -> ModelBroadcast:
        rate = work.rate(round, setting.rounds, setting.scalar)
        return ModelBroadcast(params=model.params, buffers=model.buffers, learning_rate=rate)

    def training(name: str, which: Any, rows: Rows, when: Any) -> Phase:
        """FedAvg on one of the models: ``which(server)`` names it."""

        def combine(server: RaceServer, reduction: Reduced, round: Round) -> RaceServer:
            chosen = which(server)
            new = averaged(getattr(server, chosen), reduction, round)
            return dataclasses.replace(server, **{chosen: new})

        return Phase(
            name=name,
            when=when,
            broadcast=lambda server, round: sent(getattr(server, which(server)), round),
            begin=begin_training(work.sgd),
            stages=(Stage(step=sgd_step(task, work.sgd), rows=rows, **work.whole()),),
            end=end_training,
            combine=combine,
            weight=WEIGHTS[weights],
            infers=infers,
        )

    def is_open(server: RaceServer, round: Round) -> bool:
        return int(server.mode) == OPEN

    final = setting.final_rows
    return Algorithm(
        name="perfedsi",
        init_server=init_server,
        init_client=no_client,
        rounds=(
            _judge(setting, lambda s, round: is_open(s, round) and int(round.index) >= half),
            training("race_side", lambda server: "side", "train", is_open),
            training("race_plain", lambda server: "plain", "train", is_open),
            training("train", name_of, final, lambda s, round: not is_open(s, round)),
        ),
        model=lambda b, client: Model(params=b.params, buffers=b.buffers),
        deploy=lambda server, round: sent(getattr(server, name_of(server)), round),
        deploy_unbatched=frozenset({"params", "buffers"}),
        shared_model=lambda server: Model(
            params=getattr(server, name_of(server)).params,
            buffers=getattr(server, name_of(server)).buffers,
        ),
        describe=lambda server: {"reads_side": float(name_of(server) == "side")},
    )


def _judge(setting: Setting, when: Any) -> Phase:
    """Every client scores both models on its validation rows."""
    task, device = setting.model, setting.device

    def outputs(b: RaceBroadcast, k: Any, batch: Batch) -> list[Tensor]:
        pair = (b.side, b.plain)
        return [task.predict(m.params, m.buffers, batch.x, batch.side) for m in pair]

    def end(b: RaceBroadcast, k: Any, data: ClientData) -> tuple[Empty, TrialUpload]:
        return Empty(), uploaded(k, setting.scalar)

    def combine(server: RaceServer, reduction: Reduced, round: Round) -> RaceServer:
        found = verdict(reduction)
        gain, error = (0.0, 0.0) if found is None else found.gain(0, 1)
        return dataclasses.replace(server, mode=torch.tensor(SIDE if gain > error else PLAIN))

    return Phase(
        name="judge",
        when=when,
        broadcast=lambda server, round: RaceBroadcast(side=server.side, plain=server.plain),
        begin=lambda b, client, data: trial(Empty(), 2, device),
        stages=(measuring(task, outputs, 2),),
        end=end,
        combine=combine,
        unbatched=frozenset({"side", "plain"}),
        computes="all",
        uploads="all",
        infers="losses of the two models",
    )
