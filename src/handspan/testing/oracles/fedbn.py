"""FedBN: layers of batch normalisation stay with their client, everything else is averaged.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization, ICLR 2021 (arXiv:2102.07623).

A client's steps use the statistics of each batch; its running statistics follow them with momentum
0.1, and are used when it is served.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]
Function = Callable[..., Params]


def fedbn(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Function,
    statistics: Function,
    initial: Params,
    initial_running: Params,
    norm_names: Iterable[str],
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "uniform",
) -> tuple[Params, list[Params], list[Params]]:
    """Run FedBN.

    Parameters
    ----------
    clients, cohorts, initial
        As everywhere in this package.
    batches
        Rows of each step; phase ``"train"``, stage 0.
    gradient
        ``gradient(params, x, y)`` in training mode.
    statistics
        ``statistics(params, x)``: mean and variance of a batch, with the names of the running ones.
    initial_running
        The first running statistics.
    norm_names
        Which names of ``initial`` are scales and shifts.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD on all parameters; the buffer starts at 0 in each round.
    weights
        ``"uniform"`` or ``"examples"`` mean of the shared parameters.

    Returns
    -------
    theta : dict
        The server's parameters.
    scales, running : list of dict
        Every client's scales and shifts, and its running statistics.
    """
    own = set(norm_names)
    theta = {n: np.array(v, dtype=float) for n, v in initial.items() if n not in own}
    scales = [{n: np.array(initial[n], dtype=float) for n in own} for _ in clients]
    running = [{n: np.array(v, dtype=float) for n, v in initial_running.items()} for _ in clients]
    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        sent, sizes = [], []
        for i in cohort:
            x, y = clients[i]
            model = {**theta, **scales[i]}
            buffer = {name: np.zeros_like(value) for name, value in model.items()}
            for rows in batches(round_index, "train", 0, i):
                for name, now in statistics(model, x[rows]).items():
                    running[i][name] = 0.9 * running[i][name] + 0.1 * now
                slope = gradient(model, x[rows], y[rows])
                for name in model:
                    step = slope[name] + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - learning_rate * step
            scales[i] = {name: model[name] for name in own}
            sent.append({name: model[name] for name in theta})
            sizes.append(len(y) if weights == "examples" else 1)
        for name in theta:
            theta[name] = sum(
                size / sum(sizes) * up[name] for size, up in zip(sizes, sent, strict=True)
            )
    return theta, scales, running
