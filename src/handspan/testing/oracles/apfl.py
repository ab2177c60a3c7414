"""APFL: each client trains a copy w_i of the shared model and a model v_i inside a mixture.

Algorithm 1 of Y. Deng, M. M. Kamani, M. Mahdavi, Adaptive Personalized Federated Learning,
arXiv:2003.13461, without the projections that serve the theory.

The personal model is vbar_i = alpha_i v_i + (1 - alpha_i) w_i: parameters are mixed, alpha_i weighs
the client's own. Every right-hand side below holds OLD values.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def apfl(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Params,
    *,
    mix: float,
    adaptive: bool = False,
    mix_every: str = "round",
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "uniform",
) -> tuple[Params, list[Params], list[float]]:
    """Run Algorithm 1.

    Parameters
    ----------
    clients, cohorts, gradient
        As in the package.
    batches
        Rows of each step; phase ``"train"``, stage 0. One batch serves both models.
    initial
        The server's first w, and the first v_i of every client.
    mix
        alpha_i, fixed or at the start.
    adaptive
        Whether alpha_i follows Eq. (10), clipped to [0, 1].
    mix_every
        ``"round"``: alpha_i moves at the first step of a round; ``"step"``: at every step.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD of both models; the buffers start at 0 in each round.
    weights
        ``"uniform"`` (the paper) or ``"examples"`` mean of the w_i.

    Returns
    -------
    shared : dict
        The server's w.
    own : list of dict
        v_i of each client.
    mixes : list of float
        alpha_i of each client.
    """
    if weights not in ("uniform", "examples"):
        raise ValueError(f"weights must be 'examples' or 'uniform', not {weights!r}")
    server = {name: np.array(value, dtype=float) for name, value in initial.items()}
    own = [{name: value.copy() for name, value in server.items()} for _ in clients]
    mixes = [float(mix) for _ in clients]

    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        total = {name: np.zeros_like(value) for name, value in server.items()}
        total_weight = 0.0
        for i in cohort:
            x, y = clients[i]
            w, v, alpha = dict(server), dict(own[i]), mixes[i]
            w_buffer = {name: np.zeros_like(value) for name, value in w.items()}
            v_buffer = {name: np.zeros_like(value) for name, value in v.items()}
            for number, rows in enumerate(batches(round_index, "train", 0, i)):
                blend = {name: alpha * v[name] + (1 - alpha) * w[name] for name in w}
                w_slope = gradient(w, x[rows], y[rows])
                blend_slope = gradient(blend, x[rows], y[rows])
                change = 0.0  # Eq. (10): <v_i - w_i, grad f_i(vbar_i)>
                for name in w:
                    change += float(((v[name] - w[name]) * blend_slope[name]).sum())
                for name in w:
                    step = w_slope[name] + weight_decay * w[name]
                    w_buffer[name] = momentum * w_buffer[name] + step
                    step = step + momentum * w_buffer[name] if nesterov else w_buffer[name]
                    w[name] = w[name] - learning_rate * step
                    # grad_v f_i(vbar_i) = alpha_i grad f_i(vbar_i)
                    step = alpha * blend_slope[name] + weight_decay * v[name]
                    v_buffer[name] = momentum * v_buffer[name] + step
                    step = step + momentum * v_buffer[name] if nesterov else v_buffer[name]
                    v[name] = v[name] - learning_rate * step
                if adaptive and (mix_every == "step" or number == 0):
                    alpha = min(1.0, max(0.0, alpha - learning_rate * change))
            own[i], mixes[i] = v, alpha
            weight = 1.0 if weights == "uniform" else float(len(y))
            total_weight += weight
            for name in total:
                total[name] = total[name] + weight * w[name]
        server = {name: value / total_weight for name, value in total.items()}
    return server, own, mixes
