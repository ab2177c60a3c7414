"""+gate: what a client serves, from what its candidates say of its validation rows.

Each candidate has the likelihood of the rows at its own best scale: for classes the softmax of its
logits times one of a few factors, for targets a normal distribution with the variance that suits it
best, which is its mean squared error. With n rows and nll = -log of it,

    classes   nll = min over factors s of  sum_j -log softmax(s z_j)[y_j]
    targets   nll = n/2 log(mean squared error)  +  what is the same for all

A rival is eligible if nll(local) - nll(rival) > log(evidence); the likeliest one is served, the
first of equals; local, candidate 0, where none is eligible or there are no rows.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
FACTORS = (1, 4, 2, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 0)


def choose(outputs: Sequence[Array], y: NDArray, *, evidence: float, classes: bool = True) -> int:
    """Choose one of the candidates.

    Parameters
    ----------
    outputs
        Of each candidate, local first: logits (rows, classes), or values (rows, width).
    y
        Labels (rows,), or targets (rows, width).
    evidence
        How many times likelier than local a rival must be.
    classes
        Whether y are labels.

    Returns
    -------
    int
        Position of the choice.
    """
    if len(y) == 0:
        return 0
    nll = [_labels(z, y) if classes else _targets(z, y) for z in outputs]
    eligible = [j for j in range(1, len(nll)) if nll[0] - nll[j] > np.log(evidence)]
    return min(eligible, key=lambda j: (nll[j], j)) if eligible else 0


def _labels(logits: Array, y: NDArray) -> float:
    totals = []
    for factor in FACTORS:
        total = 0.0
        for row, label in zip(factor * logits, y, strict=True):
            total += row.max() + np.log(np.exp(row - row.max()).sum()) - row[label]
        totals.append(total)
    return min(totals)


def _targets(values: Array, y: NDArray) -> float:
    return 0.5 * len(y) * float(np.log(np.mean((values - y) ** 2)))
