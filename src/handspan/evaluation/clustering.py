"""How well found components are the known classes."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def clustering_accuracy(y: Tensor, found: Tensor) -> float:
    """Share of rows on the best one-to-one match of components and classes (Hungarian)."""
    from scipy.optimize import linear_sum_assignment

    truth, guess = y.numpy(), found.numpy()
    table = np.zeros((int(truth.max()) + 1, int(guess.max()) + 1), dtype=np.int64)
    np.add.at(table, (truth, guess), 1)
    return float(table[linear_sum_assignment(-table)].sum() / len(truth))


def clustering_scores(y: Tensor, found: Tensor) -> dict[str, float]:
    """Clustering accuracy, normalised mutual information and adjusted Rand index."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    return {
        "clustering_accuracy": clustering_accuracy(y, found),
        "nmi": float(normalized_mutual_info_score(y.numpy(), found.numpy())),
        "ari": float(adjusted_rand_score(y.numpy(), found.numpy())),
    }
