"""Sets in which the rows of H and the columns of W are kept, as projections of vectors.

Vectors lie along the last axis. ``assignment`` is no convex set: there the best member is found
exactly, instead of by steps (k-means).
"""

from __future__ import annotations

import torch
from torch import Tensor

BALLS = ("simplex", "l1", "l2")
ROW_SETS = ("non_negative", "box", *BALLS, "none", "assignment")
BASIS_SETS = ("box", "non_negative", *BALLS, "none")


def project(name: str, vectors: Tensor, radius: float, low: Tensor, high: Tensor) -> Tensor:
    """Nearest members of the set; ``low`` and ``high`` are the sides of the box."""
    if name == "box":
        return vectors.clamp(low, high)
    if name == "non_negative":
        return vectors.clamp(min=0)
    if name == "simplex":
        return simplex(vectors, radius)
    if name == "l1":
        return l1_ball(vectors, radius)
    if name == "l2":
        norm = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        return vectors * (radius / norm.clamp(min=radius))
    return vectors


def simplex(vectors: Tensor, radius: float) -> Tensor:
    """Nearest vectors with entries >= 0 that add up to the radius."""
    descending = vectors.sort(dim=-1, descending=True).values
    excess = descending.cumsum(-1) - radius
    place = torch.arange(1, vectors.shape[-1] + 1, dtype=vectors.dtype, device=vectors.device)
    # The threshold is the mean excess of the entries that stay above it: a prefix of the order.
    is_above = (descending - excess / place > 0) | (
        place == 1
    )  # the largest, whatever rounding says
    above = is_above.to(vectors.dtype)
    count = above.sum(-1, keepdim=True)
    threshold = ((descending * above).sum(-1, keepdim=True) - radius) / count
    return (vectors - threshold).clamp(min=0)


def l1_ball(vectors: Tensor, radius: float) -> Tensor:
    """Nearest vectors whose absolute values add up to the radius at most."""
    sizes = vectors.abs()
    is_inside = sizes.sum(-1, keepdim=True) <= radius
    return torch.where(is_inside, vectors, vectors.sign() * simplex(sizes, radius))


def nearest_column(basis: Tensor, projected: Tensor) -> Tensor:
    """Column of W (M, K) nearest to each row x; ``projected`` is X W."""
    return ((basis * basis).sum(0) - 2 * projected).argmin(-1)


def assigned(basis: Tensor, projected: Tensor) -> Tensor:
    """One-hot rows of H that fit best: the nearest column of W."""
    places = torch.arange(basis.shape[1], device=basis.device)
    return (nearest_column(basis, projected).unsqueeze(-1) == places).to(basis.dtype)
