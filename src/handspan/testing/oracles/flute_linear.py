"""FLUTE, linear form: factors B and W of all clients' models, kept in balance by the server.

R. Liu, C. Shen, J. Yang, Federated Representation Learning in the Under-Parameterized Regime,
ICML 2024 (arXiv:2406.04596).

The server holds B and all heads W, and takes the balancing step on those of the round itself.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def balance(basis: Array, heads: Array) -> float:
    """Compute R = 1/2 |B^T B - W W^T|_F^2."""
    return float(((basis.T @ basis - heads @ heads.T) ** 2).sum() / 2)


def flute_linear(
    clients: Sequence[tuple[Array, Array]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Sequence[NDArray[np.integer]]],
    basis: Array,
    heads: Array,
    *,
    learning_rate: float,
    server_learning_rate: float = 0.01,
    divisor: float = 1.0,
) -> tuple[Array, Array]:
    """Run the linear form.

    Parameters
    ----------
    clients, cohorts, batches
        As in the other modules; phase ``"train"``, stage 0.
    basis, heads
        The first B (d, k) and W (k, n).
    learning_rate, server_learning_rate
        eta of the clients, eta_r (with lambda) of the server.
    divisor
        Of W W^T in the regulariser: 1, or the number of clients.

    Returns
    -------
    basis, heads
        B and W.
    """
    basis, heads = basis.copy(), heads.copy()
    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        local = []
        for i in cohort:
            x, y = clients[i]
            b, w = basis.copy(), heads[:, i].copy()
            for rows in batches(round_index, "train", 0, i):
                a, target = x[rows], y[rows]
                error = a @ b @ w - target
                slope_b = np.outer(a.T @ error, w) / len(rows)
                slope_w = b.T @ a.T @ error / len(rows)
                b, w = b - learning_rate * slope_b, w - learning_rate * slope_w
            local.append(b)
            heads[:, i] = w
        basis = sum(local) / len(local)  # B', W'
        difference = basis.T @ basis - heads @ heads.T / divisor
        slope_basis = 2 * basis @ difference  # grad_B R
        slope_heads = -2 * difference @ heads  # grad_W R
        basis = basis - server_learning_rate * slope_basis
        heads[:, cohort] = heads[:, cohort] - server_learning_rate * slope_heads[:, cohort]
    return basis, heads
