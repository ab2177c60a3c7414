"""FLUTE, nonlinear form: a shared body, heads that the server holds and pulls to neural collapse.

R. Liu, C. Shen, J. Yang, Federated Representation Learning in the Under-Parameterized Regime,
ICML 2024 (arXiv:2406.04596); the nonlinear round as in the authors' code.

The server holds all heads H_i and takes its own step on them, as published.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def collapse(weight: Array, present: Array) -> float:
    """Compute NC = |H H^T / |H H^T|_F - (C-1)^(-1/2) (u u^T) * (I - 11^T / C)|_F."""
    return float(np.linalg.norm(_difference(weight, present)))


def _difference(weight: Array, present: Array) -> Array:
    size = len(present)
    products = weight @ weight.T
    frame = np.outer(present, present) * (np.eye(size) - np.ones((size, size)) / size)
    return products / np.linalg.norm(products) - frame / np.sqrt(size - 1)


def gradient_collapse(weight: Array, present: Array) -> Array:
    """Differentiate `collapse` by H: 2 (G - <G, N> N / |N|^2) H / |N|, G the unit difference."""
    products = weight @ weight.T
    norm = np.linalg.norm(products)
    difference = _difference(weight, present)
    unit = difference / np.linalg.norm(difference)
    slope = (unit - (unit * products).sum() * products / norm**2) / norm
    return 2 * slope @ weight


def flute(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    gradient_features: Callable[[Params, Array], Params],
    initial: Params,
    head_weight: str,
    head_names: Sequence[str],
    *,
    learning_rate: float,
    lambdas: tuple[float, float, float] = (0.25, 0.0025, 0.0005),
    server_learning_rate: float = 0.5,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
) -> tuple[Params, list[Params]]:
    """Run FLUTE.

    Parameters
    ----------
    clients, cohorts, batches, gradient, learning_rate, momentum, nesterov, weight_decay, weights
        As in the other modules; phase ``"train"``, stage 0 = head alone, stage 1 = all parameters.
    gradient_features
        Gradient of the sum of squares of a batch's features.
    initial
        A whole model: the first body, and every client's first head.
    head_weight, head_names
        Name of H, and the names of the whole head.
    lambdas
        lambda_1, lambda_2, lambda_3.
    server_learning_rate
        eta_r.

    Returns
    -------
    body : dict
        The server's body.
    heads : list of dict
        The heads of all clients, after the server's step.
    """
    first = {name: np.array(value, dtype=float) for name, value in initial.items()}
    body = {name: value for name, value in first.items() if name not in head_names}
    heads = [{name: first[name] for name in head_names} for _ in clients]
    num_classes = len(first[head_weight])
    u = [np.array([float((y == c).any()) for c in range(num_classes)]) for _, y in clients]

    def slope(params: Params, i: int, rows, with_features: bool) -> Params:
        x, y = clients[i][0][rows], clients[i][1][rows]
        result = dict(gradient(params, x, y))
        weight = params[head_weight]
        result[head_weight] = (
            result[head_weight]
            + lambdas[0] * gradient_collapse(weight, u[i])
            + 2 * lambdas[1] * weight
        )
        if with_features:
            of_features = gradient_features(params, x)
            result = {
                name: value + lambdas[2] * of_features[name] for name, value in result.items()
            }
        return result

    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        total = {name: np.zeros_like(value) for name, value in body.items()}
        total_weight = 0.0
        for i in cohort:
            params = {**body, **heads[i]}
            for stage, moving in enumerate((list(head_names), list(params))):
                buffer = {name: np.zeros_like(params[name]) for name in moving}
                for rows in batches(round_index, "train", stage, i):
                    step = slope(params, i, rows, stage == 1)
                    params = dict(params)
                    for name in moving:
                        g = step[name] + weight_decay * params[name]
                        buffer[name] = momentum * buffer[name] + g
                        g = g + momentum * buffer[name] if nesterov else buffer[name]
                        params[name] = params[name] - learning_rate * g
            heads[i] = {name: params[name] for name in head_names}
            weight = 1.0 if weights == "uniform" else float(len(clients[i][1]))
            total_weight += weight
            total = {name: total[name] + weight * params[name] for name in total}
        body = {name: value / total_weight for name, value in total.items()}
        # Server: one step on sum over the cohort of NC_i(H_i) / |S_t|; biases stay.
        for i in cohort:
            step = gradient_collapse(heads[i][head_weight], u[i]) / len(cohort)
            moved = heads[i][head_weight] - server_learning_rate * step
            heads[i] = {**heads[i], head_weight: moved}
    return body, heads
