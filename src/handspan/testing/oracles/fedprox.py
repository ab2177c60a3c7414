"""FedProx: FedAvg with a pull to the model that the round began with.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, Federated Optimization in
Heterogeneous Networks, MLSys 2020 (arXiv:1812.06127), Algorithm 2 with the weights of its
experiments.

Round t: each client of the cohort takes SGD steps on h_i(w; w^t) = f_i(w) + mu/2 |w - w^t|^2 from
w = w^t; w^t stays the broadcast model throughout. The server takes the weighted mean.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def fedprox(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Params,
    *,
    prox_weight: float,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
) -> Params:
    """Run FedProx.

    Parameters
    ----------
    clients, cohorts, gradient, initial
        As everywhere in this package.
    batches
        Rows of each step; phase ``"train"``, stage 0.
    prox_weight
        The weight mu.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD on h_i; the buffer starts at 0 in each round.
    weights
        ``"examples"`` or ``"uniform"`` mean over the cohort.

    Returns
    -------
    dict
        The server's model.
    """
    server = {name: np.array(value, dtype=float) for name, value in initial.items()}
    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        total = {name: np.zeros_like(value) for name, value in server.items()}
        shares = 0.0
        for i in cohort:
            x, y = clients[i]
            model = {name: value.copy() for name, value in server.items()}
            buffer = {name: np.zeros_like(value) for name, value in server.items()}
            for rows in batches(round_index, "train", 0, i):
                slope = gradient(model, x[rows], y[rows])
                for name in model:
                    # grad h_i(w; w^t) = grad f_i(w) + mu (w - w^t)
                    step = slope[name] + prox_weight * (model[name] - server[name])
                    step = step + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - learning_rate * step
            share = 1.0 if weights == "uniform" else float(len(y))
            shares += share
            for name in total:
                total[name] = total[name] + share * model[name]
        server = {name: value / shares for name, value in total.items()}
    return server
