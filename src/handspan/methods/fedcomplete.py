"""Fedcomplete: federated completion of ratings, items shared and people private.

Objective, over the known entries x_ji of row j and column i
    F = 1/2 sum_ji [ (x_ji - mu - b_i - c_j - <h_j, w_i>)^2
                     + ridge (|w_i|^2 + b_i^2 + |h_j|^2 + c_j^2) ]

Map
    (h_j, c_j)    local_step   solved exactly by each client: ridge regression on its own entries
    (w_i, b_i)    combine      one Newton-like step, scaled by the shared curvature of the rows
    mu            take_mean    mean of the known entries, once

Deviations
    A method of our own: alternating minimisation whose half on the items is a scaled gradient step
    d_i = (n_i (S + ridge I))^(-1) grad_i with S = sum_j n_j q_j q_j^T / sum_j n_j, q_j = (h_j, 1):
    it needs sums of M (K + 2) numbers, not the M K^2 of exact alternation. n_i counts the entries
    of all clients, so that a cohort moves an item by its share of them. What is not stored in a
    compressed row, or is 0 in a dense one, is unknown.

References
----------
    [1] Zhou, Wilkinson, Schreiber, Pan: Large-scale Parallel Collaborative Filtering for the
        Netflix Prize. AAIM 2008 (the weighted ridge).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm, Cohort, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Csr, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Record
from handspan.numerics.sparse import times, transposed_times


@dataclass(frozen=True, kw_only=True)
class FedcompleteConfig(MethodConfig):
    """Settings of fedcomplete."""

    num_components: int = 5
    """Directions K of taste."""
    ridge: float = 0.1
    """Weight of the ridge, for each known entry."""
    step_size: float = 1.0
    """Share of the scaled step that the server takes."""
    stop_tolerance: float = 0.0
    """Relative change of the objective below which the run ends; 0 never."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.at_least("num_components", 1)
        self.at_least("stop_tolerance", 0)
        for name in ("ridge", "step_size"):
            if not 0 < getattr(self, name) < float("inf"):
                raise HandspanError(f"{name} must be above 0, not {getattr(self, name)}")


class FedcompleteServer(Record):
    """The items."""

    items: Tensor  # (M, K + 1): w_i, and last b_i
    mean: Tensor  # () mu
    known: Tensor  # (M,) n_i: known entries of each column, of all clients
    objective: Tensor  # () 2 F of the last cohort, over its known entries
    change: Tensor  # () relative change of it


class FedcompleteBroadcast(Record):
    """The items."""

    items: Tensor
    mean: Tensor


class FedcompleteClient(Record):
    """A row (h_j, c_j) for each data row."""

    rows: Tensor  # (num, K + 1)


class FedcompleteMean(Record):
    """Sum of the known entries, and how many each column has."""

    total: Tensor  # ()
    count: Tensor  # (M,)


class FedcompleteUpload(Record):
    """Gradient of the items, and what scales it."""

    gradient: Tensor  # (M, K + 1), of the squared errors
    count: Tensor  # (M,) known entries of each column
    curvature: Tensor  # (K + 1, K + 1), sum of n_j q_j q_j^T
    loss: Tensor  # () 2 F of the client, the items' ridge left out


class FedcompleteWorking(Record):
    """The rows, and what goes up."""

    rows: Tensor
    sent: Any


def known(x: Any, weight: Tensor) -> tuple[Any, Any]:
    """Known entries of rows with 0 elsewhere, and 1 where they are."""
    if isinstance(x, Csr):
        return x, dataclasses.replace(x, values=torch.ones_like(x.values))
    is_known = (x != 0) & (weight.unsqueeze(1) > 0)
    return torch.where(is_known, x, torch.zeros_like(x)), is_known.to(x)


def solved(items: Tensor, mean: Tensor, ridge: float, x: Any, weight: Tensor) -> Tensor:
    """Rows (h_j, c_j) that fit their known entries best."""
    values, mask = known(x, weight)
    basis = torch.cat([items[:, :-1], torch.ones_like(items[:, -1:])], dim=1)
    size = basis.shape[1]
    outer = (basis.unsqueeze(2) * basis.unsqueeze(1)).reshape(len(basis), size * size)
    count = times(mask, torch.ones_like(items[:, :1])).clamp(min=1)
    gram = times(mask, outer).reshape(-1, size, size)
    eye = torch.eye(size, dtype=items.dtype, device=items.device)
    # x - mu - b on the known entries, by products: mask (b + mu) is never formed.
    offset = basis * (items[:, -1:] + mean)
    target = times(values, basis) - times(mask, offset)
    return torch.linalg.solve(gram + ridge * count.unsqueeze(2) * eye, target.unsqueeze(2))[..., 0]


def errors(items: Tensor, mean: Tensor, rows: Tensor, x: Any, weight: Tensor) -> Any:
    """Fitted minus known, 0 where nothing is known."""
    left = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)  # (h, c, 1)
    right = torch.cat(
        [items[:, :-1], torch.ones_like(items[:, -1:]), items[:, -1:] + mean], dim=1
    )  # (w, 1, b + mu)
    if isinstance(x, Csr):
        owner = torch.repeat_interleave(torch.arange(len(x)), x.indptr.diff())
        return dataclasses.replace(x, values=(left[owner] * right[x.indices]).sum(1) - x.values)
    values, mask = known(x, weight)
    return mask * (left @ right.T) - values


def build(setting: Setting, config: FedcompleteConfig) -> Algorithm:
    """Compose the algorithm."""
    if len(setting.row_shape) != 1:
        raise HandspanError("give rows of one axis to fedcomplete")
    method = _Fedcomplete(setting, config)
    return Algorithm(
        name="fedcomplete",
        init_server=method.init_server,
        init_client=method.init_client,
        setup=(
            Phase(
                name="mean",
                broadcast=method.broadcast,
                begin=method.begin_mean,
                stages=(Stage(step=method.sum_entries, steps=1, sparse=True, forward_only=True),),
                end=method.end,
                combine=method.take_mean,
                computes="all",
                uploads="all",
                cohort_update=method.sum_flat,
                infers="which columns the client knows, and the mean of its entries",
            ),
        ),
        rounds=(
            Phase(
                name="complete",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(Stage(step=method.local_step, steps=1, sparse=True),),
                end=method.end,
                combine=method.combine,
                cohort_update=method.local_flat,
                infers="which columns the client knows, and its row up to scale",
            ),
        ),
        model=None,
        per_row=frozenset({"rows"}),
        done=lambda server: bool(server.change < config.stop_tolerance),
        describe=lambda server: {
            "objective": float(server.objective),
            "num_components": float(config.num_components),
        },
    )


@dataclass(frozen=True)
class _Fedcomplete:
    """The functions of the algorithm, bound to one problem."""

    setting: Setting
    config: FedcompleteConfig

    def init_server(self, key: Tensor, population: Population) -> FedcompleteServer:
        """Draw small items without biases."""
        shape, zero = (self.setting.row_shape[0], self.config.num_components), self.setting.scalar
        draw = 0.1 * keys.normal(keys.fold(key, "items"), shape).to(zero.double())
        infinite = torch.full_like(zero.double(), torch.inf)
        return FedcompleteServer(
            items=torch.cat([draw, torch.zeros_like(draw[:, :1])], dim=1),
            mean=zero.double(),
            known=torch.zeros_like(draw[:, 0]),
            objective=infinite,
            change=infinite,
        )

    def init_client(self, key: Tensor, data: ClientData) -> FedcompleteClient:
        """Begin with rows of 0."""
        shape = (len(data.num), int(data.num.max()), self.config.num_components + 1)
        return FedcompleteClient(rows=self.setting.scalar.new_zeros(shape))

    def broadcast(self, server: FedcompleteServer, round: Round) -> FedcompleteBroadcast:
        """Send the items."""
        like = self.setting.scalar
        return FedcompleteBroadcast(items=server.items.to(like), mean=server.mean.to(like))

    def end(
        self, b: FedcompleteBroadcast, k: FedcompleteWorking, data: ClientData
    ) -> tuple[FedcompleteClient, Any]:
        """Keep the rows; upload the sums."""
        return FedcompleteClient(rows=k.rows), k.sent

    # -- mean --------------------------------------------------------------------------------

    def begin_mean(
        self, b: FedcompleteBroadcast, client: FedcompleteClient, data: ClientData
    ) -> FedcompleteWorking:
        """Nothing is summed yet."""
        nothing = FedcompleteMean(
            total=torch.zeros_like(b.mean), count=torch.zeros_like(b.items[:, 0])
        )
        return FedcompleteWorking(rows=client.rows, sent=nothing)

    def sum_entries(
        self, b: FedcompleteBroadcast, k: FedcompleteWorking, batch: Batch
    ) -> FedcompleteWorking:
        """Sum the known entries."""
        return FedcompleteWorking(rows=k.rows, sent=self.entry_sums(b, batch.x, batch.weight))

    def entry_sums(self, b: FedcompleteBroadcast, x: Any, weight: Tensor) -> FedcompleteMean:
        """Weighted sum of the known entries, and their number in each column."""
        values, mask = known(x, weight)
        total = weight @ times(values, torch.ones_like(b.items[:, :1]))[:, 0]
        return FedcompleteMean(total=total, count=transposed_times(mask, weight.unsqueeze(1))[:, 0])

    def sum_flat(
        self, b: FedcompleteBroadcast, client: FedcompleteClient, cohort: Cohort
    ) -> tuple[FedcompleteClient, FedcompleteMean]:
        """Run ``sum_entries`` on flat rows."""
        weight = cohort.weights[cohort.segment.cpu()].to(b.items)
        return client, self.entry_sums(b, cohort.x, weight)

    def take_mean(self, server: FedcompleteServer, r: Reduced, round: Round) -> FedcompleteServer:
        """Mean of all known entries."""
        mean = (r.total.total / r.total.count.sum().clamp(min=1)).to(server.mean)
        return dataclasses.replace(server, mean=mean, known=r.total.count.to(server.mean))

    # -- rounds ------------------------------------------------------------------------------

    def begin(
        self, b: FedcompleteBroadcast, client: FedcompleteClient, data: ClientData
    ) -> FedcompleteWorking:
        """Nothing is summed yet."""
        zero, items = torch.zeros_like(b.mean), torch.zeros_like(b.items)
        size = items.shape[1]
        sent = FedcompleteUpload(
            gradient=items, count=items[:, 0], curvature=items.new_zeros(size, size), loss=zero
        )
        return FedcompleteWorking(rows=client.rows, sent=sent)

    def local_step(
        self, b: FedcompleteBroadcast, k: FedcompleteWorking, batch: Batch
    ) -> FedcompleteWorking:
        """Solve for the rows, then sum the gradient of the items."""
        rows, sent = self.moved(b, batch.x, batch.weight, batch.weight)
        return FedcompleteWorking(rows=rows * batch.weight.unsqueeze(1), sent=sent)

    def local_flat(
        self, b: FedcompleteBroadcast, client: FedcompleteClient, cohort: Cohort
    ) -> tuple[FedcompleteClient, FedcompleteUpload]:
        """Run ``local_step`` on flat rows."""
        weight = cohort.weights[cohort.segment.cpu()].to(client.rows)
        rows, sent = self.moved(b, cohort.x, torch.ones_like(weight), weight)
        return FedcompleteClient(rows=rows), sent

    def moved(
        self, b: FedcompleteBroadcast, x: Any, real: Tensor, weight: Tensor
    ) -> tuple[Tensor, FedcompleteUpload]:
        """Rows, and sums over them with weights."""
        rows = solved(b.items, b.mean, self.config.ridge, x, real)
        left = errors(b.items, b.mean, rows, x, real)
        q = torch.cat([rows[:, :-1], torch.ones_like(rows[:, -1:])], dim=1)
        column = weight.unsqueeze(1)
        _, mask = known(x, real)
        number = times(mask, torch.ones_like(b.items[:, :1]))
        squares = (
            dataclasses.replace(left, values=left.values**2) if isinstance(left, Csr) else left**2
        )
        fit = times(squares, torch.ones_like(b.items[:, :1]))
        ridge = self.config.ridge * number * (rows * rows).sum(1, keepdim=True)
        return rows, FedcompleteUpload(
            gradient=transposed_times(left, column * q),
            count=transposed_times(mask, column)[:, 0],
            curvature=(column * number * q).T @ q,
            loss=(column * (fit + ridge)).sum(),
        )

    def combine(self, server: FedcompleteServer, r: Reduced, round: Round) -> FedcompleteServer:
        """Take a scaled step on the items that somebody of the cohort knows."""
        sent: FedcompleteUpload = r.total
        items = server.items
        count = sent.count.to(items).unsqueeze(1)
        eye = torch.eye(items.shape[1], dtype=items.dtype, device=items.device)
        scale = sent.curvature.to(items) / count.sum().clamp(min=1) + self.config.ridge * eye
        slope = sent.gradient.to(items) + self.config.ridge * count * items
        step = torch.linalg.solve(scale, slope.T).T / server.known.clamp(min=1).unsqueeze(1)
        own = (count * items * items).sum() * self.config.ridge
        now = (sent.loss.to(items) + own) / count.sum().clamp(min=1)
        change = (now - server.objective).abs() / server.objective.abs()
        return FedcompleteServer(
            items=items - self.config.step_size * step,
            mean=server.mean,
            known=server.known,
            objective=now,
            change=torch.where(server.objective.isfinite(), change, torch.inf),
        )


METHOD = Method(
    name="fedcomplete",
    title="Fedcomplete",
    paper="ours: alternating completion with scaled steps",
    config=FedcompleteConfig,
    build=build,
    uploads="gradient of the items, entries of each column, curvature of the rows",
    private="a row (h, c) for each data row",
    inferable="which columns are known, and the row up to scale, of a client with one row",
    numbers={
        "mean": "p + 1",
        "complete": "(num_components + 1) * (p + num_components + 1) + p + 1",
    },
    problem="matrix",
)
