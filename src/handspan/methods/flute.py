"""FLUTE: a shared body and private heads, whose classes are pulled towards neural collapse.

Objective (nonlinear form), H_i (C x D) the weight of client i's head, z its features
    min over body, heads of  sum_i p_i [ f_i(body, h_i) + lambda_1 NC_i(H_i)
                                         + lambda_2 |H_i|_F^2 + lambda_3 |z|_F^2 ]
    NC_i(H) = | H H^T / |H H^T|_F - (C-1)^(-1/2) (u_i u_i^T) * (I - 11^T / C) |_F,
    u_i in {0, 1}^C the classes that client i has

Map
    local epochs, first E - E_r   head_step    head alone, without the lambda_3 term
    local epochs, last E_r        joint_step   body and head from one gradient, with lambda_3
    server, body                  combine      mean weighted by rows
    server, heads                 end          one step of size eta_r on NC_i(H_i) / |S_t|

Deviations
    The server's step on the heads is taken by the client: the server's loss is a sum of terms of
    one head each, so that the numbers are the same, and neither heads nor class lists leave. |S_t|
    counts the clients that were called. lambda_3 multiplies the sum of squares over a batch, as in
    public code, with features in evaluation mode; their gradient reaches the body. Momentum starts
    at zero in each of the two parts of the local work; weight decay concerns all parameters (in
    public code weights alone). N local steps are split 2:1 like those of all methods. The linear
    form is ``flute_linear``.

References
----------
    [1] Liu, Shen, Yang: Federated Representation Learning in the Under-Parameterized Regime.
        ICML 2024. arXiv:2406.04596.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from handspan.core.algorithm import WEIGHTS, Algorithm, Phase, Stage
from handspan.core.data import Batch, ClientData, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Params, Record
from handspan.core.task import value_and_grad
from handspan.numerics.averaging import Training, parts
from handspan.numerics.linear_head import linear_head
from handspan.numerics.local_work import LocalWork
from handspan.numerics.partial import (
    BOTH,
    PERSONAL,
    Part,
    PartialBroadcast,
    PersonalPart,
    SharedPart,
    Split,
    split_names,
)


@dataclass(frozen=True, kw_only=True)
class FluteConfig(MethodConfig):
    """Settings of FLUTE."""

    collapse_weight: float = 0.25
    """Weight lambda_1 of the neural-collapse term."""
    head_weight: float = 0.0025
    """Weight lambda_2 of the head's squared norm."""
    feature_weight: float = 0.0005
    """Weight lambda_3 of the features' squared norm, summed over a batch."""
    server_learning_rate: float = 0.5
    """Step size eta_r of the step on all heads after a round."""
    personal_steps: int | None = None
    """Steps on the head alone; two thirds of the local steps by default."""
    shared_steps: int | None = None
    """Steps on body and head; one third of the local steps by default."""
    personal_epochs: int | None = None
    """Epochs E - E_r on the head alone, instead of steps (public code: 9)."""
    shared_epochs: int | None = None
    """Epochs E_r on body and head, instead of steps (public code: 1)."""
    weights: str = "examples"
    """Weights of the body's mean: ``examples`` (public code) or ``uniform``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("collapse_weight", "head_weight", "feature_weight", "server_learning_rate"):
            self.at_least(name, 0)
        for name in ("personal_steps", "shared_steps", "personal_epochs", "shared_epochs"):
            self.at_least(name, 1)
        self.one_of("weights", WEIGHTS)


class FluteBroadcast(PartialBroadcast):
    """The body, the round's step sizes, and how many clients were called."""

    cohort_size: Tensor


class FluteWorking(Record):
    """The model in training, and which classes the client has."""

    training: Training
    present: Tensor  # (C,) u_i


def build(setting: Setting, config: FluteConfig) -> Algorithm:
    """Compose the algorithm."""
    work: LocalWork = setting.work
    method = _Flute(setting, config)
    personal, shared = work.split(
        config.personal_steps,
        config.shared_steps,
        personal_epochs=config.personal_epochs,
        shared_epochs=config.shared_epochs,
    )
    head_step = method.step(PERSONAL, 0.0)
    return Algorithm(
        name="flute",
        init_server=method.split.init_server,
        init_client=method.split.init_client,
        rounds=(
            Phase(
                name="train",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(
                    Stage(step=head_step, finish=method.restart, **personal),
                    Stage(step=method.step(BOTH, config.feature_weight), **shared),
                ),
                end=method.end,
                combine=method.split.combine,
                weight=WEIGHTS[config.weights],
                infers="gradients of the body: inversion attacks apply, the head is not shown",
            ),
        ),
        adapt=Phase(
            name="adapt",
            broadcast=method.broadcast,
            begin=method.begin,
            stages=(Stage(step=head_step, **work.adapting()),),
            end=lambda b, k, data: (method.split.end(b, k.training, data)[0], None),
        ),
        model=method.split.model,
        needs_label_counts=True,
    )


class _Flute:
    """The functions of the algorithm, bound to one problem."""

    def __init__(self, setting: Setting, config: FluteConfig) -> None:
        self.setting, self.config, self.task = setting, config, setting.model
        if self.task.kind != "classification" or self.task.num_outputs < 2:
            raise HandspanError("flute pulls classes apart: it takes labels of two classes or more")
        self.split = Split(setting=setting, personal=split_names(self.task, "head", "head"))
        self.weight = linear_head(self.task, "flute").weight

    def broadcast(self, server: SharedPart, round: Round) -> FluteBroadcast:
        """Send the body."""
        b = self.split.broadcast(server, round)
        return FluteBroadcast(
            shared=b.shared,
            buffers=b.buffers,
            learning_rate=b.learning_rate,
            personal_learning_rate=b.personal_learning_rate,
            cohort_size=torch.as_tensor(len(round.ids)).to(self.setting.scalar),
        )

    def begin(self, b: FluteBroadcast, client: PersonalPart, data: ClientData) -> FluteWorking:
        """Put body and head together."""
        assert data.label_counts is not None
        present = (data.label_counts > 0).to(b.learning_rate)
        return FluteWorking(training=self.split.begin(b, client, data), present=present)

    def step(
        self, moving: tuple[Part, ...], feature_weight: float
    ) -> Callable[[FluteBroadcast, FluteWorking, Batch], FluteWorking]:
        """One SGD step on the given parts, on the loss with its three terms."""
        config, task, names = self.config, self.task, self.split.names(*moving)
        sgd = self.split.work.sgd

        def step(b: FluteBroadcast, k: FluteWorking, batch: Batch) -> FluteWorking:
            old = k.training
            free, fixed = parts(old.params, names)

            def objective(free: Params) -> tuple[Tensor, Params]:
                params = {**fixed, **free}
                loss, buffers = task.loss(params, old.buffers, batch)
                weight = params[self.weight]
                loss = loss + config.collapse_weight * collapse(weight, k.present)
                loss = loss + config.head_weight * weight.square().sum()
                if feature_weight:
                    z = task.features(params, old.buffers, batch.x, batch.side)
                    loss = loss + feature_weight * (z.square().flatten(1).sum(1) @ batch.weight)
                return loss, buffers

            _, buffers, gradient = value_and_grad(objective, free)
            velocity, rest = parts(old.velocity, names)
            free, velocity = sgd.step(free, gradient, velocity, b.learning_rate)
            new = Training(params={**fixed, **free}, buffers=buffers, velocity={**rest, **velocity})
            return dataclasses.replace(k, training=new)

        return step

    def restart(self, b: FluteBroadcast, k: FluteWorking) -> FluteWorking:
        """Forget the momentum of the head's own steps."""
        velocity = self.split.work.sgd.start(k.training.params)
        return dataclasses.replace(k, training=dataclasses.replace(k.training, velocity=velocity))

    def end(
        self, b: FluteBroadcast, k: FluteWorking, data: ClientData
    ) -> tuple[PersonalPart, SharedPart]:
        """Take the server's step on the head; send the body alone."""
        client, upload = self.split.end(b, k.training, data)
        weight = client.personal[self.weight]
        _, _, gradient = value_and_grad(lambda w: (collapse(w, k.present), {}), weight)
        moved = weight - self.config.server_learning_rate / b.cohort_size * gradient
        personal = {**client.personal, self.weight: moved}
        return PersonalPart(personal=personal, buffers=client.buffers), upload


def collapse(weight: Tensor, present: Tensor) -> Tensor:
    """NC_i of a head's weight (C, D), given which classes are present (C,)."""
    size = len(present)
    products = weight @ weight.T
    tiny = torch.finfo(weight.dtype).tiny
    products = products / torch.linalg.vector_norm(products).clamp(min=tiny)
    eye = torch.eye(size, dtype=weight.dtype, device=weight.device)
    simplex = torch.outer(present, present) * (eye - 1 / size) / (size - 1) ** 0.5
    return torch.linalg.vector_norm(products - simplex)


METHOD = Method(
    name="flute",
    title="FLUTE",
    paper="Liu, Shen, Yang 2024",
    config=FluteConfig,
    build=build,
    uploads="the body of the model",
    private="the head; which classes there are",
    inferable="rows, by gradient inversion of the body's difference",
    numbers={"train": "b"},
)
