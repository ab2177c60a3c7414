"""LG-FedAvg: local encoders, a global head.

P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P.
Morency, Think Locally, Act Globally: Federated Learning with Local and Global Representations,
2019 (arXiv:2001.01523).

A client replaces its top layers by the broadcast ones, takes SGD steps on the whole model, and
uploads the top layers; its lower layers stay.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def lgfedavg(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Params,
    top_names: Iterable[str],
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
) -> tuple[Params, list[Params]]:
    """Run LG-FedAvg from one common model.

    Parameters
    ----------
    clients, cohorts, gradient
        As everywhere in this package.
    batches
        Rows of each step; phase ``"train"``, stage 0.
    initial
        The model from which all clients start.
    top_names
        The names of ``initial`` that are global.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD on the whole model; the buffer starts at 0 in each round.
    weights
        ``"examples"`` or ``"uniform"`` mean of the top layers.

    Returns
    -------
    top : dict
        The server's theta^g.
    models : list of dict
        Every client's whole model as it last trained it; its local layers are private.
    """
    top_names = list(top_names)
    models = [
        {name: np.array(value, dtype=float) for name, value in initial.items()} for _ in clients
    ]
    top = {name: np.array(initial[name], dtype=float) for name in top_names}
    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        total, weight = {name: np.zeros_like(top[name]) for name in top_names}, 0.0
        for i in cohort:
            x, y = clients[i]
            model = models[i]
            model.update(top)  # theta_i^g <- theta^g
            buffer = {name: 0.0 * value for name, value in model.items()}
            for rows in batches(round_index, "train", 0, i):
                slope = gradient(dict(model), x[rows], y[rows])
                for name in slope:
                    step = slope[name] + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - learning_rate * step
            share = 1.0 if weights == "uniform" else float(len(y))
            weight += share
            for name in top_names:
                total[name] = total[name] + share * model[name]
        top = {name: total[name] / weight for name in top_names}
    return top, models
