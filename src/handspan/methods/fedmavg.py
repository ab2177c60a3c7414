"""FedMAvg: federated matrix factorisation by averaging the clients' W.

Objective (Eqs. 2, 35-36), rows x_j of all clients, W (M x K) shared, h_j (K) private
    F(W, H) = 1/N sum_j |x_j - W h_j|^2
              + sum_j [ rho/2 ((1^T h_j)^2 - |h_j|^2) + nu/2 |h_j|^2 ],   W in [low, high], H >= 0
    F_p is the part of client p over omega_p = N_p / N.

Map
    Alg. 1, (11)       move_rows      Q1 projected gradient steps on the client's rows of H
    Alg. 1, (13)       own_basis      Q2 gradient steps on the client's W, in closed form
    (8), (9), (10)     take_mean      projection of the mean
    eps, SNCP          take_measured  rho grows by 1.5 when the objective has come to rest
    Eqs. 21-22         gap_phase      stationarity gaps, where a tolerance asks for them

Deviations
    Q2 steps are W (I - eta U)^Q + eta V sum_q (I - eta U)^q with U = HH^T, V = XH^T: exact, K x K
    for each client, and one sparse product for all. With ``missing`` they are taken one by one.
    d needs HH^T and eps the objective of all clients: each sends K^2 + 1 numbers a round.
    ``constants=paper``: c as printed, without the regulariser, d = 5 lambda_max(HH^T); ``safe``:
    c is 0.51 of the Lipschitz constant, and d at least 0.51 of every client's own constant (else
    a client with large rows of H diverges): one more number from each.
    The objective, and so eps, is that between the steps on H and those on W of a round.
    m = P is full participation with weights omega_p (8). Labels and start as in FedMGS.

References
----------
    [1] Wang, Chang: Federated Matrix Factorization: Algorithm Design and Application to Data
        Clustering. IEEE Transactions on Signal Processing 2022. arXiv:2002.04930.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Cohort, Phase, Stage, by_examples, uniform
from handspan.core.data import Batch, ClientData, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, Setting
from handspan.core.records import Empty, Record
from handspan.numerics.factorization.averaging import (
    AveragedFactorization,
    AveragingConfig,
    AveragingServer,
)
from handspan.numerics.factorization.gaps import gap_phase
from handspan.numerics.factorization.problem import (
    REVEALS,
    FactorBroadcast,
    FactorClient,
    inverse,
)
from handspan.numerics.factorization.sets import ROW_SETS
from handspan.numerics.scanning import scan_phase
from handspan.numerics.sparse import residual, times, transposed_times


@dataclass(frozen=True, kw_only=True)
class FedMAvgConfig(AveragingConfig):
    """Settings of FedMAvg."""

    row_steps: int = 10
    """Projected steps Q1 on H in a round."""
    shared_steps: int = 5
    """Steps Q2 on W in a round; Q-hat where they diminish."""
    schedule: str = "diminishing"
    """Q2 is ``constant``, or ``diminishing``: floor(Q-hat / s) + 1 in round s."""
    missing: bool = False
    """Entries that are not stored (dense rows: that are 0) are unknown, not 0."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        super().__post_init__()
        for name in ("row_steps", "shared_steps"):
            self.at_least(name, 1)
        self.one_of("schedule", ("constant", "diminishing"))
        if self.missing and self.gap_tolerance:
            raise HandspanError("gaps are those of complete rows: drop gap_tolerance, or missing")
        if self.missing:  # which column is nearest cannot be told from a product
            self.one_of("row_set", [name for name in ROW_SETS if name != "assignment"])


class FedMAvgBroadcast(FactorBroadcast):
    """W, the numbers of the round, and how to move W."""

    step: Tensor  # () 1/d
    count: Tensor  # () Q2


class FedMAvgUpload(Record):
    """The client's W."""

    basis: Tensor  # (M, K)


class FedMAvgWorking(Record):
    """H, its sums, and the client's W."""

    rows: Tensor
    hh: Tensor
    xh: Tensor
    basis: Tensor


def build(setting: Setting, config: FedMAvgConfig) -> Algorithm:
    """Compose the algorithm."""
    method = _FedMAvg(config, setting)
    computes = "all" if config.idle_clients == "compute" else "cohort"
    moving = Stage(step=method.move_rows, steps=1, models=config.row_steps, sparse=True)
    rows = Phase(
        name="rows",
        broadcast=method.broadcast,
        begin=lambda b, client, data: client,
        stages=(moving,),
        end=lambda b, k, data: (k, Empty()),
        combine=lambda server, r, round: server,
        computes=computes,
        uploads=computes,
        cohort_update=None if config.missing else method.move_flat,
        infers="nothing",
    )
    average = Phase(
        name="average",
        broadcast=method.broadcast_step,
        begin=method.begin,
        stages=(Stage(step=method.sums, steps=1, sparse=True),),
        end=method.end,
        combine=method.take_mean,
        weight=uniform if method.may_repeat else by_examples,
        cohort_update=None if config.missing else method.average_flat,
        infers=REVEALS,
    )
    gaps = gap_phase(method, lambda server, hh: server.constant)
    return Algorithm(
        name="fedmavg",
        init_server=method.init_server,
        init_client=method.init_client,
        setup=(scan_phase(setting.scalar, method.take_scan), method.start_phase()),
        rounds=(rows, *method.observing(), average, *((gaps,) if config.gap_tolerance else ())),
        model=None,
        deploy=method.broadcast,
        labels=method.labels,
        per_row=frozenset({"rows"}),
        sampling="weighted" if method.may_repeat else "fixed",
        done=method.done,
        describe=method.describe,
    )


def powers(matrix: Tensor, eta: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """(I - eta U)^Q and eta sum_{q<Q} (I - eta U)^q, for a symmetric U and Q = count."""
    values, vectors = torch.linalg.eigh(matrix)
    rate = eta.unsqueeze(-1) * values
    power = (1 - rate) ** count
    # (1 - (1 - t)^Q) / t loses digits where t is small, and is Q at t = 0.
    small = -torch.expm1(count * torch.log1p(-rate.clamp(max=0.5)))
    ratio = torch.where(rate < 0.5, small, 1 - power) / torch.where(rate == 0, 1.0, rate)
    total = torch.where(rate == 0, count, ratio)
    both = (power, eta.unsqueeze(-1) * total)
    first, second = ((vectors * v.unsqueeze(-2)) @ vectors.mT for v in both)
    return first, second


@dataclass(frozen=True)
class _FedMAvg(AveragedFactorization):
    """The functions of the algorithm, bound to one problem."""

    config: FedMAvgConfig

    @property
    def has_gaps(self) -> bool:
        """Whether entries of the rows are missing."""
        return self.config.missing

    # -- rows --------------------------------------------------------------------------------

    def move_rows(self, b: FactorBroadcast, k: FactorClient, batch: Batch) -> FactorClient:
        """Q1 projected steps on H."""
        real = batch.weight.unsqueeze(1)
        return FactorClient(rows=self.moved(b, k.rows * real, batch.x) * real)

    def move_flat(
        self, b: FactorBroadcast, client: FactorClient, cohort: Cohort
    ) -> tuple[FactorClient, Empty]:
        """Run ``move_rows`` on flat rows."""
        return FactorClient(rows=self.moved(b, client.rows, cohort.x)), Empty()

    def moved(self, b: FactorBroadcast, rows: Tensor, x: Any) -> Tensor:
        """Take Q1 steps; with missing entries on those that are known."""
        if not self.config.missing:
            return self.row_steps(b, rows, times(x, b.basis), self.config.row_steps)
        hessian, constant = self.curvature(b)
        # The Hessian on the known entries is at most the one on all of them.
        penalty = hessian - 2 * b.basis.T @ b.basis / b.num_rows
        step = inverse(constant)
        for _ in range(self.config.row_steps):
            slope = 2 * times(residual(x, rows, b.basis), b.basis) / b.num_rows + rows @ penalty
            rows = self.project_rows(rows - step * slope)
        return rows

    # -- W -----------------------------------------------------------------------------------

    def broadcast_step(self, server: AveragingServer, round: Round) -> FedMAvgBroadcast:
        """Send W, the step size and Q2 of the round."""
        like, count = self.setting.scalar, torch.tensor(self.config.shared_steps)
        if self.config.schedule == "diminishing":
            count = count // (round.index + 1) + 1
        return FedMAvgBroadcast(
            **vars(self.broadcast(server, round)),
            step=inverse(server.constant).to(like),
            count=count.to(like),
        )

    def begin(self, b: FedMAvgBroadcast, client: FactorClient, data: ClientData) -> FedMAvgWorking:
        """Start from the server's W."""
        size = self.config.num_components
        return FedMAvgWorking(
            rows=client.rows,
            hh=b.basis.new_zeros(size, size),
            xh=torch.zeros_like(b.basis),
            basis=b.basis,
        )

    def sums(self, b: FedMAvgBroadcast, k: FedMAvgWorking, batch: Batch) -> FedMAvgWorking:
        """HH^T and XH^T; with missing entries the steps themselves."""
        rows = k.rows * batch.weight.unsqueeze(1)
        basis = k.basis
        if self.config.missing:
            eta = 2 * b.step / batch.weight.sum()
            most = self.config.shared_steps + (self.config.schedule == "diminishing")
            for q in range(most):
                slope = transposed_times(residual(batch.x, rows, basis), rows)
                basis = torch.where(q < b.count, basis - eta * slope, basis)
        hh, xh = rows.T @ rows, transposed_times(batch.x, rows)
        return FedMAvgWorking(rows=k.rows, hh=hh, xh=xh, basis=basis)

    def end(
        self, b: FedMAvgBroadcast, k: FedMAvgWorking, data: ClientData
    ) -> tuple[FactorClient, FedMAvgUpload]:
        """Keep H; upload W_p."""
        basis = k.basis
        if not self.config.missing:
            power, total = powers(k.hh, 2 * b.step / data.num, b.count)
            basis = b.basis @ power + k.xh @ total
        return FactorClient(rows=k.rows), FedMAvgUpload(basis=basis)

    def average_flat(
        self, b: FedMAvgBroadcast, client: FactorClient, cohort: Cohort
    ) -> tuple[FactorClient, FedMAvgUpload]:
        """Sum all W_p by K x K matrices and one sparse product: no M x K for a client."""
        weight = cohort.weights.to(client.rows)
        parts = client.rows.split(cohort.num.tolist())
        hh = torch.stack([part.T @ part for part in parts])
        power, total = powers(hh, 2 * b.step / cohort.num.to(client.rows), b.count)
        mixed = torch.cat(
            [p @ t for p, t in zip(parts, weight[:, None, None] * total, strict=True)]
        )
        basis = b.basis @ torch.tensordot(weight, power, 1) + transposed_times(cohort.x, mixed)
        return client, FedMAvgUpload(basis=basis)


METHOD = Method(
    name="fedmavg",
    title="FedMAvg",
    paper="Wang, Chang 2022",
    config=FedMAvgConfig,
    build=build,
    uploads="the client's W; HH^T, its fit and a bound; once least, largest, sum, norm of the rows",
    private="one row of H for each data row",
    inferable="the span of the rows, of a client with no more rows than components",
    numbers={
        "scan": "4",
        "measure": "num_components * num_components + 1",
        "bound": "1",
        "average": "num_components * p",
    },
    problem="matrix",
)
