"""Subspaces by orthonormal bases: their distance, and how bases are made."""

from __future__ import annotations

import torch
from torch import Tensor


def orthonormal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q, R of ``matrix`` (d, k), d >= k, with a positive diagonal of R: it is unique."""
    q, r = torch.linalg.qr(matrix)
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0).to(r)
    return q * signs, r * signs.unsqueeze(1)


def top_eigenvectors(symmetric: Tensor, count: int) -> Tensor:
    """Return the eigenvectors of the largest eigenvalues, (d, count), the largest first.

    Their signs are free: the entry of largest size is made positive.
    """
    vectors = torch.linalg.eigh((symmetric + symmetric.T) / 2).eigenvectors
    vectors = vectors[:, -count:].flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0).to(vectors)


def principal_angle(first: Tensor, second: Tensor) -> Tensor:
    """Principal-angle distance |B1_perp^T B2|_2 of two column spaces, in [0, 1].

    As the norm of what is left of the second basis beside the first: exact down to round-off,
    where a root of 1 - cos^2 stops at 1e-8.
    """
    first, second = (orthonormal(basis.to(torch.float64))[0] for basis in (first, second))
    rest = second - first @ (first.T @ second)
    return torch.linalg.matrix_norm(rest, 2)


def triangle(symmetric: Tensor) -> Tensor:
    """Return the d (d + 1) / 2 numbers of a symmetric matrix."""
    row, column = torch.tril_indices(*symmetric.shape, device=symmetric.device)
    return symmetric[row, column]


def from_triangle(numbers: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix of so many numbers."""
    row, column = torch.tril_indices(size, size, device=numbers.device)
    lower = numbers.new_zeros(size, size).index_put((row, column), numbers)
    return lower + lower.tril(-1).T
