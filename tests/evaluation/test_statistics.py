"""Paired tests, their correction and intervals, against counting by hand and against scipy."""

import itertools

import numpy as np
import pytest
from scipy import stats

from handspan.evaluation import statistics
from handspan.evaluation.statistics import (
    against_best,
    bootstrap_interval,
    holm,
    pair_up,
    signed_rank_test,
)


def by_counting(differences):
    """Two-sided p-value from all signs, each as likely as the other."""
    differences = np.asarray(differences)
    ranks = stats.rankdata(np.abs(differences))[differences != 0]
    observed = ranks[differences[differences != 0] > 0].sum()
    sums = [np.dot(signs, ranks) for signs in itertools.product((0, 1), repeat=len(ranks))]
    below = np.mean([total <= observed for total in sums])
    above = np.mean([total >= observed for total in sums])
    return min(1.0, 2 * min(below, above))


CASES = {
    "no ties": [0.3, -0.1, 0.7, 0.2, -0.4, 0.5],
    "ties among the differences": [0.25, -0.25, 0.5, 0.5, 0.125, -0.5, 0.25, 0.125],
    "clients without a difference": [0.0, 0.0, 0.5, -0.25, 0.25, 0.75, 0.0, 1.0],
    "one sign alone": [-0.5, -0.25, -0.125, -1.0, -0.75],
    "a single client": [0.5],
}


@pytest.mark.parametrize("name", CASES)
def test_small_p_values_are_those_of_counting_all_signs(name):
    p, _ = signed_rank_test(np.array(CASES[name]))
    assert p == pytest.approx(by_counting(CASES[name]), rel=1e-12)


def test_without_ties_the_exact_p_value_is_scipys():
    differences = np.random.default_rng(0).normal(0.3, 1, 40)
    expected = stats.wilcoxon(differences, method="exact").pvalue
    assert signed_rank_test(differences)[0] == pytest.approx(expected, rel=1e-9)


def test_many_clients_get_scipys_normal_approximation_with_pratts_zeros_and_ties():
    rng = np.random.default_rng(1)
    differences = np.round(rng.normal(0.01, 0.1, 400), 1)  # shares of ten rows: many ties and zeros
    assert (differences == 0).sum() > 50 and (differences != 0).sum() > statistics.EXACT
    expected = stats.wilcoxon(
        differences, zero_method="pratt", correction=False, method="asymptotic"
    ).pvalue
    assert signed_rank_test(differences)[0] == pytest.approx(expected, rel=1e-9)


def test_exact_and_approximate_p_values_meet_where_one_follows_the_other(monkeypatch):
    differences = np.round(np.random.default_rng(2).normal(0.02, 0.1, 100), 2)
    exact, _ = signed_rank_test(differences)
    monkeypatch.setattr(statistics, "EXACT", 0)
    approximate, _ = signed_rank_test(differences)
    assert approximate != exact
    assert approximate == pytest.approx(exact, rel=0.05)  # the approximation's own error


def test_noise_of_floating_point_breaks_no_tie():
    clean = np.array([0.1, -0.1, 0.2, 0.2, 0.3])
    noisy = clean + np.array([1e-15, -2e-15, 3e-15, 0, 1e-15])
    assert signed_rank_test(noisy) == signed_rank_test(clean)


def test_equal_scores_are_no_evidence():
    assert signed_rank_test(np.zeros(50)) == (1.0, 0.0)


def test_the_rank_biserial_correlation_is_the_share_of_ranks_won_minus_lost():
    # |d| = 1, 2, 3 and 4 have the ranks 1, 2, 3 and 4; 1 and 3 are lost.
    assert signed_rank_test(np.array([-1.0, 2.0, -3.0, 4.0]))[1] == pytest.approx((6 - 4) / 10)
    assert signed_rank_test(np.array([-1.0, -2.0]))[1] == -1
    many_small_wins = np.array([0.01] * 9 + [-5.0])
    assert many_small_wins.mean() < 0 < signed_rank_test(many_small_wins)[1]


def test_holm_multiplies_the_smallest_by_all_and_never_decreases():
    # sorted 0.005 (x4), 0.01 (x3), 0.03 (x2), 0.04 (x1, but not below its predecessor)
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_interval_is_the_percentile_interval_of_resampled_means():
    differences = np.random.default_rng(3).normal(0.2, 1.0, 60)
    rng = np.random.default_rng(0)
    means = [differences[rng.integers(0, 60, 60)].mean() for _ in range(statistics.RESAMPLES)]
    expected = np.quantile(means, [0.025, 0.975])
    # The same draws: one block of (resamples, 60) is read row by row.
    assert bootstrap_interval(differences) == pytest.approx(tuple(expected), rel=1e-12)
    # And what theory says of a mean: 1.96 standard errors; the bootstrap's own error is 1-2 %.
    error = 1.96 * differences.std() / np.sqrt(60)
    low, high = bootstrap_interval(differences)
    assert (high - low) / 2 == pytest.approx(error, rel=0.1)


def test_the_interval_does_not_depend_on_how_many_resamples_are_held_at_a_time(monkeypatch):
    differences = np.random.default_rng(4).normal(size=37)
    whole = bootstrap_interval(differences)
    monkeypatch.setattr(statistics, "_AT_ONCE", 37 * 100)
    assert bootstrap_interval(differences) == whole


def test_seeds_with_the_same_clients_are_averaged_and_others_stand_side_by_side():
    seeds = [np.array([0.0, 1.0]), np.array([1.0, 1.0])]
    assert pair_up(seeds, same_clients=True).tolist() == [0.5, 1.0]
    assert pair_up(seeds, same_clients=False).tolist() == [0.0, 1.0, 1.0, 1.0]


def scores_of_methods():
    rng = np.random.default_rng(5)
    best = rng.uniform(0.6, 1.0, 50)
    return {
        "near": np.clip(best + rng.normal(0, 0.1, 50), 0, 1),
        "best": best,
        "far": best - rng.uniform(0, 0.3, 50),
        "close": best - rng.normal(0.03, 0.06, 50),
    }


def test_every_method_is_tested_against_the_best_as_by_hand():
    scores = scores_of_methods()
    tests = against_best(scores, "best")
    assert [test.method for test in tests] == ["near", "far", "close"]
    raw = [stats.wilcoxon(scores[t.method] - scores["best"], method="exact").pvalue for t in tests]
    order = np.argsort(raw)
    corrected = np.empty(3)
    corrected[order] = np.maximum.accumulate(np.array(raw)[order] * [3, 2, 1])
    for test, p, p_holm in zip(tests, raw, np.minimum(corrected, 1), strict=True):
        differences = np.round(scores[test.method] - scores["best"], 12)
        assert test.p == pytest.approx(p, rel=1e-9)
        assert test.p_holm == pytest.approx(p_holm, rel=1e-9)
        assert test.is_tie == (p_holm > 0.05)
        assert test.difference == pytest.approx(differences.mean())
        draws = np.random.default_rng(0).integers(0, 50, (10_000, 50))
        low, high = np.quantile(differences[draws].mean(1), [0.025, 0.975])
        assert (test.low, test.high) == pytest.approx((low, high))
        assert (test.pairs, test.zeros, test.undefined) == (50, 0, 0)
    assert {test.method: test.is_tie for test in tests} == {
        "near": True, "far": False, "close": False,
    }  # fmt: skip


def test_a_client_whose_score_only_one_method_has_is_not_dropped_silently():
    best = np.array([0.5, 0.6, 0.7, np.nan])
    diverged = np.array([0.9, np.nan, 0.9, np.nan])
    defined = np.array([0.4, 0.5, 0.6, np.nan])  # undefined for both: no pair
    broken, fine = against_best({"broken": diverged, "fine": defined, "best": best}, "best")
    assert (broken.p, broken.undefined, broken.is_tie) == (None, 1, False)
    assert (fine.pairs, fine.undefined) == (3, 0)
    assert fine.p == fine.p_holm == pytest.approx(0.25), "what is not tested is not corrected for"
