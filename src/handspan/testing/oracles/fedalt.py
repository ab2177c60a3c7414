"""FedAlt: the personal part moves first, then the shared part.

K. Pillutla, K. Malik, A. Mohamed, M. Rabbat, M. Sanjabi, L. Xiao, Federated Learning with Partial
Model Personalization, ICML 2022 (arXiv:2204.03809), Algorithms 1 and 2.

Client i, from the broadcast u^t and its own v_i: tau_v steps v <- v - gamma_v grad_v f_i(u^t, v);
then tau_u steps u <- u - gamma_u grad_u f_i(u, v+), from u = u^t, with the new v+ fixed. It keeps
v+, sends u. Before a client is served it moves v once more, at the last u.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]
Gradient = Callable[[Params, Array, NDArray], Params]


def fedalt(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Gradient,
    initial: Params,
    personal_names: Iterable[str],
    *,
    learning_rate: float,
    personal_learning_rate: float | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "uniform",
    last_pass: Callable[[int], Rows] | None = None,
) -> tuple[Params, list[Params], list[Params]]:
    """Run FedAlt from one common model.

    Parameters
    ----------
    clients, cohorts, gradient
        As everywhere in this package.
    batches
        Rows of each step; phase ``"train"``, stage 0 for v, stage 1 for u.
    initial, personal_names
        The first model of all clients, and which of its names are personal.
    learning_rate, personal_learning_rate
        gamma_u, and gamma_v where it differs.
    momentum, nesterov, weight_decay
        Plain SGD; the buffer starts at 0 for each part.
    weights
        ``"uniform"`` or ``"examples"`` mean of the u_i.
    last_pass
        Rows of each step of a client's last pass on v.

    Returns
    -------
    shared : dict
        The server's u.
    personal : list of dict
        Every client's v_i, as stored.
    served : list of dict
        Every client's v_i after the last pass.
    """
    names = list(personal_names)
    own = [{name: np.array(initial[name], dtype=float) for name in names} for _ in clients]
    u = {name: np.array(value, dtype=float) for name, value in initial.items() if name not in names}
    personal_rate = learning_rate if personal_learning_rate is None else personal_learning_rate

    def descend(part: Params, other: Params, i: int, steps: Rows, rate: float) -> Params:
        x, y = clients[i]
        part, buffer = dict(part), {name: np.zeros_like(value) for name, value in part.items()}
        for rows in steps:
            slope = gradient({**part, **other}, x[rows], y[rows])
            for name in part:
                step = slope[name] + weight_decay * part[name]
                buffer[name] = momentum * buffer[name] + step
                step = step + momentum * buffer[name] if nesterov else buffer[name]
                part[name] = part[name] - rate * step
        return part

    for t, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        uploads = {}
        for i in cohort:
            own[i] = descend(own[i], u, i, batches(t, "train", 0, i), personal_rate)
            uploads[i] = descend(u, own[i], i, batches(t, "train", 1, i), learning_rate)
        share = {i: 1.0 if weights == "uniform" else float(len(clients[i][1])) for i in cohort}
        total = sum(share.values())
        u = {name: sum(share[i] * uploads[i][name] for i in cohort) / total for name in u}

    served = own
    if last_pass is not None:
        served = [descend(v, u, i, last_pass(i), personal_rate) for i, v in enumerate(own)]
    return u, own, served
