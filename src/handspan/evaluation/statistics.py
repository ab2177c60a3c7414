"""Paired comparisons over clients: which methods can be told from the best, and by how much.

Test
    Wilcoxon's signed-rank test, two-sided, on the differences of the clients' scores. Differences
    are rounded to 12 digits first, so that noise of floating point breaks no tie. Equal absolute
    differences share their mean rank. Clients without a difference take part in the ranking and
    are left out of the sum after it (Pratt), so that many small wins beside many draws do not pass
    for many wins. Up to 100 clients with a difference the p-value is exact, given the ranks (all
    signs are equally likely); above, it is the normal approximation with the tied ranks' variance
    and no correction for continuity.
Correction
    Holm's step-down over all tests against the best method of a table.
Interval
    Percentile bootstrap of the mean difference, 10,000 resamples of the clients, drawn from a seed.

The best method is the one with the best mean on the same rows. The more methods are compared, the
more luck it may have had: an advantage over a tie is not to be claimed, and that is all a tie says.

References
----------
    F. Wilcoxon, Individual comparisons by ranking methods, 1945. J. W. Pratt, Remarks on zeros and
    ties in the Wilcoxon signed rank procedures, 1959. S. Holm, A simple sequentially rejective
    multiple test procedure, 1979. J. Demšar, Statistical comparisons of classifiers over multiple
    data sets, JMLR 2006.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05
RESAMPLES = 10_000
EXACT = 100  # clients with a difference, up to which the distribution is counted out
_DIGITS = 12
_AT_ONCE = 1 << 21  # draws of the bootstrap held at a time


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """A method against the best one.

    Attributes
    ----------
    method
        Whose scores are compared with the best method's.
    pairs, zeros
        Differences, and how many of them are zero.
    undefined
        Pairs in which just one of the two has a finite score; then nothing is tested.
    difference, low, high
        Mean difference (method minus best) and its bootstrap interval.
    p, p_holm
        Before and after the correction.
    rank_biserial
        Size of the effect: share of the ranks won minus share lost, from -1 (worse on every
        client) to 1. It may be positive where a few clients lose much and most win a little.
    is_tie
        Not distinguishable from the best: ``p_holm`` is above the level.
    """

    method: str
    pairs: int
    zeros: int = 0
    undefined: int = 0
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    rank_biserial: float | None = None
    is_tie: bool = False


def signed_rank_test(differences: np.ndarray) -> tuple[float, float]:
    """Two-sided p-value of Wilcoxon's signed-rank test, and the rank-biserial correlation.

    Examples
    --------
    >>> signed_rank_test(np.array([1.0, 2.0, 3.0]))  # 2 of the 8 signs are as far out
    (0.25, 1.0)
    """
    from scipy.stats import rankdata

    values = np.round(np.asarray(differences, dtype=np.float64), _DIGITS)
    differs = values != 0
    if not differs.any():
        return 1.0, 0.0
    ranks = rankdata(np.abs(values))[differs]
    positive, total = float(ranks[values[differs] > 0].sum()), float(ranks.sum())
    effect = (2 * positive - total) / total
    if len(ranks) <= EXACT:
        return _exact(ranks, positive), effect
    deviation = abs(positive - total / 2) / math.sqrt(float(np.square(ranks).sum()) / 4)
    return math.erfc(deviation / math.sqrt(2)), effect


def _exact(ranks: np.ndarray, positive: float) -> float:
    """Share of all signs with a sum as far from its middle; mean ranks count in halves."""
    doubled = np.round(2 * ranks).astype(np.int64)
    share = np.zeros(int(doubled.sum()) + 1)
    share[0] = 1.0
    for rank in doubled:
        share *= 0.5
        share[rank:] += share[: len(share) - rank].copy()
    observed = round(2 * positive)
    tail = min(float(share[: observed + 1].sum()), float(share[observed:].sum()))
    return min(1.0, 2.0 * tail)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the given order.

    Examples
    --------
    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for position, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - position) * p_values[index]))
        corrected[index] = largest
    return corrected


def bootstrap_interval(
    differences: np.ndarray, *, resamples: int = RESAMPLES, level: float = 1 - LEVEL, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean, from seeded resamples of the pairs."""
    values = np.asarray(differences, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means: list[np.ndarray] = []
    step = max(1, _AT_ONCE // len(values))
    for first in range(0, resamples, step):
        drawn = rng.integers(0, len(values), (min(step, resamples - first), len(values)))
        means.append(values[drawn].mean(1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def pair_up(scores: Sequence[np.ndarray], *, same_clients: bool) -> np.ndarray:
    """Bring the scores of several seeds together, so that they can be paired.

    Where the seeds have the same clients, a client's scores are averaged: it counts once, and not
    once for every seed. Where every seed deals the rows to other clients, client 3 of one seed has
    nothing to do with client 3 of the next: the clients of all seeds stand side by side.
    """
    return np.mean(scores, axis=0) if same_clients else np.concatenate(list(scores))


def against_best(scores: Mapping[str, np.ndarray], best: str, *, seed: int = 0) -> list[PairedTest]:
    """Test every other method against the best.

    Parameters
    ----------
    scores
        One score per client for each method, in the same order of clients; not-a-number where
        a client has none.
    best
        The method with the best mean.
    seed
        Of the bootstrap.

    Returns
    -------
    list
        One test per other method, in the given order.
    """
    tests = [
        _compare(name, values, scores[best], seed)
        for name, values in scores.items()
        if name != best
    ]
    tested = [test for test in tests if test.p is not None]
    corrected = dict(
        zip(
            (test.method for test in tested),
            holm([test.p for test in tested if test.p is not None]),
            strict=True,
        )
    )
    return [_settle(test, corrected.get(test.method)) for test in tests]


def _compare(name: str, values: np.ndarray, best: np.ndarray, seed: int) -> PairedTest:
    known, wanted = np.isfinite(values), np.isfinite(best)
    undefined = int((known != wanted).sum())
    differences = np.round(values[known & wanted] - best[known & wanted], _DIGITS)
    if undefined or not len(differences):  # dropping the pairs would favour what diverged
        return PairedTest(method=name, pairs=len(differences), undefined=undefined)
    low, high = bootstrap_interval(differences, seed=seed)
    p, rank_biserial = signed_rank_test(differences)
    return PairedTest(
        method=name,
        pairs=len(differences),
        zeros=int((differences == 0).sum()),
        difference=float(differences.mean()),
        low=low,
        high=high,
        p=p,
        rank_biserial=rank_biserial,
    )


def _settle(test: PairedTest, p_holm: float | None) -> PairedTest:
    is_tie = p_holm is not None and p_holm > LEVEL
    return dataclasses.replace(test, p_holm=p_holm, is_tie=is_tie)
