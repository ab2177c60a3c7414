"""Projected gradient steps on a quadratic over a box, as in non-negative factorisations."""

from __future__ import annotations

import torch
from torch import Tensor


def projected_steps(
    start: Tensor,
    quadratic: Tensor,
    linear: Tensor,
    *,
    curvature: Tensor,
    steps: int,
    low: Tensor,
    high: Tensor | None = None,
) -> Tensor:
    """Descend on the rows X of ``tr(X Q X^T) / 2 - tr(X L^T)`` with low <= X <= high.

    Parameters
    ----------
    start
        X (rows, K).
    quadratic, linear
        Q (K, K), symmetric, and L (rows, K).
    curvature
        Matrix whose largest eigenvalue is the inverse step size; 0 takes no step.
    steps
        How many.
    low, high
        The box; no upper side by default.
    """
    largest = torch.linalg.eigvalsh(curvature)[-1]
    step = torch.where(largest > 0, 1 / largest, torch.zeros_like(largest))
    for _ in range(steps):
        start = (start - step * (start @ quadratic - linear)).clamp(min=low, max=high)
    return start
