"""Phases of factorisations that average W: what the server must know of H, and step sizes.

The paper's d needs lambda_max(HH^T) over all clients, and eps needs the objective: every client
sends HH^T and one number in every round. The safe d also needs the largest of the clients' own
Lipschitz constants: one more number each, seen one by one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Cohort, Phase, Reduced, Stacked, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.records import Empty, Record
from handspan.numerics.factorization.problem import (
    FactorBroadcast,
    FactorClient,
    FactorConfig,
    Factorization,
    FactorServer,
    largest,
)
from handspan.numerics.sparse import entries, residual, times

_PAPER = 5.0  # d = 5 lambda_max(HH^T) in units of 1/2 |X - WH|^2
_SAFE = 0.51


@dataclass(frozen=True, kw_only=True)
class AveragingConfig(FactorConfig):
    """Settings of factorisations that average W."""

    penalty_tolerance: float = 1e-5
    """Relative change eps of the objective below which it rests."""
    sampling: str = "weighted"
    """Cohorts: ``weighted`` by rows with replacement (the mean counts a client as often as it was
    drawn), or ``uniform`` without (the mean is weighted by rows)."""
    idle_clients: str = "compute"
    """Clients outside the cohort ``compute`` all the same (PCC), or ``freeze`` (PCP)."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        super().__post_init__()
        self.one_of("sampling", ("weighted", "uniform"))
        self.one_of("idle_clients", ("compute", "freeze"))


class AveragingServer(FactorServer):
    """W, and the inverse step size of the round."""

    constant: Tensor  # () d


class Measured(Record):
    """What the objective and d need of a client."""

    hh: Tensor  # (K, K)
    fit: Tensor  # () |X_p - W H_p|^2 - |X_p|^2


class Measuring(Record):
    """The private record on its way through, and what goes up."""

    client: FactorClient
    sent: Measured


class Bound(Record):
    """A client's own Lipschitz constant in W."""

    constant: Tensor  # () 2 lambda_max(U_p) / N_p


@dataclass(frozen=True)
class AveragedFactorization(Factorization):
    """A factorisation whose clients move W themselves."""

    config: AveragingConfig

    @property
    def is_whole(self) -> bool:
        """Whether all clients take part: m = P means weights omega_p, not P draws."""
        return self.setting.cohort >= self.setting.num_clients

    @property
    def may_repeat(self) -> bool:
        """Whether a client may be drawn twice."""
        return self.config.sampling == "weighted" and not self.is_whole

    @property
    def has_gaps(self) -> bool:
        """Whether entries of the rows are missing."""
        return False

    def init_server(self, key: Tensor, population: Population) -> AveragingServer:
        """Draw W."""
        fields = self.first_server(key, population)
        return AveragingServer(**fields, constant=torch.zeros_like(fields["low"]))

    def start_phase(self) -> Phase:
        """Return the set-up phase in which clients bring H to scale; nothing is sent."""

        def scaled(b: FactorBroadcast, k: FactorClient, batch: Batch) -> FactorClient:
            rows = self.first_rows(b, k.rows, batch.x) * batch.weight.unsqueeze(1)
            return FactorClient(rows=rows)

        def combine(server: AveragingServer, r: Reduced, round: Round) -> AveragingServer:
            return dataclasses.replace(server, scale=torch.ones_like(server.scale))

        return Phase(
            name="start",
            broadcast=self.broadcast,
            begin=lambda b, client, data: client,
            stages=(Stage(step=scaled, steps=1, sparse=True, forward_only=True),),
            end=lambda b, k, data: (k, Empty()),
            combine=combine,
            computes="all",
            uploads="all",
            infers="nothing",
        )

    # -- what the server must know -----------------------------------------------------------

    def measured(self, b: FactorBroadcast, rows: Tensor, x: Any, weight: Tensor) -> Measured:
        """HH^T and the fit of rows, weighted."""
        real = rows * weight.unsqueeze(1)
        hh = real.T @ rows
        if self.has_gaps:
            known = entries(x, weight)
            left = entries(residual(x, rows, b.basis), weight)
            return Measured(hh=hh, fit=(left * left).sum() - (known * known).sum())
        cross = (real * times(x, b.basis)).sum()
        return Measured(hh=hh, fit=(b.basis.T @ b.basis * hh).sum() - 2 * cross)

    def measure_phase(self) -> Phase:
        """Return the phase in which every client tells HH^T and its fit."""

        def begin(b: FactorBroadcast, client: FactorClient, data: ClientData) -> Measuring:
            size = self.config.num_components
            hh = b.basis.new_zeros(size, size)
            return Measuring(client=client, sent=Measured(hh=hh, fit=torch.zeros_like(b.scale)))

        def step(b: FactorBroadcast, k: Measuring, batch: Batch) -> Measuring:
            rows = k.client.rows * batch.weight.unsqueeze(1)
            return Measuring(client=k.client, sent=self.measured(b, rows, batch.x, batch.weight))

        def flat(
            b: FactorBroadcast, client: FactorClient, cohort: Cohort
        ) -> tuple[FactorClient, Measured]:
            weight = cohort.weights[cohort.segment.cpu()].to(client.rows)
            return client, self.measured(b, client.rows, cohort.x, weight)

        return Phase(
            name="measure",
            broadcast=self.broadcast,
            begin=begin,
            stages=(Stage(step=step, steps=1, sparse=True, forward_only=True),),
            end=lambda b, k, data: (k.client, k.sent),
            combine=self.take_measured,
            computes="all",
            uploads="all",
            cohort_update=None if self.has_gaps else flat,
            infers="how the client uses the components",
        )

    def take_measured(self, server: AveragingServer, r: Reduced, round: Round) -> AveragingServer:
        """Take the objective of the round, and d as printed."""
        total: Measured = r.total
        hh = total.hh.to(server.basis)
        fit = server.square_norm + total.fit.to(server.basis)
        d = _PAPER * largest(2 * hh / server.num_rows)
        server = dataclasses.replace(server, constant=d)
        return self.known(server, fit, hh, round)

    def bound_phase(self) -> Phase:
        """Return the phase in which every client tells its own Lipschitz constant."""

        def end(
            b: FactorBroadcast, client: FactorClient, data: ClientData
        ) -> tuple[FactorClient, Bound]:
            place = torch.arange(len(client.rows), device=client.rows.device)
            rows = client.rows * (place < data.num).to(client.rows).unsqueeze(1)
            return client, Bound(constant=2 * largest(rows.T @ rows) / data.num)

        def combine(server: AveragingServer, r: Stacked, round: Round) -> AveragingServer:
            own = _SAFE * r.uploads.constant.max().to(server.constant)
            return dataclasses.replace(server, constant=torch.maximum(server.constant, own))

        return Phase(
            name="bound",
            broadcast=self.broadcast,
            begin=lambda b, client, data: client,
            end=end,
            combine=combine,
            reduce="stack",
            computes="all",
            uploads="all",
            infers="how strongly the client uses its main direction",
        )

    def observing(self) -> tuple[Phase, ...]:
        """Phases that settle the objective and d."""
        safe = (self.bound_phase(),) if self.config.constants == "safe" else ()
        return (self.measure_phase(), *safe)

    def take_mean(self, server: AveragingServer, r: Reduced, round: Round) -> AveragingServer:
        """Eqs. 8-9: projection of the mean."""
        mean = (r.total.basis / r.weight).to(server.basis)
        return dataclasses.replace(server, basis=self.project(mean, server.low, server.high))
