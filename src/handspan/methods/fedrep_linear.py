"""FedRep for linear regression: a shared orthonormal basis B, and a head w_i for each client.

Objective (Eqs. 6-7)
    min over B in R^(d x k), w_1, ..., w_n of  1/n sum_i f_i,   f_i = 1/(2m) |y_i - X_i B w_i|^2

Map
    Alg. 2, initialisation   start_phases   Z_i = 1/m sum_j y_ij^2 x_ij x_ij^T, k eigenvectors
    Alg. 2, client, head     step           w_i = argmin f_i(w, B), on the batch of the round
    Alg. 2, client, basis    step           B - eta grad_B f_i(w_i, B), on the same batch
    Alg. 2, server           combine        mean, then QR with positive diagonal
    Theorem 1                combine        eta = 1 / (4 sbar_max^2), ``step_size=theorem``
    baselines                step           GD-GD, 10GD-GD: ``head=gradient``; FedSGD: ``shared``

Deviations
    Clients send their step on B and not B_i; the mean is the same. A batch is drawn from the
    client's rows, which are finite; ``--batch-size all`` takes the same rows in all rounds, as the
    paper's simulations do. sbar_max is that of the heads found so far. A kept head (``gradient``)
    follows the QR: B w = Q (R w). Before a client is served its head is solved anew for the last
    B, where it is solved at all. ``start=projected``: the step of client i is 1 over the largest
    eigenvalue of X_i^T X_i / m_i, which the paper does not tell. Heads and the unfactorised models
    start at 0. Several outputs share B and have a column of w each. No intercept.

References
----------
    [1] Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized
        Federated Learning. ICML 2021. arXiv:2102.07078v3. Algorithm 2, Theorem 1, Section A.1.
    [2] Tu, Boczar, Simchowitz, Soltanolkotabi, Recht: Low-rank Solutions of Linear Matrix Equations
        via Procrustes Flow. ICML 2016. Algorithm 1 (``start=projected``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Record
from handspan.numerics.linear_model import LinearModel, least_squares
from handspan.numerics.local_work import LocalWork
from handspan.numerics.subspace_start import STARTS, start_phases
from handspan.numerics.subspaces import orthonormal, principal_angle


@dataclass(frozen=True, kw_only=True)
class FedrepLinearConfig(MethodConfig):
    """Settings of linear FedRep."""

    rank: int = 2
    """Columns k of the basis B."""
    head: str = "exact"
    """How heads are found: ``exact`` (Algorithm 2), ``gradient`` (GD-GD), or ``shared`` (FedSGD:
    one head for all, moved by the server)."""
    head_steps: int = 1
    """Steps on the head in a round with ``head=gradient``: 1 is GD-GD, 10 is 10GD-GD."""
    head_learning_rate: float | None = None
    """Step size of the head; that of the run by default."""
    step_size: str = "run"
    """``run``: eta is the run's; ``theorem``: 1 / (4 sbar_max^2), for rows of covariance I."""
    start: str = "moments"
    """B^0: ``moments`` (Algorithm 2), ``projected`` (Section A.1) or ``random``."""
    projected_rounds: int = 10
    """Rounds of projected gradient descent before the first, with ``start=projected``."""
    orthonormal: bool = True
    """QR after each round; optional for GD-GD, needed for the rest."""
    weights: str = "uniform"
    """Weights of the server's means: ``uniform`` (1/(rn)) or ``examples``."""
    truth: str | None = None
    """File (.npy) with a planted basis B* (d x k): summaries tell the distance to it."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.one_of("head", ("exact", "gradient", "shared"))
        self.one_of("step_size", ("run", "theorem"))
        self.one_of("start", STARTS)
        self.one_of("weights", WEIGHTS)
        for name in ("rank", "head_steps", "projected_rounds"):
            self.at_least(name, 1)
        self.at_least("head_learning_rate", 0)
        self.only_with(self.head == "gradient", "head=gradient", "head_steps")
        self.only_with(self.head != "exact", "head=gradient or shared", "head_learning_rate")
        self.only_with(self.start == "projected", "start=projected", "projected_rounds")
        if not self.orthonormal and self.head != "gradient":
            raise HandspanError(
                "orthonormal=false is for head=gradient: the others lose their scale"
            )


class FedrepLinearServer(Record):
    """The basis, and what has become of it."""

    basis: Tensor  # (d, k)
    turn: Tensor  # (k, k) product of all R: a kept head w is turn @ (what its client stores)
    head: Tensor | None  # (k, c) head=shared
    largest: Tensor  # () square of sbar_max over the heads seen so far
    moved: Tensor  # () principal-angle distance that the last round went


class FedrepLinearBroadcast(Record):
    """The basis, the shared head where there is one, and the step sizes."""

    basis: Tensor
    turn: Tensor
    head: Tensor | None
    learning_rate: Tensor
    head_rate: Tensor


class FedrepLinearClient(Record):
    """What a client keeps, as far as the settings ask for it."""

    head: Tensor | None = None  # (k, c), before all turns
    is_fitted: Tensor | None = None  # () 1 if the head is its own (new clients of FedSGD)
    unfactorised: Tensor | None = None  # (d, c) start=projected


class FedrepLinearWorking(Record):
    """Basis and head in local work."""

    client: FedrepLinearClient
    basis: Tensor
    head: Tensor


class FedrepLinearUpload(Record):
    """The client's step on B; w w^T for the step size of Theorem 1, the head for FedSGD."""

    basis_delta: Tensor  # (d, k)
    products: Tensor | None  # (k, k)
    head: Tensor | None  # (k, c)


class FedrepLinearServed(Record):
    """A head solved for the basis that is served; never stored."""

    head: Tensor


def build(setting: Setting, config: FedrepLinearConfig) -> Algorithm:
    """Compose the algorithm."""
    method = _FedrepLinear(setting, config)
    work, is_exact = method.work, config.head == "exact"
    solve = Stage(step=method.solve, steps=1, batch_size=None)
    steps = 1 if work.steps is None and work.epochs is None else work.steps
    train = Stage(step=method.step, steps=steps, epochs=work.epochs, batch_size=work.batch_size)

    def private(name: str, end: Any) -> Phase:
        return Phase(
            name=name, broadcast=method.broadcast, begin=method.begin, stages=(solve,), end=end
        )

    return Algorithm(
        name="fedrep_linear",
        init_server=method.init_server,
        init_client=method.init_client,
        setup=start_phases(
            config.start,
            method.linear,
            rank=config.rank,
            rounds=config.projected_rounds,
            batch_size=work.batch_size,
            weights=config.weights,
            broadcast=method.broadcast,
        ),
        rounds=(
            Phase(
                name="train",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(train,),
                end=method.end,
                combine=method.combine,
                weight=WEIGHTS[config.weights],
                infers="the direction of w_i, by the singular vectors of one step on B; residuals",
            ),
        ),
        adapt=None if is_exact else private("adapt", method.keep_solved),
        personal=(private("solve", method.serve_solved),) if is_exact else (),
        model=method.model,
        describe=method.describe,
    )


class _FedrepLinear:
    """The functions of the algorithm, bound to one problem."""

    def __init__(self, setting: Setting, config: FedrepLinearConfig) -> None:
        self.setting, self.config = setting, config
        self.work: LocalWork = setting.work
        self.linear = LinearModel(setting, "fedrep_linear")
        if config.rank > (most := min(self.linear.num_features, setting.num_clients)):
            raise HandspanError(f"rank {config.rank} exceeds {most} features or clients: lower it")
        if self.work.sgd.momentum or self.work.sgd.weight_decay:
            raise HandspanError("fedrep_linear takes plain steps: no momentum and no weight_decay")
        if config.step_size == "theorem" and (self.work.epochs or (self.work.steps or 1) > 1):
            raise HandspanError(
                "step_size=theorem is for one step in a round: drop steps and epochs"
            )
        self.truth = None if config.truth is None else self._read(config.truth)

    def _read(self, path: str) -> Tensor:
        try:
            basis = np.load(Path(path), allow_pickle=False)
        except (OSError, ValueError) as error:
            raise HandspanError(f"truth={path} cannot be read as a .npy file: {error}") from None
        if basis.ndim != 2 or len(basis) != self.linear.num_features:
            raise HandspanError(
                f"truth={path} has shape {basis.shape}: it takes a row for each of the "
                f"{self.linear.num_features} features"
            )
        return torch.from_numpy(basis.astype("float64"))

    # -- start -------------------------------------------------------------------------------

    def init_server(self, key: Tensor, population: Population) -> FedrepLinearServer:
        """Draw a random basis; the set-up replaces it."""
        size, like = self.config.rank, self.setting.scalar
        draw = keys.normal(keys.fold(key, "basis"), (self.linear.num_features, size))
        is_shared = self.config.head == "shared"
        return FedrepLinearServer(
            basis=orthonormal(draw)[0].to(like),
            turn=torch.eye(size, dtype=torch.float64).to(like),
            head=like.new_zeros(size, self.linear.num_outputs) if is_shared else None,
            largest=torch.zeros_like(like),
            moved=torch.zeros_like(like),
        )

    def init_client(self, key: Tensor, data: ClientData) -> FedrepLinearClient:
        """Heads and unfactorised models of 0, where they are kept."""
        count, outputs, like = len(data.num), self.linear.num_outputs, self.setting.scalar
        keeps_head = self.config.head != "exact"
        keeps_model = self.config.start == "projected"
        return FedrepLinearClient(
            head=like.new_zeros(count, self.config.rank, outputs) if keeps_head else None,
            is_fitted=like.new_zeros(count) if self.config.head == "shared" else None,
            unfactorised=like.new_zeros(count, self.linear.num_features, outputs)
            if keeps_model
            else None,
        )

    # -- rounds ------------------------------------------------------------------------------

    def broadcast(self, server: FedrepLinearServer, round: Round) -> FedrepLinearBroadcast:
        """Send the basis."""
        rounds, like = self.setting.rounds, self.setting.scalar
        is_ours = self.config.step_size == "theorem"  # then eta is the server's affair
        return FedrepLinearBroadcast(
            basis=server.basis,
            turn=server.turn,
            head=server.head,
            learning_rate=self.work.rate(round, rounds, like, 1.0 if is_ours else None),
            head_rate=self.work.rate(round, rounds, like, self.config.head_learning_rate),
        )

    def known_head(self, b: FedrepLinearBroadcast, client: FedrepLinearClient) -> Tensor:
        """Head that the client has before it computes one, for the basis of the broadcast."""
        if client.head is None:
            return b.basis.new_zeros(self.config.rank, self.linear.num_outputs)
        own = b.turn @ client.head
        if b.head is None:
            return own
        assert client.is_fitted is not None
        return torch.where(client.is_fitted > 0, own, b.head)

    def begin(
        self, b: FedrepLinearBroadcast, client: FedrepLinearClient, data: ClientData
    ) -> FedrepLinearWorking:
        """Start from the broadcast basis and the head that is known."""
        return FedrepLinearWorking(client=client, basis=b.basis, head=self.known_head(b, client))

    def step(
        self, b: FedrepLinearBroadcast, k: FedrepLinearWorking, batch: Batch
    ) -> FedrepLinearWorking:
        """Head, then one step on B with it, on the same rows (Alg. 2)."""
        x, y, count = self.linear.rows(batch)
        z, kind = x @ k.basis, self.config.head
        if kind == "exact":
            head = least_squares(z, y)
        else:
            head = k.head
            for _ in range(self.config.head_steps if kind == "gradient" else 1):
                head = head - b.head_rate * (z.T @ (z @ head - y)) / count
        used = k.head if kind == "shared" else head  # FedSGD: one gradient at the OLD pair
        slope = x.T @ (z @ used - y) @ used.T / count  # grad_B f_i(w_i, B)
        return replace(k, basis=k.basis - b.learning_rate * slope, head=head)

    def solve(
        self, b: FedrepLinearBroadcast, k: FedrepLinearWorking, batch: Batch
    ) -> FedrepLinearWorking:
        """Head of all rows."""
        x, y, _ = self.linear.rows(batch)
        return replace(k, head=least_squares(x @ k.basis, y))

    def end(
        self, b: FedrepLinearBroadcast, k: FedrepLinearWorking, data: ClientData
    ) -> tuple[FedrepLinearClient, FedrepLinearUpload]:
        """Keep the head where it goes on from; upload the step on B."""
        kind, client = self.config.head, k.client
        if kind == "gradient":
            client = replace(client, head=torch.linalg.solve(b.turn, k.head))
        return client, FedrepLinearUpload(
            basis_delta=k.basis - b.basis,
            products=k.head @ k.head.T if self.config.step_size == "theorem" else None,
            head=k.head if kind == "shared" else None,
        )

    def combine(
        self, server: FedrepLinearServer, reduction: Reduced, round: Round
    ) -> FedrepLinearServer:
        """Mean, then QR."""
        mean: FedrepLinearUpload = reduction.mean()
        largest, eta = server.largest, 1.0
        if mean.products is not None:
            largest = torch.maximum(largest, torch.linalg.eigvalsh(mean.products)[-1].to(largest))
            eta = 1 / (4 * largest.clamp(min=torch.finfo(largest.dtype).tiny))  # Theorem 1
        basis = server.basis + eta * mean.basis_delta.to(server.basis)
        turn, head = server.turn, mean.head
        moved = principal_angle(basis, server.basis).to(server.moved)
        if self.config.orthonormal:
            basis, r = orthonormal(basis)
            turn = r @ turn
            head = None if head is None else r.to(head) @ head
        return FedrepLinearServer(
            basis=basis,
            turn=turn,
            head=None if head is None else head.to(server.basis),
            largest=largest,
            moved=moved,
        )

    # -- serving -----------------------------------------------------------------------------

    def serve_solved(
        self, b: FedrepLinearBroadcast, k: FedrepLinearWorking, data: ClientData
    ) -> tuple[FedrepLinearServed, None]:
        """Serve the solved head."""
        return FedrepLinearServed(head=k.head), None

    def keep_solved(
        self, b: FedrepLinearBroadcast, k: FedrepLinearWorking, data: ClientData
    ) -> tuple[FedrepLinearClient, None]:
        """Keep the solved head: a new client's."""
        own = torch.linalg.solve(b.turn, k.head)
        fitted = None if k.client.is_fitted is None else torch.ones_like(k.client.is_fitted)
        return replace(k.client, head=own, is_fitted=fitted), None

    def model(self, b: FedrepLinearBroadcast, c: Any) -> Model:
        """theta_i = B w_i."""
        head = c.head if isinstance(c, FedrepLinearServed) else self.known_head(b, c)
        return self.linear.served(b.basis @ head)

    def describe(self, server: FedrepLinearServer) -> dict[str, float]:
        """Distance that the last round went, and to the planted basis where one is given."""
        told = {"rank": float(self.config.rank), "angle_moved": float(server.moved)}
        if self.truth is not None:
            told["angle_to_truth"] = float(principal_angle(server.basis.cpu(), self.truth))
        return told


METHOD = Method(
    name="fedrep_linear",
    title="FedRep (linear)",
    paper="Collins et al. 2021, Algorithm 2",
    config=FedrepLinearConfig,
    build=build,
    uploads="its step on the basis; once the second moments y^2 x x^T",
    private="the head w_i",
    inferable="the direction of w_i; the rows, of a client with few of them",
    numbers={"moments_0": "p * (p + 1) / 2", "train": "rank * p"},
    problem="regression",
)
