"""PALM: the centralised counterpart of FedMGS, on the pooled data matrix.

Each round takes q1 projected gradient steps on H at the current W, then q2 projected gradient
steps on W at the new H, on the objective of `fedmgs`::

    F(W, H) = 1/N |X - W H|_F^2 + rho/2 sum_j ((1^T h_j)^2 - |h_j|^2) + nu/2 |H|_F^2

(J. Bolte, S. Sabach, M. Teboulle, Proximal alternating linearized minimization, 2014, with several
inner steps.) FedMGS with full participation takes the same steps, because the step constant of H
is common to all columns.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def palm(
    X: Array,
    W: Array,
    H: Array,
    *,
    rounds: int,
    q1: int,
    q2: int,
    rho: float = 0.0,
    nu: float = 0.0,
    low: float | None = None,
    high: float | None = None,
    constants: str = "safe",
) -> tuple[Array, Array, list[float]]:
    """Run PALM on one matrix.

    Parameters
    ----------
    X
        Data, (M, N), one data row per column.
    W, H
        First dictionary (M, K) and first coefficients (K, N), nonnegative.
    rounds
        Number of rounds.
    q1, q2
        Steps on H and on W in a round.
    rho, nu
        Weights of the penalty.
    low, high
        Box of the entries of W; the extreme entries of X by default.
    constants
        ``"safe"``: 0.51 times the Lipschitz constants of the two partial gradients; ``"paper"``:
        lambda_max(W^T W)/N and lambda_max(H H^T)/N.

    Returns
    -------
    W : array
        Dictionary.
    H : array
        Coefficients.
    objectives : list of float
        F after each round.
    """
    if constants not in ("paper", "safe"):
        raise ValueError(f"constants must be 'paper' or 'safe', not {constants!r}")
    X = np.array(X, dtype=float)
    W = np.array(W, dtype=float)
    H = np.array(H, dtype=float)
    K, N = H.shape
    low = float(X.min()) if low is None else low
    high = float(X.max()) if high is None else high
    penalty = rho * (np.ones((K, K)) - np.eye(K)) + nu * np.eye(K)  # Hessian of R_H by a column

    objectives = []
    for _ in range(rounds):
        curvature = 2 * W.T @ W / N + penalty
        c = 0.51 * np.linalg.eigvalsh(curvature)[-1]
        if constants == "paper":
            c = np.linalg.eigvalsh(W.T @ W)[-1] / N
        for _ in range(q1):
            if c > 0:
                slope = 2 * W.T @ (W @ H - X) / N + penalty @ H
                H = np.maximum(H - slope / c, 0.0)
        d = np.linalg.eigvalsh(H @ H.T)[-1] / N
        if constants == "safe":
            d = 0.51 * np.linalg.eigvalsh(2 * H @ H.T / N)[-1]
        for _ in range(q2):
            if d > 0:
                slope = 2 * (W @ H - X) @ H.T / N
                W = np.clip(W - slope / d, low, high)
        fit = ((X - W @ H) ** 2).sum() / N
        objectives.append(float(fit + 0.5 * (H * (penalty @ H)).sum()))
    return W, H, objectives
