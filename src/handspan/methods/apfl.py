"""APFL: every client mixes a model of its own with the shared one, weight by weight.

Objective
    shared    min over w    of  1/n sum_i f_i(w)
    personal  min over v_i  of  f_i(vbar_i),  vbar_i = alpha_i v_i + (1 - alpha_i) w

Map
    Alg. 1, w_i      step (shared_step)   w_i <- w_i - eta g_i(w_i): the step of FedAvg
    Alg. 1, v_i      mixed_step           v_i <- v_i - eta alpha_i g_i(vbar_i), all values OLD
    Eq. (10)         mixed_step           alpha_i <- alpha_i - eta <v_i - w_i, g_i(vbar_i)>
    Alg. 1, server   combine              mean of the w_i, uniform

Deviations
    The projections of Algorithm 1 serve its theory and are left out. alpha_i is clipped to [0, 1],
    as in the authors' code. Where the text leaves a choice: the first step of a round mixes with
    the NEW w, as the theory does; a moved alpha_i counts from the next step on; a client is served
    the mixture with the w after aggregation. For a new client, of which the paper says nothing, v
    starts at w, w is frozen, and an adaptive alpha moves at every step: at the first one v = w, so
    that once a round would be never. Both tracks take the run's local steps, twice the gradients of
    FedAvg. Running statistics of w are averaged, those of the mixture stay with the client.

References
----------
    [1] Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. arXiv:2003.13461v3, 2020.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Stage
from handspan.core.data import Batch, ClientData
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Params, Record
from handspan.core.task import value_and_grad
from handspan.numerics.averaging import (
    ModelBroadcast,
    ModelState,
    Training,
    begin_training,
    copies,
    sgd_step,
    shared_algorithm,
)
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class ApflConfig(MethodConfig):
    """Settings of APFL."""

    mix: float | None = None
    """Share alpha_i of the client's own model, 0 to 1: 0.5 by default; if adaptive, it starts at
    0.01."""
    adaptive: bool = False
    """Whether every client learns its alpha_i (Eq. 10) or keeps the given one."""
    mix_every: str = "round"
    """When alpha_i moves: at the first step of a ``round`` (the authors' code) or each ``step``."""
    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (the paper) or ``examples``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.mix is not None and not 0 <= self.mix <= 1:
            raise HandspanError(f"mix must lie in [0, 1], not {self.mix}")
        self.one_of("mix_every", ("round", "step"))
        self.one_of("weights", WEIGHTS)


class ApflClient(Record):
    """The client's own model v_i, the running statistics of its mixture, and alpha_i."""

    params: Params
    buffers: Params
    mix: Tensor  # ()


class ApflWorking(Record):
    """Both models in local training."""

    shared: Training
    own: Training
    mix: Tensor  # ()
    moves: Tensor  # () 1 where alpha_i moves at the next step


def mixture(own: Params, shared: Params, mix: Tensor) -> Params:
    """Return the personal model vbar_i = alpha_i v_i + (1 - alpha_i) w."""
    return {name: mix * value + (1 - mix) * shared[name] for name, value in own.items()}


def build(setting: Setting, config: ApflConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    work: LocalWork = setting.work
    sgd = work.sgd
    begin_shared, shared_step = begin_training(sgd), sgd_step(task, sgd)
    first_mix = (0.01 if config.adaptive else 0.5) if config.mix is None else config.mix

    def init_client(key: Tensor, data: ClientData) -> ApflClient:
        (params, buffers), count = task.init(key), len(data.num)
        mix = (setting.scalar + first_mix).repeat(count)
        return ApflClient(params=copies(params, count), buffers=copies(buffers, count), mix=mix)

    def begin(b: ModelBroadcast, client: ApflClient, data: ClientData) -> ApflWorking:
        own = Training(
            params=client.params, buffers=client.buffers, velocity=sgd.start(client.params)
        )
        return ApflWorking(
            shared=begin_shared(b, client, data),
            own=own,
            mix=client.mix,
            moves=torch.ones_like(client.mix),
        )

    def begin_new(b: ModelBroadcast, client: ApflClient, data: ClientData) -> ApflWorking:
        start = ApflClient(params=b.params, buffers=b.buffers, mix=client.mix)
        return begin(b, start, data)

    def mixed_step(b: ModelBroadcast, k: ApflWorking, batch: Batch) -> ApflWorking:
        mixed = mixture(k.own.params, k.shared.params, k.mix)
        _, buffers, slope = value_and_grad(
            lambda params: task.loss(params, k.own.buffers, batch), mixed
        )
        own_slope = {name: k.mix * g for name, g in slope.items()}  # d vbar_i / d v_i = alpha_i
        own, velocity = sgd.step(k.own.params, own_slope, k.own.velocity, b.learning_rate)
        mix = k.mix
        if config.adaptive:  # Eq. (10), with OLD v_i and w_i
            parts = [((k.own.params[n] - k.shared.params[n]) * g).sum() for n, g in slope.items()]
            mix = (mix - k.moves * b.learning_rate * torch.stack(parts).sum()).clamp(0, 1)
        return dataclasses.replace(
            k, own=Training(params=own, buffers=buffers, velocity=velocity), mix=mix
        )

    def step(b: ModelBroadcast, k: ApflWorking, batch: Batch) -> ApflWorking:
        moves = k.moves if config.mix_every == "step" else torch.zeros_like(k.moves)
        shared = shared_step(b, k.shared, batch)
        return dataclasses.replace(mixed_step(b, k, batch), shared=shared, moves=moves)

    def end(b: ModelBroadcast, k: ApflWorking, data: ClientData) -> tuple[ApflClient, ModelState]:
        upload = ModelState(params=k.shared.params, buffers=k.shared.buffers)
        return ApflClient(params=k.own.params, buffers=k.own.buffers, mix=k.mix), upload

    def end_new(b: ModelBroadcast, k: ApflWorking, data: ClientData) -> tuple[ApflClient, Any]:
        return end(b, k, data)[0], None

    def model(b: ModelBroadcast, client: ApflClient) -> Model:
        return Model(params=mixture(client.params, b.params, client.mix), buffers=client.buffers)

    base = shared_algorithm(
        "apfl",
        setting,
        (Stage(step=step, models=2, **work.whole()),),
        weights=config.weights,
        infers="gradients of the shared model: inversion attacks apply, v_i is not shown",
    )
    (train,) = base.rounds
    return dataclasses.replace(
        base,
        init_client=init_client,
        rounds=(dataclasses.replace(train, begin=begin, end=end),),
        adapt=Phase(
            name="adapt",
            broadcast=train.broadcast,
            begin=begin_new,
            stages=(Stage(step=mixed_step, **work.adapting()),),
            end=end_new,
        ),
        model=model,
    )


METHOD = Method(
    name="apfl",
    title="APFL",
    paper="Deng et al. 2020",
    config=ApflConfig,
    build=build,
    uploads="the whole shared model",
    private="a whole model of its own, and its share in the mixture",
    inferable="rows, by gradient inversion of the shared model's difference",
    numbers={"train": "d"},
)
