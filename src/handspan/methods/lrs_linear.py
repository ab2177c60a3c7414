"""LRS for linear regression (AMHT-LRS): low rank plus sparse, theta_i = U w_i + b_i.

Objective (Eq. 2)
    min over U in R^(d x r), w_i, b_i of  sum_i 1/2 |y_i - X_i (U w_i + b_i)|^2,
    U^T U = I, |b_i|_0 <= k: a common subspace, and for each client a few entries of its own

Map, iteration l
    OptimizeSparseVector   sparse    b <- threshold(b - 1/m X^T (X b + X U w - y)), T steps at the
                                     OLD U and w
    least squares          step      w_i <- argmin |X_i U w - (y_i - X_i b_i)|, NEW b, OLD U
    server                 combine   vec(U) = A^-1 vec(V), A = sum_i w_i w_i^T kron X_i^T X_i,
                                     V = sum_i X_i^T (y_i - X_i b_i) w_i^T; then QR
    Algorithm 6            adapt     new client: w by least squares, then b, in turn; U stays

Deviations
    A batch is drawn from the client's rows, which are finite; ``--batch-size all`` takes the same
    rows in all rounds. By default the k largest entries stay; ``threshold=schedule`` is the paper's
    rule, with gamma starting each iteration at c3^(l-1) B. The step of the thresholding is 1 over
    the largest eigenvalue of X^T X / m; ``sparse_learning_rate=1`` is the paper's, for rows of
    covariance I. Directions of U about which the rows of a round say nothing stay as they are (the
    least change that solves the system). Eq. 7 as printed has y - b for y - X b. Before a client
    is served its w is solved anew for the last U. One number for each row; no intercept.

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
from handspan.core.algorithm import Algorithm, Model, Phase, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Record
from handspan.numerics.linear_model import LinearModel, Rows, least_squares
from handspan.numerics.local_work import LocalWork
from handspan.numerics.subspace_start import start_phases
from handspan.numerics.subspaces import from_triangle, orthonormal, triangle
from handspan.numerics.thresholding import largest_entries


@dataclass(frozen=True, kw_only=True)
class LrsLinearConfig(MethodConfig):
    """Settings of linear LRS."""

    rank: int = 2
    """Columns r of the basis U."""
    sparsity: int = 1
    """Entries k of b_i that may differ from 0; 0 leaves the low-rank part alone."""
    sparse_steps: int = 10
    """Thresholding steps T in an iteration."""
    sparse_learning_rate: float | None = None
    """Step size of the thresholding; safe by default, 1 in the paper."""
    threshold: str = "largest"
    """Which entries stay: the k ``largest``, or by the paper's ``schedule``: those above
    Delta = alpha + c1 (gamma + beta / sqrt k)."""
    bound: float = 1.0
    """Bound B on the error of the subspace, from which the schedule starts."""
    c1: float = 0.25
    """Constant c1 of Delta, in [0, 1/2]."""
    c3: float = 0.8
    """Factor of gamma from iteration to iteration: c3^(l-1) B."""
    c4: float = 0.8
    """Factor of alpha from iteration to iteration: c4^(l-1) B / sqrt k."""
    c5: float = 0.8
    """Factor of beta from iteration to iteration: c5^(l-1) B."""
    start: str = "moments"
    """U of the first round: ``moments`` (top eigenvectors of sum y^2 x x^T) or ``random``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.one_of("threshold", ("largest", "schedule"))
        self.one_of("start", ("moments", "random"))
        for name in ("rank", "sparse_steps"):
            self.at_least(name, 1)
        for name in ("sparsity", "sparse_learning_rate", "bound"):
            self.at_least(name, 0)
        is_scheduled = self.threshold == "schedule"
        self.only_with(is_scheduled, "threshold=schedule", "bound", "c1", "c3", "c4", "c5")
        if is_scheduled and not self.sparsity:
            raise HandspanError(
                "threshold=schedule divides by the root of sparsity: give it above 0"
            )
        for name, most in (("c1", 0.5), ("c3", 1), ("c4", 1), ("c5", 1)):
            if not 0 <= getattr(self, name) <= most:
                raise HandspanError(f"{name} must lie between 0 and {most}")


class LrsLinearServer(Record):
    """The basis U."""

    basis: Tensor  # (d, r)


class LrsLinearBroadcast(Record):
    """The basis, and where the threshold's schedule is."""

    basis: Tensor
    alpha: Tensor
    beta: Tensor
    gamma: Tensor


class LrsLinearClient(Record):
    """What a client keeps."""

    coordinates: Tensor  # (r, 1) w_i
    sparse: Tensor  # (d, 1) b_i


class LrsLinearWorking(Record):
    """The client's two parts, and what its rows say about U."""

    coordinates: Tensor
    sparse: Tensor
    covariance: Tensor  # (d, d) X^T X
    targets: Tensor  # (d, r) X^T (y - X b) w^T


class LrsLinearUpload(Record):
    """What the engine keeps of an upload; the wire carries products."""

    coordinates: Tensor  # (r, 1)
    covariance: Tensor  # (d, d)
    targets: Tensor  # (d, r)


class LrsLinearSums(Record):
    """A client's contribution to A (lower triangle) and V, or their sums."""

    quadratic: Tensor  # (dr (dr + 1) / 2,)
    targets: Tensor  # (d, r)


def build(setting: Setting, config: LrsLinearConfig) -> Algorithm:
    """Compose the algorithm."""
    method = _LrsLinear(setting, config)
    alternate = Stage(step=method.alternate, steps=method.work.adapt_steps, batch_size=None)
    solve = Stage(step=method.solve, steps=1, batch_size=None)
    return Algorithm(
        name="lrs_linear",
        init_server=method.init_server,
        init_client=method.init_client,
        setup=start_phases(
            config.start,
            method.linear,
            rank=config.rank,
            rounds=1,
            batch_size=method.work.batch_size,
            weights="uniform",
            broadcast=method.broadcast,
        ),
        rounds=(
            Phase(
                name="train",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(Stage(step=method.step, steps=1, batch_size=method.work.batch_size),),
                end=method.end,
                combine=method.combine,
                reduce=method.reduce,
                wire=method.wire,
                infers="w_i up to sign and X_i^T X_i up to scale, from w w^T kron X^T X",
            ),
        ),
        adapt=method.private("adapt", alternate),
        personal=(method.private("solve", solve),),
        model=method.model,
    )


class _LrsLinear:
    """The functions of the algorithm, bound to one problem."""

    def __init__(self, setting: Setting, config: LrsLinearConfig) -> None:
        self.setting, self.config = setting, config
        self.work: LocalWork = setting.work
        self.linear = LinearModel(setting, "lrs_linear")
        features = self.linear.num_features
        if self.linear.num_outputs != 1:
            raise HandspanError("lrs_linear predicts one number for each row: give y one column")
        if config.rank > (most := min(features, setting.num_clients)):
            raise HandspanError(f"rank {config.rank} exceeds {most} features or clients: lower it")
        if config.sparsity > features:
            raise HandspanError(f"sparsity {config.sparsity} exceeds {features} features: lower it")
        if self.work.sgd.momentum or self.work.sgd.weight_decay:
            raise HandspanError("lrs_linear solves its steps: no momentum and no weight_decay")

    def init_server(self, key: Tensor, population: Population) -> LrsLinearServer:
        """Draw a random orthonormal basis; the set-up may replace it."""
        shape = (self.linear.num_features, self.config.rank)
        draw = keys.normal(keys.fold(key, "basis"), shape)
        return LrsLinearServer(basis=orthonormal(draw)[0].to(self.setting.scalar))

    def init_client(self, key: Tensor, data: ClientData) -> LrsLinearClient:
        """W = b = 0."""
        count, like = len(data.num), self.setting.scalar
        return LrsLinearClient(
            coordinates=like.new_zeros(count, self.config.rank, 1),
            sparse=like.new_zeros(count, self.linear.num_features, 1),
        )

    def broadcast(self, server: LrsLinearServer, round: Round) -> LrsLinearBroadcast:
        """Send the basis."""
        config, like = self.config, self.setting.scalar
        at = round.index.to(torch.float64)
        root = max(1, config.sparsity) ** 0.5
        return LrsLinearBroadcast(
            basis=server.basis,
            alpha=(config.c4**at * config.bound / root).to(like),
            beta=(config.c5**at * config.bound).to(like),
            gamma=(config.c3**at * config.bound).to(like),
        )

    def begin(
        self, b: LrsLinearBroadcast, client: LrsLinearClient, data: ClientData
    ) -> LrsLinearWorking:
        """Start from the stored parts."""
        size = self.linear.num_features
        return LrsLinearWorking(
            coordinates=client.coordinates,
            sparse=client.sparse,
            covariance=b.basis.new_zeros(size, size),
            targets=torch.zeros_like(b.basis),
        )

    def sparse(self, b: LrsLinearBroadcast, rows: Rows, start: Tensor, shared: Tensor) -> Tensor:
        """OptimizeSparseVector: b_i for ``shared`` = U w_i, from the OLD b_i."""
        config, (x, y, num) = self.config, rows
        covariance, target = x.T @ x / num, x.T @ (y - x @ shared) / num
        if config.sparse_learning_rate is None:
            tiny = torch.finfo(x.dtype).tiny
            rate = 1 / torch.linalg.eigvalsh(covariance)[-1].clamp(min=tiny)
        else:
            rate = torch.full_like(num, config.sparse_learning_rate)
        gamma, root = b.gamma, max(1, config.sparsity) ** 0.5
        for _ in range(config.sparse_steps):
            c = start - rate * (covariance @ start - target)
            if config.threshold == "largest":
                start = largest_entries(c, config.sparsity)
            else:
                level = b.alpha + config.c1 * (gamma + b.beta / root)  # Delta
                start = torch.where(c.abs() > level, c, 0.0)
                gamma = 2 * config.c1 * gamma + 2 * (b.alpha + config.c1 * b.beta / root)
        return start

    def step(self, b: LrsLinearBroadcast, k: LrsLinearWorking, batch: Batch) -> LrsLinearWorking:
        """Sparse part, coordinates, and what the rows then say about U."""
        rows = self.linear.rows(batch)
        sparse = self.sparse(b, rows, k.sparse, b.basis @ k.coordinates)
        rest = rows.y - rows.x @ sparse
        coordinates = least_squares(rows.x @ b.basis, rest)
        return LrsLinearWorking(
            coordinates=coordinates,
            sparse=sparse,
            covariance=rows.x.T @ rows.x,
            targets=rows.x.T @ rest @ coordinates.T,
        )

    def alternate(
        self, b: LrsLinearBroadcast, k: LrsLinearWorking, batch: Batch
    ) -> LrsLinearWorking:
        """Algorithm 6, once: coordinates, then the sparse part."""
        k, rows = self.solve(b, k, batch), self.linear.rows(batch)
        return replace(k, sparse=self.sparse(b, rows, k.sparse, b.basis @ k.coordinates))

    def solve(self, b: LrsLinearBroadcast, k: LrsLinearWorking, batch: Batch) -> LrsLinearWorking:
        """Coordinates for the stored sparse part."""
        rows = self.linear.rows(batch)
        rest = rows.y - rows.x @ k.sparse
        return replace(k, coordinates=least_squares(rows.x @ b.basis, rest))

    def private(self, name: str, stage: Stage) -> Phase:
        """Return a phase that uploads nothing."""

        def end(b: Any, k: LrsLinearWorking, data: ClientData) -> tuple[LrsLinearClient, None]:
            return LrsLinearClient(coordinates=k.coordinates, sparse=k.sparse), None

        return Phase(
            name=name, broadcast=self.broadcast, begin=self.begin, stages=(stage,), end=end
        )

    def end(
        self, b: LrsLinearBroadcast, k: LrsLinearWorking, data: ClientData
    ) -> tuple[LrsLinearClient, LrsLinearUpload]:
        """Keep the two parts; upload what the rows say about U."""
        return LrsLinearClient(coordinates=k.coordinates, sparse=k.sparse), LrsLinearUpload(
            coordinates=k.coordinates, covariance=k.covariance, targets=k.targets
        )

    def reduce(self, uploads: LrsLinearUpload, weights: Tensor) -> LrsLinearSums:
        """Sums over a block, without a Kronecker product for each client."""
        w, weights = uploads.coordinates[..., 0].double(), weights.to(uploads.targets.device)
        products = torch.einsum("n,np,nq,nab->paqb", weights, w, w, uploads.covariance.double())
        size = w.shape[1] * uploads.covariance.shape[1]
        return LrsLinearSums(
            quadratic=triangle(products.reshape(size, size)),
            targets=torch.einsum("n,nar->ar", weights, uploads.targets.double()),
        )

    def wire(self, upload: LrsLinearUpload) -> LrsLinearSums:
        """Return what one client sends."""
        products = upload.coordinates @ upload.coordinates.T
        return LrsLinearSums(
            quadratic=triangle(torch.kron(products, upload.covariance)), targets=upload.targets
        )

    def combine(self, server: LrsLinearServer, r: LrsLinearSums, round: Round) -> LrsLinearServer:
        """Solve for U, stacked column by column; then QR."""
        shape = server.basis.shape
        quadratic = from_triangle(r.quadratic.double(), shape.numel())
        old = server.basis.T.reshape(-1).double()
        change = torch.linalg.pinv(quadratic, hermitian=True) @ (
            r.targets.T.reshape(-1).double() - quadratic @ old
        )
        solved = (old + change).reshape(shape[1], shape[0]).T
        return LrsLinearServer(basis=orthonormal(solved)[0].to(server.basis))

    def model(self, b: LrsLinearBroadcast, client: LrsLinearClient) -> Model:
        """theta_i = U w_i + b_i."""
        return self.linear.served(b.basis @ client.coordinates + client.sparse)


METHOD = Method(
    name="lrs_linear",
    title="LRS (linear)",
    paper="Pal et al. 2024",
    config=LrsLinearConfig,
    build=build,
    uploads="w w^T kron X^T X and X^T (y - X b) w^T; once the second moments y^2 x x^T",
    private="w_i and the sparse b_i",
    inferable="w_i up to sign, and the rows up to a rotation among them",
    numbers={"moments_0": "p * (p + 1) / 2", "train": "rank * p * (rank * p + 1) / 2 + rank * p"},
    problem="regression",
)
