"""FedMGS: federated matrix factorisation by gradient sharing, with the clustering penalty.

S. Wang, T.-H. Chang, Federated Matrix Factorization: Algorithm Design and Application to Data
Clustering, 2020, Algorithm 2. The dictionary W (M x K) is shared, H_p (K x N_p) is private; data
rows are the columns of X_p (M x N_p), N = sum_p N_p.

Objective, (2) with (35)-(36) and R_W = 0
    F(W, H) = 1/N sum_p |X_p - W H_p|_F^2 + sum_p R_H(H_p)
    R_H(H)  = rho/2 sum_j ((1^T h_j)^2 - |h_j|^2) + nu/2 |H|_F^2

Gradients of this F (not of F_p = F's terms of client p over omega_p; a step is the same in both,
since (1/c_p) grad F_p = (1/c) grad_{H_p} F when c = omega_p c_p)
    grad_{H_p} F = 2/N W^T (W H_p - X_p) + rho (1 1^T - I) H_p + nu H_p
    grad_W F     = W G1 - G2,   G1 = 2/N sum_p H_p H_p^T,   G2 = 2/N sum_p X_p H_p^T        (29)

Step constants (a step is 1/c grad_{H_p} F, or 1/d grad_W F, always the whole gradient of F)
    "paper"  The paper prints c = 1/2 lambda_max(W^T W) and d = 1/2 lambda_max(H H^T), which are
             step constants for 1/2 |X - W H|^2. Since F = 2/N (1/2 |X - W H|^2) + R_H, the same
             step on F has the constants times 2/N: c = lambda_max(W^T W)/N,
             d = lambda_max(sum_p H_p H_p^T)/N. These are 1/2 of the Lipschitz constants without
             R_H (gamma = 1, and Theorem 2 wants gamma > 1), so descent is not guaranteed.
    "safe"   gamma = 1.02 and R_H counted:
             c = 0.51 lambda_max(2/N W^T W + rho 1 1^T + (nu - rho) I),
             d = 0.51 lambda_max(G1).  F never increases at fixed rho.
    A constant of 0 (W = 0, or H = 0) means that there is no step to take.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def objective(
    clients: Sequence[Array], W: Array, H: Sequence[Array], rho: float, nu: float
) -> float:
    """Compute F(W, H).

    Parameters
    ----------
    clients
        X_p of each client, (M, N_p).
    W
        Dictionary, (M, K).
    H
        H_p of each client, (K, N_p).
    rho, nu
        Weights of the penalty (35).

    Returns
    -------
    float
        The objective, over all clients.
    """
    N = sum(X.shape[1] for X in clients)
    total = 0.0
    for X, H_p in zip(clients, H, strict=True):
        total += float(((X - W @ H_p) ** 2).sum()) / N  # Eq. (36)
        for j in range(X.shape[1]):  # Eq. (35)
            h = H_p[:, j]
            total += rho / 2 * (h.sum() ** 2 - (h**2).sum()) + nu / 2 * (h**2).sum()
    return float(total)


def gradient_H(X: Array, W: Array, H: Array, N: int, rho: float, nu: float) -> Array:
    """Differentiate F by one client's H_p, (K, N_p); N counts the rows of all clients.

    Parameters
    ----------
    X, W, H
        The client's X_p, the dictionary, and the client's H_p.
    N
        Number of data rows of all clients together.
    rho, nu
        Weights of the penalty (35).

    Returns
    -------
    array
        The gradient, (K, N_p).
    """
    K = W.shape[1]
    penalty = rho * (np.ones((K, K)) - np.eye(K)) @ H + nu * H
    return 2 / N * W.T @ (W @ H - X) + penalty


def gradient_W(W: Array, G1: Array, G2: Array) -> Array:
    """Differentiate F by W from the two sums of the server, Eq. (29).

    Parameters
    ----------
    W
        Dictionary, (M, K).
    G1, G2
        2/N sum_p H_p H_p^T, (K, K), and 2/N sum_p X_p H_p^T, (M, K).

    Returns
    -------
    array
        The gradient, (M, K).
    """
    return W @ G1 - G2


def _largest(matrix: Array) -> float:
    """Give the largest eigenvalue of a symmetric matrix."""
    return float(np.linalg.eigvalsh(matrix)[-1])


def fedmgs(
    clients: Sequence[Array],
    cohorts: Sequence[Sequence[int]],
    W: Array,
    H: Sequence[Array],
    *,
    q1: int,
    q2: int,
    rho: float = 0.0,
    nu: float = 0.0,
    low: float | None = None,
    high: float | None = None,
    constants: str = "safe",
    penalty_growth: float = 1.0,
    penalty_tolerance: float = 5e-5,
) -> tuple[Array, list[Array], list[float], list[float]]:
    """Run Algorithm 2.

    Parameters
    ----------
    clients
        X_p of each client, (M, N_p), dense.
    cohorts
        Sorted client ids of each round; a round without clients is skipped.
    W, H
        First dictionary (M, K) and first H_p of each client, (K, N_p), nonnegative.
    q1, q2
        Projected steps of the clients on H_p and of the server on W in a round.
    rho, nu
        Weights of the penalty (35).
    low, high
        Box of the entries of W; the extreme entries of X by default.
    constants
        ``"paper"`` or ``"safe"``: see the module.
    penalty_growth
        SNCP: the factor of rho (the paper's 1.5), applied after a round whose normalised change
        |F after - F before| / F before, both at the rho of the round, is below the tolerance.
        1 keeps rho fixed.
    penalty_tolerance
        The tolerance of that test.

    Returns
    -------
    W : array
        The server's dictionary.
    H : list of array
        H_p of each client.
    objectives : list of float
        F after each round, at the rho of the round.
    penalties : list of float
        The rho that each round used.
    """
    if constants not in ("paper", "safe"):
        raise ValueError(f"constants must be 'paper' or 'safe', not {constants!r}")
    clients = [np.array(X, dtype=float) for X in clients]
    W = np.array(W, dtype=float)
    H = [np.array(H_p, dtype=float) for H_p in H]
    K = W.shape[1]
    N = sum(X.shape[1] for X in clients)
    low = min(float(X.min()) for X in clients) if low is None else low
    high = max(float(X.max()) for X in clients) if high is None else high

    # Set-up upload of all clients: the sums at H_p^0. The server keeps nothing else of them.
    G1 = np.zeros((K, K))
    G2 = np.zeros((len(W), K))
    for X, H_p in zip(clients, H, strict=True):
        G1 = G1 + 2 / N * (H_p @ H_p.T)
        G2 = G2 + 2 / N * (X @ H_p.T)

    objectives: list[float] = []
    penalties: list[float] = []
    for cohort in cohorts:
        before = objective(clients, W, H, rho, nu)
        penalties.append(rho)
        if len(cohort) == 0:
            objectives.append(before)
            continue
        c = _largest(W.T @ W) / N
        if constants == "safe":
            curvature = 2 / N * W.T @ W + rho * np.ones((K, K)) + (nu - rho) * np.eye(K)
            c = 0.51 * _largest(curvature)
        for p in cohort:
            old = H[p]
            new = old
            for _ in range(q1):
                if c > 0:  # Eq. (28), projected on H >= 0
                    slope = gradient_H(clients[p], W, new, N, rho, nu)
                    new = np.maximum(new - slope / c, 0.0)
            # Uplink: the differences of the sums (31)
            G1 = G1 + 2 / N * (new @ new.T - old @ old.T)
            G2 = G2 + 2 / N * (clients[p] @ (new - old).T)
            H[p] = new

        d = 0.5 * _largest(G1)  # lambda_max(sum H H^T) / N
        if constants == "safe":
            d = 0.51 * _largest(G1)
        for _ in range(q2):
            if d > 0:  # Eq. (32), projected on the box
                W = np.clip(W - gradient_W(W, G1, G2) / d, low, high)

        after = objective(clients, W, H, rho, nu)
        objectives.append(after)
        # SNCP, at most once a round
        if abs(after - before) < penalty_tolerance * before:
            rho = rho * penalty_growth
    return W, H, objectives, penalties
