"""FedPALM: every client runs PALM on its own factorisation problem; the server averages W.

S. Wang, T.-H. Chang, Federated Matrix Factorization, 2020, Remark 1, (15)-(16): Q/2 pairs of a
projected step on H_p at the client's W_p, and a projected step on W_p. W_p starts at the server's
W, H_p where it was.

Local objective: F_p(W, H_p) = 1/N_p |X_p - W H_p|^2 + N/N_p R_H(H_p), with R_H and F as in
`fedmavg`. Constants in units of F: c = lambda_max(W_p^T W_p)/N and d = 10/N lambda_max(H H^T) with
the H of all clients at the start of the round ("paper"); "safe": c = 0.51 lambda_max of the
Hessian of F in a column of H, and d at least 0.51 of every client's 2/N_p lambda_max(H_p H_p^T),
those at the start of the round and its own at each step.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _largest(matrix: Array) -> float:
    """Give the largest eigenvalue of a symmetric matrix."""
    return float(np.linalg.eigvalsh(matrix)[-1])


def fedpalm(
    clients: Sequence[Array],
    cohorts: Sequence[Mapping[int, int]],
    W: Array,
    H: Sequence[Array],
    *,
    pairs: int,
    idle_compute: bool,
    rho: float = 0.0,
    nu: float = 0.0,
    constants: str = "safe",
    row_weights: bool = False,
) -> tuple[Array, list[Array]]:
    """Run the rounds.

    Parameters
    ----------
    clients
        X_p of each client, (M, N_p).
    cohorts
        For each round the clients that upload, with the number of times each was drawn.
    W, H
        First dictionary (M, K) and first H_p of each client, (K, N_p).
    pairs
        Q/2.
    idle_compute
        Whether clients outside the cohort move their H_p.
    rho, nu
        Weights of the penalty.
    constants
        ``"paper"`` or ``"safe"``: see the module.
    row_weights
        Whether the mean of the cohort is weighted by rows, or by draws.

    Returns
    -------
    W : array
        The server's dictionary.
    H : list of array
        H_p of each client.
    """
    H = [np.array(H_p, dtype=float) for H_p in H]
    K = W.shape[1]
    N = sum(X.shape[1] for X in clients)
    low, high = min(X.min() for X in clients), max(X.max() for X in clients)
    penalty = rho * (np.ones((K, K)) - np.eye(K)) + nu * np.eye(K)
    for cohort in cohorts:
        d = 10 / N * _largest(sum(H_p @ H_p.T for H_p in H))
        if constants == "safe":
            d = max(d, *[0.51 * 2 / H_p.shape[1] * _largest(H_p @ H_p.T) for H_p in H])
        total, weight = np.zeros_like(W), 0.0
        for p, X in enumerate(clients):
            if p not in cohort and not idle_compute:
                continue
            N_p, W_p = X.shape[1], W
            for _ in range(pairs):
                hessian = 2 / N * W_p.T @ W_p + penalty
                c = 0.51 * _largest(hessian) if constants == "safe" else _largest(W_p.T @ W_p) / N
                H[p] = np.maximum(H[p] - (hessian @ H[p] - 2 / N * W_p.T @ X) / c, 0.0)  # (15)
                step = d
                if constants == "safe":
                    step = max(d, 0.51 * 2 / N_p * _largest(H[p] @ H[p].T))
                slope = 2 / N_p * (W_p @ H[p] - X) @ H[p].T
                W_p = np.clip(W_p - slope / step, low, high)  # (16)
            if p in cohort:
                share = N_p if row_weights else cohort[p]
                total, weight = total + share * W_p, weight + share
        W = np.clip(total / weight, low, high)
    return W, H
