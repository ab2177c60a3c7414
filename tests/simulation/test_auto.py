"""``--engine auto`` with a clock that tests can set: what it tries, takes and spends."""

import types

import pytest
import torch

from handspan.numerics.local_work import LocalWork
from handspan.registry import parse
from handspan.simulation import engine, timing
from handspan.testing.toys import problem

COHORT = 20


class Clock:
    """Pretends that a client's step takes so many seconds each way."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds, self.began, self.tried = 0.0, seconds, {}, []
        self.seconds = {("workers", 1): 1.0, **seconds}
        monkeypatch.setattr(timing, "_time", self.time)
        fake = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(timing, "time", fake)
        monkeypatch.setattr(engine, "_remembered", {})
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(self, "threads", count))
        self.threads = 2

    def time(self, simulation, phase, broadcast, ids):
        way = simulation.executor.name, self.threads
        if way[0] == "workers":
            self.tried.append(simulation.executor.block_size)
        self.began.setdefault((*way, simulation.executor.block_size), self.now)
        seconds = self.seconds[way] * len(ids) * phase.stages[0].steps
        self.now += seconds
        return seconds


def choose(rounds, **options):
    spec = parse("fedavg")
    made = problem(spec.method, sizes=(8,) * COHORT, work=LocalWork(steps=10, batch_size=4))
    return engine.choose_engine(
        spec.build(made.setting), made.data, cohort=COHORT, rounds=rounds, **options
    )


def test_two_threads_are_tried_though_blocks_are_slow(monkeypatch):
    slow = {("loop", 1): 0.1, ("loop", 2): 0.06, ("stacked", 1): 0.3, ("stacked", 2): 0.2}
    chosen = choose(1000) if Clock(monkeypatch, slow) else None
    assert (chosen.engine, chosen.threads) == ("loop", 2)


def test_threads_that_gain_little_are_left_alone(monkeypatch):
    Clock(monkeypatch, {("loop", 1): 0.1, ("loop", 2): 0.095, ("stacked", 1): 0.3})
    assert choose(1000).threads == 1


def test_blocks_are_taken_where_they_are_faster(monkeypatch):
    fast = {("loop", 1): 0.01, ("loop", 2): 0.02, ("stacked", 1): 0.005, ("stacked", 2): 0.007}
    Clock(monkeypatch, fast)
    chosen = choose(1000)
    assert (chosen.engine, chosen.threads) == ("stacked", 1)
    assert {name.split(",")[0] for name, _ in chosen.milliseconds} >= {"loop"}


@pytest.mark.parametrize("step, engine", [(0.0095, "loop"), (0.005, "workers")])
def test_workers_are_taken_where_they_win_clearly(monkeypatch, step, engine):
    clock = Clock(monkeypatch, {("loop", 1): 0.01, ("loop", 2): 0.02, ("workers", 1): step})
    clock.seconds |= {("stacked", 1): 0.03}
    chosen = choose(1000)
    assert (chosen.engine, clock.tried[0]) == (engine, 1)
    assert chosen.workers == (2 if engine == "workers" else 1)
    assert any(name.startswith("2 workers") for name, _ in chosen.milliseconds)


def test_inside_workers_the_fastest_blocks_are_tried_as_well(monkeypatch):
    fast = {("loop", 1): 0.01, ("loop", 2): 0.02, ("stacked", 1): 0.004, ("stacked", 2): 0.009}
    clock = Clock(monkeypatch, {**fast, ("workers", 1): 0.002})
    assert choose(1000).engine == "workers"
    assert sorted(set(clock.tried)) == [1, 4]
    clock = Clock(monkeypatch, {**fast, ("workers", 1): 0.002})
    choose(1000, block_size=16)
    assert sorted(set(clock.tried)) == [1, COHORT // 2]  # both workers have a block


@pytest.mark.parametrize("options", [{"rounds": 5}, {"workers": 1}, {"threads": 1}, {"threads": 2}])
def test_workers_are_not_even_started_where_they_cannot_pay(monkeypatch, options):
    slow = {("loop", 1): 0.01, ("loop", 2): 0.02, ("stacked", 1): 0.03, ("stacked", 2): 0.03}
    clock = Clock(monkeypatch, slow)
    choose(**{"rounds": 1000, **options})
    assert not clock.tried


def test_a_short_run_is_not_timed(monkeypatch):
    clock = Clock(monkeypatch, {("loop", 1): 1e-4})
    chosen = choose(2)
    assert (chosen.engine, chosen.threads, chosen.milliseconds) == ("loop", 1, ())
    assert clock.now < 0.01


@pytest.mark.parametrize("rounds", [10, 20, 1000])
def test_nothing_new_is_tried_when_a_small_share_of_the_run_is_spent(monkeypatch, rounds):
    step = 0.01
    ways = {(name, threads): step for name in ("loop", "stacked") for threads in (1, 2)}
    clock = Clock(monkeypatch, ways)
    choose(rounds, workers=1)
    budget = min(timing._MOST_SECONDS, 0.05 * rounds * COHORT * 10 * step)
    first_timed = clock.began["loop", 2, 32]  # from here on it counts
    assert max(clock.began.values()) <= first_timed + budget
    assert ("stacked", 1, 4) in clock.began


def test_a_choice_is_remembered(monkeypatch):
    clock = Clock(monkeypatch, {("loop", 1): 0.1, ("loop", 2): 0.06, ("stacked", 1): 0.3})
    first, spent = choose(1000), clock.now
    assert choose(1001) == first
    assert clock.now == spent


def test_what_is_given_is_kept(monkeypatch):
    Clock(monkeypatch, {})
    chosen = choose(1000, engine="stacked", block_size=5, threads=3)
    assert (chosen.engine, chosen.block_size, chosen.threads) == ("stacked", 5, 3)
    chosen = choose(1000, engine="workers", workers=7)
    assert (chosen.engine, chosen.block_size, chosen.threads) == ("workers", 1, 1)
    assert chosen.workers == 7
    assert choose(1000, engine="workers", block_size=5).block_size == 5
