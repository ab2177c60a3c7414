"""pFedFDA: a shared representation, and heads that follow from how each client's features lie.

Model
    z = h_theta(x), z | y = c ~ N(mu_c, Sigma), one Sigma for all classes, class frequencies pi_i.
    The head is a closed form: weight_c = Sigma^-1 mu_c, bias_c = log pi_c - mu_c^T weight_c / 2.

Objective
    min over theta of  sum_i p_i f_i(theta, head(mu_g, Sigma_g, pi_i)), and in each client
    (mu_i, Sigma_i) = beta_i (local estimate) + (1 - beta_i) (mu_g, Sigma_g)

Map
    local training       step         SGD on theta; the head of (mu_g, Sigma_g, pi_i) is frozen
    local estimates      describe     class means, pooled covariance + eps I, at the NEW theta
    interpolation        describe     beta_i by 2-fold cross-validation, then the blend
    server               combine      means of theta, mu, Sigma weighted by rows
    test time            serve        the same from the NEW (theta, mu_g, Sigma_g), then the head

Deviations
    Features are taken once, at the new theta, since theta and its statistics are averaged
    together; public code collects them while theta moves. beta_i is the best of a grid (steps of
    1/20, or 1/10 x 1/10 for ``betas=pair``) where public code runs L-BFGS from 1/2. No projection
    to positive matrices: a sum of squares plus eps I is one. eps = 1, since public code, which
    made the published numbers, adds a whole identity; the 1e-4 that is said to be meant lets
    Sigma_g shrink with the features until training diverges (page, measured), and what public
    code adds to every other entry is left out. mu_g starts uniform on [0, 1), Sigma_g = I, as in
    public code (the text of the paper could not be read).

References
----------
    [1] McLaughlin, Su: Personalized Federated Learning via Feature Distribution Adaptation.
        NeurIPS 2024. arXiv:2411.00329.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Params, Record
from handspan.core.task import value_and_grad
from handspan.numerics.averaging import no_client, parts
from handspan.numerics.gaussian_head import (
    Gaussians,
    blend,
    choose_blend,
    estimate,
    head,
    rows_of,
)
from handspan.numerics.linear_head import linear_head
from handspan.numerics.local_work import LocalWork

_FLOOR = 1e-4  # added to every class frequency: no class is impossible


@dataclass(frozen=True, kw_only=True)
class PfedfdaConfig(MethodConfig):
    """Settings of pFedFDA."""

    betas: str = "single"
    """``single``: one beta_i for means and covariance (SB); ``pair``: one for each (MB)."""
    beta: float | None = None
    """A fixed beta in [0, 1] for all clients; each chooses its own by cross-validation by default.
    0 takes the global distribution, 1 the local one."""
    folds: int = 2
    """Folds k of the cross-validation."""
    ridge: float = 1.0
    """Added to the diagonal of local covariances (eps), in units of squared features."""
    shrinkage: float = 1e-4
    """Share of a multiple of the identity in the covariance of every head (e)."""
    weights: str = "examples"
    """Weights of the server's means: ``examples`` (the paper) or ``uniform``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.one_of("betas", ("single", "pair"))
        self.one_of("weights", WEIGHTS)
        self.at_least("folds", 2)
        if self.beta is not None and not 0 <= self.beta <= 1:
            raise HandspanError(f"beta must lie between 0 and 1, not {self.beta}")
        self.only_with(self.beta is None, "a beta that is chosen", "betas", "folds")
        for name in ("ridge", "shrinkage"):
            if not 0 < getattr(self, name) <= 1:
                raise HandspanError(f"{name} must be above 0 and at most 1")


class PfedfdaServer(Record):
    """The representation theta, and the global distribution of its features."""

    shared: Params
    buffers: Params
    known: Gaussians


class PfedfdaBroadcast(Record):
    """What the server knows, and the step size."""

    shared: Params
    buffers: Params
    known: Gaussians
    learning_rate: Tensor


class PfedfdaWorking(Record):
    """The representation in training, the frozen head, and the client's distribution."""

    shared: Params
    buffers: Params
    velocity: Params
    head: Params
    prior: Tensor  # (C,)
    blended: Gaussians


class PfedfdaUpload(Record):
    """The trained representation and the client's blended distribution."""

    shared: Params
    buffers: Params
    known: Gaussians


class PfedfdaServed(Record):
    """The head that a client is served; never stored."""

    head: Params


def build(setting: Setting, config: PfedfdaConfig) -> Algorithm:
    """Compose the algorithm."""
    method = _Pfedfda(setting, config)
    describe = Stage(step=method.describe, steps=1, batch_size=None, forward_only=True)
    train = Stage(step=method.step, **setting.work.whole())
    return Algorithm(
        name="pfedfda",
        init_server=method.init_server,
        init_client=no_client,
        rounds=(
            Phase(
                name="train",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(describe,) if method.layer.is_whole_model else (train, describe),
                end=method.end,
                combine=method.combine,
                weight=WEIGHTS[config.weights],
                infers="class means of the features, as far as beta_i tells them; gradients",
            ),
        ),
        personal=(
            Phase(
                name="serve",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(describe,),
                end=method.serve,
            ),
        ),
        model=lambda b, c: Model(params={**b.shared, **c.head}, buffers=b.buffers),
        needs_label_counts=True,
    )


class _Pfedfda:
    """The functions of the algorithm, bound to one problem."""

    def __init__(self, setting: Setting, config: PfedfdaConfig) -> None:
        self.setting, self.config, self.task = setting, config, setting.model
        self.work: LocalWork = setting.work
        if self.task.kind != "classification":
            raise HandspanError("pfedfda describes classes: it takes class labels, not numbers")
        self.layer = linear_head(self.task, "pfedfda", needs_bias=True)
        steps = torch.linspace(0, 1, 21 if config.betas == "single" else 11, dtype=torch.float64)
        pairs = (
            (steps, steps)
            if config.betas == "single"
            else torch.meshgrid(steps, steps, indexing="ij")
        )
        self.candidates = torch.stack([p.flatten() for p in pairs], 1).to(setting.device)

    def init_server(self, key: Tensor, population: Population) -> PfedfdaServer:
        """A fresh representation; mu_g uniform on [0, 1), Sigma_g = I."""
        params, buffers = self.task.init(key)
        shape = (self.task.num_outputs, self.layer.width)
        like = self.setting.scalar
        known = Gaussians(
            means=keys.uniform(keys.fold(key, "means"), shape).to(like),
            covariance=torch.eye(self.layer.width, dtype=torch.float64).to(like),
        )
        return PfedfdaServer(shared=parts(params, self.task.head)[1], buffers=buffers, known=known)

    def broadcast(self, server: PfedfdaServer, round: Round) -> PfedfdaBroadcast:
        """Send theta, mu_g and Sigma_g."""
        return PfedfdaBroadcast(
            shared=server.shared,
            buffers=server.buffers,
            known=server.known,
            learning_rate=self.work.rate(round, self.setting.rounds, self.setting.scalar),
        )

    def head(self, known: Gaussians, prior: Tensor) -> Params:
        """Head of a distribution, as parameters of the task."""
        weight, bias = head(known, prior, self.config.shrinkage)
        like = self.setting.scalar
        assert self.layer.bias is not None
        return {self.layer.weight: weight.to(like), self.layer.bias: bias.to(like)}

    def begin(self, b: PfedfdaBroadcast, client: Any, data: ClientData) -> PfedfdaWorking:
        """Start from theta, with the head of (mu_g, Sigma_g, pi_i)."""
        assert data.label_counts is not None
        counts = data.label_counts.to(self.setting.scalar).double()
        prior = counts / counts.sum().clamp(min=1) + _FLOOR
        prior = prior / prior.sum()
        return PfedfdaWorking(
            shared=b.shared,
            buffers=b.buffers,
            velocity=self.work.sgd.start(b.shared),
            head=self.head(b.known, prior),
            prior=prior,
            blended=b.known,
        )

    def step(self, b: PfedfdaBroadcast, k: PfedfdaWorking, batch: Batch) -> PfedfdaWorking:
        """One step on theta; the head stays."""
        _, buffers, gradient = value_and_grad(
            lambda shared: self.task.loss({**shared, **k.head}, k.buffers, batch), k.shared
        )
        shared, velocity = self.work.sgd.step(k.shared, gradient, k.velocity, b.learning_rate)
        return dataclasses.replace(k, shared=shared, buffers=buffers, velocity=velocity)

    def describe(self, b: PfedfdaBroadcast, k: PfedfdaWorking, batch: Batch) -> PfedfdaWorking:
        """Estimate the client's distribution from all its rows, and blend it with the global."""
        config = self.config
        features = self.task.features({**k.shared, **k.head}, k.buffers, batch.x, batch.side)
        if batch.y is None or batch.y.ndim != 1 or features.ndim != 2:
            raise HandspanError("pfedfda takes one label for each row, and no sequences of labels")
        rows = rows_of(features, batch.y, batch.weight, self.task.num_outputs)
        if config.beta is None:
            beta = choose_blend(
                rows,
                b.known,
                k.prior,
                self.candidates,
                folds=config.folds,
                ridge=config.ridge,
                shrinkage=config.shrinkage,
            )
        else:
            beta = torch.full_like(self.candidates[0], config.beta)
        blended = blend(estimate(rows, b.known, config.ridge), b.known, beta)
        like = self.setting.scalar
        return dataclasses.replace(
            k,
            blended=Gaussians(means=blended.means.to(like), covariance=blended.covariance.to(like)),
        )

    def end(
        self, b: PfedfdaBroadcast, k: PfedfdaWorking, data: ClientData
    ) -> tuple[Any, PfedfdaUpload]:
        """Upload theta and the distribution; keep nothing."""
        upload = PfedfdaUpload(shared=k.shared, buffers=k.buffers, known=k.blended)
        return no_client(b.learning_rate, data), upload

    def serve(
        self, b: PfedfdaBroadcast, k: PfedfdaWorking, data: ClientData
    ) -> tuple[PfedfdaServed, None]:
        """Head of the client's distribution."""
        return PfedfdaServed(head=self.head(k.blended, k.prior)), None

    def combine(self, server: PfedfdaServer, reduction: Reduced, round: Round) -> PfedfdaServer:
        """Weighted means of theta, mu and Sigma."""
        like = PfedfdaUpload(shared=server.shared, buffers=server.buffers, known=server.known)
        mean = reduction.mean(like=like)
        return PfedfdaServer(shared=mean.shared, buffers=mean.buffers, known=mean.known)


METHOD = Method(
    name="pfedfda",
    title="pFedFDA",
    paper="McLaughlin, Su 2024",
    config=PfedfdaConfig,
    build=build,
    uploads="the body of the model, class means and one covariance of its features",
    private="nothing; its label frequencies stay with it",
    inferable="class means of its features; rows, by gradient inversion",
    numbers={"train": "b + c * f + f * f"},
)
