"""Central counterparts: SNCP (orthogonal NMF by a growing penalty), k-means++ and NMF.

SNCP minimises, for the whole table, the objective of ``fedmgs``: one projected step on H, one on W,
an iteration; rho grows by ``growth`` when the relative change of the objective falls below
``rest`` or after ``patience`` iterations at one rho, and the run ends below ``stop``.

References
----------
    Wang, Chang, Cui, Pang: Clustering by Orthogonal NMF Model and Non-Convex Penalty Optimization.
    IEEE Transactions on Signal Processing 2021. arXiv:1906.00570.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from handspan.baselines.rows import Clustering, row_squares


def sncp(
    x: Any,
    basis: np.ndarray,
    rows: np.ndarray,
    *,
    iterations: int = 2000,
    orthogonality: float = 1e-8,
    shrinkage: float = 1e-10,
    growth: float = 1.5,
    rest: float = 1e-5,
    patience: int = 500,
    stop: float = 1e-8,
) -> Clustering:
    """Cluster a table centrally.

    Parameters
    ----------
    x
        Rows (N, M).
    basis, rows
        First W (M, K) and H (N, K).
    iterations, patience
        At most in all, and at one rho.
    orthogonality, shrinkage
        rho and nu over |X|^2 / N.
    growth, rest, stop
        Factor of rho, and relative changes below which it grows and the run ends.
    """
    count, size = rows.shape
    square = float(row_squares(x).sum())
    rho, nu = orthogonality * square / count, shrinkage * square / count
    low = min(0.0, float(x.min())) if hasattr(x, "nnz") else float(x.min())
    high, before, since = float(x.max()), None, 0
    ones, eye = np.ones((size, size)), np.eye(size)
    for _ in range(iterations):
        hessian = 2 * basis.T @ basis / count + rho * (ones - eye) + nu * eye
        step = 1 / (0.51 * np.linalg.eigvalsh(hessian)[-1])
        rows = np.maximum(rows - step * (rows @ hessian - 2 * np.asarray(x @ basis) / count), 0)
        hh, xh = rows.T @ rows, np.asarray(x.T @ rows)
        step = count / (1.02 * np.linalg.eigvalsh(hh)[-1])
        basis = np.clip(basis - step * 2 / count * (basis @ hh - xh), low, high)
        fit = square - 2 * (basis * xh).sum() + (basis.T @ basis * hh).sum()
        spread = (hh.sum() - np.trace(hh)) / 2
        now = fit / count + rho * spread + nu / 2 * np.trace(hh)
        change = np.inf if before is None else abs(now - before) / before
        if change < stop:
            break
        before, since = now, since + 1
        if change < rest or since >= patience:
            before, rho, since = now + (growth - 1) * rho * spread, growth * rho, 0
    return Clustering(labels=labels(x, basis, rows), centres=basis.T)


def labels(x: Any, basis: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Largest entry of each row of H; an all-zero one takes the nearest column of W."""
    distance = (basis * basis).sum(axis=0) - 2 * np.asarray(x @ basis)
    return np.where(rows.max(axis=1) > 0, rows.argmax(axis=1), distance.argmin(axis=1))


def central_kmeans(x: Any, num_clusters: int, seed: int = 0) -> Clustering:
    """k-means++ and Lloyd on the whole table, one start."""
    from sklearn.cluster import KMeans

    model = KMeans(num_clusters, n_init=1, random_state=seed).fit(x)
    return Clustering(labels=model.labels_, centres=model.cluster_centers_)


def central_nmf(
    x: Any, num_components: int, seed: int = 0, iterations: int = 2000, tolerance: float = 1e-7
) -> tuple[np.ndarray, float]:
    """Components (K, M) of non-negative matrix factorisation, and |X - HW|^2 / N."""
    from sklearn.decomposition import NMF

    model = NMF(
        num_components, init="random", random_state=seed, max_iter=iterations, tol=tolerance
    ).fit(x)
    return model.components_, float(model.reconstruction_err_**2) / x.shape[0]
