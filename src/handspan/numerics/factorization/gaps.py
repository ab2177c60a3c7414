"""How far from stationary: G_H and G_W of Eqs. 21-22, measured on all clients after a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Cohort, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Round
from handspan.core.records import Record
from handspan.numerics.factorization.problem import (
    REVEALS,
    FactorBroadcast,
    FactorClient,
    Factorization,
    FactorServer,
    inverse,
)
from handspan.numerics.sparse import times, transposed_times


class GapUpload(Record):
    """The client's part of G_H, and its sums where the server does not have them."""

    gap: Tensor  # ()
    hh: Tensor | None
    xh: Tensor | None


class GapWorking(Record):
    """The private record on its way through, and what goes up."""

    client: FactorClient
    sent: GapUpload
    num: Tensor


def gap_phase(
    problem: Factorization,
    constant: Callable[[Any, Tensor], Tensor],
    sums: Callable[[Any], tuple[Tensor, Tensor]] | None = None,
) -> Phase:
    """Return the phase that measures both gaps.

    Parameters
    ----------
    problem
        The factorisation.
    constant
        (S, HH^T) -> d.
    sums
        S -> HH^T, XH^T of a server that keeps them; otherwise clients send theirs.
    """

    def upload(b: FactorBroadcast, rows: Tensor, x: Any, weight: Tensor, num: Tensor) -> GapUpload:
        moved = problem.row_steps(b, rows, times(x, b.basis), 1) - rows
        # Eq. 21 with omega_p = N_p / N and c_p = c / omega_p
        square = (moved * moved).sum(1) * weight * b.num_rows / num
        gap = problem.curvature(b)[1] ** 2 * square.sum()
        if sums is not None:
            return GapUpload(gap=gap, hh=None, xh=None)
        real = rows * weight.unsqueeze(1)
        return GapUpload(gap=gap, hh=real.T @ rows, xh=transposed_times(x, real))

    def begin(b: FactorBroadcast, client: FactorClient, data: ClientData) -> GapWorking:
        size = problem.config.num_components
        nothing = GapUpload(
            gap=torch.zeros_like(b.scale),
            hh=None if sums is not None else b.basis.new_zeros(size, size),
            xh=None if sums is not None else torch.zeros_like(b.basis),
        )
        return GapWorking(client=client, sent=nothing, num=data.num)

    def step(b: FactorBroadcast, k: GapWorking, batch: Batch) -> GapWorking:
        rows = k.client.rows * batch.weight.unsqueeze(1)
        sent = upload(b, rows, batch.x, batch.weight, k.num)
        return GapWorking(client=k.client, sent=sent, num=k.num)

    def cohort_update(
        b: FactorBroadcast, client: FactorClient, cohort: Cohort
    ) -> tuple[FactorClient, GapUpload]:
        segment, rows = cohort.segment.cpu(), client.rows
        weight = cohort.weights[segment].to(rows)
        return client, upload(b, rows, cohort.x, weight, cohort.num[segment].to(rows))

    def combine(server: FactorServer, r: Reduced, round: Round) -> FactorServer:
        total: GapUpload = r.total
        if sums is not None:
            hh, xh = sums(server)
        else:
            assert total.hh is not None and total.xh is not None
            hh, xh = total.hh.to(server.basis), total.xh.to(server.basis)
        d, basis = constant(server, hh), server.basis
        slope = 2 * (basis @ hh - xh) / server.num_rows
        moved = problem.project(basis - inverse(d) * slope, server.low, server.high) - basis
        gap = d**2 * (moved * moved).sum()  # Eq. 22
        return dataclasses.replace(server, gap_rows=total.gap.to(basis), gap_basis=gap)

    return Phase(
        name="gaps",
        broadcast=problem.broadcast,
        begin=begin,
        stages=(Stage(step=step, steps=1, sparse=True, forward_only=True),),
        end=lambda b, k, data: (k.client, k.sent),
        combine=combine,
        computes="all",
        uploads="all",
        cohort_update=cohort_update,
        infers="how far the client's rows are from fitted" if sums is not None else REVEALS,
    )
