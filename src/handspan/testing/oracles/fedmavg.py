"""FedMAvg: federated matrix factorisation by model averaging, with the clustering penalty.

S. Wang, T.-H. Chang, Federated Matrix Factorization: Algorithm Design and Application to Data
Clustering, 2020, Algorithm 1. The dictionary W (M x K) is shared, H_p (K x N_p) is private; data
rows are the columns of X_p (M x N_p), N = sum_p N_p, omega_p = N_p / N.

Local objective, (2) with (35)-(36) and R_W = 0, over the known entries Omega_p of X_p
    F_p(W, H_p) = 1/N_p |Omega_p * (X_p - W H_p)|^2 + 1/omega_p R_H(H_p)
    R_H(H)      = rho/2 sum_j ((1^T h_j)^2 - |h_j|^2) + nu/2 |H|_F^2
    F = sum_p omega_p F_p

Every step is taken one by one, and every client's W_p is formed.

Step constants. The paper prints c = 1/2 lambda_max(W^T W), d = 5 lambda_max(H H^T), constants for
1/2 |X - W H|^2. In units of F: c = lambda_max(W^T W)/N for grad_H F, d = 10/N lambda_max(H H^T) for
grad_W F_p, H that of all clients after their steps. "safe": c = 0.51 lambda_max(2/N W^T W +
rho (1 1^T - I) + nu I), and d at least 0.51 max_p 2/N_p lambda_max(H_p H_p^T).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _largest(matrix: Array) -> float:
    """Give the largest eigenvalue of a symmetric matrix."""
    return float(np.linalg.eigvalsh(matrix)[-1])


def fedmavg(
    clients: Sequence[Array],
    cohorts: Sequence[Mapping[int, int]],
    W: Array,
    H: Sequence[Array],
    *,
    q1: int,
    q2: int,
    diminishing: bool,
    idle_compute: bool,
    rho: float = 0.0,
    nu: float = 0.0,
    low: float | None = None,
    high: float | None = None,
    constants: str = "safe",
    missing: bool = False,
    row_weights: bool = False,
    penalty_growth: float = 1.0,
    penalty_tolerance: float = 1e-5,
) -> tuple[Array, list[Array], list[float], list[float]]:
    """Run Algorithm 1.

    Parameters
    ----------
    clients
        X_p of each client, (M, N_p), dense.
    cohorts
        For each round the clients that upload, with the number of times each was drawn.
    W, H
        First dictionary (M, K) and first H_p of each client, (K, N_p), nonnegative.
    q1, q2
        Projected steps on H_p, and steps on W_p; with ``diminishing`` round s takes
        floor(q2 / s) + 1 of the latter.
    idle_compute
        Whether clients outside the cohort move their H_p (PCC) or not (PCP).
    rho, nu
        Weights of the penalty (35).
    low, high
        Box of the entries of W; the extreme entries of X by default.
    constants
        ``"paper"`` or ``"safe"``: see the module.
    missing
        Whether entries that are 0 are unknown.
    row_weights
        Whether the mean of the cohort is weighted by rows (8), or by draws (9).
    penalty_growth, penalty_tolerance
        SNCP: rho is multiplied when F(W^s, H^s) has changed by a smaller share.

    Returns
    -------
    W : array
        The server's dictionary.
    H : list of array
        H_p of each client.
    objectives : list of float
        F(W^s, H^s) of each round, before the averaging.
    penalties : list of float
        The rho that each round used.
    """
    clients = [np.array(X, dtype=float) for X in clients]
    W = np.array(W, dtype=float)
    H = [np.array(H_p, dtype=float) for H_p in H]
    K = W.shape[1]
    N = sum(X.shape[1] for X in clients)
    low = min(float(X.min()) for X in clients) if low is None else low
    high = max(float(X.max()) for X in clients) if high is None else high
    known = [(X != 0).astype(float) if missing else np.ones_like(X) for X in clients]

    objectives: list[float] = []
    penalties: list[float] = []
    before = None
    for s, cohort in enumerate(cohorts, start=1):
        penalties.append(rho)
        curvature = 2 / N * W.T @ W + rho * np.ones((K, K)) + (nu - rho) * np.eye(K)
        c = 0.51 * _largest(curvature) if constants == "safe" else _largest(W.T @ W) / N
        for p, X in enumerate(clients):
            if p not in cohort and not idle_compute:
                continue
            for _ in range(q1):
                left = known[p] * (W @ H[p] - X)
                slope = 2 / N * W.T @ left
                slope = slope + rho * (np.ones((K, K)) - np.eye(K)) @ H[p] + nu * H[p]
                H[p] = np.maximum(H[p] - slope / c, 0.0)  # Eq. (11), in units of F

        now = 0.0
        for p, X in enumerate(clients):
            now += float((known[p] * (X - W @ H[p]) ** 2).sum()) / N
            for h in H[p].T:
                now += rho / 2 * (h.sum() ** 2 - (h**2).sum()) + nu / 2 * (h**2).sum()
        objectives.append(now)

        d = 10 / N * _largest(sum(H_p @ H_p.T for H_p in H))
        if constants == "safe":
            own = [2 / H_p.shape[1] * _largest(H_p @ H_p.T) for H_p in H]
            d = max(d, 0.51 * max(own))
        steps = q2 // s + 1 if diminishing else q2
        total, weight = np.zeros_like(W), 0.0
        for p, times in cohort.items():
            N_p = clients[p].shape[1]
            W_p = W
            for _ in range(steps):  # Eq. (13): no projection
                slope = 2 / N_p * (known[p] * (W_p @ H[p] - clients[p])) @ H[p].T
                W_p = W_p - slope / d
            share = N_p if row_weights else times
            total, weight = total + share * W_p, weight + share
        W = np.clip(total / weight, low, high)  # Eqs. (8)-(10)

        if before is not None and abs(now - before) < penalty_tolerance * before:
            grown = rho * penalty_growth
            for p in range(len(clients)):
                for h in H[p].T:
                    now += (grown - rho) / 2 * (h.sum() ** 2 - (h**2).sum())
            rho = grown
        before = now
    return W, H, objectives, penalties
