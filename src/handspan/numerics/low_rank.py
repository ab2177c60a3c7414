"""Models on a shared basis: theta = U v, with one row of U for each direction.

A basis is parameters with a leading axis of directions, ``basis[name]`` of shape (r, ...), so that
the coordinates of a client are one vector for the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from handspan.core.records import Params, map_tensors


def compose(basis: Params, coordinates: Tensor) -> Params:
    """Return the parameters U v of one client."""
    return {
        name: (coordinates @ rows.flatten(1)).view(rows.shape[1:]) for name, rows in basis.items()
    }


def gram(basis: Params) -> Tensor:
    """Inner products of the directions over all factorised parameters, (r, r) in float64."""
    parts = [rows.flatten(1).to(torch.float64) for rows in basis.values()]
    return torch.stack([part @ part.T for part in parts]).sum(0)


def spectrum(basis: Params, moments: Tensor | None) -> dict[str, float]:
    """Singular values of U V / sqrt(n), largest first, named as summaries and pictures know them.

    ``moments`` is the mean of v v^T over n clients; where it is not known there is no spectrum.
    """
    if moments is None:
        return {}
    products = gram(basis)
    if not (products.isfinite().all() and moments.isfinite().all()):  # a run that diverged
        return {f"spectrum_{k}": float("nan") for k in range(1, len(moments) + 1)}
    values, vectors = torch.linalg.eigh(moments)
    root = vectors * values.clamp(min=0).sqrt()
    squares = torch.linalg.eigvalsh(root.T @ products @ root).clamp(min=0).flip(0)
    return {f"spectrum_{k}": value for k, value in enumerate(squares.sqrt().tolist(), 1)}


def weighted_sum(stacked: Any, weights: Tensor) -> Any:
    """Weighted sum over the leading client axis of a record or parameters, in float64."""
    return map_tensors(lambda t: torch.tensordot(weights, t.to(torch.float64), dims=1), stacked)


def outer_sums(deltas: Params, coordinates: Tensor, weights: Tensor) -> Params:
    """Sum of weight * v delta^T over a block of clients, without a stack of outer products.

    ``deltas`` and ``coordinates`` have a leading client axis; the sums are in float64.
    """
    weighted = (coordinates.to(torch.float64) * weights.to(coordinates.device).unsqueeze(1)).T
    return {
        name: (weighted @ delta.flatten(1).to(torch.float64)).view(-1, *delta.shape[1:])
        for name, delta in deltas.items()
    }


def apply_map(matrix: Tensor, basis: Params) -> Params:
    """Mix the directions: new row k is the sum over l of ``matrix[k, l]`` times row l."""
    return {
        name: (matrix.to(rows) @ rows.flatten(1)).view(-1, *rows.shape[1:])
        for name, rows in basis.items()
    }
