"""Clients with quadratic losses: where methods end there has a closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from handspan.core.data import Batch, FederatedData
from handspan.core.records import Params
from handspan.core.task import Task


class QuadraticTask(Task):
    """f_i(w) = 1/2 (w - a_i)^T A_i (w - a_i), w the sum of all parameters, A_i diagonal.

    Rows are those of ``quadratic``: one for each client, with a_i and the diagonal of A_i. What
    methods end at has a closed form here.

    Parameters
    ----------
    start
        First values by name; the last name is the head.
    """

    kind = "regression"

    def __init__(self, **start: Tensor) -> None:
        self.start = start
        self.names = tuple(sorted(start))
        self.head = (list(start)[-1],)
        self.num_outputs = len(start[self.head[0]])

    def init(self, key: Tensor) -> tuple[Params, Params]:
        """Return the given values, whatever the key."""
        return {name: value.clone() for name, value in self.start.items()}, {}

    def features(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """Return the rows: there are no features."""
        return x

    def predict(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """Return A^(1/2) (w - a), for each row."""
        target, curvature = x.chunk(2, dim=-1)
        w = torch.stack([params[name] for name in self.names]).sum(0)
        return curvature.sqrt() * (w - target)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Half the square of the outputs."""
        return 0.5 * outputs.square().sum(-1)

    def loss(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Mean over the real rows."""
        losses = self.row_loss(self.predict(params, buffers, batch.x, None), batch.weight)
        return (losses * batch.weight).sum() / batch.weight.sum(), buffers


def quadratic(targets: Tensor, curvatures: Tensor | None = None) -> FederatedData:
    """One row for each client, to train and to test on: a_i and the diagonal of A_i (1 if None)."""
    curvatures = torch.ones_like(targets) if curvatures is None else curvatures
    rows = torch.cat([targets, curvatures], dim=1).repeat_interleave(2, dim=0)
    one = torch.ones(len(targets), dtype=torch.int64)
    return FederatedData(
        x=rows,
        y=torch.zeros(len(rows), targets.shape[1], dtype=rows.dtype),
        offsets=2 * torch.arange(len(targets) + 1),
        num_train=one,
        num_validation=0 * one,
        num_test=one,
    )
