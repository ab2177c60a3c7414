"""IFCA, Option II (model averaging): k models, and each client trains the one that fits it best.

A. Ghosh, J. Chung, D. Yin, K. Ramchandran, An Efficient Framework for Clustered Federated
Learning, NeurIPS 2020 (arXiv:2006.04088), Algorithm 1.

Objective: min over theta_1..theta_k of (1/n) sum_i min_j F_i(theta_j). The choice is made anew in
every round, on all the client's training rows; clients keep nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]
Loss = Callable[[Params, Array, NDArray], float]


def choose(models: Sequence[Params], loss: Loss, x: Array, y: NDArray) -> int:
    """Give the cluster estimate: the model of least loss on the rows given.

    Parameters
    ----------
    models
        The k models.
    loss
        Mean loss of rows.
    x, y
        All training rows of one client.

    Returns
    -------
    int
        j = argmin_j F_i(theta_j), with losses rounded to 1e-9 and ties going to the lowest index.
    """
    best, best_loss = 0, np.inf
    for j, model in enumerate(models):
        value = round(float(loss(model, x, y)), 9)
        if value < best_loss:
            best, best_loss = j, value
    return best


def ifca(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    loss: Loss,
    initial: Sequence[Params],
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "uniform",
) -> tuple[list[Params], list[dict[int, int]]]:
    """Run IFCA with model averaging.

    Parameters
    ----------
    clients
        Training rows (x, y) of each client.
    cohorts
        Sorted client ids of each round.
    batches
        Rows of each SGD step: phase ``"train"``, stage 1. Stage 0 is the choice; it takes all rows
        and ``batches`` is not called for it.
    gradient
        Gradient of the mean loss of a batch.
    loss
        Mean loss of rows, for the choice.
    initial
        The k first models.
    learning_rate
        Step size of the clients.
    momentum, nesterov, weight_decay
        Plain SGD; the buffer starts at 0 in each round.
    weights
        ``"uniform"`` or ``"examples"`` mean inside a cluster.

    Returns
    -------
    models : list of dict
        The k models of the server.
    choices : list of dict
        For each round the model that each client of the cohort chose, by client id.
    """
    if weights not in ("uniform", "examples"):
        raise ValueError(f"weights must be 'examples' or 'uniform', not {weights!r}")
    models = [
        {name: np.array(value, dtype=float) for name, value in one.items()} for one in initial
    ]
    choices: list[dict[int, int]] = []

    for round_index, cohort in enumerate(cohorts):
        chosen: dict[int, int] = {}
        trained: dict[int, Params] = {}
        for client in cohort:
            x, y = clients[client]
            chosen[client] = choose(models, loss, x, y)
            model = dict(models[chosen[client]])
            buffer = {name: np.zeros_like(value) for name, value in model.items()}
            for rows in batches(round_index, "train", 1, client):
                slope = gradient(model, x[rows], y[rows])
                for name in model:
                    step = slope[name] + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - learning_rate * step
            trained[client] = model
        choices.append(chosen)

        # theta_j <- sum_i s_ij theta~_i / sum_i s_ij
        for j in range(len(models)):
            members = [client for client in cohort if chosen[client] == j]
            if not members:
                continue  # an empty cluster keeps its model
            sizes = [1 if weights == "uniform" else len(clients[c][1]) for c in members]
            mean = {name: np.zeros_like(value) for name, value in models[j].items()}
            for client, size in zip(members, sizes, strict=True):
                for name in mean:
                    mean[name] = mean[name] + size / sum(sizes) * trained[client][name]
            models[j] = mean
    return models, choices
