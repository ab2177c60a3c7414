"""Means inside clusters, as sums over the cohort; and a cluster in two."""

from __future__ import annotations

from typing import Any

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


def bipartition(similarity: Tensor) -> tuple[Tensor, Tensor]:
    """Two groups between which the greatest similarity is least (Eq. 23); its value.

    Merging the most similar groups until two are left (single linkage) finds them exactly. The
    first client's group is False.
    """
    from scipy.cluster.hierarchy import linkage, to_tree  # pyright: ignore

    first, second = torch.triu_indices(len(similarity), len(similarity), 1).unbind()
    distance = (1 - similarity[first, second]).clamp(min=0)
    root: Any = to_tree(linkage(distance.cpu().numpy(), method="single"))
    leaves = torch.zeros(len(similarity), dtype=torch.bool, device=similarity.device)
    leaves[torch.tensor(root.get_left().pre_order(), device=similarity.device)] = True
    leaves = leaves ^ leaves[0]
    return leaves, similarity[leaves][:, ~leaves].max()
