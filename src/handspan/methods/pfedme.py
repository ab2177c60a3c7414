"""pFedMe: personal models are proximal points of the shared one, on whose envelope it descends.

Objective
    min over w of  1/n sum_i F_i(w),  F_i(w) = min over theta of f_i(theta) + lambda/2 |theta - w|^2
    (the Moreau envelope), with grad F_i(w) = lambda (w - theta_i(w)), theta_i(w) the minimiser

Map
    Alg. 1, l. 5-7   step       theta ~ theta_i(w_r) by K gradient steps on one batch, w_r OLD
    Alg. 1, l. 8     step       w_r+1 = w_r - eta lambda (w_r - theta)
    Alg. 1, l. 10    combine    w = (1 - beta) w + beta mean_S w_i,R
    Section 3        personal   theta_i(w^T) by steps on the client's training rows

Deviations
    Only the cohort computes: what others would compute leaves no trace. The personal model is
    computed from w^T when a client is served, so that clients that were not drawn have one too; in
    the paper it is the last one of the local work. theta starts at w^t, and in later local
    iterations at the last theta. The run's step size is that of theta. N local steps are N/K local
    iterations R, so that all methods of a table take as many gradients.

References
----------
    [1] Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020.
        arXiv:2006.08848v3.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Empty, Params, Record, map_tensors
from handspan.core.task import value_and_grad
from handspan.numerics.averaging import (
    ModelBroadcast,
    ModelState,
    averaged,
    begin_training,
    sgd_step,
    shared_algorithm,
)
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import pulled


@dataclass(frozen=True, kw_only=True)
class PFedMeConfig(MethodConfig):
    """Settings of pFedMe."""

    prox_weight: float = 1.0
    """Pull lambda of theta to w; ours. The paper takes 15, which wants step sizes below 0.1."""
    inner_steps: int = 5
    """Gradient steps K on theta in each local iteration; the paper's."""
    outer_learning_rate: float | None = None
    """Step size eta of w; 1/lambda by default: w moves onto theta. The paper tunes it (0.005)."""
    server_mixing: float = 1.0
    """Share beta of the new mean in w; the paper's default, 2 when tuned."""
    personal_steps: int | None = None
    """Steps to the proximal point before a client is served; the local steps by default."""
    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (the paper) or ``examples`` (public code)."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not 0 < self.prox_weight < float("inf"):
            raise HandspanError(f"prox_weight must be above 0, not {self.prox_weight}")
        self.at_least("inner_steps", 1)
        self.at_least("outer_learning_rate", 0)
        self.at_least("server_mixing", 0)
        self.at_least("personal_steps", 0)
        self.one_of("weights", WEIGHTS)
        if self.mixing > 1:
            raise HandspanError(
                f"outer_learning_rate times prox_weight is {self.mixing:g}, and above 1 the shared "
                "model overshoots the personal one: lower one of them"
            )

    @property
    def mixing(self) -> float:
        """How far w moves towards theta, eta lambda."""
        if self.outer_learning_rate is None:
            return 1.0
        return self.outer_learning_rate * self.prox_weight


class PFedMeWorking(Record):
    """The local model w_r and the personal one in training."""

    params: Params
    theta: Params
    buffers: Params
    velocity: Params


def build(setting: Setting, config: PFedMeConfig) -> Algorithm:
    """Compose the algorithm."""
    task, work = setting.model, setting.work
    assert isinstance(work, LocalWork)
    sgd, mixing = work.sgd, config.mixing

    def begin(b: ModelBroadcast, client: Empty, data: ClientData) -> PFedMeWorking:
        velocity = sgd.start(b.params)
        return PFedMeWorking(params=b.params, theta=b.params, buffers=b.buffers, velocity=velocity)

    def step(b: ModelBroadcast, k: PFedMeWorking, batch: Batch) -> PFedMeWorking:
        theta, buffers, velocity = k.theta, k.buffers, k.velocity
        for _ in range(config.inner_steps):
            _, buffers, gradient = value_and_grad(
                lambda theta, buffers=buffers: task.loss(theta, buffers, batch), theta
            )
            gradient = pulled(gradient, theta, k.params, config.prox_weight)
            theta, velocity = sgd.step(theta, gradient, velocity, b.learning_rate)
        params = {name: w + mixing * (theta[name] - w) for name, w in k.params.items()}
        return PFedMeWorking(params=params, theta=theta, buffers=buffers, velocity=velocity)

    def end(b: ModelBroadcast, k: PFedMeWorking, data: ClientData) -> tuple[Empty, ModelState]:
        return Empty(), ModelState(params=k.params, buffers=k.buffers)

    def combine(server: ModelState, reduction: Reduced, round: Round) -> ModelState:
        share, mean = config.server_mixing, averaged(server, reduction, round)
        return map_tensors(lambda old, new: (1 - share) * old + share * new, server, mean)

    local = Stage(step=step, models=config.inner_steps, **work.whole(config.inner_steps))
    last = work.told(work.whole(), config.personal_steps)
    pulled_step = sgd_step(task, sgd, config.prox_weight)
    plain = shared_algorithm("pfedme", setting, (), weights=config.weights)
    (phase,) = plain.rounds
    proximal = Phase(
        name="proximal_point",
        broadcast=phase.broadcast,
        begin=begin_training(sgd),
        stages=(Stage(step=pulled_step, **last),) if last else (),
        end=lambda b, k, data: (Model(params=k.params, buffers=k.buffers), None),
    )
    return dataclasses.replace(
        plain,
        rounds=(
            dataclasses.replace(phase, begin=begin, stages=(local,), end=end, combine=combine),
        ),
        personal=(proximal,),
        model=lambda b, client: client,
        deploy=lambda server, round: Empty(),
        deploy_unbatched=frozenset(),
    )


METHOD = Method(
    name="pfedme",
    title="pFedMe",
    paper="Dinh, Tran, Nguyen 2020",
    config=PFedMeConfig,
    build=build,
    uploads="the whole local model",
    private="nothing; the personal model is never sent",
    inferable="rows, by gradient inversion",
    numbers={"train": "d"},
)
