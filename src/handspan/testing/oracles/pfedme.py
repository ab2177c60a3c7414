"""pFedMe: personal models as proximal points, the shared model on the Moreau envelopes.

C. T. Dinh, N. H. Tran, T. D. Nguyen, Personalized Federated Learning with Moreau Envelopes,
NeurIPS 2020 (arXiv:2006.08848), Algorithm 1, the cohort alone computing.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]
Gradient = Callable[[Params, Array, NDArray], Params]


def proximal_point(
    start: Params,
    centre: Params,
    gradients: Sequence[Callable[[Params], Params]],
    prox_weight: float,
    learning_rate: float,
) -> Params:
    """Approach argmin f(theta) + lambda/2 |theta - centre|^2, one step for each gradient given."""
    theta = dict(start)
    for gradient in gradients:
        slope = gradient(theta)
        for name in theta:
            pull = prox_weight * (theta[name] - centre[name])
            theta[name] = theta[name] - learning_rate * (slope[name] + pull)
    return theta


def pfedme(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Gradient,
    initial: Params,
    *,
    prox_weight: float,
    inner_steps: int,
    outer_learning_rate: float,
    learning_rate: float,
    server_mixing: float = 1.0,
    weights: str = "uniform",
) -> Params:
    """Run Algorithm 1.

    Parameters
    ----------
    clients, cohorts, gradient, initial
        As everywhere in this package.
    batches
        Rows of each local iteration; phase ``"train"``, stage 0.
    prox_weight, inner_steps
        lambda, and K.
    outer_learning_rate, learning_rate
        eta of w, and the step size of theta.
    server_mixing
        beta.
    weights
        ``"uniform"`` or ``"examples"`` mean of the local models.

    Returns
    -------
    dict
        The server's w.
    """
    w = {name: np.array(value, dtype=float) for name, value in initial.items()}
    for t, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        local = {}
        for i in cohort:
            x, y = clients[i]
            own, theta = dict(w), dict(w)
            for rows in batches(t, "train", 0, i):
                slope = [lambda p, r=rows, x=x, y=y: gradient(p, x[r], y[r])] * inner_steps
                theta = proximal_point(theta, own, slope, prox_weight, learning_rate)
                for n in own:  # w_{r+1} = w_r - eta lambda (w_r - theta)
                    own[n] = own[n] - outer_learning_rate * prox_weight * (own[n] - theta[n])
            local[i] = own
        size = {i: len(clients[i][1]) if weights == "examples" else 1 for i in cohort}
        for n in w:
            mean = sum(size[i] * local[i][n] for i in cohort) / sum(size.values())
            w[n] = (1 - server_mixing) * w[n] + server_mixing * mean
    return w
