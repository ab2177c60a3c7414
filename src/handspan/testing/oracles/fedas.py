"""FedAS: align the shared body with the client's last one, and weigh bodies by their Fisher trace.

X. Yang, W. Huang, M. Ye, FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR
2024. Body theta shared, head omega_i private. A round of client i, from the OLD theta:

1. alignment: gradient steps on the mean square distance between the features theta(x) and those of
   the client's own last body, which stay fixed (skipped by a client that has none);
2. local SGD on body and head together;
3. alpha_i = mean over the client's rows of |grad log p(y|x)|^2, body and head, at the NEW model;

and theta = sum_i alpha_i theta_i / sum_i alpha_i at the server.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]
Gradient = Callable[[Params, Array, NDArray], Params]


def fisher_trace(params: Params, gradient: Gradient, x: Array, y: NDArray) -> float:
    """Average the square norm of the gradient over rows, each row alone."""
    total = 0.0
    for j in range(len(y)):
        slope = gradient(params, x[j : j + 1], y[j : j + 1])
        total += sum(float((value**2).sum()) for value in slope.values())
    return total / len(y)


def fedas(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Gradient,
    features: Callable[[Params, Array], Array],
    gradient_features: Gradient,
    initial: Params,
    head_names: Iterable[str],
    *,
    align_learning_rate: float,
    align: bool = True,
    trace_power: float = 1.0,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> tuple[Params, list[Params], list[bool]]:
    """Run FedAS.

    Parameters
    ----------
    clients, cohorts, gradient
        As in the package.
    batches
        Rows of each step; phase ``"train"``: alignment (if there is one), then training. The trace
        takes all rows.
    features, gradient_features
        Input of the head, and the gradient of its mean square distance to given features.
    initial
        A whole model: the first body, and the first head of every client.
    head_names
        Which of its names are the head.
    align_learning_rate, align
        Step size of the alignment, by plain SGD, and whether there is one.
    trace_power
        alpha_i is the trace to this power.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD of the training; the buffer starts at 0.

    Returns
    -------
    body : dict
        The server's theta.
    models : list of dict
        Body and head of each client after its last training; the first model if there was none.
    is_trained : list of bool
        Whether there was one.
    """
    head_names = list(head_names)
    first = {name: np.array(value, dtype=float) for name, value in initial.items()}
    theta = {name: value for name, value in first.items() if name not in head_names}
    models = [dict(first) for _ in clients]
    is_trained = [False for _ in clients]

    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        total = {name: np.zeros_like(value) for name, value in theta.items()}
        total_weight = 0.0
        for i in cohort:
            x, y = clients[i]
            old = models[i]
            model = {**old, **theta}
            if align and is_trained[i]:
                for rows in batches(round_index, "train", 0, i):  # Eq. (4)
                    slope = gradient_features(model, x[rows], features(old, x[rows]))
                    for name in theta:
                        model[name] = model[name] - align_learning_rate * slope[name]
            buffer = {name: np.zeros_like(value) for name, value in model.items()}
            for rows in batches(round_index, "train", 1 if align else 0, i):
                slope = gradient(model, x[rows], y[rows])
                for name in model:
                    step = slope[name] + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - learning_rate * step
            models[i], is_trained[i] = model, True
            alpha = fisher_trace(model, gradient, x, y) ** trace_power
            total_weight += alpha
            for name in total:
                total[name] = total[name] + alpha * model[name]
        theta = {name: value / total_weight for name, value in total.items()}  # Eq. (5)
    return theta, models, is_trained
