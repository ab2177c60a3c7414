"""Equal rows and equal bytes: every run spends what was asked for, but for less than a round."""

import itertools

import pytest
from torch import nn

import handspan
from handspan.comparison.budget import Budget, Estimate, is_met, nearest_to, read_equal, revise
from handspan.core.errors import HandspanError

METHODS = [
    "local", "fedavg", "fedavg+ft:ft_steps=3", "fedavg+gate", "fedrep", "ifca:k=2",
    "pflmf:rank=2", "pflmf:rank=2:participation=bernoulli",
]  # fmt: skip
ENGINE = {"engine": "loop", "threads": 1}


@pytest.fixture
def terms(terms):
    """A linear model is all head: it leaves fedrep nothing to share."""
    return {**terms, "model": nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 3))}


def spent(row, unit):
    return row["rows"] if unit == "rows" else row["bytes_up"] + row["bytes_down"]


def test_a_budget_is_read_with_or_without_an_exponent():
    assert read_equal("rounds") is None
    assert read_equal("rows:2e4") == Budget(unit="rows", amount=20_000)
    assert str(read_equal(" bytes:1000 ")) == "bytes:1000"


@pytest.mark.parametrize(
    "text", ["rows", "rounds:3", "rows:", "rows:many", "rows:0", "bytes:-5", "rows:inf", "rows:nan"]
)
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(HandspanError, match="--equal"):
        read_equal(text)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("unit", ["rows", "bytes"])
def test_a_run_ends_with_the_first_round_that_spends_the_budget(method, unit, by_seed, terms):
    del terms["rounds"]
    if unit == "bytes" and method == "local":
        terms["rounds"] = 5  # it sends next to nothing
    amount = {"rows": 700, "bytes": 3000}[unit]
    table = handspan.compare(
        [method], by_seed, seeds=1, equal=f"{unit}:{amount}", **terms, **ENGINE
    )
    (row,) = table
    if unit == "bytes" and method == "local":
        assert (row["rounds"], row["budget_met"]) == (5, False)
        assert "Not within a round of the budget: local, seed 0" in table.table("markdown")
        return
    assert row["budget_met"]
    terms.pop("rounds", None)
    data, _ = by_seed(0, "labels")
    again = handspan.fit(method, data, rounds=row["rounds"], **terms, **ENGINE).summary
    before = handspan.fit(method, data, rounds=row["rounds"] - 1, **terms, **ENGINE).summary
    assert spent(row, unit) == spent(again, unit)
    assert spent(before, unit) < amount <= spent(row, unit)


def test_trials_get_the_same_budget_as_the_final_runs(by_seed, terms):
    del terms["rounds"]
    table = handspan.compare(
        ["fedavg", "fedrep"], by_seed, seeds=1, tune=2, equal="rows:600", **terms, **ENGINE
    )
    for row in table:
        for trial in table.tuning["methods"][row["method"]]["trials"]:
            assert 0 <= trial["rows"] - 600 < 2 * trial["rows"] / trial["rounds"]
            # A trial trains on fewer rows than a final run, and so for more rounds.
            assert trial["rounds"] > row["rounds"]


def test_rounds_are_only_a_bound_and_what_it_cuts_short_is_told(by_seed, terms):
    terms["rounds"] = 2
    table = handspan.compare(["fedavg"], by_seed, seeds=1, equal="rows:100000", **terms, **ENGINE)
    assert (table[0]["rounds"], table[0]["budget_met"]) == (2, False)
    assert "Not within a round of the budget: fedavg, seed 0" in table.table("text")


def test_what_never_spends_its_budget_is_refused_before_anything_runs(by_seed, terms, tmp_path):
    del terms["rounds"]
    with pytest.raises(HandspanError, match=r"would take local more than 100,000 rounds"):
        handspan.compare(
            ["local", "fedavg"], by_seed, seeds=1, equal="rows:1e12", out=tmp_path / "c", **terms
        )
    assert not list((tmp_path / "c").iterdir())


def test_without_a_bound_a_method_that_sends_nothing_is_refused(by_seed, terms, monkeypatch):
    from handspan.comparison import budget

    # Local sends no bytes in some thousand rounds: stand in for a method that sends none at all.
    monkeypatch.setattr(budget, "_bytes", lambda *given: (0, lambda drawn: 0))
    del terms["rounds"]
    with pytest.raises(HandspanError, match=r"spends no bytes.*give --rounds"):
        handspan.compare(["local"], by_seed, seeds=1, equal="bytes:1000", **terms)


COSTS = {
    "even": lambda rounds: 100 * rounds,
    "dearer than estimated": lambda rounds: 150 * rounds + 400,
    "cheaper than estimated": lambda rounds: 70 * rounds,
    "dearer and dearer": lambda rounds: 100 * rounds + rounds**2 // 10,
    "cheap, then dear": lambda rounds: 40 * rounds + 160 * max(0, rounds - 60),
}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("amount", [1, 999, 10_000, 10_001])
def test_a_count_that_missed_is_corrected_in_few_attempts(name, amount):
    cost, budget = COSTS[name], Budget(unit="rows", amount=amount)
    found = Estimate(rounds=max(1, -(-amount // 100)), dearest=100)
    attempts = [(found.rounds, cost(found.rounds))]
    while (rounds := revise(attempts, budget, found, None)) is not None:
        attempts.append((rounds, cost(rounds)))
    assert len(attempts) <= 6
    best = attempts[nearest_to(attempts, budget)]
    dearest = max(b - a for a, b in itertools.pairwise(map(cost, range(1, 400))))
    least = cost(1)
    assert is_met(best, budget, found) or abs(best[1] - amount) <= max(dearest, least)


def test_no_number_of_rounds_is_tried_twice_and_the_bound_holds():
    budget = Budget(unit="rows", amount=1000)
    found = Estimate(rounds=10, dearest=10)
    assert revise([(10, 500)], budget, found, 10) is None, "no more rounds are allowed"
    assert revise([(10, 500)], budget, found, 15) == 15
    assert revise([(10, 1000)], budget, found, None) is None
    assert revise([(1, 50_000)], budget, found, None) is None, "fixed costs alone exceed it"


def test_the_budget_is_the_same_for_every_seed_and_method(by_seed, terms):
    del terms["rounds"]
    table = handspan.compare(
        ["local", "fedrep"], by_seed, seeds=2, equal="rows:800", **terms, **ENGINE
    )
    assert len(table) == 4
    for row in table:
        assert 0 <= row["rows"] - 800 < 2 * row["rows"] / row["rounds"]
    assert "equal rows (800 a run)" in table.table("latex")
