"""k-means||: candidates by oversampling, a few rounds, then weighted k-means on the candidates.

    1. C = one row, drawn uniformly over all rows.
    2. ``rounds`` times: a row enters with probability min(1, l d^2(x, C) / phi(C)), independently;
       phi is that of C before the round, the same for all clients.
    3. w_c = number of rows nearest to c; weighted k-means++ and Lloyd on (C, w).
    4. ``lloyd`` steps on the data: clients send sums and counts.

Deviations
    The draw of a row is hashed from the row's place and the round, so that C does not depend on how
    the rows are distributed. Raw rows are uploaded: this is no method for private rows.

References
----------
    Bahmani, Moseley, Vattani, Kumar, Vassilvitskii: Scalable K-Means++. PVLDB 5(7), 2012.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from handspan.baselines.rows import (
    Clustering,
    nearest,
    row_squares,
    square_distances,
    weighted_kmeans,
)
from handspan.core import keys


def kmeans_parallel(
    x: Any,
    owner: np.ndarray,
    num_clusters: int,
    *,
    oversampling: float,
    rounds: int = 5,
    lloyd: int = 0,
    seed: int = 0,
) -> Clustering:
    """Cluster the rows of all clients.

    Parameters
    ----------
    x, owner
        Rows, and the client of each.
    num_clusters
        K.
    oversampling
        l: rows that enter in a round, on average.
    rounds, lloyd
        Rounds of sampling, and steps on the data afterwards.
    seed
        Of all draws.
    """
    count, clients = x.shape[0], len(np.unique(owner))
    place, squares = torch.arange(count), row_squares(x)
    first = float(keys.uniform(keys.key(seed, "kmeans||", "first"), (1,)))
    chosen = [np.array([int(first * count)])]
    distance = square_distances(x, x[chosen[0]], squares)[:, 0]
    numbers = x.shape[1]
    for index in range(rounds):
        draw = keys.uniform(keys.fold(keys.key(seed, "kmeans||", index), place), (1,))[:, 0].numpy()
        new = np.flatnonzero(draw * distance.sum() < oversampling * distance)
        numbers += len(new) * x.shape[1] + clients  # rows, and the clients' costs
        if len(new):
            chosen.append(new)
            distance = np.minimum(distance, square_distances(x, x[new], squares).min(axis=1))
    candidates = x[np.unique(np.concatenate(chosen))]
    if candidates.shape[0] < num_clusters:
        raise ValueError("fewer candidates than clusters: raise oversampling or rounds")
    weights = np.bincount(nearest(x, candidates)[0], minlength=candidates.shape[0])
    numbers += clients * candidates.shape[0]
    centres = weighted_kmeans(candidates, weights.astype(float), num_clusters, seed)
    for _ in range(lloyd):
        labels = nearest(x, centres)[0]
        centres = means(x, labels, centres)
        numbers += clients * (centres.size + num_clusters)
    return Clustering(labels=nearest(x, centres)[0], centres=centres, numbers_up=numbers)


def means(x: Any, labels: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Mean of the rows of each cluster; an empty one keeps its centre."""
    from scipy import sparse

    shape = (len(centres), len(labels))
    member = sparse.csr_array((np.ones(len(labels)), (labels, np.arange(len(labels)))), shape=shape)
    total = member @ x
    total = total.toarray() if sparse.issparse(total) else total
    size = np.bincount(labels, minlength=len(centres))[:, None]
    return np.where(size > 0, total / np.maximum(size, 1), centres)
