"""Local training: every client continues its own model, nothing is sent or averaged.

The lower bar of every table. In a round, each client of the cohort takes its SGD steps from where
it stopped; the others keep their models.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def local(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Params | Sequence[Params],
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> list[Params]:
    """Train every client alone.

    Parameters
    ----------
    clients
        Training rows (x, y) of each client.
    cohorts
        Sorted client ids of each round.
    batches
        Rows of each step; called with phase ``"local"``, stage 0.
    gradient
        Gradient of the mean loss of a batch.
    initial
        One start for all clients, or one for each client.
    learning_rate
        Step size of the local steps.
    momentum, nesterov, weight_decay
        As in plain SGD; the buffer starts at 0 in each round.

    Returns
    -------
    list of dict
        The model of each client.
    """
    models: list[Params] = []
    for client in range(len(clients)):
        start = initial if isinstance(initial, dict) else initial[client]
        models.append({name: np.array(value, dtype=float) for name, value in start.items()})

    for round_index, cohort in enumerate(cohorts):
        for client in cohort:
            x, y = clients[client]
            model = models[client]
            buffer = {name: np.zeros_like(value) for name, value in model.items()}
            for rows in batches(round_index, "local", 0, client):
                slope = gradient(model, x[rows], y[rows])
                for name in model:
                    step = slope[name] + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - learning_rate * step
    return models
