"""+FT: local fine-tuning of any method's model on chosen parameters.

After the last aggregation, a client starts from the model that the method would deploy and takes
SGD steps on its own training rows, on a chosen set of names; the other parameters do not move.
Nothing is sent and no state changes. The baseline of Collins et al. (2021, section 5) tunes the
head only; K. Wang et al. (arXiv:1910.10252) and Yu et al. (arXiv:2002.04758) tune all names.

With early stopping the loss on rows that are not trained on is looked at before the first step and
between chunks of steps, and the first model of the least loss is kept.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]


def finetune(
    x: Array,
    y: NDArray,
    start: Params,
    gradient: Callable[[Params, Array, NDArray], Params],
    batches: Sequence[NDArray[np.integer]],
    *,
    learning_rate: float,
    names: Iterable[str] | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Params:
    """Fine-tune one client's model.

    Parameters
    ----------
    x, y
        The client's training rows.
    start
        The model that the method would deploy on this client.
    gradient
        Gradient of the mean loss of a batch.
    batches
        Rows of each step, in order. No steps give the start back.
    learning_rate
        Step size.
    names
        Parameters that move; all of them by default.
    momentum, nesterov, weight_decay
        Plain SGD; the buffer starts at 0.

    Returns
    -------
    dict
        The fine-tuned model.
    """
    model = {name: np.array(value, dtype=float) for name, value in start.items()}
    tuned = list(model) if names is None else list(names)
    buffer = {name: np.zeros_like(model[name]) for name in tuned}
    for rows in batches:
        slope = gradient(model, x[rows], y[rows])
        for name in tuned:
            step = slope[name] + weight_decay * model[name]
            buffer[name] = momentum * buffer[name] + step
            step = step + momentum * buffer[name] if nesterov else buffer[name]
            model[name] = model[name] - learning_rate * step
    return model


def finetune_stopping(
    x: Array,
    y: NDArray,
    start: Params,
    gradient: Callable[[Params, Array, NDArray], Params],
    chunks: Sequence[Sequence[NDArray[np.integer]]],
    loss: Callable[[Params], float] | None,
    *,
    learning_rate: float,
    momentum: float = 0.0,
) -> Params:
    """Fine-tune one client's model, and keep the best one that was seen.

    Parameters
    ----------
    x, y, start, gradient, learning_rate, momentum
        As in ``finetune``; the buffer goes on from chunk to chunk.
    chunks
        Rows of the steps between two looks.
    loss
        Of a model on the client's validation rows; None for a client that has none, which keeps
        the last model.
    """
    model = {name: np.array(value, dtype=float) for name, value in start.items()}
    buffer = {name: np.zeros_like(value) for name, value in model.items()}
    best, least = dict(model), np.inf if loss is None else loss(model)
    for chunk in chunks:
        for rows in chunk:
            slope = gradient(model, x[rows], y[rows])
            for name in model:
                buffer[name] = momentum * buffer[name] + slope[name]
                model[name] = model[name] - learning_rate * buffer[name]
        if loss is None:
            best = dict(model)
        elif loss(model) < least:
            best, least = dict(model), loss(model)
    return best
