"""+prior: log label frequencies of the client on its logits, and in its loss (balanced softmax).

    term(y) = T (log p_i(y) - log p(y)),   p_i(y) = (n_i(y) + s C p(y)) / (n_i + s C)

for n_i(y) rows of class y among the client's n_i training rows, C classes, strength s, temperature
T, and a reference p. In balanced training the term stands inside the loss: the cross-entropy of
z + term.

References
----------
J. Ren et al. Balanced Meta-Softmax for Long-Tailed Visual Recognition. NeurIPS 2020.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]


def prior_term(
    labels: NDArray[np.integer],
    num_classes: int,
    *,
    strength: float = 1.0,
    temperature: float = 1.0,
    reference: Array | None = None,
) -> Array:
    """Compute the term of the logits of one client.

    Parameters
    ----------
    labels
        Of its training rows.
    num_classes
        How many classes there are.
    strength, temperature
        As in the formula.
    reference
        Frequencies of the classes; uniform by default.
    """
    term = np.zeros(num_classes)
    for label in range(num_classes):
        expected = 1 / num_classes if reference is None else reference[label]
        count = sum(1 for y in labels if y == label)
        share = (count + strength * num_classes * expected) / (len(labels) + strength * num_classes)
        term[label] = temperature * (np.log(share) - np.log(expected))
    return term


def pooled_reference(labels: list[NDArray[np.integer]], num_classes: int) -> Array:
    """Frequencies over all clients, with one row more of each class."""
    counts = np.ones(num_classes)
    for mine in labels:
        for label in mine:
            counts[label] += 1
    return counts / counts.sum()


def balanced(
    gradient: Callable[[Params, Array, NDArray], Params], num_classes: int
) -> Callable[[Params, Array, NDArray], Params]:
    """Return the gradient of the balanced loss.

    It takes rows to which the client's term is appended, as so many columns more.
    """

    def with_term(params: Params, x: Array, y: NDArray) -> Params:
        rows, term = x[:, :-num_classes], x[0, -num_classes:]
        told = {**params, "head.bias": params["head.bias"] + term}
        return gradient(told, rows, y)

    return with_term
