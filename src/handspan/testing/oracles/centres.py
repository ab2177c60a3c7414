"""Centres of points found by sums: Lloyd's step with memory, splitting and merging.

What span does with its clients' coordinates, one centre after the other. Distances are those of
models: squared lengths of U (a - b), by the Gram matrix of the directions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Centres:
    """Clients of each centre (0: free), means and variances by coordinate."""

    count: Array
    mean: Array
    variance: Array


def updated(centres: Centres, points: dict[int, list[Array]]) -> Centres:
    """Move each centre to the mean of what it remembers and of its new points.

    Parameters
    ----------
    centres
        Those of the last round; they count for 0.8 of what they were.
    points
        The new points of each centre, in the first coordinates; the others keep their mean.

    Returns
    -------
    Centres
        Those that have less than 0.3 points left are given up, but for the largest.
    """
    count, mean, variance = (
        np.array(part) for part in (centres.count, centres.mean, centres.variance)
    )
    for j in range(len(count)):
        new = points.get(j, [])
        old = 0.8 * count[j]
        count[j] = old + len(new)
        if count[j] == 0:
            continue
        size = len(new[0]) if new else mean.shape[1]
        before = mean[j, :size], variance[j, :size] + mean[j, :size] ** 2
        first = (old * before[0] + sum(new)) / count[j]
        second = (old * before[1] + sum(point**2 for point in new)) / count[j]
        mean[j, :size], variance[j, :size] = first, np.maximum(second - first**2, 0)
    lost = (count < 0.3) & (count < count.max())
    count[lost] = 0.0
    return Centres(count, mean, variance)


def split(centres: Centres, gram: Array) -> Centres:
    """Split centres of 4 clients at least along their widest axis, the widest first."""
    count, mean, variance = (
        np.array(part) for part in (centres.count, centres.mean, centres.variance)
    )
    spread = variance[:, : len(gram)] * np.diag(gram)
    free = [j for j in range(len(count)) if count[j] == 0]
    for j in np.argsort(-count * spread.sum(1), kind="stable"):
        axis = int(np.argmax(spread[j]))
        if not free or count[j] < 4 or spread[j, axis] <= 0:
            continue
        other = free.pop(0)
        deviation = np.sqrt(variance[j, axis])
        mean[other] = mean[j]
        mean[j, axis] -= np.sqrt(2 / np.pi) * deviation  # means of the halves of a normal
        mean[other, axis] += np.sqrt(2 / np.pi) * deviation
        variance[j, axis] *= 1 - 2 / np.pi
        variance[other] = variance[j]
        count[j] /= 2
        count[other] = count[j]
    return Centres(count, mean, variance)


def merged(centres: Centres, gram: Array, apart: float) -> Centres:
    """Merge the two centres that are least apart, until all are further than ``apart``."""
    count, mean, variance = (
        np.array(part) for part in (centres.count, centres.mean, centres.variance)
    )
    size = len(gram)
    while True:
        there = [j for j in range(len(count)) if count[j] > 0]
        typical = sum(count[j] * (variance[j, :size] @ np.diag(gram)) for j in there) / count.sum()
        least, pair = np.inf, None
        for a in there:
            for b in there:
                if a < b:
                    line = mean[a, :size] - mean[b, :size]
                    pull, square = gram @ line, line @ gram @ line
                    share = count[a] / (count[a] + count[b])
                    pooled = share * variance[a, :size] + (1 - share) * variance[b, :size]
                    inside = (pull**2 @ pooled) / max(square, 1e-300) + 1e-3 * typical
                    distance = np.sqrt(square / max(inside, 1e-300))
                    if distance < least:
                        least, pair = distance, (a, b)
        if pair is None or least > apart:
            return Centres(count, mean, variance)
        a, b = pair
        share = count[a] / (count[a] + count[b])
        both = share * mean[a] + (1 - share) * mean[b]
        second = share * (variance[a] + mean[a] ** 2) + (1 - share) * (variance[b] + mean[b] ** 2)
        mean[a], variance[a] = both, np.maximum(second - both**2, 0)
        count[a], count[b] = count[a] + count[b], 0.0
