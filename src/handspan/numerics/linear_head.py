"""The last layer of a network as a matrix, for methods that compute heads or constrain them."""

from __future__ import annotations

from typing import NamedTuple

from handspan.core import keys
from handspan.core.errors import HandspanError
from handspan.core.task import Task


class LinearHead(NamedTuple):
    """Names and sizes of a head that is one linear layer: outputs = weight features + bias.

    Attributes
    ----------
    weight, bias
        Names of its parameters, (outputs, width) and (outputs,); ``bias`` is None without one.
    width
        Features that the head reads.
    is_whole_model
        Whether the model has no other parameters: then the features are the rows themselves.
    """

    weight: str
    bias: str | None
    width: int
    is_whole_model: bool


def linear_head(task: Task, method: str, *, needs_bias: bool = False) -> LinearHead:
    """Find the head's matrix and bias; on behalf of a method, refuse any other head."""
    params = task.init(keys.key(0))[0]
    weights = [n for n in task.head if params[n].ndim == 2 and len(params[n]) == task.num_outputs]
    biases = [n for n in task.head if tuple(params[n].shape) == (task.num_outputs,)]
    is_linear = len(weights) == 1 and len(biases) <= 1 and len(weights + biases) == len(task.head)
    if not is_linear or (needs_bias and not biases):
        layer = "one linear layer with bias" if needs_bias else "one linear layer"
        raise HandspanError(
            f"{method} needs a model whose last layer is {layer}, and the head of this one is "
            f"({', '.join(task.head)}): choose another --model"
        )
    return LinearHead(
        weight=weights[0],
        bias=biases[0] if biases else None,
        width=params[weights[0]].shape[1],
        is_whole_model=set(task.head) == set(task.names),
    )
