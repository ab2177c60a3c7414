"""LRS for linear regression (AMHT-LRS): models of low rank plus sparse, theta_i = U w_i + b_i.

S. Pal et al., Sample-Efficient Personalization: Modeling User Parameters as Low Rank Plus Sparse
Components, AISTATS 2024 (arXiv:2210.03505): Algorithms 1, 2 and 6.

The Kronecker system is formed for each user and solved as a whole, vec column by column.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def optimize_sparse_vector(
    x: Array,
    y: Array,
    v: Array,
    start: Array,
    steps: int,
    *,
    keep: int | None = None,
    schedule: tuple[float, float, float, float, float] | None = None,
    rate: float | None = None,
) -> Array:
    """Find the sparse part b for the shared part v.

    Parameters
    ----------
    x, y, v, start, steps
        Rows, numbers, U w, the first b, and T.
    keep
        How many of the largest entries stay.
    schedule
        Or alpha, beta, gamma, c1 and the root of k of the paper's threshold.
    rate
        Step size; 1 over the largest eigenvalue of X^T X / m by default.
    """
    m = len(y)
    rate = 1 / np.linalg.norm(x.T @ x / m, 2) if rate is None else rate
    b = start.copy()
    if schedule is not None:
        alpha, beta, gamma, c1, root = schedule
    for _ in range(steps):
        c = b - rate * x.T @ (x @ b + x @ v - y) / m
        b = np.zeros_like(c)
        if schedule is None:
            order = np.argsort(-np.abs(c), kind="stable")[:keep]
            b[order] = c[order]
        else:
            delta = alpha + c1 * (gamma + beta / root)
            b[np.abs(c) > delta] = c[np.abs(c) > delta]
            gamma = 2 * c1 * gamma + 2 * (alpha + c1 * beta / root)
    return b


def new_user(x, y, basis, iterations: int, steps: int, keep: int) -> tuple[Array, Array]:
    """Fit w and b to a fixed U, in turn, from 0 (Algorithm 6)."""
    w, b = np.zeros(basis.shape[1]), np.zeros(len(basis))
    for _ in range(iterations):
        w = np.linalg.lstsq(x @ basis, y - x @ b, rcond=None)[0]
        b = optimize_sparse_vector(x, y, basis @ w, b, steps, keep=keep)
    return w, b


def lrs_linear(
    clients: Sequence[tuple[Array, Array]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Sequence[NDArray[np.integer]]],
    basis: Array,
    *,
    keep: int,
    steps: int = 10,
    rate: float | None = None,
    bound: float | None = None,
    c1: float = 0.25,
    c3: float = 0.8,
    c4: float = 0.8,
    c5: float = 0.8,
) -> tuple[Array, Array, Array]:
    """Run AMHT-LRS.

    Parameters
    ----------
    clients, cohorts, batches
        As in the other modules; phase ``"train"``, stage 0: one batch in a round.
    basis
        The first U, orthonormal.
    keep, steps, rate
        As in `optimize_sparse_vector`.
    bound
        B, where the paper's schedule of thresholds is to be used.
    c1, c3, c4, c5
        Its constants.

    Returns
    -------
    basis, coordinates, sparse
        U, w_i (n, r) and b_i (n, d).
    """
    basis = basis.copy()
    d, r = basis.shape
    ws, bs = np.zeros((len(clients), r)), np.zeros((len(clients), d))
    for past, cohort in enumerate(cohorts):  # l - 1 of the paper
        if len(cohort) == 0:
            continue
        a, v = np.zeros((d * r, d * r)), np.zeros((d, r))
        for i in cohort:
            (rows,) = batches(past, "train", 0, i)
            x, y = clients[i][0][rows], clients[i][1][rows]
            schedule = None
            if bound is not None:
                root = np.sqrt(keep)
                schedule = (c4**past * bound / root, c5**past * bound, c3**past * bound, c1, root)
            bs[i] = optimize_sparse_vector(
                x, y, basis @ ws[i], bs[i], steps, keep=keep, schedule=schedule, rate=rate
            )
            ws[i] = np.linalg.lstsq(x @ basis, y - x @ bs[i], rcond=None)[0]
            a += np.kron(np.outer(ws[i], ws[i]), x.T @ x)
            v += np.outer(x.T @ (y - x @ bs[i]), ws[i])
        old = basis.flatten(order="F")
        change = np.linalg.lstsq(a, v.flatten(order="F") - a @ old, rcond=None)[0]
        q, triangular = np.linalg.qr((old + change).reshape(d, r, order="F"))
        basis = q * np.where(np.diag(triangular) < 0, -1.0, 1.0)
    return basis, ws, bs
