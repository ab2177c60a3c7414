"""Hard thresholding: the projection on vectors with few entries that differ from 0."""

from __future__ import annotations

import torch
from torch import Tensor

from handspan.numerics.carrying import rounded


def largest_entries(vector: Tensor, count: int) -> Tensor:
    """Keep the ``count`` entries of largest size, the rest becomes 0; equals stay together."""
    if count == 0:
        return torch.zeros_like(vector)
    size = rounded(vector.abs()).flatten()
    least = size.topk(count).values[-1]
    return torch.where((size >= least).view(vector.shape), vector, 0.0)
