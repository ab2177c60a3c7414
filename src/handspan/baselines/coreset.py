"""BEL: a distributed coreset, then weighted k-means on it.

    1. Client: B_i, a k-means solution of its own rows; sends cost_i = sum_x d^2(x, B_i).
    2. Server: t_i, its share of the t sampled rows, in proportion to cost_i.
    3. Client: draws t_i rows with probability d^2(x, B_i) / cost_i, with replacement; weight
       cost_i / (t_i d^2). A centre b weighs |P_b| - the weights drawn in its cell.
    4. Server: weighted k-means on all samples and centres.

Deviations
    t_i by largest remainders (flooring is biased). A client that draws nothing still sends its
    centres with the sizes of their cells. Weights of centres may be negative: for k-means they are
    clipped at 0, and the client's weights scaled to its number of rows.

References
----------
    Balcan, Ehrlich, Liang: Distributed k-Means and k-Median Clustering on General Topologies.
    NeurIPS 2013. arXiv:1306.0604.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from handspan.baselines.rows import Clustering, nearest, rows_of_clients, stack, weighted_kmeans


def distributed_coreset(
    x: Any,
    owner: np.ndarray,
    num_clusters: int,
    *,
    samples: int,
    starts: int = 10,
    seed: int = 0,
) -> Clustering:
    """Cluster the rows of all clients.

    Parameters
    ----------
    x, owner
        Rows, and the client of each.
    num_clusters
        K.
    samples
        t: sampled rows in all.
    starts
        Starts of the clients' own k-means.
    seed
        Of all draws.
    """
    parts = [x[rows] for rows in rows_of_clients(owner)]
    own = [local_centres(part, num_clusters, starts, seed + i) for i, part in enumerate(parts)]
    costs = np.array([nearest(part, b)[1].sum() for part, b in zip(parts, own, strict=True)])
    points, weights = [], []
    for i, share in enumerate(largest_remainders(costs, samples)):
        rng = np.random.default_rng([seed, i])
        point, weight = client_coreset(parts[i], own[i], int(share), rng)
        points.append(point)
        weights.append(usable(weight, parts[i].shape[0]))
    union, weight = stack(points), np.concatenate(weights)
    centres = weighted_kmeans(union, weight, num_clusters, seed)
    numbers = len(parts) + union.shape[0] * (x.shape[1] + 1)
    return Clustering(labels=nearest(x, centres)[0], centres=centres, numbers_up=numbers)


def local_centres(part: Any, num_clusters: int, starts: int, seed: int) -> Any:
    """Centres of a client's own rows; all rows where there are few."""
    from scipy import sparse
    from sklearn.cluster import KMeans

    if part.shape[0] <= num_clusters:
        return part
    found = KMeans(num_clusters, n_init=starts, random_state=seed).fit(part).cluster_centers_
    return sparse.csr_array(found) if sparse.issparse(part) else found


def client_coreset(
    part: Any, centres: Any, count: int, rng: np.random.Generator
) -> tuple[Any, np.ndarray]:
    """Sampled rows and centres with their weights, which add up to the number of rows."""
    cell, distance = nearest(part, centres)
    size = np.bincount(cell, minlength=centres.shape[0]).astype(float)
    cost = distance.sum()
    if not count or cost <= 0:
        return centres, size
    drawn = rng.choice(part.shape[0], count, p=distance / cost)
    weight = cost / (count * distance[drawn])
    np.subtract.at(size, cell[drawn], weight)
    return stack([part[drawn], centres]), np.concatenate([weight, size])


def usable(weights: np.ndarray, total: int) -> np.ndarray:
    """Clip negative weights, and keep the sum."""
    clipped = np.maximum(weights, 0)
    return clipped * total / clipped.sum()


def largest_remainders(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to the shares that add up to the total."""
    exact = shares / shares.sum() * total if shares.sum() > 0 else np.zeros(len(shares))
    whole = np.floor(exact).astype(int)
    left = round(float(exact.sum())) - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:left]] += 1
    return whole
