"""CAL: a summary of each client's rows by growing balls, then weighted k-means on the summaries.

    While more than 8 t_i rows are left: draw alpha kappa of them with replacement,
    kappa = max(log n, k); the nearest beta share of what is left goes to its nearest drawn row.
    What is left at the end stands for itself. Augmented: as many more centres as there are rows
    left beyond the drawn ones, and every other row goes to its nearest centre.

Deviations
    All rows are labelled: the outliers of the second level are not set apart. beta |X_j| is rounded
    up, so that the loop ends with t = 0 as well.

References
----------
    Chen, Sadeqi Azer, Zhang: A Practical Algorithm for Distributed Clustering and Outlier
    Detection. NeurIPS 2018. arXiv:1805.09495.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from handspan.baselines.rows import Clustering, nearest, rows_of_clients, stack, weighted_kmeans


def ball_growing(
    x: Any,
    owner: np.ndarray,
    num_clusters: int,
    *,
    outliers: float,
    alpha: float = 2.0,
    beta: float = 0.45,
    seed: int = 0,
) -> Clustering:
    """Cluster the rows of all clients.

    Parameters
    ----------
    x, owner
        Rows, and the client of each.
    num_clusters
        K.
    outliers
        t_i: outliers that a client may have.
    alpha, beta
        Rows drawn over kappa, and the share of rows that a ball takes.
    seed
        Of all draws.
    """
    points, weights = [], []
    for i, rows in enumerate(rows_of_clients(owner)):
        rng = np.random.default_rng([seed, i])
        kept, weight = summary(x[rows], num_clusters, outliers, alpha, beta, rng)
        points.append(x[rows][kept])
        weights.append(weight)
    union, weight = stack(points), np.concatenate(weights)
    centres = weighted_kmeans(union, weight, num_clusters, seed)
    numbers = union.shape[0] * (x.shape[1] + 1)
    return Clustering(labels=nearest(x, centres)[0], centres=centres, numbers_up=numbers)


def summary(
    part: Any, num_clusters: int, outliers: float, alpha: float, beta: float, rng: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Rows that stand for a client's rows, and for how many each."""
    count = part.shape[0]
    size = math.ceil(alpha * max(math.log(count), num_clusters))
    left, centres = np.arange(count), np.array([], dtype=int)
    while len(left) > 8 * outliers:
        drawn = np.unique(rng.choice(left, size))
        centres = np.union1d(centres, drawn)
        distance = nearest(part[left], part[drawn])[1]
        order = np.argsort(distance, kind="stable")
        left = np.sort(left[order[math.ceil(beta * len(left)) :]])
    rest = np.setdiff1d(np.arange(count), left)
    more = len(left) - len(centres)
    free = np.setdiff1d(rest, centres)
    if more > 0 and len(free):
        centres = np.union1d(centres, rng.choice(free, more))
    centres = np.setdiff1d(centres, left)  # a drawn row that is left stands for itself
    kept = np.concatenate([left, centres])
    weight = np.concatenate([np.ones(len(left)), np.zeros(len(centres))])
    if len(rest):
        reached = centres if len(centres) else left
        place = nearest(part[rest], part[reached])[0]
        offset = len(left) if len(centres) else 0
        np.add.at(weight, offset + place, 1)
    return kept, weight
