"""Parts of span that stand alone: canonical coordinates, what is tried, when things are done."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from handspan.numerics.low_rank import compose, gram
from handspan.numerics.spanning import canonical as module
from handspan.numerics.spanning.canonical import CANDIDATES, canonical, sizes
from handspan.numerics.spanning.clients import extended
from handspan.numerics.spanning.schedule import COMMON, PERSONAL, RACE, Schedule


@contextmanager
def without_ridge():
    before, module._WHITENING = module._WHITENING, 0.0
    try:
        yield
    finally:
        module._WHITENING = before


def heads(seed, rank, width, clients=40):
    """A server's basis and moments, and the coordinates that they are of."""
    rng = np.random.default_rng(seed)
    basis = {
        "weight": torch.from_numpy(rng.normal(size=(1 + width, 3, 4))),
        "bias": torch.from_numpy(rng.normal(size=(1 + width, 3))),
    }
    v = torch.zeros(clients, width, dtype=torch.float64)
    mixing = rng.normal(size=(rank, rank))
    v[:, :rank] = torch.from_numpy(
        rng.normal(size=(clients, rank)) @ mixing + rng.normal(size=rank)
    )
    whole = torch.cat([torch.ones(clients, 1).double(), v], 1)
    moments = torch.eye(1 + width, dtype=torch.float64)
    moments[: 1 + rank, : 1 + rank] = (whole.T @ whole / clients)[: 1 + rank, : 1 + rank]
    server = SimpleNamespace(basis=basis, moments=moments, rank=torch.tensor(rank))
    return server, v


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 2), st.booleans())
def test_canonical_coordinates_leave_all_models_as_they_are(seed, rank, dormant, has_offset):
    server, v = heads(seed, rank, rank + dormant)
    basis, matrix, shift, values = canonical(server, has_offset)
    new = v @ matrix.T + shift
    for name in basis:
        before = torch.stack([compose(server.basis, extended(one))[name] for one in v])
        after = torch.stack([compose(basis, extended(one))[name] for one in new])
        torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-8)
        assert torch.equal(basis[name][1 + rank :], server.basis[name][1 + rank :])
    assert not new[:, rank:].any(), "in dormant directions coordinates are 0"
    products = gram(basis)[1 : 1 + rank, 1 : 1 + rank]
    torch.testing.assert_close(products, torch.diag(values**2), rtol=1e-8, atol=1e-8)
    assert bool((values[:-1] >= values[1:]).all())
    if not has_offset:
        assert torch.equal(basis["bias"][0], server.basis["bias"][0])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_canonical_coordinates_are_white_and_the_offset_is_the_mean_head(seed, rank):
    server, v = heads(seed, rank, rank)
    with without_ridge():
        basis, matrix, shift, _ = canonical(server, True)
    new = v @ matrix.T + shift
    eye = torch.eye(rank, dtype=torch.float64)
    torch.testing.assert_close(new.mean(0), 0 * new[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(new.T @ new / len(new), eye, rtol=0, atol=1e-6)
    mean = torch.stack([compose(server.basis, extended(one))["bias"] for one in v]).mean(0)
    torch.testing.assert_close(basis["bias"][0], mean, rtol=1e-6, atol=1e-6)


def test_lengths_are_singular_values_of_the_centred_heads():
    server, v = heads(0, 3, 3)
    models = torch.stack(
        [
            torch.cat([p.flatten() for p in compose(server.basis, extended(one)).values()])
            for one in v
        ]
    )
    wanted = torch.linalg.svdvals(models - models.mean(0))[:3] / len(v) ** 0.5
    with without_ridge():
        values = canonical(server, True)[3]
    torch.testing.assert_close(values, wanted, rtol=1e-8, atol=0)


def test_coordinates_of_a_run_that_diverged_do_not_fail():
    server, _ = heads(0, 2, 3)
    server.moments[1, 1] = torch.nan
    server.basis["bias"][1] = torch.inf
    basis, *_ = canonical(server, True)
    assert basis["bias"].isnan().any()


def test_sizes_are_all_of_them_the_dormant_ones_and_the_largest_falls():
    values = torch.tensor([10.0, 9, 8, 1, 0.9, 0.1], dtype=torch.float64)
    assert sizes(values, 6) == [1, 2, 3, 4, 5, 6, 6, 6]
    long = torch.tensor([10.0, 9.9, 5, 4.9, 4.8, 4.7, 4.6, 4.5, 4.4, 4.3, 4.2, 0.4, 0.1])
    found = sizes(long.double(), 20)
    assert len(found) == CANDIDATES and {13, 20, 2, 11} <= set(found)
    assert 12 not in found, "what is small falls for no reason"


@pytest.mark.parametrize(("rank", "width"), [(1, 1), (1, 5), (3, 3)])
def test_few_directions_leave_few_sizes(rank, width):
    found = sizes(torch.ones(rank, dtype=torch.float64), width)
    assert len(found) == CANDIDATES and set(found) >= {rank, width}
    assert max(found) == width


# -- the schedule --------------------------------------------------------------------------------


def at(index):
    return SimpleNamespace(index=torch.tensor(index))


def server(mode, num_cuts=0, weighed=0):
    return SimpleNamespace(mode=mode, num_cuts=num_cuts, weighed=weighed)


def play(schedule, rounds, winner, lost=()):
    """What happens in each round, the decisions being played as the server would."""
    told, state = [], server(schedule.first_mode)
    for t in range(rounds):
        if t in lost:
            told.append([])
            continue
        done = []
        if schedule.judges(state, at(t)):
            done.append("judge")
            state.mode = winner if schedule.must_end(at(t)) else RACE
        if schedule.cuts_now(state, at(t)):
            done.append("cut")
            state.num_cuts += 1
        if schedule.weighs(state, at(t)):
            done.append("weigh")
            state.weighed = 1
        training = {
            "race": schedule.races_common(state, at(t)),
            "common": schedule.is_common(state, at(t)),
            "explore": schedule.explores(state, at(t)),
            "train": schedule.is_personal(state, at(t)),
        }
        assert sum(training.values()) == 1, f"round {t} is trained by {training}"
        told.append([*done, *(name for name, is_on in training.items() if is_on)])
    return told


@pytest.mark.parametrize("winner", [PERSONAL, COMMON])
@pytest.mark.parametrize("parts", range(8))
def test_every_round_is_trained_by_exactly_one_phase(winner, parts):
    for rounds in range(1, 31):
        race, cut, shrink = (bool(parts >> bit & 1) for bit in range(3))
        schedule = Schedule.of(rounds, race=race, cut=cut, shrink=shrink)
        told = play(schedule, rounds + 3, winner)  # a run may be continued
        decisions = [what for done in told for what in done[:-1]]
        assert decisions.count("judge") == len(schedule.races)
        assert bool(schedule.races) == race
        is_personal = winner == PERSONAL or not race
        assert decisions.count("weigh") == (shrink and is_personal)
        assert decisions.count("cut") == len(schedule.cuts) * is_personal
        # Once validation rows are trained on, nothing is decided.
        last = max([t for t, done in enumerate(told) if len(done) > 1], default=0)
        first = min([t for t, done in enumerate(told) if done[-1] in ("common", "train")])
        assert last <= first


def test_either_side_of_the_race_has_trained_before_it_ends():
    for rounds in range(3, 31):
        told = play(Schedule.of(rounds, race=True, cut=True, shrink=True), rounds, PERSONAL)
        before = [done[-1] for done in told[: next(t for t, d in enumerate(told) if len(d) > 1)]]
        assert before.count("race") - before.count("explore") in (0, 1) and "explore" in before


@pytest.mark.parametrize("winner", [PERSONAL, COMMON])
@pytest.mark.parametrize("rounds", [10, 30])
def test_decisions_of_a_lost_round_are_made_in_the_next(rounds, winner):
    schedule = Schedule.of(rounds, race=True, cut=True, shrink=True)
    usual = play(schedule, rounds, winner)
    decided = [t for t, done in enumerate(usual) if len(done) > 1]
    for t in set(decided) - set(schedule.races[:-1]):  # a look that may be missed is
        told = play(schedule, rounds, winner, lost=(t,))
        assert told[t + 1][: len(usual[t]) - 1] == usual[t][:-1]
        assert sorted(w for d in told for w in d[:-1]) == sorted(w for d in usual for w in d[:-1])


def test_the_decisions_of_a_run_of_a_hundred_rounds():
    schedule = Schedule.of(100, race=True, cut=True, shrink=True)
    assert (schedule.races, schedule.cuts, schedule.shrink) == ((5, 10, 15, 20), (35, 45), 55)
    assert schedule.settled == 55 and schedule.clusters_from == 35
    personal, others = server(PERSONAL), [server(RACE), server(COMMON)]
    assert [t for t in range(100) if schedule.clusters(personal, at(t))] == list(range(35, 100))
    assert not any(schedule.clusters(one, at(40)) for one in others)
    assert [t for t in range(35, 100) if schedule.splits(at(t))] == list(range(36, 54, 2))
    assert [t for t in range(100) if schedule.averages(at(t), 0.25)] == list(range(75, 100))
    assert not any(schedule.averages(at(t), 0.0) for t in range(100))
