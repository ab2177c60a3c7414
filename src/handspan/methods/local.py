"""Local: every client trains its own model, alone.

Objective
    min over theta_1, ..., theta_n of  sum_i f_i(theta_i)

Map
    step   one SGD step on the client's own model, continued where its last round ended

Deviations
    All clients start from one common random model, as their rivals do.

References
----------
    The usual baseline; it has no paper of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from handspan.core.algorithm import Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import ClientData, Population, Round
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Empty, Params, Record
from handspan.numerics.averaging import Training, copies, sgd_step
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class LocalConfig(MethodConfig):
    """Local has no settings of its own."""


class LocalBroadcast(Record):
    """Nothing but the learning rate."""

    learning_rate: Tensor


class LocalClient(Record):
    """The client's own model."""

    params: Params
    buffers: Params


def build(setting: Setting, config: LocalConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    work: LocalWork = setting.work

    def init_server(key: Tensor, population: Population) -> Empty:
        return Empty()

    def init_client(key: Tensor, data: ClientData) -> LocalClient:
        params, buffers = task.init(key)
        count = len(data.num)
        return LocalClient(params=copies(params, count), buffers=copies(buffers, count))

    def broadcast(server: Empty, round: Round) -> LocalBroadcast:
        return LocalBroadcast(learning_rate=work.rate(round, setting.rounds, setting.scalar))

    def begin(b: LocalBroadcast, client: LocalClient, data: ClientData) -> Training:
        velocity = work.sgd.start(client.params)
        return Training(params=client.params, buffers=client.buffers, velocity=velocity)

    def end(b: LocalBroadcast, k: Training, data: ClientData) -> tuple[LocalClient, Any]:
        return LocalClient(params=k.params, buffers=k.buffers), Empty()

    def combine(server: Empty, reduction: Reduced, round: Round) -> Empty:
        return server

    step = sgd_step(task, work.sgd)
    phase = Phase(
        name="local",
        broadcast=broadcast,
        begin=begin,
        stages=(Stage(step=step, **work.whole()),),
        end=end,
        combine=combine,
        infers="nothing: nothing is sent",
    )
    return Algorithm(
        name="local",
        init_server=init_server,
        init_client=init_client,
        rounds=(phase,),
        adapt=dataclasses.replace(phase, stages=(Stage(step=step, **work.adapting()),)),
        model=lambda b, client: Model(params=client.params, buffers=client.buffers),
    )


METHOD = Method(
    name="local",
    title="Local",
    paper="the usual baseline",
    config=LocalConfig,
    build=build,
    uploads="nothing",
    private="the whole model",
    inferable="nothing",
)
