"""Ditto: FedAvg beside personal models that are held near it.

T. Li, S. Hu, A. Beirami, V. Smith, Ditto: Fair and Robust Federated Learning Through
Personalization, ICML 2021 (arXiv:2012.04221), Algorithm 1.

In round t a client of the cohort trains w_i from w^t as in FedAvg, and moves its own v_i by steps
on f_i(v) + lambda/2 |v - w^t|^2. w^t is what was broadcast, in both; v_i is never sent.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def ditto(
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
) -> tuple[Params, list[Params]]:
    """Run Algorithm 1.

    Parameters
    ----------
    clients, cohorts, gradient
        As everywhere in this package.
    batches
        Rows of each step; phase ``"train"``, stage 0 for w_i, stage 1 for v_i.
    initial
        The first w, and the first v_i of every client.
    prox_weight
        The weight lambda.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD in both tracks; the buffers start at 0 in each round.
    weights
        ``"examples"`` or ``"uniform"`` mean of the w_i.

    Returns
    -------
    shared : dict
        The server's w.
    personal : list of dict
        Every client's v_i.
    """
    w = {name: np.array(value, dtype=float) for name, value in initial.items()}
    v = [{name: np.array(value, dtype=float) for name, value in w.items()} for _ in clients]

    def solve(start: Params, i: int, steps: Rows, pull: float) -> Params:
        x, y = clients[i]
        model, buffer = dict(start), {name: np.zeros_like(value) for name, value in start.items()}
        for rows in steps:
            slope = gradient(model, x[rows], y[rows])
            for name in model:
                step = slope[name] + pull * (model[name] - w[name]) + weight_decay * model[name]
                buffer[name] = momentum * buffer[name] + step
                step = step + momentum * buffer[name] if nesterov else buffer[name]
                model[name] = model[name] - learning_rate * step
        return model

    for t, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        trained = {}
        for i in cohort:
            trained[i] = solve(w, i, batches(t, "train", 0, i), 0.0)
            v[i] = solve(v[i], i, batches(t, "train", 1, i), prox_weight)
        size = {i: len(clients[i][1]) if weights == "examples" else 1 for i in cohort}
        total = sum(size.values())
        # w^{t+1} = w^t + sum_i p_i (w_i - w^t)
        w = {n: w[n] + sum(size[i] / total * (trained[i][n] - w[n]) for i in cohort) for n in w}
    return w, v
