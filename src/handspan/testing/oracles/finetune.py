"""+FT: local fine-tuning of any method's model on chosen parameters.

After the last aggregation, a client starts from the model that the method would deploy and takes
SGD steps on its own training rows, on a chosen set of names; the other parameters do not move.
Nothing is sent and no state changes. The baseline of Collins et al. (2021, section 5) tunes the
head only; K. Wang et al. (arXiv:1910.10252) and Yu et al. (arXiv:2002.04758) tune all names.
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
