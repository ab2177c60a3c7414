"""Per-FedAvg: one shared model, trained so that a single gradient step makes it personal.

Objective
    min over w of  1/n sum_i F_i(w),  F_i(w) = f_i(w - alpha grad f_i(w)), with
    grad F_i(w) = (I - alpha hess f_i(w)) grad f_i(w - alpha grad f_i(w))

Map
    Alg. 1, l. 7       step       w~ = w - alpha g_i(w; D)
    Alg. 1, l. 8, FO   step       d = q = g_i(w~; D'): the Hessian is left out
    Alg. 1, l. 8, HF   step       d = q - alpha/(2 delta) (g_i(w + delta q; D'')
                                                           - g_i(w - delta q; D''))
    Alg. 1, l. 8       step       w <- w - beta d, from w and not from w~
    Alg. 1, l. 11      averaged   plain mean of the local models
    Section 3          personal   w^T - alpha g_i(w^T; D_i), one step on the training rows

Deviations
    D, D' and D'' are the rows of one batch, dealt out in turn, so that a step costs what it does
    elsewhere; ``batches=same`` gives all of them to each, and then of N local steps there are N/2
    (FO) or N/4 (HF). Where a batch is too small to share, each takes all. alpha is the run's step
    size by default, whatever the schedule; beta is the run's.
    Momentum acts on beta's steps alone. Running statistics follow the pass at w. The exact variant
    (with second derivatives) is not here.

References
----------
    [1] Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A
        Model-Agnostic Meta-Learning Approach. NeurIPS 2020. arXiv:2002.07948v4.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Stage
from handspan.core.data import Batch
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Empty, Params
from handspan.core.task import value_and_grad
from handspan.numerics.averaging import (
    ModelBroadcast,
    Training,
    begin_training,
    shared_algorithm,
)
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class PerFedAvgConfig(MethodConfig):
    """Settings of Per-FedAvg."""

    variant: str = "FO"
    """``FO`` (first order), or ``HF`` (Hessian-free: a difference of gradients)."""
    inner_learning_rate: float | None = None
    """Step size alpha of the personal step; the run's (beta) by default."""
    delta: float = 1e-3
    """Half width of HF's difference, in units of the gradient."""
    batches: str = "split"
    """D, D', D'': ``split`` (apart, as the paper asks) or ``same`` (the whole batch each)."""
    personal_steps: int = 1
    """Personal steps before a client is served; the paper's 1."""
    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (the paper's 1/(rn)) or ``examples``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.one_of("variant", ("FO", "HF"))
        self.one_of("batches", ("split", "same"))
        self.one_of("weights", WEIGHTS)
        self.at_least("inner_learning_rate", 0)
        self.at_least("personal_steps", 0)
        self.only_with(self.variant == "HF", "variant=HF", "delta")
        if not 0 < self.delta < float("inf"):
            raise HandspanError(f"delta must be above 0, not {self.delta}")


def build(setting: Setting, config: PerFedAvgConfig) -> Algorithm:
    """Compose the algorithm."""
    task, work = setting.model, setting.work
    assert isinstance(work, LocalWork)
    alpha = config.inner_learning_rate
    alpha = work.learning_rate if alpha is None else alpha
    uses_difference = config.variant == "HF"
    count = {"same": 1, "split": 3 if uses_difference else 2}[config.batches]

    def gradient(params: Params, buffers: Params, batch: Batch) -> tuple[Params, Params]:
        _, buffers, slope = value_and_grad(lambda p: task.loss(p, buffers, batch), params)
        return slope, buffers

    def step(b: ModelBroadcast, k: Training, batch: Batch) -> Training:
        first, second, third = (dealt(batch, j % count, count) for j in range(3))
        inner, buffers = gradient(k.params, k.buffers, first)
        q, _ = gradient(moved(k.params, inner, -alpha), k.buffers, second)
        direction = q
        if uses_difference:
            above, _ = gradient(moved(k.params, q, config.delta), k.buffers, third)
            below, _ = gradient(moved(k.params, q, -config.delta), k.buffers, third)
            product = {n: (above[n] - below[n]) / (2 * config.delta) for n in q}
            direction = moved(q, product, -alpha)
        params, velocity = work.sgd.step(k.params, direction, k.velocity, b.learning_rate)
        return Training(params=params, buffers=buffers, velocity=velocity)

    def personal_step(b: ModelBroadcast, k: Training, batch: Batch) -> Training:
        slope, buffers = gradient(k.params, k.buffers, batch)
        params = moved(k.params, slope, -alpha)
        return Training(params=params, buffers=buffers, velocity=k.velocity)

    passes = (4 if uses_difference else 2) / count  # gradients of a row in a step, on average
    plain = shared_algorithm(
        "perfedavg",
        setting,
        (Stage(step=step, models=passes, **work.whole(int(passes))),),
        weights=config.weights,
    )
    personal = Phase(
        name="personal_step",
        broadcast=plain.rounds[0].broadcast,
        begin=begin_training(work.sgd),
        stages=(Stage(step=personal_step, steps=config.personal_steps),),
        end=lambda b, k, data: (Model(params=k.params, buffers=k.buffers), None),
    )
    return dataclasses.replace(
        plain,
        personal=(personal,),
        model=lambda b, client: client,
        deploy=lambda server, round: Empty(),
        deploy_unbatched=frozenset(),
    )


def moved(params: Params, direction: Params, length: float) -> Params:
    """Return params + length * direction."""
    return {name: p.add(direction[name], alpha=length) for name, p in params.items()}


def dealt(batch: Batch, place: int, count: int) -> Batch:
    """Every count-th real row of a batch, from the given place; all rows where there are none."""
    turn = batch.weight.cumsum(0).to(torch.int64) - 1
    share = torch.where(turn % count == place, batch.weight, 0.0)
    return dataclasses.replace(batch, weight=torch.where(share.sum() > 0, share, batch.weight))


METHOD = Method(
    name="perfedavg",
    title="Per-FedAvg",
    paper="Fallah, Mokhtari, Ozdaglar 2020",
    config=PerFedAvgConfig,
    build=build,
    uploads="the whole model",
    private="nothing; the personal model is never sent",
    inferable="rows, by gradient inversion",
    numbers={"train": "d"},
)
