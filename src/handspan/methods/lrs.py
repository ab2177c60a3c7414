"""LRS: models of low rank plus sparse, theta_i = U w_i + b_i, for any network.

Objective (Eq. 2, for the parameter vector of any model)
    min over U in R^(d x r), w_i, b_i of  1/n sum_i f_i(U w_i + b_i),   |b_i|_0 <= k

Map, in the order of AMHT-LRS
    OptimizeSparseVector   sparse_step       b <- threshold(b - eta grad f_i(U w + b)), OLD w
    coordinates            coordinate_step   w <- w - eta (U^T U)^-1 U^T grad f_i(U w + b), NEW b
    basis                  basis_step        local steps on theta_i = U w_i + b_i, NEW w and b
    server                 combine           U <- U + mean(D w^T) (mean w w^T + lambda I)^-1, D the
                                             change of theta_i

Deviations
    Networks have no exact solves (those are ``lrs_linear``): each is replaced by gradient steps.
    U^T U = I fixes a gauge alone: steps on w are preconditioned by the Gram matrix of U, as if U
    were orthonormal, and steps on U by that of the w_i, so that no QR is needed. The k largest
    entries of b stay, k a share of d; the paper's networks have an L2 term on b instead, and Adam.
    Thresholding steps are plain, whatever the run's momentum. Start: each column of U is a fresh
    model, w ~ N(0, I/r), b = 0. ``factor`` other than ``all`` leaves the rest of the model shared.

References
----------
    [1] Pal, Varshney, Madan, Jain, Thakurta, Aggarwal, Shenoy, Srivastava: Sample-Efficient
        Personalization: Modeling User Parameters as Low Rank Plus Sparse Components. AISTATS 2024.
        arXiv:2210.03505.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Params, Record, map_tensors
from handspan.core.task import value_and_grad
from handspan.numerics.averaging import chosen_names, parts
from handspan.numerics.local_work import LocalWork
from handspan.numerics.low_rank import apply_map, compose, gram, outer_sums, weighted_sum
from handspan.numerics.thresholding import largest_entries


@dataclass(frozen=True, kw_only=True)
class LrsConfig(MethodConfig):
    """Settings of LRS."""

    rank: int = 5
    """Columns r of the basis U."""
    sparsity: float = 0.02
    """Share k/d of the entries of b_i that may differ from 0; 0 leaves the low-rank part alone."""
    factor: str = "all"
    """What is factorised: ``all``, ``head``, or patterns of names joined by ``+``."""
    sparse_steps: int | None = None
    """Thresholding steps T on b_i in a round; a third of the local steps by default."""
    personal_steps: int | None = None
    """Steps on w_i in a round; a third of the local steps by default."""
    shared_steps: int | None = None
    """Steps on the basis in a round; a third of the local steps by default."""
    sparse_learning_rate: float | None = None
    """Step size of b_i; that of the run by default."""
    coordinate_learning_rate: float | None = None
    """Step size of w_i; that of the run by default."""
    damping: float = 1e-3
    """Ridge lambda added to the mean of w w^T."""
    gram_ridge: float = 1e-8
    """Ridge added to U^T U."""
    weights: str = "uniform"
    """Weights of the server's means: ``uniform`` (the paper's sum over users) or ``examples``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.one_of("weights", WEIGHTS)
        for name in ("rank", "sparse_steps", "personal_steps", "shared_steps"):
            self.at_least(name, 1)
        for name in ("sparse_learning_rate", "coordinate_learning_rate", "damping", "gram_ridge"):
            self.at_least(name, 0)
        if not 0 <= self.sparsity <= 1:
            raise HandspanError(f"sparsity is a share between 0 and 1, not {self.sparsity}")


class LrsServer(Record):
    """The basis U (directions first), and what is not factorised."""

    basis: Params
    body: Params
    buffers: Params


class LrsBroadcast(Record):
    """Basis, body, and the round's numbers."""

    basis: Params
    body: Params
    buffers: Params
    preconditioner: Tensor  # (r, r) (U^T U)^-1
    learning_rate: Tensor
    sparse_rate: Tensor
    coordinate_rate: Tensor


class LrsClient(Record):
    """What a client keeps: w_i and b_i."""

    coordinates: Tensor  # (r,)
    sparse: Params


class LrsWorking(Record):
    """The private parts in their stages; then theta = anchor + delta, and the body."""

    coordinates: Tensor
    coordinate_velocity: Tensor
    sparse: Params
    anchor: Params
    delta: Params
    body: Params
    buffers: Params
    velocity: Params


class LrsUpload(Record):
    """What the engine keeps of an upload: D_i and w_i; the wire carries their products."""

    delta: Params
    coordinates: Tensor
    body: Params
    buffers: Params


class LrsSums(Record):
    """Products of one client, or their weighted sums over the cohort."""

    products: Params  # w D^T
    moments: Tensor  # w w^T
    body: Params
    buffers: Params


class LrsReduction(Record):
    """Weighted sums, and the sum of the weights."""

    sums: LrsSums
    weight: Tensor


def build(setting: Setting, config: LrsConfig) -> Algorithm:
    """Compose the algorithm."""
    work: LocalWork = setting.work
    if work.sgd.weight_decay:
        raise HandspanError("lrs takes no weight_decay: which of U, w_i and b_i would it concern?")
    if config.rank > setting.num_clients:
        raise HandspanError(
            f"rank {config.rank} exceeds the {setting.num_clients} clients: lower the rank"
        )
    method = _Lrs(setting, config)
    sparse, coordinates, shared = method.blocks()
    sparse_stage = Stage(step=method.sparse_step, **sparse)
    coordinate_stage = Stage(step=method.coordinate_step, finish=method.start_basis, **coordinates)
    stages = (coordinate_stage, Stage(step=method.basis_step, **shared))
    adapting = [Stage(step=method.coordinate_step, **work.adapting())]
    if config.sparsity:  # otherwise there is nothing to find, and this is pFL-MF with scaled steps
        stages = (sparse_stage, *stages)
        adapting.append(Stage(step=method.sparse_step, **work.adapting()))
    unbatched = frozenset({"basis"})
    return Algorithm(
        name="lrs",
        init_server=method.init_server,
        init_client=method.init_client,
        rounds=(
            Phase(
                name="train",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=stages,
                end=method.end,
                combine=method.combine,
                unbatched=unbatched,
                reduce=method.reduce,
                wire=method.wire,
                weight=WEIGHTS[config.weights],
                infers="w_i up to sign, from its w w^T; gradients",
            ),
        ),
        adapt=Phase(
            name="adapt",
            broadcast=method.broadcast,
            begin=method.begin,
            stages=tuple(adapting),
            end=lambda b, k, data: (method.end(b, k, data)[0], None),
            unbatched=unbatched,
        ),
        model=method.model,
    )


class _Lrs:
    """The functions of the algorithm, bound to one problem."""

    def __init__(self, setting: Setting, config: LrsConfig) -> None:
        self.setting, self.config, self.task = setting, config, setting.model
        self.work: LocalWork = setting.work
        self.names = chosen_names(self.task, config.factor, "factor")
        params = self.task.init(keys.key(0))[0]
        size = sum(params[name].numel() for name in self.names)
        self.count = round(config.sparsity * size)  # k

    def blocks(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Options of the three stages: N steps go in thirds, 2:1 where there is no sparse part."""
        config = self.config
        personal, shared = self.work.split(None, config.shared_steps)
        each = personal["steps"]
        if each is not None and config.sparsity:
            each = max(1, each // 2)

        def block(told: int | None) -> dict[str, Any]:
            steps = each if told is None else told
            return {**personal, "steps": steps, "epochs": None if steps else personal["epochs"]}

        return block(config.sparse_steps), block(config.personal_steps), shared

    def init_server(self, key: Tensor, population: Population) -> LrsServer:
        """Every direction is a fresh model: theta_i has the scale of a model."""
        starts = [
            parts(self.task.init(keys.fold(key, "direction", j))[0], self.names)[0]
            for j in range(self.config.rank)
        ]
        params, buffers = self.task.init(key)
        return LrsServer(
            basis={name: torch.stack([start[name] for start in starts]) for name in self.names},
            body=parts(params, self.names)[1],
            buffers=buffers,
        )

    def init_client(self, key: Tensor, data: ClientData) -> LrsClient:
        """w_i ~ N(0, I / r), b_i = 0."""
        rank, params = self.config.rank, self.task.init(key)[0]
        draw = keys.normal(keys.fold(data.key, "coordinates"), (rank,)) / rank**0.5
        return LrsClient(
            coordinates=draw.to(self.setting.scalar),
            sparse={n: params[n].new_zeros(len(data.num), *params[n].shape) for n in self.names},
        )

    def broadcast(self, server: LrsServer, round: Round) -> LrsBroadcast:
        """Send U and the inverse of its Gram matrix."""
        rounds, like, config = self.setting.rounds, self.setting.scalar, self.config
        eye = torch.eye(config.rank, dtype=torch.float64, device=like.device)
        return LrsBroadcast(
            basis=server.basis,
            body=server.body,
            buffers=server.buffers,
            preconditioner=torch.linalg.inv(gram(server.basis) + config.gram_ridge * eye).to(like),
            learning_rate=self.work.rate(round, rounds, like),
            sparse_rate=self.work.rate(round, rounds, like, config.sparse_learning_rate),
            coordinate_rate=self.work.rate(round, rounds, like, config.coordinate_learning_rate),
        )

    def theta(self, b: LrsBroadcast, coordinates: Tensor, sparse: Params) -> Params:
        """U w + b."""
        return {name: value + sparse[name] for name, value in compose(b.basis, coordinates).items()}

    def begin(self, b: LrsBroadcast, client: LrsClient, data: ClientData) -> LrsWorking:
        """Start from the stored parts; the basis part waits for its stage."""
        zeros = {name: torch.zeros_like(rows[0]) for name, rows in b.basis.items()}
        return LrsWorking(
            coordinates=client.coordinates,
            coordinate_velocity=torch.zeros_like(client.coordinates),
            sparse=client.sparse,
            anchor=zeros,
            delta=zeros,
            body=b.body,
            buffers=b.buffers,
            velocity=self.work.sgd.start({**zeros, **b.body}),
        )

    def sparse_step(self, b: LrsBroadcast, k: LrsWorking, batch: Batch) -> LrsWorking:
        """One gradient step on b, then the largest entries of all its parameters together."""
        _, _, gradient = value_and_grad(
            lambda sparse: self.task.loss(
                {**k.body, **self.theta(b, k.coordinates, sparse)}, k.buffers, batch
            ),
            k.sparse,
        )
        moved = {name: old - b.sparse_rate * gradient[name] for name, old in k.sparse.items()}
        kept = largest_entries(torch.cat([value.flatten() for value in moved.values()]), self.count)
        pieces = kept.split([value.numel() for value in moved.values()])
        sparse = {n: p.view_as(moved[n]) for n, p in zip(moved, pieces, strict=True)}
        return replace(k, sparse=sparse)

    def coordinate_step(self, b: LrsBroadcast, k: LrsWorking, batch: Batch) -> LrsWorking:
        """One step on w, as if U were orthonormal."""
        _, _, gradient = value_and_grad(
            lambda w: self.task.loss({**k.body, **self.theta(b, w, k.sparse)}, k.buffers, batch),
            k.coordinates,
        )
        moved, velocity = self.work.sgd.step(
            {"w": k.coordinates},
            {"w": b.preconditioner @ gradient},
            {"w": k.coordinate_velocity},
            b.coordinate_rate,
        )
        velocity = velocity.get("w", k.coordinate_velocity)
        return replace(k, coordinates=moved["w"], coordinate_velocity=velocity)

    def start_basis(self, b: LrsBroadcast, k: LrsWorking) -> LrsWorking:
        """Fix w and b for the basis steps."""
        return replace(k, anchor=self.theta(b, k.coordinates, k.sparse))

    def basis_step(self, b: LrsBroadcast, k: LrsWorking, batch: Batch) -> LrsWorking:
        """One step on theta_i and on what is not factorised."""
        theta = {name: value + k.delta[name] for name, value in k.anchor.items()}
        _, buffers, gradient = value_and_grad(
            lambda params: self.task.loss(params, k.buffers, batch), {**theta, **k.body}
        )
        moved, velocity = self.work.sgd.step(
            {**k.delta, **k.body}, gradient, k.velocity, b.learning_rate
        )
        delta, body = parts(moved, tuple(k.delta))
        return replace(k, delta=delta, body=body, buffers=buffers, velocity=velocity)

    def end(self, b: LrsBroadcast, k: LrsWorking, data: ClientData) -> tuple[LrsClient, LrsUpload]:
        """Keep w and b; upload the change of theta_i, as the basis sees it."""
        return LrsClient(coordinates=k.coordinates, sparse=k.sparse), LrsUpload(
            delta=k.delta, coordinates=k.coordinates, body=k.body, buffers=k.buffers
        )

    def wire(self, upload: LrsUpload) -> LrsSums:
        """Return what one client sends."""
        w = upload.coordinates
        return LrsSums(
            products={name: torch.tensordot(w, d, dims=0) for name, d in upload.delta.items()},
            moments=torch.outer(w, w),
            body=upload.body,
            buffers=upload.buffers,
        )

    def reduce(self, uploads: LrsUpload, weights: Tensor) -> LrsReduction:
        """Sum over a block, without a stack of outer products."""
        w = uploads.coordinates.to(torch.float64)
        weights = weights.to(w.device)
        return LrsReduction(
            sums=LrsSums(
                products=outer_sums(uploads.delta, uploads.coordinates, weights),
                moments=(w * weights.unsqueeze(1)).T @ w,
                body=weighted_sum(uploads.body, weights),
                buffers=weighted_sum(uploads.buffers, weights),
            ),
            weight=weights.sum(),
        )

    def combine(self, server: LrsServer, r: LrsReduction, round: Round) -> LrsServer:
        """Move U by the least-squares fit of the changes to the coordinates."""
        mean: LrsSums = map_tensors(lambda total: total / r.weight, r.sums)
        eye = torch.eye(self.config.rank, dtype=torch.float64, device=r.weight.device)
        inverse = torch.linalg.inv(mean.moments + self.config.damping * eye)
        step = apply_map(inverse, mean.products)
        return LrsServer(
            basis={name: rows + step[name].to(rows) for name, rows in server.basis.items()},
            body=map_tensors(lambda new, old: new.to(old), mean.body, server.body),
            buffers=map_tensors(lambda new, old: new.to(old), mean.buffers, server.buffers),
        )

    def model(self, b: LrsBroadcast, client: LrsClient) -> Model:
        """theta_i = U w_i + b_i, and the shared body."""
        theta = self.theta(b, client.coordinates, client.sparse)
        return Model(params={**b.body, **theta}, buffers=b.buffers)


METHOD = Method(
    name="lrs",
    title="LRS",
    paper="Pal et al. 2024",
    config=LrsConfig,
    build=build,
    uploads="a rank-one change of the basis (d x r numbers) and w w^T",
    private="the coordinates w_i and the sparse b_i",
    inferable="w_i up to sign, from its w w^T; rows, by gradient inversion",
    numbers={"train": "rank * (d + rank)"},
)
