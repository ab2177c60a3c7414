"""Rows as the baselines see them: distances, weighted k-means, and whose rows are whose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse


@dataclass(frozen=True)
class Clustering:
    """Labels of all rows, the centres, and the numbers that clients sent."""

    labels: np.ndarray
    centres: np.ndarray
    numbers_up: int = 0


def row_squares(x: Any) -> np.ndarray:
    """Squared norm of each row."""
    square = x.multiply(x).sum(axis=1) if sparse.issparse(x) else (x * x).sum(axis=1)
    return np.asarray(square, dtype=np.float64).reshape(-1)


def square_distances(x: Any, centres: Any, squares: np.ndarray | None = None) -> np.ndarray:
    """Squared distances (rows, centres), never negative."""
    squares = row_squares(x) if squares is None else squares
    product = x @ centres.T
    product = product.toarray() if sparse.issparse(product) else np.asarray(product)
    return np.maximum(squares[:, None] - 2 * product + row_squares(centres)[None, :], 0)


def nearest(x: Any, centres: Any) -> tuple[np.ndarray, np.ndarray]:
    """Position of the nearest centre of each row, and the squared distance to it."""
    distances = square_distances(x, centres)
    return distances.argmin(axis=1), distances.min(axis=1)


def weighted_kmeans(x: Any, weights: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """Centres of weighted k-means, started by k-means++ once."""
    from sklearn.cluster import KMeans

    keep = np.flatnonzero(weights > 0)
    model = KMeans(num_clusters, n_init=1, random_state=seed)
    return model.fit(x[keep], sample_weight=weights[keep]).cluster_centers_


def stack(parts: list[Any]) -> Any:
    """Join rows of several clients."""
    return (
        sparse.vstack(parts, format="csr") if sparse.issparse(parts[0]) else np.concatenate(parts)
    )


def rows_of_clients(owner: np.ndarray) -> list[np.ndarray]:
    """Positions of the rows of each client that has any, in the order of the clients."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(owner[order])) + 1)
