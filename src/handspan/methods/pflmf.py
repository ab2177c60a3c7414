"""pFL-MF: personalised models as a low-rank matrix, theta_i = U v_i, U shared and v_i private.

Objective (Eq. 6)
    min over U in R^(d x r), V in R^(n x r) of  1/n sum_i f_i(U v_i)

Map
    Alg. 1, loop over k     coordinate_step   v <- v - eta_v U^T grad f_i(U v)           (Eq. 8)
    Alg. 1, G_i             basis_step        gradient at the OLD v_i (``v_for_basis``)  (Eq. 7)
    Alg. 1, server          combine           U <- U - eta_u mean_i G_i                  (Eq. 9)
    Setup 6                 basis_step        ``shared_steps`` K_U local steps on U at fixed v

Identity
    With v fixed, K_U local steps keep U_i = U + D_i v^T: steps of size eta on U_i are steps of size
    eta |v|^2 on theta_i, momentum included. So no client ever holds a d x r matrix.

Deviations
    The paper's one step size moves v with eta/n, which stands still in practice: the default takes
    the v-step on U^T grad f_i with its own step size; ``preset=algorithm1`` is the printed text.
    The paper does not say where to start: each column of U is a fresh model and v ~ N(0, I/r), so
    that theta_i has the scale of a model. Ours, off by default: ``scaled`` (steps preconditioned by
    the Gram matrices), ``affine`` (theta_i = theta_0 + U v_i), ``factor`` other than ``all``.

References
----------
    [1] Dadras, Stich, Yurtsever: Personalized Federated Learning via Low-Rank Matrix Optimization.
        Transactions on Machine Learning Research (final version).
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
from handspan.core.task import Task, value_and_grad
from handspan.numerics.averaging import chosen_names, moved_by_mean, parts
from handspan.numerics.local_work import LocalWork
from handspan.numerics.low_rank import apply_map, compose, gram, outer_sums, spectrum, weighted_sum


@dataclass(frozen=True, kw_only=True)
class PflmfConfig(MethodConfig):
    """Settings of pFL-MF."""

    rank: int = 10
    """Number of columns r of U."""
    personal_steps: int | None = None
    """Steps K on v in a round; 5 by default, two thirds of the local steps if those are given."""
    shared_steps: int | None = None
    """Steps K_U on U in a round; 1 by default, one third of the local steps if those are given."""
    v_learning_rate: float | None = None
    """Step size eta_v of v; the run's by default."""
    u_learning_rate: float | None = None
    """Step size eta_u of U; the run's by default."""
    preset: str = "practice"
    """``practice``, or ``algorithm1``: the printed text, v moving with eta/n."""
    v_for_basis: str = "old"
    """Which v_i the basis step uses: ``old`` (Algorithm 1) or ``new``."""
    factor: str = "all"
    """What is factorised: ``all`` (the paper), ``head``, or a pattern of names (``2.*``)."""
    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (the paper) or ``examples``."""
    participation: str = "fixed"
    """``fixed`` cohort size (experiments), or ``bernoulli`` with the cohort's share (theory)."""
    bernoulli_mean: str = "cohort"
    """With Bernoulli participation, divide by the realised ``cohort`` or by ``expected`` p n."""
    scaled: bool = False
    """Precondition both steps by the inverse Gram matrices (ours)."""
    affine: bool = False
    """Add a shared offset: theta_i = theta_0 + U v_i (ours)."""
    damping: float = 1e-3
    """Ridge added to mean v v^T when ``scaled`` (lambda)."""
    gram_ridge: float = 1e-8
    """Ridge added to U^T U when ``scaled``."""
    upload: str = "sum"
    """``sum``: D_i v_i^T, d x r numbers, only the sum is needed; ``rank_one``: d + r, shows v_i."""

    def __post_init__(self) -> None:
        """Refuse unknown or contradictory choices."""
        self.one_of("preset", ("practice", "algorithm1"))
        self.one_of("v_for_basis", ("old", "new"))
        self.one_of("weights", ("uniform", "examples"))
        self.one_of("participation", ("fixed", "bernoulli"))
        self.one_of("bernoulli_mean", ("cohort", "expected"))
        self.one_of("upload", ("sum", "rank_one"))
        for name in ("rank", "personal_steps", "shared_steps"):
            self.at_least(name, 1)
        for name in ("v_learning_rate", "u_learning_rate", "damping", "gram_ridge"):
            self.at_least(name, 0)
        extras = ("scaled", "affine", "v_learning_rate", "u_learning_rate")
        self.only_with(self.preset != "algorithm1", "preset=practice", *extras)
        self.only_with(self.scaled, "scaled=true", "damping", "gram_ridge")
        is_drawn = self.participation == "bernoulli"
        self.only_with(is_drawn, "participation=bernoulli", "bernoulli_mean")


class PflmfServer(Record):
    """Basis U (directions first; row 0 is the offset when affine), and what is not factorised."""

    basis: Params
    body: Params
    buffers: Params
    moments: Tensor | None  # mean v v^T over the last cohort, where clients send it (scaled)


class PflmfBroadcast(Record):
    """Basis, body, and the round's numbers."""

    basis: Params
    body: Params
    buffers: Params
    preconditioner: Tensor  # (r, r) inverse Gram matrix, or the identity
    v_rate: Tensor
    u_rate: Tensor


class PflmfClient(Record):
    """Coordinates v_i."""

    coordinates: Tensor  # (r,)


class PflmfWorking(Record):
    """Local work: v in its stage; then theta = anchor + scale * delta, and the body."""

    coordinates: Tensor
    velocity: Tensor  # momentum of v
    fixed: Tensor  # (r or 1 + r,) the v of the basis step, the offset's 1 in front
    anchor: Params  # U v at the start of the basis steps
    delta: Params  # D_i
    body: Params
    buffers: Params
    delta_velocity: Params


class PflmfUpload(Record):
    """What the engine keeps of an upload: D_i and v_i; the wire carries their product or these."""

    delta: Params
    coordinates: Tensor
    body: Params
    buffers: Params


class PflmfReduction(Record):
    """Weighted sums over the cohort."""

    products: Params  # sum of v D^T
    moments: Tensor  # sum of v v^T
    body: Params
    buffers: Params
    weight: Tensor


class PflmfSumUpload(Record):
    """On the wire, ``upload=sum``: one client's products, to be summed."""

    products: Params
    moments: Tensor | None
    body: Params
    buffers: Params


def build(setting: Setting, config: PflmfConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    work: LocalWork = setting.work
    if work.sgd.weight_decay:
        raise HandspanError("pflmf takes no weight_decay: it would make the local basis full rank")
    if config.rank > setting.num_clients:
        raise HandspanError(
            f"rank {config.rank} exceeds the {setting.num_clients} clients: lower the rank"
        )
    method = _Pflmf(task, work, setting, config)
    personal, shared = work.split(config.personal_steps, config.shared_steps, default=(5, 1))
    unbatched = frozenset({"basis"})
    coordinate_stage = Stage(step=method.coordinate_step, finish=method.start_basis, **personal)
    return Algorithm(
        name="pflmf",
        init_server=method.init_server,
        init_client=method.init_client,
        rounds=(
            Phase(
                name="train",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(coordinate_stage, Stage(step=method.basis_step, **shared)),
                end=method.end,
                combine=method.combine,
                unbatched=unbatched,
                reduce=method.reduce,
                wire=method.wire,
                weight=WEIGHTS[config.weights],
                infers="v_i up to scale, by the singular vectors of one upload; gradients",
            ),
        ),
        adapt=Phase(
            name="adapt",
            broadcast=method.broadcast,
            begin=method.begin,
            stages=(Stage(step=method.coordinate_step, **work.adapting()),),
            end=lambda b, k, data: (method.end(b, k, data)[0], None),
            unbatched=unbatched,
        ),
        model=method.model,
        sampling="bernoulli" if config.participation == "bernoulli" else "fixed",
        describe=lambda s: {"rank": float(method.num_rows), **spectrum(s.basis, s.moments)},
    )


@dataclass(frozen=True)
class _Pflmf:
    """The functions of the algorithm, bound to one problem."""

    task: Task
    work: LocalWork
    setting: Setting
    config: PflmfConfig

    @property
    def factored(self) -> tuple[str, ...]:
        """Names of the factorised parameters."""
        return chosen_names(self.task, self.config.factor, "factor")

    @property
    def num_rows(self) -> int:
        """Rows of the basis: directions, and the offset."""
        return self.config.rank + self.config.affine

    def init_server(self, key: Tensor, population: Population) -> PflmfServer:
        """Every direction is a fresh model: theta_i has the scale of a model."""
        names = self.factored
        starts = [
            parts(self.task.init(keys.fold(key, "direction", j))[0], names)[0]
            for j in range(self.num_rows)
        ]
        params, buffers = self.task.init(key)
        eye = torch.eye(self.num_rows, dtype=torch.float64, device=self.setting.device)
        return PflmfServer(
            basis={name: torch.stack([start[name] for start in starts]) for name in names},
            body=parts(params, names)[1],
            buffers=buffers,
            moments=eye if self.config.scaled else None,
        )

    def init_client(self, key: Tensor, data: ClientData) -> PflmfClient:
        """v_i ~ N(0, I / r)."""
        rank = self.config.rank
        draw = keys.normal(keys.fold(data.key, "coordinates"), (rank,)) / rank**0.5
        return PflmfClient(coordinates=draw.to(self.setting.scalar))

    def broadcast(self, server: PflmfServer, round: Round) -> PflmfBroadcast:
        """Send U; with scaled steps also the inverse Gram matrix of its directions."""
        like, config = self.setting.scalar, self.config
        eye = torch.eye(config.rank, dtype=torch.float64, device=like.device)
        inverse = eye
        if config.scaled:
            products = gram(server.basis)[self.num_rows - config.rank :][:, -config.rank :]
            inverse = torch.linalg.inv(products + config.gram_ridge * eye)
        rate = self.work.rate(round, self.setting.rounds, like, config.v_learning_rate)
        if config.preset == "algorithm1":
            rate = rate / self.setting.num_clients  # the gradient of (7) has the factor 1/n
        return PflmfBroadcast(
            basis=server.basis,
            body=server.body,
            buffers=server.buffers,
            preconditioner=inverse.to(like),
            v_rate=rate,
            u_rate=self.work.rate(round, self.setting.rounds, like, config.u_learning_rate),
        )

    def extended(self, coordinates: Tensor) -> Tensor:
        """Coordinates with the offset's fixed 1 in front."""
        if not self.config.affine:
            return coordinates
        return torch.cat([torch.ones_like(coordinates[:1]), coordinates])

    def begin(self, b: PflmfBroadcast, client: PflmfClient, data: ClientData) -> PflmfWorking:
        """Start at the stored v; the basis part waits for its stage."""
        zeros = {k: torch.zeros_like(rows[0]) for k, rows in b.basis.items()}
        moving = {**zeros, **b.body}
        return PflmfWorking(
            coordinates=client.coordinates,
            velocity=torch.zeros_like(client.coordinates),
            fixed=self.extended(client.coordinates),
            anchor=zeros,
            delta=zeros,
            body=b.body,
            buffers=b.buffers,
            delta_velocity=self.work.sgd.start(moving),
        )

    def coordinate_step(self, b: PflmfBroadcast, k: PflmfWorking, batch: Batch) -> PflmfWorking:
        """Alg. 1: v <- v - eta U^T grad f_i(U v)   (Eq. 8)."""
        _, _, gradient = value_and_grad(
            lambda v: self.task.loss(
                {**k.body, **compose(b.basis, self.extended(v))}, k.buffers, batch
            ),
            k.coordinates,
        )
        gradient = b.preconditioner @ gradient if self.config.scaled else gradient
        moved, velocity = self.work.sgd.step(
            {"v": k.coordinates}, {"v": gradient}, {"v": k.velocity}, b.v_rate
        )
        return replace(k, coordinates=moved["v"], velocity=velocity.get("v", k.velocity))

    def start_basis(self, b: PflmfBroadcast, k: PflmfWorking) -> PflmfWorking:
        """Fix v and theta = U v for the basis steps."""
        fixed = k.fixed if self.config.v_for_basis == "old" else self.extended(k.coordinates)
        return replace(k, fixed=fixed, anchor=compose(b.basis, fixed))

    def basis_step(self, b: PflmfBroadcast, k: PflmfWorking, batch: Batch) -> PflmfWorking:
        """Alg. 1's G_i, and Setup 6: a step on U_i = U + D v^T is one on D; theta moves |v|^2 D."""
        scale = torch.ones_like(b.u_rate) if self.config.scaled else k.fixed @ k.fixed
        theta = {name: a + scale * k.delta[name] for name, a in k.anchor.items()}
        _, buffers, gradient = value_and_grad(
            lambda params: self.task.loss(params, k.buffers, batch), {**theta, **k.body}
        )
        moved, velocity = self.work.sgd.step(
            {**k.delta, **k.body}, gradient, k.delta_velocity, b.u_rate
        )
        delta, body = parts(moved, tuple(k.delta))
        return replace(k, delta=delta, body=body, buffers=buffers, delta_velocity=velocity)

    def end(
        self, b: PflmfBroadcast, k: PflmfWorking, data: ClientData
    ) -> tuple[PflmfClient, PflmfUpload]:
        """Keep the new v; upload the rank-one change of the basis."""
        return PflmfClient(coordinates=k.coordinates), PflmfUpload(
            delta=k.delta, coordinates=k.fixed, body=k.body, buffers=k.buffers
        )

    def wire(self, upload: PflmfUpload) -> Record:
        """Return what one client sends."""
        if self.config.upload == "rank_one":
            return upload
        v = upload.coordinates
        products = {k: torch.tensordot(v, d, dims=0) for k, d in upload.delta.items()}
        moments = torch.outer(v, v) if self.config.scaled else None
        return PflmfSumUpload(
            products=products, moments=moments, body=upload.body, buffers=upload.buffers
        )

    def reduce(self, uploads: PflmfUpload, weights: Tensor) -> PflmfReduction:
        """Sum over a block: one product instead of a stack of outer products."""
        v = uploads.coordinates.to(torch.float64)
        weights = weights.to(v.device)
        return PflmfReduction(
            products=outer_sums(uploads.delta, uploads.coordinates, weights),
            moments=(v * weights.unsqueeze(1)).T @ v,
            body=weighted_sum(uploads.body, weights),
            buffers=weighted_sum(uploads.buffers, weights),
            weight=weights.sum(),
        )

    def combine(self, server: PflmfServer, r: PflmfReduction, round: Round) -> PflmfServer:
        """Eq. 9, or its preconditioned form."""
        config, weight = self.config, r.weight
        if config.participation == "bernoulli" and config.bernoulli_mean == "expected":
            weight = torch.full_like(weight, float(self.setting.cohort))  # p n
        change = r.products
        if config.scaled:
            eye = torch.eye(self.num_rows, dtype=torch.float64, device=weight.device)
            change = apply_map(torch.linalg.inv(r.moments / weight + config.damping * eye), change)

        def moved(old: Tensor, total: Tensor) -> Tensor:
            change = (total - r.weight * old.to(torch.float64)) / weight
            return (old.to(torch.float64) + change).to(old)

        return PflmfServer(
            basis=moved_by_mean(server.basis, change, weight),
            body=map_tensors(moved, server.body, r.body),
            buffers=map_tensors(moved, server.buffers, r.buffers),
            moments=r.moments / r.weight if config.scaled else None,
        )

    def model(self, b: PflmfBroadcast, client: PflmfClient) -> Model:
        """theta_i = U v_i, and the shared body."""
        theta = compose(b.basis, self.extended(client.coordinates))
        return Model(params={**b.body, **theta}, buffers=b.buffers)


METHOD = Method(
    name="pflmf",
    title="pFL-MF",
    paper="Dadras, Stich, Yurtsever (TMLR)",
    config=PflmfConfig,
    build=build,
    uploads="a rank-one change of the basis (d x r numbers, or d + r with upload=rank_one)",
    private="the coordinates v_i",
    inferable="the direction of v_i, from one upload; rows, by gradient inversion",
    numbers={"train": "rank * d"},
)
