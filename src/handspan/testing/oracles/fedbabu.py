"""FedBABU: bodies are averaged under one frozen random head; clients fine-tune at the end.

J. Oh, S. Kim, S.-Y. Yun, FedBABU: Towards Enhanced Representation for Federated Image
Classification, ICLR 2022 (arXiv:2106.06042), Algorithm 1.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def fedbabu(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Params,
    head_names: Iterable[str],
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
) -> Params:
    """Run the federated part.

    Parameters
    ----------
    clients, cohorts, gradient
        As everywhere in this package.
    batches
        Rows of each step; phase ``"train"``, stage 0.
    initial
        The first model, head_0 included.
    head_names
        Which of its names are head_0.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD on the body; the buffer starts at 0 in each round. Nothing moves the head, neither
        its gradient nor its decay.
    weights
        ``"examples"`` or ``"uniform"`` mean of the bodies.

    Returns
    -------
    dict
        The server's model: body and head_0.
    """
    frozen = set(head_names)
    model = {name: np.array(value, dtype=float) for name, value in initial.items()}
    body_names = [name for name in model if name not in frozen]
    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        bodies, sizes = [], []
        for i in cohort:
            x, y = clients[i]
            body = {name: model[name] for name in body_names}
            buffer = {name: np.zeros_like(body[name]) for name in body_names}
            for rows in batches(round_index, "train", 0, i):
                slope = gradient({**model, **body}, x[rows], y[rows])
                for name in body_names:
                    step = slope[name] + weight_decay * body[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    body[name] = body[name] - learning_rate * step
            bodies.append(body)
            sizes.append(len(y) if weights == "examples" else 1)
        for name in body_names:
            pairs = zip(sizes, bodies, strict=True)
            model[name] = np.sum([size * body[name] for size, body in pairs], axis=0) / sum(sizes)
    return model


def personalise(
    x: Array,
    y: NDArray,
    model: Params,
    gradient: Callable[[Params, Array, NDArray], Params],
    batches: Rows,
    *,
    learning_rate: float,
    names: Iterable[str],
) -> Params:
    """Fine-tune (body, head_0) on one client's rows, on the given names, by plain SGD."""
    tuned = dict(model)
    for rows in batches:
        slope = gradient(tuned, x[rows], y[rows])
        tuned.update({name: tuned[name] - learning_rate * slope[name] for name in names})
    return tuned
