"""Coordinates in which directions can be dropped, and how many of them are worth a try."""

from __future__ import annotations

import torch
from torch import Tensor

from handspan.core.records import Params
from handspan.numerics.low_rank import apply_map, gram
from handspan.numerics.spanning.records import SpanServer

CANDIDATES = 8
"""Numbers of directions that are tried at a cut."""
_WHITENING = 1e-2  # ridge of the covariance that is made canonical: cohorts are small
_SMALL = 0.05  # of the longest direction; below it the spectrum falls for no reason


def canonical(server: SpanServer, has_offset: bool) -> tuple[Params, Tensor, Tensor, Tensor]:
    """Basis whose directions are orthogonal, and for which the coordinates are white.

    The models stay what they are; with an offset it takes the mean head. Dormant directions stay,
    and clients' coordinates there are 0.

    Returns
    -------
    basis, matrix, shift
        The new coordinates are matrix v + shift.
    values
        (rank,) lengths of the directions: singular values of the (centred) heads.
    """
    rank, width = int(server.rank), server.moments.shape[0] - 1
    first, second = server.moments[0, 1 : 1 + rank], server.moments[1 : 1 + rank, 1 : 1 + rank]
    mean = first if has_offset else torch.zeros_like(first)
    values, vectors = _eigh(_covariance(second, mean))
    values = values.clamp(min=1e-12)
    root, inverse_root = (vectors * values**power @ vectors.T for power in (0.5, -0.5))
    directions = {name: rows[1 : 1 + rank] for name, rows in server.basis.items()}
    squares, rotation = _eigh(root @ gram(directions) @ root)
    squares, rotation = squares.flip(0).clamp(min=0), rotation.flip(1)
    # A direction's sign is free: its largest entry is positive, on every machine.
    largest = rotation.gather(0, rotation.abs().argmax(0, keepdim=True))
    rotation = rotation * torch.where(largest < 0, -1.0, 1.0)
    matrix = torch.zeros(width, width).to(mean)
    matrix[:rank, :rank] = rotation.T @ inverse_root
    shift = torch.zeros(width).to(mean)
    shift[:rank] = -matrix[:rank, :rank] @ mean
    change = torch.eye(1 + width).to(mean)
    change[0, 1 : 1 + rank] = mean
    change[1 : 1 + rank, 1 : 1 + rank] = rotation.T @ root
    return apply_map(change, server.basis), matrix, shift, squares.sqrt()


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    # A run that diverged goes on without meaning, and without failing.
    values, vectors = torch.linalg.eigh(matrix.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    return values, vectors


def _covariance(second: Tensor, mean: Tensor) -> Tensor:
    covariance = second - torch.outer(mean, mean)
    eye = torch.eye(len(mean)).to(mean)
    return covariance + _WHITENING * covariance.diagonal().mean() * eye


def sizes(values: Tensor, width: int) -> list[int]:
    """Numbers of directions to try: all, dormant ones too, and where the spectrum falls most."""
    rank = len(values)
    falls = (values[:-1] - values[1:]) / values[:-1].clamp(min=1e-30)
    falls = torch.where(values[:-1] > _SMALL * values[0], falls, -1.0)
    order = (1 + falls.argsort(descending=True, stable=True)).tolist()
    chosen = list(dict.fromkeys([rank, width, *order]))[:CANDIDATES]
    return sorted(chosen) + [max(chosen)] * (CANDIDATES - len(chosen))
