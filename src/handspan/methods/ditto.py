"""Ditto: a model of its own for each client, held near the shared one; the shared one is FedAvg's.

Objective
    for each i  min over v_i of  h_i(v_i; w*) = f_i(v_i) + lambda/2 |v_i - w*|^2,  w* the solution
    of the global problem, here FedAvg's

Map
    Alg. 1, shared track     sgd_step   local SGD from w^t, as in FedAvg
    Alg. 1, personal track   sgd_step   v_i <- v_i - eta (g_i(v_i) + lambda (v_i - w^t)), w^t OLD
    Alg. 1, server           averaged   mean of the w_i; the v_i have no part in it

Deviations
    Clients are drawn uniformly and the mean is weighted by rows; public code draws by rows and
    takes the plain mean. Each track takes batches of its own. N local steps are split 2:1 between
    the personal and the shared track, so that all methods of a table take as many gradients. One
    lambda for all; in the paper each client may choose its own. New clients start at w.

References
----------
    [1] Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization.
        ICML 2021. arXiv:2012.04221v3.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Stage
from handspan.core.data import ClientData
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Record
from handspan.numerics.averaging import (
    ModelBroadcast,
    ModelState,
    Training,
    begin_training,
    copies,
    sgd_step,
    shared_algorithm,
)
from handspan.numerics.carrying import on_field
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class DittoConfig(MethodConfig):
    """Settings of Ditto."""

    prox_weight: float = 1.0
    """Pull lambda of v_i to the shared model; the paper chooses from 0.1, 1 and 2."""
    personal_steps: int | None = None
    """Steps s on v_i of a round; two thirds of the local steps by default."""
    shared_steps: int | None = None
    """Steps on w_i of a round; one third of the local steps by default."""
    weights: str = "examples"
    """Weights of the server's mean: ``examples`` or ``uniform``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.at_least("prox_weight", 0)
        self.at_least("personal_steps", 1)
        self.at_least("shared_steps", 1)
        self.one_of("weights", WEIGHTS)


class DittoWorking(Record):
    """The two tracks in local training; neither sees the other."""

    shared: Training
    personal: Training


def build(setting: Setting, config: DittoConfig) -> Algorithm:
    """Compose the algorithm."""
    task, work = setting.model, setting.work
    assert isinstance(work, LocalWork)
    personal, shared = work.split(config.personal_steps, config.shared_steps)
    pulled_step = sgd_step(task, work.sgd, config.prox_weight)
    begin_shared = begin_training(work.sgd)
    plain = shared_algorithm("ditto", setting, (), weights=config.weights)

    def init_client(key: Tensor, data: ClientData) -> ModelState:
        params, buffers = task.init(key)
        count = len(data.num)
        return ModelState(params=copies(params, count), buffers=copies(buffers, count))

    def begin(b: ModelBroadcast, client: ModelState, data: ClientData) -> DittoWorking:
        velocity = work.sgd.start(client.params)
        return DittoWorking(
            shared=begin_shared(b, client, data),
            personal=Training(params=client.params, buffers=client.buffers, velocity=velocity),
        )

    def end(b: ModelBroadcast, k: DittoWorking, data: ClientData) -> tuple[ModelState, ModelState]:
        return _kept(k.personal), _kept(k.shared)

    stages = (
        on_field(Stage(step=sgd_step(task, work.sgd), **shared), "shared"),
        on_field(Stage(step=pulled_step, **personal), "personal"),
    )
    (fedavg,) = plain.rounds
    adapt = Phase(
        name="adapt",
        broadcast=fedavg.broadcast,
        begin=begin_shared,
        stages=(Stage(step=pulled_step, **work.adapting()),),
        end=lambda b, k, data: (_kept(k), None),
    )
    return dataclasses.replace(
        plain,
        init_client=init_client,
        rounds=(dataclasses.replace(fedavg, begin=begin, stages=stages, end=end),),
        adapt=adapt,
        model=lambda b, client: Model(params=client.params, buffers=client.buffers),
    )


def _kept(k: Training) -> ModelState:
    return ModelState(params=k.params, buffers=k.buffers)


METHOD = Method(
    name="ditto",
    title="Ditto",
    paper="Li et al. 2021",
    config=DittoConfig,
    build=build,
    uploads="the whole shared model",
    private="the whole personal model",
    inferable="rows, by gradient inversion of the shared model's difference",
    numbers={"train": "d"},
)
