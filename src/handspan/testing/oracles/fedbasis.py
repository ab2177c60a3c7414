"""FedBasis: shareable bases v_1, ..., v_K and private shares alpha_i = softmax(psi_i).

H.-Y. Chen et al., Federated Learning of Shareable Bases for Personalization-Friendly Image
Classification (arXiv:2304.07882). Objective: min sum_i p_i f_i(sum_k alpha_i[k] v_k).

Every client holds and trains K whole models here; nothing is said in rank-one form.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def softmax(psi: Array) -> Array:
    """Normalise exp(psi)."""
    e = np.exp(psi - psi.max())
    return e / e.sum()


def mixed(bases: Sequence[Params], alpha: Array) -> Params:
    """Compute theta = sum_k alpha[k] v_k."""
    return {name: sum(a * v[name] for a, v in zip(alpha, bases, strict=True)) for name in bases[0]}


def fedbasis(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Sequence[Params],
    *,
    learning_rate: float,
    share_learning_rate: float | None = None,
    temperature: float = 0.2,
    start: str = "stored",
    mean: str = "shares",
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
) -> tuple[list[Params], Array]:
    """Run FedBasis with shares on the simplex.

    Parameters
    ----------
    clients, cohorts, batches, gradient, learning_rate, momentum, nesterov, weights
        As in the other modules; phase ``"train"``, stage 0 = shares, stage 1 = bases.
    initial
        The first bases.
    share_learning_rate
        Step size of psi; ten times ``learning_rate`` by default.
    temperature
        alpha = softmax(psi / temperature) in the basis steps.
    start
        ``"stored"`` or ``"uniform"``: where psi starts in a round.
    mean
        ``"clients"``: v_k gets the weights p_i; ``"shares"``: p_i alpha_i[k].
    weight_decay
        Has to be 0.

    Returns
    -------
    bases : list of dict
        The server's bases.
    psi : array
        psi_i of each client, (n, K).
    """
    assert weight_decay == 0
    count = len(initial)
    bases = [{n: np.array(v, dtype=float) for n, v in basis.items()} for basis in initial]
    psi = np.zeros((len(clients), count))
    share_rate = 10 * learning_rate if share_learning_rate is None else share_learning_rate

    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        total = [{n: np.zeros_like(v) for n, v in basis.items()} for basis in bases]
        total_weight = np.zeros(count)
        for i in cohort:
            x, y = clients[i]
            own = psi[i].copy() if start == "stored" else np.zeros(count)
            buffer = np.zeros(count)
            for rows in batches(round_index, "train", 0, i):
                alpha = softmax(own)
                slope = gradient(mixed(bases, alpha), x[rows], y[rows])
                by_alpha = np.array([sum((slope[n] * v[n]).sum() for n in v) for v in bases])
                by_psi = alpha * (by_alpha - alpha @ by_alpha)  # Jacobian of the softmax
                buffer = momentum * buffer + by_psi
                own = own - share_rate * (by_psi + momentum * buffer if nesterov else buffer)
            psi[i] = own
            alpha = softmax(own / temperature)
            local = [dict(basis) for basis in bases]
            buffers = [{n: np.zeros_like(v) for n, v in basis.items()} for basis in bases]
            for rows in batches(round_index, "train", 1, i):
                slope = gradient(mixed(local, alpha), x[rows], y[rows])
                for k in range(count):
                    for n in local[k]:
                        step = alpha[k] * slope[n]
                        buffers[k][n] = momentum * buffers[k][n] + step
                        step = step + momentum * buffers[k][n] if nesterov else buffers[k][n]
                        local[k][n] = local[k][n] - learning_rate * step
            p = 1.0 if weights == "uniform" else float(len(y))
            for k in range(count):
                weight = p * alpha[k] if mean == "shares" else p
                total_weight[k] += weight
                for n in total[k]:
                    total[k][n] += weight * local[k][n]
        bases = [{n: v / total_weight[k] for n, v in total[k].items()} for k in range(count)]
    return bases, psi
