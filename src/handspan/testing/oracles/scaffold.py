"""SCAFFOLD: local steps corrected by control variates.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, SCAFFOLD: Stochastic
Controlled Averaging for Federated Learning, ICML 2020 (arXiv:1910.06378), Algorithm 1.

Everything on a right-hand side is old: the controls c and c_i of a round stay what they were when
it began. The quotient (x - y) / (K eta) of option II is that of plain SGD; there is no momentum.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def scaffold(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Params,
    *,
    learning_rate: float,
    server_learning_rate: float = 1.0,
    option: str = "II",
) -> tuple[Params, Params, list[Params]]:
    """Run Algorithm 1.

    Parameters
    ----------
    clients, cohorts, gradient, initial
        As everywhere in this package. All clients weigh alike.
    batches
        Rows of each step; phase ``"train"``, stage 0.
    learning_rate
        The clients' step size eta_l.
    server_learning_rate
        The server's step size eta_g.
    option
        ``"I"``: c_i+ = g_i(x) on all rows; ``"II"``: from the local steps.

    Returns
    -------
    model : dict
        The server's x.
    control : dict
        The server's c.
    controls : list of dict
        Every client's c_i.
    """
    x = {name: np.array(value, dtype=float) for name, value in initial.items()}
    c = {name: np.zeros_like(value) for name, value in x.items()}
    own = [{name: np.zeros_like(value) for name, value in x.items()} for _ in clients]

    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        changes, control_changes = [], []
        for i in cohort:
            rows_x, rows_y = clients[i]
            y = dict(x)
            steps = batches(round_index, "train", 0, i)
            for rows in steps:
                slope = gradient(y, rows_x[rows], rows_y[rows])
                # l. 10: y <- y - eta_l (g_i(y) - c_i + c)
                y = {n: y[n] - learning_rate * (slope[n] - own[i][n] + c[n]) for n in y}
            if option == "I":  # l. 12 (i)
                new = gradient(x, rows_x, rows_y)
            else:  # l. 12 (ii)
                scale = 1.0 / (len(steps) * learning_rate)
                new = {n: own[i][n] - c[n] + scale * (x[n] - y[n]) for n in y}
            changes.append({n: y[n] - x[n] for n in x})
            control_changes.append({n: new[n] - own[i][n] for n in x})
            own[i] = new
        for n in x:  # l. 16 and 17
            mean = sum(change[n] for change in changes) / len(cohort)
            control_mean = sum(change[n] for change in control_changes) / len(cohort)
            x[n] = x[n] + server_learning_rate * mean
            c[n] = c[n] + len(cohort) / len(clients) * control_mean
    return x, c, own
