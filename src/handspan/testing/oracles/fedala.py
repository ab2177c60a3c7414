"""FedALA: local training starts from an element-wise mixture of the own and the shared model.

J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, FedALA: Adaptive Local Aggregation for
Personalized Federated Learning, AAAI 2023 (arXiv:2212.01197).

A client receives theta and forms, on the named top layers, Theta = theta_i + (theta - theta_i) W;
the layers below are theta's. W follows the gradient at Theta with theta and theta_i frozen,

    W <- clip(W - eta grad L(Theta) (theta - theta_i), 0, 1),

one batch after the other, and local training starts from Theta with the new W. A client that has
not trained yet has theta_i = theta, so that W does not move.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]
Gradient = Callable[[Params, Array, NDArray], Params]


def learn_weights(
    shared: Params,
    local: Params,
    weights: Params,
    gradient: Gradient,
    x: Array,
    y: NDArray,
    steps: Rows,
    *,
    drawn: NDArray[np.bool_],
    weight_learning_rate: float,
) -> tuple[Params, Params]:
    """Adapt W on batches, and mix.

    Parameters
    ----------
    shared
        theta, a whole model.
    local, weights
        theta_i and W on the mixed layers.
    gradient, x, y, steps
        Of the client; ``steps`` are the rows of each batch.
    drawn
        Which of the client's rows W may be learned on; a batch without any of them takes all.
    weight_learning_rate
        eta.

    Returns
    -------
    weights, model : dict
        The new W, and the whole model with Theta in its mixed layers.
    """
    weights = {name: value.copy() for name, value in weights.items()}

    def mixed() -> Params:
        top = {k: old + (shared[k] - old) * weights[k] for k, old in local.items()}
        return {**shared, **top}

    for rows in steps:
        some = [row for row in rows if drawn[row]] or list(rows)
        slope = gradient(mixed(), x[some], y[some])
        for name in weights:
            step = weight_learning_rate * slope[name] * (shared[name] - local[name])
            weights[name] = np.clip(weights[name] - step, 0.0, 1.0)
    return weights, mixed()


def fedala(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Gradient,
    initial: Params,
    names: Iterable[str],
    drawn: Callable[[int, int], NDArray[np.bool_]],
    *,
    weight_learning_rate: float,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
) -> tuple[Params, list[Params | None], list[Params]]:
    """Run FedALA.

    Parameters
    ----------
    clients, cohorts, gradient
        As in the package.
    batches
        Rows of each step; phase ``"train"``, stage 0 = W, stage 1 = local training.
    initial
        The server's first model.
    names
        The layers that are mixed.
    drawn
        ``drawn(round, client)`` tells for each row whether W is learned on it in that round.
    weight_learning_rate
        eta of W.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD of the local training; the buffer starts at 0 in each round.
    weights
        ``"examples"`` or ``"uniform"`` mean of the local models.

    Returns
    -------
    shared : dict
        The server's theta.
    local : list
        theta_i of each client; None if it never trained.
    mixing : list of dict
        W of each client.
    """
    names = list(names)
    server = {name: np.array(value, dtype=float) for name, value in initial.items()}
    local: list[Params | None] = [None for _ in clients]
    mixing = [{name: np.ones_like(server[name]) for name in names} for _ in clients]

    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        total = {name: np.zeros_like(value) for name, value in server.items()}
        total_weight = 0.0
        for i in cohort:
            x, y = clients[i]
            own = local[i]
            old = {name: server[name] if own is None else own[name] for name in names}
            mixing[i], model = learn_weights(
                server,
                old,
                mixing[i],
                gradient,
                x,
                y,
                batches(round_index, "train", 0, i),
                drawn=drawn(round_index, i),
                weight_learning_rate=weight_learning_rate,
            )
            buffer = {name: np.zeros_like(value) for name, value in model.items()}
            for rows in batches(round_index, "train", 1, i):
                slope = gradient(model, x[rows], y[rows])
                for name in model:
                    step = slope[name] + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - learning_rate * step
            local[i] = model
            weight = 1.0 if weights == "uniform" else float(len(y))
            total_weight += weight
            for name in total:
                total[name] = total[name] + weight * model[name]
        server = {name: value / total_weight for name, value in total.items()}
    return server, local, mixing
