"""PerFedSI: FedAvg on a model f(x, z) that also reads the client's side information z.

PerFedSI: A Framework for Personalized Federated Learning with Side Information, section 2,
"Algorithm". Objective (2): min over theta of sum_m n_m / N L_m(f_theta^{z_m}). All parameters are
shared and the server takes the plain mean, 1/|B_t|. Nothing is sent but theta; z_m stays with its
client.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def perfedsi(
    clients: Sequence[tuple[Array, NDArray]],
    side: Sequence[Array],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, Array, NDArray], Params],
    initial: Params,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "uniform",
) -> Params:
    """Run PerFedSI.

    Parameters
    ----------
    clients
        Training rows (x, y) of each client.
    side
        Side information z of each client, (q,).
    cohorts
        Sorted client ids of each round; a round without clients is skipped.
    batches
        Rows of each step; called with phase ``"train"``, stage 0.
    gradient
        ``gradient(params, x, z, y)`` of the mean loss of a batch.
    initial
        The server's first model.
    learning_rate
        Step size eta of the clients.
    momentum, nesterov, weight_decay
        Plain SGD; the buffer starts at 0 in each round.
    weights
        ``"uniform"`` (the paper's mean) or ``"examples"``.

    Returns
    -------
    dict
        The server's model theta.
    """
    if weights not in ("uniform", "examples"):
        raise ValueError(f"weights must be 'examples' or 'uniform', not {weights!r}")
    theta = {name: np.array(value, dtype=float) for name, value in initial.items()}

    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        total = {name: np.zeros_like(value) for name, value in theta.items()}
        total_weight = 0.0
        for client in cohort:
            x, y = clients[client]
            model = dict(theta)  # theta_{t,m,0} = theta_t
            buffer = {name: np.zeros_like(value) for name, value in model.items()}
            for rows in batches(round_index, "train", 0, client):
                slope = gradient(model, x[rows], side[client], y[rows])
                for name in model:  # theta_{t,m,s+1} = theta_{t,m,s} - eta g_{t,m,s}
                    step = slope[name] + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - learning_rate * step
            weight = 1.0 if weights == "uniform" else float(len(y))
            total_weight += weight
            for name in total:
                total[name] = total[name] + weight * model[name]
        # theta_{t+1} = 1/|B_t| sum_m theta_{t,m,tau}
        theta = {name: value / total_weight for name, value in total.items()}
    return theta
