"""Alternating least squares with a weighted ridge: what ``fedcomplete`` does, on the whole table.

References
----------
    Zhou, Wilkinson, Schreiber, Pan: Large-scale Parallel Collaborative Filtering for the Netflix
    Prize. AAIM 2008.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse


def central_completion(
    x: Any, num_components: int, *, ridge: float, sweeps: int = 50, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, float]:
    """Complete a table from its stored entries.

    Parameters
    ----------
    x
        CSR (N, M).
    num_components, ridge
        K, and the weight of the ridge for each entry.
    sweeps
        Times that all rows and then all columns are solved for.
    seed
        Of the start.

    Returns
    -------
    rows, columns, mean
        (h, c) of the rows, (w, b) of the columns, and mu.
    """
    x = sparse.csr_array(x)
    turned, mean = sparse.csr_array(x.T), float(x.data.mean())
    rng = np.random.default_rng(seed)
    columns = np.pad(0.1 * rng.normal(size=(x.shape[1], num_components)), ((0, 0), (0, 1)))
    rows = np.zeros((x.shape[0], num_components + 1))
    for _ in range(sweeps):
        rows = solve_each(x, columns, mean, ridge)
        columns = solve_each(turned, rows, mean, ridge)
    return rows, columns, mean


def solve_each(x: Any, others: np.ndarray, mean: float, ridge: float) -> np.ndarray:
    """Ridge regression of each row on what it knows, the other side fixed."""
    found = np.zeros((x.shape[0], others.shape[1]))
    for j in range(x.shape[0]):
        at, values = (part[x.indptr[j] : x.indptr[j + 1]] for part in (x.indices, x.data))
        A = np.column_stack([others[at, :-1], np.ones(len(at))])
        own = ridge * max(1, len(at)) * np.eye(A.shape[1])
        found[j] = np.linalg.solve(A.T @ A + own, A.T @ (values - mean - others[at, -1]))
    return found
