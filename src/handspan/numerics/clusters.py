"""Means inside clusters, as sums over the cohort."""

from __future__ import annotations

import torch
from torch import Tensor

from handspan.core.algorithm import Model
from handspan.core.records import Record, map_tensors


class ClusterReduction(Record):
    """Weighted sums for each cluster."""

    total: Model  # leading axis: clusters
    weight: Tensor  # (k,)


def sum_by_cluster(choice: Tensor, models: Model, weights: Tensor) -> ClusterReduction:
    """Sum the models of a block of clients by cluster; ``choice`` (c, k) is one-hot."""
    share = choice.to(torch.float64) * weights.to(choice.device).unsqueeze(1)  # (c, k)

    def total(stacked: Tensor) -> Tensor:
        flat = stacked.reshape(len(share), -1).to(torch.float64)
        return (share.T @ flat).view(-1, *stacked.shape[1:])

    return ClusterReduction(total=map_tensors(total, models), weight=share.sum(0))


def mean_by_cluster(models: Model, reduction: ClusterReduction) -> Model:
    """Return the mean model of each cluster; a cluster that nobody chose keeps its model."""
    weight = reduction.weight

    def mean(old: Tensor, total: Tensor) -> Tensor:
        shape = (-1, *[1] * (old.ndim - 1))
        new = total / weight.clamp(min=torch.finfo(torch.float64).tiny).view(shape)
        return torch.where(weight.view(shape) > 0, new.to(old), old)

    return map_tensors(mean, models, reduction.total)
