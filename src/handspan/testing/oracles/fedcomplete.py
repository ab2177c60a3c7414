"""Fedcomplete: alternating completion of ratings, one row and one column after the other.

Objective over known entries (x_ji != 0), e_ji = mu + b_i + c_j + <h_j, w_i> - x_ji
    1/2 sum_ji [ e_ji^2 + ridge (|w_i|^2 + b_i^2 + |h_j|^2 + c_j^2) ]

A round: every row of the cohort solves its normal equations for (h_j, c_j); with q_j = (h_j, 1),
n_i the known entries of a column in all rows, n_j those of a row, and
S = sum_j n_j q_j q_j^T / sum_j n_j over the cohort
    (w_i, b_i) -= step_size / n_i (S + ridge I)^(-1) sum_j [ e_ji q_j + ridge (w_i, b_i) ]
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def fedcomplete(
    clients: Sequence[Array],
    cohorts: Sequence[Sequence[int]],
    items: Array,
    *,
    ridge: float,
    step_size: float,
) -> tuple[Array, float, list[Array]]:
    """Run the rounds.

    Parameters
    ----------
    clients
        Rows of each client, (N_p, M); 0 is unknown.
    cohorts
        Client ids of each round.
    items
        First (w_i, b_i), (M, K + 1).
    ridge, step_size
        As above.

    Returns
    -------
    items : array
        The last (w_i, b_i).
    mean : float
        mu.
    rows : list of array
        (h_j, c_j) of each client's rows.
    """
    items = np.array(items, dtype=float)
    M, size = items.shape
    entries = np.concatenate([x[x != 0] for x in clients])
    mean = float(entries.mean())
    rows = [np.zeros((len(x), size)) for x in clients]
    for cohort in cohorts:
        gradient = np.zeros((M, size))
        S, total = np.zeros((size, size)), 0
        for p in cohort:
            for j, x in enumerate(clients[p]):
                at = np.flatnonzero(x)
                A = np.column_stack([items[at, :-1], np.ones(len(at))])
                target = x[at] - mean - items[at, -1]
                own = ridge * max(1, len(at)) * np.eye(size)
                theta = np.linalg.solve(A.T @ A + own, A.T @ target)
                rows[p][j] = theta
                q = np.append(theta[:-1], 1.0)
                S, total = S + len(at) * np.outer(q, q), total + len(at)
                for i, e in zip(at, A @ theta - target, strict=True):
                    gradient[i] += e * q + ridge * items[i]
        for i in range(M):
            known = sum(int((x[:, i] != 0).sum()) for x in clients)
            scaled = np.linalg.solve(S / total + ridge * np.eye(size), gradient[i])
            items[i] = items[i] - step_size * scaled / max(1, known)
    return items, mean, rows
