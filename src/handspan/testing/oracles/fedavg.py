"""FedAvg, with adaptive server steps and inside given groups.

Round t: the server sends w; each client i of the cohort S takes its SGD steps from w and sends
w_i; the server forms the pseudo-gradient -Delta, Delta = sum_S p_i (w_i - w), and takes one step
of its own optimiser. The p_i are the normalised numbers of rows, or 1/|S|.

Server steps (Algorithm 2 of [2], without bias correction; products elementwise)::

    sgd     m = mu m + Delta                            w = w + eta m
    adam    m = b1 m + (1 - b1) Delta                   w = w + eta m / (sqrt(v) + tau)
            v = b2 v + (1 - b2) Delta^2
    yogi    the same with  v = v - (1 - b2) Delta^2 sign(v - Delta^2)

from m = 0 and v = tau^2. The default, sgd with eta = 1 and mu = 0, is FedAvg [1]: w = sum p_i w_i.

References
----------
[1] B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas. Communication-Efficient
Learning of Deep Networks from Decentralized Data. AISTATS 2017.
[2] S. Reddi et al. Adaptive Federated Optimization. ICLR 2021.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]
Clients = Sequence[tuple[Array, NDArray]]
Batches = Callable[[int, str, int, int], Rows]
Gradient = Callable[[Params, Array, NDArray], Params]


def fedavg(
    clients: Clients,
    cohorts: Sequence[Sequence[int]],
    batches: Batches,
    gradient: Gradient,
    initial: Params,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
    server_optimizer: str = "sgd",
    server_learning_rate: float = 1.0,
    server_momentum: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    initial_second_moment: float | None = None,
) -> Params:
    """Run FedAvg, or FedAdam, FedYogi or server momentum around it.

    Parameters
    ----------
    clients
        Training rows (x, y) of each client.
    cohorts
        Sorted client ids of each round; a round without clients is skipped.
    batches
        Rows of each step; called with phase ``"train"``, stage 0.
    gradient
        Gradient of the mean loss of a batch.
    initial
        The server's first model.
    learning_rate
        Step size of the clients.
    momentum, nesterov, weight_decay
        Plain SGD of the clients; the buffer starts at 0 in each round.
    weights
        ``"examples"`` or ``"uniform"`` mean over the cohort.
    server_optimizer
        ``"sgd"``, ``"adam"`` or ``"yogi"``.
    server_learning_rate
        Step size eta of the server.
    server_momentum
        The factor mu of the server's ``"sgd"``.
    beta1, beta2, tau
        Constants of ``"adam"`` and ``"yogi"``.
    initial_second_moment
        Every entry of the first v; tau^2 by default.

    Returns
    -------
    dict
        The server's model.
    """
    if weights not in ("examples", "uniform"):
        raise ValueError(f"weights must be 'examples' or 'uniform', not {weights!r}")
    if server_optimizer not in ("sgd", "adam", "yogi"):
        raise ValueError(f"server_optimizer must be sgd, adam or yogi, not {server_optimizer!r}")
    v_start = tau**2 if initial_second_moment is None else initial_second_moment
    server = {name: np.array(value, dtype=float) for name, value in initial.items()}
    first = {name: np.zeros_like(value) for name, value in server.items()}
    second = {name: np.full_like(value, v_start) for name, value in server.items()}

    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        sizes = {i: 1 if weights == "uniform" else len(clients[i][1]) for i in cohort}
        delta = {name: np.zeros_like(value) for name, value in server.items()}
        for i in cohort:
            x, y = clients[i]
            model = dict(server)
            buffer = {name: np.zeros_like(value) for name, value in model.items()}
            for rows in batches(round_index, "train", 0, i):
                slope = gradient(model, x[rows], y[rows])
                for name in model:
                    step = slope[name] + weight_decay * model[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    model[name] = model[name] - learning_rate * step
            share = sizes[i] / sum(sizes.values())
            for name in server:  # Delta = sum_S p_i (w_i - w)
                delta[name] = delta[name] + share * (model[name] - server[name])

        for name in server:
            change = delta[name]
            if server_optimizer == "sgd":
                first[name] = server_momentum * first[name] + change
                server[name] = server[name] + server_learning_rate * first[name]
                continue
            # [2], Algorithm 2
            first[name] = beta1 * first[name] + (1 - beta1) * change
            if server_optimizer == "adam":
                second[name] = beta2 * second[name] + (1 - beta2) * change**2
            else:
                sign = np.sign(second[name] - change**2)
                second[name] = second[name] - (1 - beta2) * change**2 * sign
            server[name] = server[name] + server_learning_rate * first[name] / (
                np.sqrt(second[name]) + tau
            )
    return server


def fedavg_groups(
    clients: Clients,
    cohorts: Sequence[Sequence[int]],
    batches: Batches,
    gradient: Gradient,
    initial: Params,
    groups: Mapping[int, Hashable] | Sequence[Hashable] | NDArray,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
) -> dict[Hashable, Params]:
    """Run FedAvg inside given groups: one model per group, averaged over its cohort members.

    Every group runs alone, on the members of each cohort that belong to it.

    Parameters
    ----------
    clients, cohorts, batches, gradient, initial, weights
        As in `fedavg`; every group starts at ``initial``.
    groups
        The group of each client, ``groups[client]``.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD of the clients.

    Returns
    -------
    dict
        The model of each group. A group with nobody in a cohort keeps its model in that round.
    """
    labels = [groups[client] for client in range(len(clients))]
    models: dict[Hashable, Params] = {}
    for label in dict.fromkeys(labels):
        members = [[i for i in cohort if labels[i] == label] for cohort in cohorts]
        models[label] = fedavg(
            clients,
            members,
            batches,
            gradient,
            initial,
            learning_rate=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            weights=weights,
        )
    return models
