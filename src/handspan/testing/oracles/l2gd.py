"""L2GD: local models x_i, pulled towards their mean whenever a common coin says so.

Algorithm 1 of F. Hanzely, P. Richtarik, Federated Learning of a Mixture of Global and Local Models,
arXiv:2002.05516. It minimises 1/n sum_i f_i(x_i) + lambda/(2n) sum_i |x_i - xbar|^2 with

    xi = 0:  x_i <- x_i - alpha / (n (1 - p)) grad f_i(x_i)
    xi = 1:  x_i <- x_i - alpha lambda / (n p) (x_i - xbar),  xbar the mean of all OLD x_i

in every iteration, for all clients at once.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def l2gd(
    clients: Sequence[tuple[Array, NDArray]],
    coins: Sequence[bool],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Params,
    *,
    regularization: float,
    pull_probability: float,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> tuple[list[Params], Params, int]:
    """Run Algorithm 1.

    Parameters
    ----------
    clients, gradient
        As in the package.
    coins
        xi of each iteration: True is a pull.
    batches
        Rows of each step; phase ``"local"``, stage 0. The paper takes one step on all rows.
    initial
        The first x_i of every client.
    regularization, pull_probability
        lambda and p.
    learning_rate
        eta = alpha / (n (1 - p)), the step size that a client sees.
    momentum, nesterov, weight_decay
        Plain SGD; the buffer starts at 0 in each iteration.

    Returns
    -------
    models : list of dict
        x_i of each client.
    mean : dict
        xbar, as it was at the last pull that followed local steps; the start if there was none.
    contacts : int
        How often such a pull occurred: between two of them nothing is sent.
    """
    n = len(clients)
    alpha = learning_rate * n * (1 - pull_probability)
    models = [{name: np.array(v, dtype=float) for name, v in initial.items()} for _ in clients]
    mean = {name: np.array(value, dtype=float) for name, value in initial.items()}
    contacts, moved = 0, False

    for round_index, is_pull in enumerate(coins):
        if is_pull:
            current = {k: sum(model[k] for model in models) / n for k in mean}
            if moved:
                mean, contacts, moved = current, contacts + 1, False
            factor = min(1.0, alpha * regularization / (n * pull_probability))
            for model in models:
                for name in model:
                    model[name] = model[name] - factor * (model[name] - current[name])
            continue
        moved = True
        for i, (x, y) in enumerate(clients):
            model = models[i]
            buffer = {name: np.zeros_like(value) for name, value in model.items()}
            for rows in batches(round_index, "local", 0, i):
                slope = gradient(model, x[rows], y[rows])
                for name in model:
                    step = slope[name] + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - alpha / (n * (1 - pull_probability)) * step
    return models, mean, contacts
