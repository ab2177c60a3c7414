"""Comparisons that take a moment: a linear model on a few separable rows."""

import functools

import numpy as np

from handspan.core.data import FederatedData

TERMS = {"model": "linear", "rounds": 3, "steps": 2, "cohort": 0.5, "batch_size": None}


@functools.cache
def federation(seed):
    """Eight clients with 8 to 22 rows each, in two groups that name the classes differently."""
    rng = np.random.default_rng(seed)
    weights = np.random.default_rng(99).normal(size=(5, 3))
    clients = []
    for client in range(8):
        x = rng.normal(size=(8 + 2 * client, 5)).astype("float32")
        y = (x @ weights + 0.3 * rng.normal(size=(len(x), 3))).argmax(1)
        clients.append((x, (y + client % 2) % 3))
    return FederatedData.from_clients(clients, seed=seed, num_classes=3)
