"""FedEM: expectation-maximisation over a federation whose rows are a mixture of M distributions.

O. Marfoq, G. Neglia, A. Bellet, L. Kameni, R. Vidal, Federated Multi-Task Learning under a Mixture
of Distributions, NeurIPS 2021 (arXiv:2108.10252).

Objective: min -(1/N) sum_i sum_s log sum_m pi_im exp(-l(h_theta_m(x_s), y_s)).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]
Loss = Callable[[Params, Array, NDArray], float]


def e_step(models: Sequence[Params], mixture: Array, loss: Loss, x: Array, y: NDArray) -> Array:
    """Compute q_s(m) = pi_m exp(-l(h_theta_m(x_s), y_s)) / sum over m', (rows, M)."""
    q = np.zeros((len(y), len(models)))
    for s in range(len(y)):
        for m, model in enumerate(models):
            q[s, m] = mixture[m] * np.exp(-loss(model, x[s : s + 1], y[s : s + 1]))
        q[s] /= q[s].sum()
    return q


def fit_mixture(
    models: Sequence[Params], mixture: Array, loss: Loss, x: Array, y: NDArray, passes: int
) -> Array:
    """Alternate E step and pi_m <- mean_s q_s(m) with the models fixed (service of new clients)."""
    for _ in range(passes):
        mixture = e_step(models, mixture, loss, x, y).mean(axis=0)
    return mixture


def log_likelihood(models, mixtures, loss: Loss, clients) -> float:
    """Compute sum_i sum_s log sum_m pi_im exp(-l(h_theta_m(x_s), y_s))."""
    total = 0.0
    for (x, y), mixture in zip(clients, mixtures, strict=True):
        for s in range(len(y)):
            single = [np.exp(-loss(model, x[s : s + 1], y[s : s + 1])) for model in models]
            total += np.log(np.dot(mixture, single))
    return float(total)


def fedem(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    loss: Loss,
    initial: Sequence[Params],
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
) -> tuple[list[Params], list[Array]]:
    """Run FedEM.

    Parameters
    ----------
    clients, cohorts, batches, gradient, learning_rate, momentum, nesterov, weight_decay, weights
        As in the other modules; phase ``"train"``, stage 0 = E step (all rows), stage 1 = SGD.
    loss
        Mean loss of rows, a negative log-likelihood.
    initial
        The M first models.

    Returns
    -------
    models : list of dict
        The M models.
    mixtures : list of array
        pi_i of each client.
    """
    count = len(initial)
    models = [{n: np.array(v, dtype=float) for n, v in model.items()} for model in initial]
    mixtures = [np.full(count, 1 / count) for _ in clients]
    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        total = [{n: np.zeros_like(v) for n, v in model.items()} for model in models]
        total_weight = 0.0
        for i in cohort:
            x, y = clients[i]
            q = e_step(models, mixtures[i], loss, x, y)  # OLD theta, OLD pi
            mixtures[i] = q.mean(axis=0)
            weight = 1.0 if weights == "uniform" else float(len(y))
            total_weight += weight
            for m in range(count):
                own = dict(models[m])
                buffer = {name: np.zeros_like(value) for name, value in own.items()}
                for rows in batches(round_index, "train", 1, i):
                    slope = {name: np.zeros_like(value) for name, value in own.items()}
                    for s in rows:  # (1/B) sum_s q_s(m) grad l(h_theta_m(x_s), y_s)
                        single = gradient(own, x[[s]], y[[s]])
                        for name in own:
                            slope[name] += q[s, m] * single[name] / len(rows)
                    for name in own:
                        step = slope[name] + weight_decay * own[name]
                        buffer[name] = momentum * buffer[name] + step
                        step = step + momentum * buffer[name] if nesterov else buffer[name]
                        own[name] = own[name] - learning_rate * step
                for name in own:
                    total[m][name] += weight * own[name]
        models = [{n: v / total_weight for n, v in model.items()} for model in total]
    return models, mixtures
