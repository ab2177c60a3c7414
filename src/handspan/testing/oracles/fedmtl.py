"""Fed-MTL in its primal form: SGD on sum_i f_i(w_i) + l1 tr(W Omega W^T) + l2 |W|^2.

V. Smith, C.-K. Chiang, M. Sanjabi, A. Talwalkar, Federated Multi-Task Learning, NIPS 2017
(arXiv:1705.10467); SGD in the place of the dual solver. A client moves its own column w_i of W
(d x n) alone; the other columns are those that the clients last sent. The gradient of the middle
term by w_i is 2 sum_j Omega_ij w_j (Omega symmetric).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def mean_relation(n: int) -> Array:
    """Omega = (I - 11^T/n)^2, the square of a projector: tr(W Omega W^T) = sum |w_i - wbar|^2."""
    projector = np.eye(n) - np.ones((n, n)) / n
    return projector @ projector


def learned_relation(w: Array, floor: float) -> Array:
    """Omega^-1 = (W^T W)^(1/2) / tr (W^T W)^(1/2), mixed with a share of I/n; W is d x n."""
    n = w.shape[1]
    _, singular, right = np.linalg.svd(w, full_matrices=False)
    root = (right.T * singular) @ right
    return np.linalg.inv((1 - floor) * root / np.trace(root) + floor * np.eye(n) / n)


def fedmtl(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Params,
    *,
    relation_weight: float,
    shrinkage: float = 0.0,
    relation_every: int | None = None,
    relation_floor: float = 0.1,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> tuple[list[Params], Array]:
    """Run Fed-MTL.

    Parameters
    ----------
    clients, cohorts, gradient
        As in the package.
    batches
        Rows of each step; phase ``"train"``, stage 0.
    initial
        The first model of every client.
    relation_weight, shrinkage
        l1 and l2.
    relation_every
        Rounds from one learned Omega to the next, beginning with n I; None for the fixed relation.
    relation_floor
        Share of I/n in a learned Omega^-1.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD; the buffer starts at 0 in each round.

    Returns
    -------
    models : list of dict
        w_i of each client.
    relation : array
        The last Omega.
    """
    n, names = len(clients), sorted(initial)
    models = [{name: np.array(initial[name], dtype=float) for name in names} for _ in clients]
    relation = mean_relation(n) if relation_every is None else n * np.eye(n)

    for round_index, cohort in enumerate(cohorts):
        old = [dict(model) for model in models]
        for i in cohort:
            x, y = clients[i]
            model = dict(old[i])
            buffer = {name: np.zeros_like(value) for name, value in model.items()}
            for rows in batches(round_index, "train", 0, i):
                slope = gradient(model, x[rows], y[rows])
                columns = [model if j == i else old[j] for j in range(n)]
                for name in names:
                    related = sum(relation[i, j] * columns[j][name] for j in range(n))
                    step = slope[name] + 2 * relation_weight * related
                    step = step + 2 * shrinkage * model[name] + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - learning_rate * step
            models[i] = model
        if relation_every is not None and (round_index + 1) % relation_every == 0:
            w = np.stack([np.concatenate([m[k].ravel() for k in names]) for m in models], axis=1)
            relation = learned_relation(w, relation_floor)
    return models, relation
