"""FedBasis: a few shareable whole models, and for each client the shares in which it mixes them.

Objective
    min over v_1, ..., v_K, alpha_i of  sum_i p_i f_i(sum_k alpha_i[k] v_k),
    alpha_i = softmax(psi_i): parameters are mixed, so that a client is served one model

Map
    coefficients   share_step   SGD on psi_i alone, the bases frozen
    sharpening     start_bases  alpha_i = softmax(psi_i / T), fixed from here on
    bases          basis_step   SGD on all v_k, with gradient alpha_i[k] grad f_i(theta_i)
    server         combine      weighted mean of each v_k

Identity
    With alpha fixed, steps of size eta on all v_k keep v_k + alpha[k] D: they are steps of size
    eta |alpha|^2 on theta_i, momentum included. So no client holds K models of its own.

Deviations
    Only abstracts of the paper could be read: objective, state and the single served model are
    its own, the rest is a design. psi_i goes on from its last value (``start=uniform``: from 0).
    Sharpening with T < 1 acts in the basis steps alone, against bases that collapse into one; the
    served shares are softmax(psi_i), which is what was fitted. The means take the weights
    p_i alpha_i[k], normalised for each k, so that a basis goes as far as those who use it
    (``mean=clients``: p_i). Bases start as v_k = theta_0 + spread (theta_k - theta_0) from K
    seeds, in place of a FedAvg warm start. ``shares=free`` drops the simplex: that is pFL-MF of
    rank K.

References
----------
    [1] Chen et al.: Federated Learning of Shareable Bases for Personalization-Friendly Image
        Classification. 2023. arXiv:2304.07882v2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Params, Record, map_tensors
from handspan.core.task import value_and_grad
from handspan.numerics.local_work import LocalWork
from handspan.numerics.low_rank import compose, outer_sums, weighted_sum


@dataclass(frozen=True, kw_only=True)
class FedbasisConfig(MethodConfig):
    """Settings of FedBasis."""

    num_bases: int = 4
    """Number of models K."""
    personal_steps: int | None = None
    """Steps on psi_i in a round; two thirds of the local steps by default."""
    shared_steps: int | None = None
    """Steps on the bases in a round; one third of the local steps by default."""
    personal_epochs: int | None = None
    """Epochs on psi_i, instead of steps."""
    shared_epochs: int | None = None
    """Epochs on the bases, instead of steps."""
    share_learning_rate: float | None = None
    """Step size of psi_i; ten times that of the run by default, as at equal shares the softmax
    divides its gradient by K."""
    temperature: float = 0.2
    """Temperature T of the shares in the basis steps; 1 does not sharpen."""
    spread: float = 0.5
    """How far apart the bases start: 0 is one model K times, 1 is K fresh models."""
    start: str = "stored"
    """Where psi_i starts in a round: ``stored`` (its last value) or ``uniform`` (equal shares)."""
    shares: str = "simplex"
    """``simplex``: alpha_i = softmax(psi_i); ``free``: alpha_i = psi_i, any numbers."""
    mean: str = "shares"
    """Weights of a client in the mean of v_k: ``shares`` (p_i alpha_i[k]) or ``clients`` (p_i)."""
    weights: str = "examples"
    """What p_i is: ``examples`` (rows of the client) or ``uniform``."""
    upload: str = "sum"
    """``sum``: K changes, only their sum is needed; ``rank_one``: one change and alpha_i."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.one_of("start", ("stored", "uniform"))
        self.one_of("shares", ("simplex", "free"))
        self.one_of("mean", ("clients", "shares"))
        self.one_of("weights", WEIGHTS)
        self.one_of("upload", ("sum", "rank_one"))
        for name in ("personal_steps", "shared_steps", "personal_epochs", "shared_epochs"):
            self.at_least(name, 1)
        self.at_least("num_bases", 1)
        self.at_least("share_learning_rate", 0)
        self.at_least("spread", 0)
        if not 0 < self.temperature < float("inf"):
            raise HandspanError(f"temperature must be above 0, not {self.temperature}")
        self.only_with(self.shares == "simplex", "shares=simplex", "temperature")
        if self.shares == "free" and self.mean == "shares":
            raise HandspanError(
                "free shares can be negative, so they are no weights: add mean=clients"
            )


class FedbasisServer(Record):
    """The bases v_1, ..., v_K, on a leading axis."""

    bases: Params
    buffers: Params


class FedbasisBroadcast(Record):
    """The bases and the round's step sizes."""

    bases: Params
    buffers: Params
    learning_rate: Tensor
    share_rate: Tensor


class FedbasisClient(Record):
    """The client's psi_i."""

    psi: Tensor  # (K,)


class FedbasisWorking(Record):
    """psi in its stage; then theta = anchor + |alpha|^2 delta."""

    psi: Tensor  # (K,)
    psi_velocity: Tensor
    alpha: Tensor  # (K,) fixed in the basis steps
    anchor: Params
    delta: Params
    velocity: Params
    buffers: Params


class FedbasisUpload(Record):
    """D and alpha_i: the local basis v_k is v_k + alpha_i[k] D."""

    delta: Params
    alpha: Tensor
    buffers: Params


class FedbasisReduction(Record):
    """Weighted sums over the cohort."""

    products: Params  # changes of each v_k
    shares: Tensor | None  # sums of alpha, where they are the weights
    buffers: Params
    weight: Tensor


class FedbasisSumUpload(Record):
    """On the wire, ``upload=sum``: the client's change of each basis, to be summed."""

    products: Params
    shares: Tensor | None
    buffers: Params


def build(setting: Setting, config: FedbasisConfig) -> Algorithm:
    """Compose the algorithm."""
    work: LocalWork = setting.work
    if work.sgd.weight_decay:
        raise HandspanError("fedbasis takes no weight_decay: local bases would leave their plane")
    if config.num_bases > setting.num_clients:
        raise HandspanError(
            f"num_bases {config.num_bases} exceeds the {setting.num_clients} clients: lower it"
        )
    method = _Fedbasis(setting, config)
    personal, shared = work.split(
        config.personal_steps,
        config.shared_steps,
        personal_epochs=config.personal_epochs,
        shared_epochs=config.shared_epochs,
    )
    unbatched = frozenset({"bases"})
    return Algorithm(
        name="fedbasis",
        init_server=method.init_server,
        init_client=method.init_client,
        rounds=(
            Phase(
                name="train",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(
                    Stage(step=method.share_step, finish=method.start_bases, **personal),
                    Stage(step=method.basis_step, **shared),
                ),
                end=method.end,
                combine=method.combine,
                unbatched=unbatched,
                reduce=method.reduce,
                wire=method.wire,
                weight=WEIGHTS[config.weights],
                infers="alpha_i up to scale, by the singular vectors of one upload; gradients",
            ),
        ),
        adapt=Phase(
            name="adapt",
            broadcast=method.broadcast,
            begin=method.begin,
            stages=(Stage(step=method.share_step, **work.adapting()),),
            end=lambda b, k, data: (FedbasisClient(psi=k.psi), None),
            unbatched=unbatched,
        ),
        model=method.model,
    )


class _Fedbasis:
    """The functions of the algorithm, bound to one problem."""

    def __init__(self, setting: Setting, config: FedbasisConfig) -> None:
        self.setting, self.config, self.task = setting, config, setting.model
        self.work: LocalWork = setting.work
        is_free = config.shares == "free"
        self.first_psi = 1 / config.num_bases if is_free else 0.0  # equal shares

    def init_server(self, key: Tensor, population: Population) -> FedbasisServer:
        """Bases around the model that FedAvg starts from."""
        (first, buffers), count = self.task.init(key), self.config.num_bases
        starts = [self.task.init(keys.fold(key, "basis", k))[0] for k in range(1, count)]
        spread = self.config.spread
        return FedbasisServer(
            bases={
                name: torch.stack(
                    [start, *(start + spread * (other[name] - start) for other in starts)]
                )
                for name, start in first.items()
            },
            buffers=buffers,
        )

    def init_client(self, key: Tensor, data: ClientData) -> FedbasisClient:
        """Equal shares."""
        shape = (len(data.num), self.config.num_bases)
        return FedbasisClient(psi=self.setting.scalar.new_full(shape, self.first_psi))

    def broadcast(self, server: FedbasisServer, round: Round) -> FedbasisBroadcast:
        """Send all bases."""
        rounds, like, told = self.setting.rounds, self.setting.scalar, self.config
        share_rate = told.share_learning_rate
        if share_rate is None:
            share_rate = 10 * self.work.learning_rate
        return FedbasisBroadcast(
            bases=server.bases,
            buffers=server.buffers,
            learning_rate=self.work.rate(round, rounds, like),
            share_rate=self.work.rate(round, rounds, like, share_rate),
        )

    def alpha(self, psi: Tensor, temperature: float = 1.0) -> Tensor:
        """Shares of the bases."""
        return psi if self.config.shares == "free" else torch.softmax(psi / temperature, 0)

    def begin(
        self, b: FedbasisBroadcast, client: FedbasisClient, data: ClientData
    ) -> FedbasisWorking:
        """Start at the stored psi, or at equal shares; the basis part waits for its stage."""
        is_stored = self.config.start == "stored"
        psi = client.psi if is_stored else torch.full_like(client.psi, self.first_psi)
        zeros = {name: torch.zeros_like(rows[0]) for name, rows in b.bases.items()}
        return FedbasisWorking(
            psi=psi,
            psi_velocity=torch.zeros_like(psi),
            alpha=psi,
            anchor=zeros,
            delta=zeros,
            velocity=self.work.sgd.start(zeros),
            buffers=b.buffers,
        )

    def share_step(self, b: FedbasisBroadcast, k: FedbasisWorking, batch: Batch) -> FedbasisWorking:
        """One step on psi; the gradient of alpha is <grad f(theta), v_k>."""
        _, _, gradient = value_and_grad(
            lambda psi: self.task.loss(compose(b.bases, self.alpha(psi)), k.buffers, batch), k.psi
        )
        moved, velocity = self.work.sgd.step(
            {"psi": k.psi}, {"psi": gradient}, {"psi": k.psi_velocity}, b.share_rate
        )
        return replace(k, psi=moved["psi"], psi_velocity=velocity.get("psi", k.psi_velocity))

    def start_bases(self, b: FedbasisBroadcast, k: FedbasisWorking) -> FedbasisWorking:
        """Sharpen and fix the shares."""
        alpha = self.alpha(k.psi, self.config.temperature)
        return replace(k, alpha=alpha, anchor=compose(b.bases, alpha))

    def basis_step(self, b: FedbasisBroadcast, k: FedbasisWorking, batch: Batch) -> FedbasisWorking:
        """One step on all bases at once: D moves by the gradient at theta."""
        scale = k.alpha @ k.alpha
        theta = {name: a + scale * k.delta[name] for name, a in k.anchor.items()}
        _, buffers, gradient = value_and_grad(
            lambda params: self.task.loss(params, k.buffers, batch), theta
        )
        delta, velocity = self.work.sgd.step(k.delta, gradient, k.velocity, b.learning_rate)
        return replace(k, delta=delta, velocity=velocity, buffers=buffers)

    def end(
        self, b: FedbasisBroadcast, k: FedbasisWorking, data: ClientData
    ) -> tuple[FedbasisClient, FedbasisUpload]:
        """Keep psi; upload the change of the bases."""
        upload = FedbasisUpload(delta=k.delta, alpha=k.alpha, buffers=k.buffers)
        return FedbasisClient(psi=k.psi), upload

    def factor(self, alpha: Tensor) -> Tensor:
        """Weight with which D enters each basis: its change is alpha[k] D."""
        return alpha * alpha if self.config.mean == "shares" else alpha

    def wire(self, upload: FedbasisUpload) -> Record:
        """Return what one client sends."""
        if self.config.upload == "rank_one":
            return upload
        factor = self.factor(upload.alpha)
        return FedbasisSumUpload(
            products={n: torch.tensordot(factor, d, dims=0) for n, d in upload.delta.items()},
            shares=upload.alpha if self.config.mean == "shares" else None,
            buffers=upload.buffers,
        )

    def reduce(self, uploads: FedbasisUpload, weights: Tensor) -> FedbasisReduction:
        """Sum over a block, without K models of each client."""
        weights = weights.to(uploads.alpha.device)
        is_shared = self.config.mean == "shares"
        return FedbasisReduction(
            products=outer_sums(uploads.delta, self.factor(uploads.alpha), weights),
            shares=weighted_sum(uploads.alpha, weights) if is_shared else None,
            buffers=weighted_sum(uploads.buffers, weights),
            weight=weights.sum(),
        )

    def combine(self, server: FedbasisServer, r: FedbasisReduction, round: Round) -> FedbasisServer:
        """Mean of each basis."""
        tiny = torch.finfo(torch.float64).tiny  # a basis that nobody mixes in stays
        divisor = r.weight if r.shares is None else r.shares.clamp(min=tiny)

        def moved(rows: Tensor, change: Tensor) -> Tensor:
            each = divisor.expand(len(rows)).view(-1, *[1] * (rows.ndim - 1))
            return rows + (change / each).to(rows)

        return FedbasisServer(
            bases={name: moved(rows, r.products[name]) for name, rows in server.bases.items()},
            buffers=map_tensors(lambda t, old: (t / r.weight).to(old), r.buffers, server.buffers),
        )

    def model(self, b: FedbasisBroadcast, client: FedbasisClient) -> Model:
        """theta_i = sum_k alpha_i[k] v_k."""
        return Model(params=compose(b.bases, self.alpha(client.psi)), buffers=b.buffers)


METHOD = Method(
    name="fedbasis",
    title="FedBasis",
    paper="Chen et al. 2023",
    config=FedbasisConfig,
    build=build,
    uploads="its change of K models (K x d numbers, or d + K with upload=rank_one)",
    private="psi_i: its shares of the K models",
    inferable="its shares, from one upload; rows, by gradient inversion",
    numbers={"train": "num_bases * (d + 1)"},
)
