"""Per-FedAvg: a shared model from which one gradient step makes a personal one.

A. Fallah, A. Mokhtari, A. Ozdaglar, Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach, NeurIPS 2020 (arXiv:2002.07948), Algorithm 1 with its two
approximations of the second derivative.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def perfedavg(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Params,
    *,
    variant: str,
    inner_learning_rate: float,
    learning_rate: float,
    delta: float = 1e-3,
    is_split: bool = True,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "uniform",
) -> Params:
    """Run Per-FedAvg.

    Parameters
    ----------
    clients, cohorts, gradient, initial
        As everywhere in this package.
    batches
        Rows of each step; phase ``"train"``, stage 0.
    variant
        ``"FO"`` or ``"HF"``.
    inner_learning_rate, learning_rate
        alpha and beta.
    delta
        Half width of HF's difference.
    is_split
        Whether the rows of a step are dealt out in turn to D, D' (and D''); a hand that stays empty
        takes all.
    momentum, nesterov, weight_decay
        Of the steps with beta.
    weights
        ``"uniform"`` or ``"examples"`` mean.

    Returns
    -------
    dict
        The server's w.
    """
    server = {name: np.array(value, dtype=float) for name, value in initial.items()}
    hands = {"FO": 2, "HF": 3}[variant]
    for t, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        local, sizes = [], []
        for i in cohort:
            x, y = clients[i]
            w = {name: value.copy() for name, value in server.items()}
            buffer = {name: np.zeros_like(value) for name, value in w.items()}
            for rows in batches(t, "train", 0, i):
                dealt = [rows[j::hands] if is_split and len(rows) > j else rows for j in range(3)]

                def slope(p, place, x=x, y=y, dealt=dealt):
                    return gradient(p, x[dealt[place]], y[dealt[place]])

                def away(direction, length, w=w):
                    return {n: w[n] + length * direction[n] for n in w}

                q = slope(away(slope(w, 0), -inner_learning_rate), 1)  # g(w~; D')
                d = q
                if variant == "HF":
                    plus, minus = slope(away(q, delta), 2), slope(away(q, -delta), 2)
                    scale = inner_learning_rate / (2 * delta)
                    d = {n: q[n] - scale * (plus[n] - minus[n]) for n in w}
                for n in w:
                    step = d[n] + weight_decay * w[n]
                    buffer[n] = momentum * buffer[n] + step
                    step = step + momentum * buffer[n] if nesterov else buffer[n]
                    w[n] = w[n] - learning_rate * step
            local.append(w)
            sizes.append(len(y) if weights == "examples" else 1)
        for n in server:
            server[n] = sum(size / sum(sizes) * w[n] for size, w in zip(sizes, local, strict=True))
    return server
