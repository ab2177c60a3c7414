"""FedSim: the personal and the shared part move at once.

K. Pillutla, K. Malik, A. Mohamed, M. Rabbat, M. Sanjabi, L. Xiao, Federated Learning with Partial
Model Personalization, ICML 2022 (arXiv:2204.03809), Algorithms 1 and 3.

Client i, from the broadcast u^t and its own v_i, for each batch, both gradients at the same (u, v):
v <- v - gamma_v grad_v f_i(u, v) and u <- u - gamma_u grad_u f_i(u, v). It keeps v, sends u. Before
a client is served it moves v once more, at the last u.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def fedsim(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
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
    """Run FedSim from one common model.

    Parameters
    ----------
    clients, cohorts, gradient
        As everywhere in this package.
    batches
        Rows of each step; phase ``"train"``, stage 0.
    initial, personal_names
        The first model of all clients, and which of its names are personal.
    learning_rate, personal_learning_rate
        gamma_u, and gamma_v where it differs.
    momentum, nesterov, weight_decay
        Plain SGD; the buffers start at 0 in each round.
    weights
        ``"uniform"`` or ``"examples"`` mean of the u_i.
    last_pass
        Rows of each step of a client's last pass on v.

    Returns
    -------
    shared, personal, served
        As in `fedalt`.
    """
    names = list(personal_names)
    rates = dict.fromkeys(initial, learning_rate)
    if personal_learning_rate is not None:
        rates.update(dict.fromkeys(names, personal_learning_rate))
    models = [
        {name: np.array(value, dtype=float) for name, value in initial.items()} for _ in clients
    ]
    u = {name: value for name, value in models[0].items() if name not in names}

    def train(model: Params, i: int, steps: Rows, moving: Iterable[str]) -> Params:
        x, y = clients[i]
        model, buffer = dict(model), {name: 0.0 * value for name, value in model.items()}
        for rows in steps:
            slope = gradient(dict(model), x[rows], y[rows])
            for name in moving:
                step = slope[name] + weight_decay * model[name]
                buffer[name] = momentum * buffer[name] + step
                step = step + momentum * buffer[name] if nesterov else buffer[name]
                model[name] = model[name] - rates[name] * step
        return model

    for t, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        for i in cohort:
            models[i] = train({**models[i], **u}, i, batches(t, "train", 0, i), list(initial))
        share = {i: 1.0 if weights == "uniform" else float(len(clients[i][1])) for i in cohort}
        for name in u:
            mean = sum(share[i] * models[i][name] for i in cohort) / sum(share.values())
            u = {**u, name: mean}

    personal = [{name: model[name] for name in names} for model in models]
    served = personal
    if last_pass is not None:
        tuned = [train({**own, **u}, i, last_pass(i), names) for i, own in enumerate(personal)]
        served = [{name: model[name] for name in names} for model in tuned]
    return u, personal, served
