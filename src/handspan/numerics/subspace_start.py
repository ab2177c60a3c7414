"""First bases for linear methods: what all clients say once about the subspace of their models.

``moments``: the top eigenvectors of the mean of Z_i = 1/m sum_j y_ij^2 x_ij x_ij^T; with rows of
covariance I they span the models. ``projected``: some rounds of gradient descent on each client's
own model, each followed by a projection of all models side by side to rank k, which needs the sum
of m_i m_i^T alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import WEIGHTS, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Round
from handspan.core.records import Record
from handspan.numerics.linear_model import LinearModel
from handspan.numerics.subspaces import from_triangle, top_eigenvectors, triangle

STARTS = ("moments", "projected", "random")


class Moment(Record):
    """Lower triangle of a symmetric matrix: Z_i, or m_i m_i^T of an unfactorised model."""

    numbers: Tensor  # (d (d + 1) / 2,)


class Starting(Record):
    """A private record on its way through the set-up, and what is sent."""

    client: Any
    moment: Moment


def start_phases(
    start: str,
    linear: LinearModel,
    *,
    rank: int,
    rounds: int,
    batch_size: int | None,
    weights: str,
    broadcast: Callable[[Any, Round], Any],
) -> tuple[Phase, ...]:
    """Return the set-up phases after which the server's ``basis`` (d, k) is the start.

    Parameters
    ----------
    start
        One of ``STARTS``; ``random`` leaves the basis as it is.
    linear
        The model.
    rank
        Columns of the basis.
    rounds
        Of projected gradient descent.
    batch_size
        Rows of the batch that gives the moments; projected descent takes all rows.
    weights
        Of the mean over all clients.
    broadcast
        (S, Round) -> B with the field ``basis``; with ``projected`` the client's record has the
        field ``unfactorised`` (d, c).
    """
    if start == "random":
        return ()
    size = linear.num_features

    def begin(b: Any, client: Any, data: ClientData) -> Starting:
        nothing = b.basis.new_zeros(size * (size + 1) // 2)
        return Starting(client=client, moment=Moment(numbers=nothing))

    def moments(b: Any, k: Starting, batch: Batch) -> Starting:
        x, y, num = linear.rows(batch)
        z = (x * y.square().sum(1, keepdim=True)).T @ x / num
        return Starting(client=k.client, moment=Moment(numbers=triangle(z)))

    def projected(b: Any, k: Starting, batch: Batch) -> Starting:
        x, y, num = linear.rows(batch)
        old = b.basis @ (b.basis.T @ k.client.unfactorised)
        covariance = x.T @ x / num
        largest = torch.linalg.eigvalsh(covariance)[-1].clamp(min=torch.finfo(x.dtype).tiny)
        new = old - (covariance @ old - x.T @ y / num) / largest
        client = dataclasses.replace(k.client, unfactorised=new)
        return Starting(client=client, moment=Moment(numbers=triangle(new @ new.T)))

    def combine(server: Any, r: Reduced, round: Round) -> Any:
        mean = from_triangle(r.total.numbers / r.weight, size)
        return dataclasses.replace(server, basis=top_eigenvectors(mean, rank).to(server.basis))

    is_once = start == "moments"
    stage = Stage(
        step=moments if is_once else projected,
        steps=1,
        batch_size=batch_size if is_once else None,
        forward_only=True,
    )
    return tuple(
        Phase(
            name=f"{start}_{index}",
            broadcast=broadcast,
            begin=begin,
            stages=(stage,),
            end=lambda b, k, data: (k.client, k.moment),
            combine=combine,
            weight=WEIGHTS[weights],
            computes="all",
            uploads="all",
            infers="the rows, of a client with few of them",
        )
        for index in range(1 if is_once else rounds)
    )
