"""FLUTE for linear models of more dimensions than the shared basis has: y = <phi_i, x> + noise.

Objective, W = (w_1, ..., w_n)
    min over B (d x k), W (k x n) of  1/n sum_i 1/(2m) |y_i - X_i B w_i|^2 + lambda R(B, W),
    R(B, W) = 1/2 | B^T B - W W^T |_F^2: the two factors share the scale of B W evenly

Map
    client          step      one gradient step on B and on w_i, both at the OLD pair
    server, basis   combine   B' = mean of the B_i
    server, both    balance   B <- B' - 2 eta_r B' D and w_i <- w_i + 2 eta_r D w_i,
                              D = B'^T B' - W W^T

Deviations
    The form of R and the order of the steps are from memory of the paper, which could not be read:
    R is kept in one place (``difference``). The server's step on the heads needs D alone, so that
    clients take it: the server keeps W W^T, told by changes of w_i w_i^T, and no head. Heads of
    clients that are not drawn count in W W^T and stay. B moves by a mean over clients and w_i by
    its own gradient, so that with many clients ``balance=mean`` is better scaled. eta_r contains
    lambda. No moments, no exact heads, no QR: that is what it changes against ``fedrep_linear``.
    Several outputs share B and have a column of w each. No intercept.

References
----------
    [1] Liu, Shen, Yang: Federated Representation Learning in the Under-Parameterized Regime.
        ICML 2024. arXiv:2406.04596.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Record
from handspan.numerics.linear_model import LinearModel, least_squares
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class FluteLinearConfig(MethodConfig):
    """Settings of linear FLUTE."""

    rank: int = 2
    """Columns k of the basis B."""
    scale: float = 0.1
    """Standard deviation alpha of the first entries of B and W."""
    balance: str = "sum"
    """What B^T B is held against: ``sum`` (W W^T) or ``mean`` (W W^T / n), for many clients."""
    server_learning_rate: float = 0.01
    """Step size eta_r of the balancing step, lambda included; 2 eta_r |B|^2 has to stay below 1."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.one_of("balance", ("sum", "mean"))
        self.at_least("rank", 1)
        self.at_least("server_learning_rate", 0)
        if not 0 < self.scale < float("inf"):
            raise HandspanError(f"scale must be above 0, not {self.scale}: from 0 nothing moves")


class FluteLinearServer(Record):
    """The basis, and what all heads are together."""

    basis: Tensor  # (d, k)
    products: Tensor  # (k, k) W W^T


class FluteLinearBroadcast(Record):
    """The basis and the step size."""

    basis: Tensor
    learning_rate: Tensor


class FluteLinearImbalance(Record):
    """What comes back after a round: D, from which a client balances its head."""

    imbalance: Tensor  # (k, k)


class FluteLinearClient(Record):
    """The client's head."""

    head: Tensor  # (k, c)


class FluteLinearWorking(Record):
    """Basis and head in local work, and the head that it began with."""

    basis: Tensor
    head: Tensor
    old: Tensor


class FluteLinearUpload(Record):
    """Changes of B and of w w^T."""

    basis_delta: Tensor
    products_delta: Tensor


class FluteLinearProducts(Record):
    """A change of w w^T."""

    products_delta: Tensor


def build(setting: Setting, config: FluteLinearConfig) -> Algorithm:
    """Compose the algorithm."""
    method = _FluteLinear(setting, config)
    work = method.work
    steps = 1 if work.steps is None and work.epochs is None else work.steps
    train = Stage(step=method.step, steps=steps, epochs=work.epochs, batch_size=work.batch_size)
    infers = "w_i up to sign, from its change of w w^T; residuals of its rows"
    return Algorithm(
        name="flute_linear",
        init_server=method.init_server,
        init_client=method.init_client,
        setup=(
            Phase(
                name="products",
                broadcast=method.broadcast,
                begin=method.begin,
                end=lambda b, k, data: (method.kept(k), method.products(k, 0 * k.old)),
                combine=method.add_products,
                computes="all",
                uploads="all",
                infers="the first head, up to sign",
            ),
        ),
        rounds=(
            Phase(
                name="train",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(train,),
                end=method.end,
                combine=method.combine,
                infers=infers,
            ),
            Phase(
                name="balance",
                broadcast=method.imbalance,
                begin=method.balance_head,
                end=lambda b, k, data: (method.kept(k), method.products(k, k.old)),
                combine=method.balance,
                infers=infers,
            ),
        ),
        adapt=Phase(
            name="adapt",
            broadcast=method.broadcast,
            begin=method.begin,
            stages=(Stage(step=method.solve, steps=1, batch_size=None),),
            end=lambda b, k, data: (method.kept(k), None),
        ),
        model=method.model,
        deploy=method.broadcast,
        describe=method.describe,
    )


class _FluteLinear:
    """The functions of the algorithm, bound to one problem."""

    def __init__(self, setting: Setting, config: FluteLinearConfig) -> None:
        self.setting, self.config = setting, config
        self.work: LocalWork = setting.work
        self.linear = LinearModel(setting, "flute_linear")
        if config.rank > (most := min(self.linear.num_features, setting.num_clients)):
            raise HandspanError(f"rank {config.rank} exceeds {most} features or clients: lower it")
        if self.work.sgd.momentum or self.work.sgd.weight_decay:
            raise HandspanError("flute_linear takes plain steps: no momentum and no weight_decay")

    def init_server(self, key: Tensor, population: Population) -> FluteLinearServer:
        """B ~ N(0, alpha^2); the heads are counted in the set-up."""
        shape, like = (self.linear.num_features, self.config.rank), self.setting.scalar
        return FluteLinearServer(
            basis=self.config.scale * keys.normal(keys.fold(key, "basis"), shape).to(like),
            products=like.new_zeros(self.config.rank, self.config.rank),
        )

    def init_client(self, key: Tensor, data: ClientData) -> FluteLinearClient:
        """w_i ~ N(0, alpha^2)."""
        shape = (self.config.rank, self.linear.num_outputs)
        draw = keys.normal(keys.fold(data.key, "head"), shape)
        return FluteLinearClient(head=self.config.scale * draw.to(self.setting.scalar))

    def broadcast(self, server: FluteLinearServer, round: Round) -> FluteLinearBroadcast:
        """Send the basis."""
        rate = self.work.rate(round, self.setting.rounds, self.setting.scalar)
        return FluteLinearBroadcast(basis=server.basis, learning_rate=rate)

    def begin(
        self, b: FluteLinearBroadcast, client: FluteLinearClient, data: ClientData
    ) -> FluteLinearWorking:
        """Start from the broadcast basis and the stored head."""
        return FluteLinearWorking(basis=b.basis, head=client.head, old=client.head)

    def step(
        self, b: FluteLinearBroadcast, k: FluteLinearWorking, batch: Batch
    ) -> FluteLinearWorking:
        """One step on both factors, from the same residual."""
        x, y, num = self.linear.rows(batch)
        z = x @ k.basis
        residual = (z @ k.head - y) / num
        return replace(
            k,
            basis=k.basis - b.learning_rate * (x.T @ residual @ k.head.T),
            head=k.head - b.learning_rate * (z.T @ residual),
        )

    def solve(
        self, b: FluteLinearBroadcast, k: FluteLinearWorking, batch: Batch
    ) -> FluteLinearWorking:
        """Head that is best for the basis."""
        x, y, _ = self.linear.rows(batch)
        return replace(k, head=least_squares(x @ k.basis, y))

    def kept(self, k: FluteLinearWorking) -> FluteLinearClient:
        """Keep the head."""
        return FluteLinearClient(head=k.head)

    def products(self, k: FluteLinearWorking, old: Tensor) -> FluteLinearProducts:
        """Change of w w^T."""
        return FluteLinearProducts(products_delta=k.head @ k.head.T - old @ old.T)

    def end(
        self, b: FluteLinearBroadcast, k: FluteLinearWorking, data: ClientData
    ) -> tuple[FluteLinearClient, FluteLinearUpload]:
        """Keep the head; upload the changes."""
        return self.kept(k), FluteLinearUpload(
            basis_delta=k.basis - b.basis, products_delta=self.products(k, k.old).products_delta
        )

    def add_products(
        self, server: FluteLinearServer, r: Reduced, round: Round
    ) -> FluteLinearServer:
        """Keep W W^T up to date."""
        return replace(server, products=server.products + r.total.products_delta.to(server.basis))

    def combine(self, server: FluteLinearServer, r: Reduced, round: Round) -> FluteLinearServer:
        """B' = mean of the B_i."""
        moved = server.basis + (r.total.basis_delta / r.weight).to(server.basis)
        return replace(self.add_products(server, r, round), basis=moved)

    def difference(self, server: FluteLinearServer) -> Tensor:
        """D = B^T B - W W^T; grad_B R = 2 B D and grad_W R = -2 D W."""
        count = self.setting.num_clients if self.config.balance == "mean" else 1
        return server.basis.T @ server.basis - server.products / count

    def imbalance(self, server: FluteLinearServer, round: Round) -> FluteLinearImbalance:
        """Send D."""
        return FluteLinearImbalance(imbalance=self.difference(server))

    def balance_head(
        self, b: FluteLinearImbalance, client: FluteLinearClient, data: ClientData
    ) -> FluteLinearWorking:
        """w_i <- w_i + 2 eta_r D w_i."""
        head = client.head + 2 * self.config.server_learning_rate * b.imbalance @ client.head
        return FluteLinearWorking(basis=b.imbalance, head=head, old=client.head)

    def balance(self, server: FluteLinearServer, r: Reduced, round: Round) -> FluteLinearServer:
        """B <- B' - 2 eta_r B' D, D from before the heads moved."""
        step = 2 * self.config.server_learning_rate * server.basis @ self.difference(server)
        return replace(self.add_products(server, r, round), basis=server.basis - step)

    def model(self, b: FluteLinearBroadcast, client: FluteLinearClient) -> Model:
        """theta_i = B w_i."""
        return self.linear.served(b.basis @ client.head)

    def describe(self, server: FluteLinearServer) -> dict[str, float]:
        """Rank, and how far the factors are from balance."""
        size = float(torch.linalg.matrix_norm(self.difference(server)))
        return {"rank": float(self.config.rank), "imbalance": size}


METHOD = Method(
    name="flute_linear",
    title="FLUTE (linear)",
    paper="Liu, Shen, Yang 2024",
    config=FluteLinearConfig,
    build=build,
    uploads="its change of the basis and of w w^T",
    private="the head w_i",
    inferable="w_i up to sign, from its change of w w^T; residuals of its rows",
    numbers={"products": "rank * rank", "train": "rank * (p + rank)", "balance": "rank * rank"},
    problem="regression",
)
