"""FedPALM: clients run PALM on their own problem, and the server averages W.

Objective (Eqs. 2, 35-36), rows x_j of all clients, W (M x K) shared, h_j (K) private
    F(W, H) = 1/N sum_j |x_j - W h_j|^2
              + sum_j [ rho/2 ((1^T h_j)^2 - |h_j|^2) + nu/2 |h_j|^2 ],   W in [low, high], H >= 0
    F_p is the part of client p over omega_p = N_p / N.

Map
    (15), (16)   pairs          a projected step on H at the client's W, one on its W; pairs = Q/2
    (8), (9)     take_mean      projection of the mean
    eps, SNCP    take_measured  rho grows by 1.5 when the objective has come to rest

Deviations
    A baseline of the paper (Remark 1): good at Q = 2 only. c follows the client's W from pair to
    pair. ``constants=paper``: c and d as printed, d from the rows of H with which the round
    begins; ``safe``: 0.51 of the Lipschitz constants at least, a client's own d included. The
    objective is that of the beginning of the round. m = P is full participation (8).

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

from handspan.core.algorithm import Algorithm, Phase, Stage, by_examples, uniform
from handspan.core.data import Batch, ClientData, Round
from handspan.core.method import Method, Setting
from handspan.core.records import Record
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
    largest,
)
from handspan.numerics.scanning import scan_phase
from handspan.numerics.sparse import times, transposed_times


@dataclass(frozen=True, kw_only=True)
class FedPalmConfig(AveragingConfig):
    """Settings of FedPALM."""

    pairs: int = 1
    """Pairs Q/2 of a step on H and a step on W in a round."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        super().__post_init__()
        self.at_least("pairs", 1)


class FedPalmBroadcast(FactorBroadcast):
    """W, the numbers of the round, and how to move W."""

    constant: Tensor  # () d
    low: Tensor
    high: Tensor


class FedPalmUpload(Record):
    """The client's W."""

    basis: Tensor  # (M, K)


class FedPalmWorking(Record):
    """H, and the client's W."""

    rows: Tensor
    basis: Tensor


def build(setting: Setting, config: FedPalmConfig) -> Algorithm:
    """Compose the algorithm."""
    method = _FedPalm(config, setting)
    moving = Stage(step=method.local_pairs, steps=1, models=2 * config.pairs, sparse=True)
    palm = Phase(
        name="palm",
        broadcast=method.broadcast_step,
        begin=lambda b, client, data: FedPalmWorking(rows=client.rows, basis=b.basis),
        stages=(moving,),
        end=method.end,
        combine=method.take_mean,
        weight=uniform if method.may_repeat else by_examples,
        computes="all" if config.idle_clients == "compute" else "cohort",
        infers=REVEALS,
    )
    gaps = gap_phase(method, lambda server, hh: server.constant)
    return Algorithm(
        name="fedpalm",
        init_server=method.init_server,
        init_client=method.init_client,
        setup=(scan_phase(setting.scalar, method.take_scan), method.start_phase()),
        rounds=(*method.observing(), palm, *((gaps,) if config.gap_tolerance else ())),
        model=None,
        deploy=method.broadcast,
        labels=method.labels,
        per_row=frozenset({"rows"}),
        sampling="weighted" if method.may_repeat else "fixed",
        done=method.done,
        describe=method.describe,
    )


@dataclass(frozen=True)
class _FedPalm(AveragedFactorization):
    """The functions of the algorithm, bound to one problem."""

    config: FedPalmConfig

    def broadcast_step(self, server: AveragingServer, round: Round) -> FedPalmBroadcast:
        """Send W, d and the box."""
        like = self.setting.scalar
        return FedPalmBroadcast(
            **vars(self.broadcast(server, round)),
            constant=server.constant.to(like),
            low=server.low.to(like),
            high=server.high.to(like),
        )

    def local_pairs(self, b: FedPalmBroadcast, k: FedPalmWorking, batch: Batch) -> FedPalmWorking:
        """Take all pairs of steps (15)-(16)."""
        real, num = batch.weight.unsqueeze(1), batch.weight.sum()
        rows, basis = k.rows * real, k.basis
        for _ in range(self.config.pairs):
            here = dataclasses.replace(b, basis=basis)
            rows = self.row_steps(here, rows, times(batch.x, basis), 1) * real
            hh, xh = rows.T @ rows, transposed_times(batch.x, rows)
            d = b.constant
            if self.config.constants == "safe":
                d = torch.maximum(d, 0.51 * largest(2 * hh / num))
            slope = 2 * (basis @ hh - xh) / num
            basis = self.project(basis - inverse(d) * slope, b.low, b.high)
        return FedPalmWorking(rows=rows, basis=basis)

    def end(
        self, b: FedPalmBroadcast, k: FedPalmWorking, data: ClientData
    ) -> tuple[FactorClient, FedPalmUpload]:
        """Keep H; upload W_p."""
        return FactorClient(rows=k.rows), FedPalmUpload(basis=k.basis)


METHOD = Method(
    name="fedpalm",
    title="FedPALM",
    paper="Wang, Chang 2022, Remark 1",
    config=FedPalmConfig,
    build=build,
    uploads="the client's W; HH^T, its fit and a bound; once least, largest, sum, norm of the rows",
    private="one row of H for each data row",
    inferable="the span of the rows, of a client with no more rows than components",
    numbers={
        "scan": "4",
        "measure": "num_components * num_components + 1",
        "bound": "1",
        "palm": "num_components * p",
    },
    problem="matrix",
)
