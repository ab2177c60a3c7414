"""FedRep: a shared representation phi and private heads h_i, trained one after the other.

Algorithm 1 of L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, Exploiting Shared
Representations for Personalized Federated Learning, ICML 2021 (arXiv:2102.07078).

Objective (3): min over phi of 1/n sum_i min over h_i of f_i(h_i o phi).
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]
Gradient = Callable[[Params, Array, NDArray], Params]


def fedrep(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Gradient,
    initial: Params,
    head_names: Iterable[str],
    *,
    learning_rate: float,
    head_learning_rate: float | None = None,
    initial_heads: Sequence[Params] | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "uniform",
) -> tuple[Params, list[Params]]:
    """Run Algorithm 1.

    Parameters
    ----------
    clients
        Training rows (x, y) of each client.
    cohorts
        Sorted client ids of each round; a round without clients is skipped.
    batches
        Rows of each step; phase ``"train"``, stage 0 = head steps, stage 1 = representation steps.
    gradient
        Gradient of the mean loss of a batch, by representation and head together.
    initial
        A whole model: the first representation, and the first head of every client.
    head_names
        The names of ``initial`` that are the head; the others are the representation.
    learning_rate
        Step size alpha of both blocks.
    head_learning_rate
        Step size of the head steps, where it is to be another one.
    initial_heads
        The first head of each client, where they are to differ.
    momentum, nesterov, weight_decay
        Plain SGD in both blocks; the buffer starts at 0 in each.
    weights
        ``"uniform"`` (the paper's 1/(rn)) or ``"examples"`` mean of the representations.

    Returns
    -------
    representation : dict
        The server's phi.
    heads : list of dict
        The private head of each client, as stored after its last round.
    """
    if weights not in ("uniform", "examples"):
        raise ValueError(f"weights must be 'examples' or 'uniform', not {weights!r}")
    head_names = list(head_names)
    first = {name: np.array(value, dtype=float) for name, value in initial.items()}
    phi = {name: value for name, value in first.items() if name not in head_names}
    heads = [{name: first[name] for name in head_names} for _ in clients]
    if initial_heads is not None:
        heads = [
            {name: np.array(h[name], dtype=float) for name in head_names} for h in initial_heads
        ]
    head_rate = learning_rate if head_learning_rate is None else head_learning_rate

    def grd(
        moving: Params, fixed: Params, x: Array, y: NDArray, steps: Rows, rate: float
    ) -> Params:
        """Repeat GRD(f_i, moving, rate) with the other block fixed; the buffer starts at 0."""
        moving = dict(moving)
        buffer = {name: np.zeros_like(value) for name, value in moving.items()}
        for rows in steps:
            slope = gradient({**fixed, **moving}, x[rows], y[rows])
            for name in moving:
                step = slope[name] + weight_decay * moving[name]
                buffer[name] = momentum * buffer[name] + step
                step = step + momentum * buffer[name] if nesterov else buffer[name]
                moving[name] = moving[name] - rate * step
        return moving

    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        total = {name: np.zeros_like(value) for name, value in phi.items()}
        total_weight = 0.0
        for i in cohort:
            x, y = clients[i]
            # h_i^{t,0} <- h_i^{t-1,tau_h}; tau_h head steps at phi^{t-1}
            heads[i] = grd(heads[i], phi, x, y, batches(round_index, "train", 0, i), head_rate)
            # phi_i^{t,0} <- phi^{t-1}; tau_phi representation steps at the new head h_i^{t,tau_h}
            own = grd(phi, heads[i], x, y, batches(round_index, "train", 1, i), learning_rate)
            weight = 1.0 if weights == "uniform" else float(len(y))
            total_weight += weight
            for name in total:
                total[name] = total[name] + weight * own[name]
        # phi^t = 1/(rn) sum_i phi_i^{t,tau_phi}
        phi = {name: value / total_weight for name, value in total.items()}
    return phi, heads
