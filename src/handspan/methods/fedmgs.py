"""FedMGS: federated matrix factorisation by sharing what makes up the gradient.

Objective (Eqs. 2, 35-36), rows x_j of all clients, W (M x K) shared, h_j (K) private
    F(W, H) = 1/N sum_j |x_j - W h_j|^2
              + sum_j [ rho/2 ((1^T h_j)^2 - |h_j|^2) + nu/2 |h_j|^2 ],   W in [low, high], H >= 0

Map
    Eq. 28      row_steps   Q1 projected gradient steps on the client's rows of H
    Eq. 31      row_steps   upload HH^T and XH^T, as differences to what was sent before
    Eqs. 29-30  combine     Q2 projected gradient steps on W from the running sums alone
    Eq. 37      combine     SNCP: rho grows by 1.5 when the objective has come to rest
    Eqs. 21-22  gap_phase   stationarity gaps, where a tolerance asks for them

Deviations
    Clients upload differences and compute their old sums from the stored H, so that the server
    keeps running sums only: W, HH^T, XH^T. The first round takes one upload of everybody's sums,
    or H = 0 (``start=zero``). A client drawn twice (``sampling=weighted``) works and counts once.
    ``constants=paper``: c and d as printed, gamma = 1 and without the regulariser; ``safe``: 0.51
    of the true Lipschitz constants, so that F descends. Labels are argmax_k h_jk; a row that is
    all zero takes the nearest column of W. Start: W, H = sqrt(mean |X| / K) * U[0, 1).
    ``row_set=assignment`` finds one-hot rows and W exactly: federated k-means (Lloyd).

References
----------
    [1] Wang, Chang: Federated Matrix Factorization: Algorithm Design and Application to Data
        Clustering. IEEE Transactions on Signal Processing 2022. arXiv:2002.04930.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Cohort, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.method import Method, Setting
from handspan.core.records import Record
from handspan.numerics.factorization.gaps import gap_phase
from handspan.numerics.factorization.problem import (
    REVEALS,
    FactorBroadcast,
    FactorClient,
    FactorConfig,
    Factorization,
    FactorServer,
    fit_from_sums,
    gradient_map,
    inverse,
    largest,
)
from handspan.numerics.scanning import scan_phase
from handspan.numerics.sparse import times, transposed_times


@dataclass(frozen=True, kw_only=True)
class FedMgsConfig(FactorConfig):
    """Settings of FedMGS."""

    row_steps: int = 10
    """Projected steps Q1 on H in a round."""
    shared_steps: int = 10
    """Projected steps Q2 on W in a round."""
    start: str = "upload"
    """First sums: ``upload`` (of all clients, once) or ``zero`` (H = 0: nobody sends any)."""
    sampling: str = "uniform"
    """Cohorts: ``uniform`` without replacement, or ``weighted`` by rows with replacement."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        super().__post_init__()
        for name in ("row_steps", "shared_steps"):
            self.at_least(name, 1)
        self.one_of("start", ("upload", "zero"))
        self.one_of("sampling", ("uniform", "weighted"))


class FedMgsServer(FactorServer):
    """W, and the running sums of all clients."""

    hh: Tensor  # (K, K), sum of h h^T
    xh: Tensor  # (M, K), sum of x h^T


class FedMgsBroadcast(FactorBroadcast):
    """W, the numbers of the round, and how often a client was drawn."""

    share: Tensor | None  # () of each client: 1 / multiplicity


class FedMgsUpload(Record):
    """Change of the client's sums."""

    hh: Tensor  # (K, K)
    xh: Tensor  # (M, K)


class FedMgsWorking(Record):
    """H, and what goes up."""

    rows: Tensor
    sent: FedMgsUpload


def build(setting: Setting, config: FedMgsConfig) -> Algorithm:
    """Compose the algorithm."""
    method = _FedMgs(config, setting)
    start = Phase(
        name="start",
        broadcast=method.broadcast,
        begin=method.begin,
        stages=(Stage(step=method.sums_at_start, steps=1, sparse=True, forward_only=True),),
        end=method.end,
        combine=method.take_start,
        computes="all",
        uploads="all",
        cohort_update=method.cohort_start,
        infers=REVEALS,
    )
    factorise = Phase(
        name="factorise",
        broadcast=method.broadcast_round,
        begin=method.begin,
        stages=(Stage(step=method.local_steps, steps=1, models=config.row_steps, sparse=True),),
        end=method.end,
        combine=method.combine,
        per_client=frozenset({"share"} if method.may_repeat else ()),
        cohort_update=method.cohort_update,
        infers=REVEALS,
    )
    gaps = gap_phase(method, method.constant, lambda server: (server.hh, server.xh))
    return Algorithm(
        name="fedmgs",
        init_server=method.init_server,
        init_client=method.init_client,
        setup=(
            scan_phase(setting.scalar, method.take_scan),
            *((start,) if config.start == "upload" else ()),
        ),
        rounds=(factorise, *((gaps,) if config.gap_tolerance else ())),
        model=None,
        deploy=method.broadcast,
        labels=method.labels,
        per_row=frozenset({"rows"}),
        sampling="weighted" if method.may_repeat else "fixed",
        done=method.done,
        describe=method.describe,
    )


@dataclass(frozen=True)
class _FedMgs(Factorization):
    """The functions of the algorithm, bound to one problem."""

    config: FedMgsConfig
    setting: Setting

    @property
    def may_repeat(self) -> bool:
        """Whether a client may be drawn twice; m = P is full participation."""
        is_part = self.setting.cohort < self.setting.num_clients
        return self.config.sampling == "weighted" and is_part

    def init_server(self, key: Tensor, population: Population) -> FedMgsServer:
        """Draw W; there are no sums yet."""
        fields = self.first_server(key, population)
        size, basis = self.config.num_components, fields["basis"]
        return FedMgsServer(**fields, hh=basis.new_zeros(size, size), xh=torch.zeros_like(basis))

    def init_client(self, key: Tensor, data: ClientData) -> FactorClient:
        """Draw H in [0, 1), or begin with H = 0."""
        client = super().init_client(key, data)
        if self.config.start == "upload":
            return client
        return FactorClient(rows=torch.zeros_like(client.rows))

    # -- set-up ------------------------------------------------------------------------------

    def sums_at_start(self, b: FactorBroadcast, k: FedMgsWorking, batch: Batch) -> FedMgsWorking:
        """Scale H, bring it into its set, and sum."""
        rows = self.first_rows(b, k.rows, batch.x) * batch.weight.unsqueeze(1)
        sent = FedMgsUpload(hh=rows.T @ rows, xh=transposed_times(batch.x, rows))
        return FedMgsWorking(rows=rows, sent=sent)

    def cohort_start(
        self, b: FactorBroadcast, client: FactorClient, cohort: Cohort
    ) -> tuple[FactorClient, FedMgsUpload]:
        """Run ``sums_at_start`` on flat rows."""
        rows = self.first_rows(b, client.rows, cohort.x)
        sent = rows * cohort.weights[cohort.segment.cpu()].to(rows).unsqueeze(1)
        return FactorClient(rows=rows), FedMgsUpload(
            hh=sent.T @ rows, xh=transposed_times(cohort.x, sent)
        )

    def take_start(self, server: FedMgsServer, r: Reduced, round: Round) -> FedMgsServer:
        """Take the sums of all clients."""
        total: FedMgsUpload = r.total
        one = torch.ones_like(server.scale)
        hh, xh = total.hh.to(server.hh), total.xh.to(server.xh)
        server = dataclasses.replace(server, hh=hh, xh=xh, scale=one)
        return dataclasses.replace(server, objective=self.objective(server, self.fit(server), hh))

    # -- rounds ------------------------------------------------------------------------------

    def broadcast_round(self, server: FedMgsServer, round: Round) -> FedMgsBroadcast:
        """Send W; to clients that may be drawn twice also their share of one upload."""
        share = (1 / round.multiplicity.double()).to(self.setting.scalar)
        plain = vars(self.broadcast(server, round))
        return FedMgsBroadcast(**plain, share=share if self.may_repeat else None)

    def begin(self, b: FactorBroadcast, client: FactorClient, data: ClientData) -> FedMgsWorking:
        """Start from the stored H."""
        size = self.config.num_components
        nothing = FedMgsUpload(hh=b.basis.new_zeros(size, size), xh=torch.zeros_like(b.basis))
        return FedMgsWorking(rows=client.rows, sent=nothing)

    def local_steps(self, b: FedMgsBroadcast, k: FedMgsWorking, batch: Batch) -> FedMgsWorking:
        """Q1 projected steps on H, then the change of the sums."""
        real = batch.weight.unsqueeze(1)
        old = k.rows * real
        new = self.row_steps(b, old, times(batch.x, b.basis), self.config.row_steps) * real
        share = torch.ones_like(b.scale) if b.share is None else b.share
        hh = share * (new.T @ new - old.T @ old)
        xh = transposed_times(batch.x, share * (new - old))
        return FedMgsWorking(rows=new, sent=FedMgsUpload(hh=hh, xh=xh))

    def cohort_update(
        self, b: FedMgsBroadcast, client: FactorClient, cohort: Cohort
    ) -> tuple[FactorClient, FedMgsUpload]:
        """Run ``local_steps`` on flat rows: one sparse product for the cohort, each way."""
        old = client.rows
        new = self.row_steps(b, old, times(cohort.x, b.basis), self.config.row_steps)
        weight = cohort.weights if b.share is None else cohort.weights * b.share.cpu().double()
        weight = weight[cohort.segment.cpu()].to(new).unsqueeze(1)
        change = (new - old) * weight
        hh = (new * weight).T @ new - (old * weight).T @ old
        return FactorClient(rows=new), FedMgsUpload(hh=hh, xh=transposed_times(cohort.x, change))

    def end(
        self, b: FactorBroadcast, k: FedMgsWorking, data: ClientData
    ) -> tuple[FactorClient, FedMgsUpload]:
        """Keep H; upload the change of the sums."""
        return FactorClient(rows=k.rows), k.sent

    def combine(self, server: FedMgsServer, r: Reduced, round: Round) -> FedMgsServer:
        """Q2 projected steps on W (Eq. 30), then the penalty schedule."""
        change: FedMgsUpload = r.total
        hh = server.hh + change.hh.to(server.hh)
        xh = server.xh + change.xh.to(server.xh)
        server = dataclasses.replace(server, hh=hh, xh=xh)
        server = dataclasses.replace(server, basis=self.basis_steps(server))
        return self.known(server, self.fit(server), hh, round)

    def constant(self, server: FedMgsServer, hh: Tensor) -> Tensor:
        """d: lambda_max(HH^T) / N in units of F, and 0.51 of the Lipschitz constant."""
        share = 0.5 if self.config.constants == "paper" else 0.51
        return share * largest(2 * hh / server.num_rows)

    def basis_steps(self, server: FedMgsServer) -> Tensor:
        """Take Q2 projected steps on W; beside one-hot rows the means are exact."""
        basis, hh, xh = server.basis, server.hh, server.xh
        if self.config.row_set == "assignment":
            count = hh.diagonal()
            means = torch.where(count > 0, xh / count.clamp(min=1), basis)
            return self.project(means, server.low, server.high)
        quadratic, linear = 2 * hh / server.num_rows, 2 * xh / server.num_rows  # G1, G2 (Eq. 29)
        move, shift = gradient_map(quadratic, linear, inverse(self.constant(server, hh)))
        for _ in range(self.config.shared_steps):
            basis = self.project(torch.addmm(shift, basis, move), server.low, server.high)
        return basis

    def fit(self, server: FedMgsServer) -> Tensor:
        """|X - WH|^2 from the running sums alone."""
        return fit_from_sums(server.square_norm, server.basis, server.hh, server.xh)


METHOD = Method(
    name="fedmgs",
    title="FedMGS",
    paper="Wang, Chang 2022",
    config=FedMgsConfig,
    build=build,
    uploads="changes of HH^T and XH^T; once least, largest, sum and norm of the rows",
    private="one row of H for each data row",
    inferable="the rows themselves, of a client with no more rows than components",
    numbers={
        "scan": "4",
        "start": "num_components * (p + num_components)",
        "factorise": "num_components * (p + num_components)",
    },
    problem="matrix",
)
