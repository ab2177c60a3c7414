"""FedPer: a shared base and personal last layers, trained together.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary, Federated Learning with Personalization
Layers, 2019 (arXiv:1912.00818).

A client puts the broadcast base W_B and its own W_P,i together, takes SGD steps on the whole model
(one gradient for both parts), keeps W_P,i and uploads W_B,i.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def fedper(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Params,
    initial_personal: Sequence[Params],
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
) -> tuple[Params, list[Params]]:
    """Run FedPer.

    Parameters
    ----------
    clients, cohorts, gradient
        As everywhere in this package.
    batches
        Rows of each step; phase ``"train"``, stage 0.
    initial
        The first base.
    initial_personal
        The first personal layers of each client.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD on the whole model; the buffer starts at 0 in each round.
    weights
        ``"examples"`` or ``"uniform"`` mean of the bases.

    Returns
    -------
    base : dict
        The server's W_B.
    personal : list of dict
        Every client's W_P,i.
    """
    base = {name: np.array(value, dtype=float) for name, value in initial.items()}
    personal = [dict(own) for own in initial_personal]
    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        uploads, sizes = [], []
        for i in cohort:
            x, y = clients[i]
            model = {**base, **personal[i]}
            buffer = {name: np.zeros_like(value) for name, value in model.items()}
            for rows in batches(round_index, "train", 0, i):
                slope = gradient(model, x[rows], y[rows])
                for name in model:
                    step = slope[name] + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - learning_rate * step
            personal[i] = {name: model[name] for name in personal[i]}
            uploads.append({name: model[name] for name in base})
            sizes.append(len(y) if weights == "examples" else 1)
        for name in base:  # W_B = sum_i N_i/N W_B,i
            shares = [size / sum(sizes) * up[name] for size, up in zip(sizes, uploads, strict=True)]
            base[name] = np.sum(shares, axis=0)
    return base, personal
