"""Plans are pure functions of a key: the same alone, in a cohort, and under any padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from handspan.core import keys
from handspan.core.algorithm import Phase, Stage
from handspan.core.data import FederatedData
from handspan.core.federation import draw_round, make_round, run
from handspan.registry import methods, parse
from handspan.simulation.captured import padded
from handspan.simulation.federation import Simulation
from handspan.simulation.plans import Blocks, batch_rows, count_rows, groups, plan_stage
from handspan.testing.case import compare, numbers
from handspan.testing.toys import labelled, problem

sizes = st.lists(st.integers(1, 12), min_size=1, max_size=6)
works = st.one_of(
    st.builds(dict, epochs=st.integers(1, 3), batch_size=st.one_of(st.none(), st.integers(1, 13))),
    st.builds(dict, steps=st.integers(0, 9), batch_size=st.one_of(st.none(), st.integers(1, 13))),
)
quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def stage_of(work):
    return Stage(step=lambda b, k, batch: k, **work)


def phase_of(stage):
    return Phase(
        name="train",
        broadcast=lambda s, r: s,
        begin=lambda b, c, d: c,
        end=lambda b, k, d: (k, k),
        stages=(stage,),
    )


def clients_of(sizes):
    """A federation of so many rows, that nobody looks at."""
    none = torch.zeros_like(sizes)
    offsets = torch.cat([none[:1], sizes.cumsum(0)])
    return FederatedData(
        x=torch.zeros(int(offsets[-1])),
        y=None,
        offsets=offsets,
        num_train=sizes,
        num_validation=none,
        num_test=none,
    )


def planned(stage, num, ids=None, base=None, seed=0, round=0, extra=0):
    num = torch.tensor(num)
    ids = torch.arange(len(num)) if ids is None else torch.tensor(ids)
    base = torch.zeros_like(num) if base is None else torch.tensor(base)
    k = keys.fold(keys.key(seed, "plan", round), "train", 0, ids)
    width = int(batch_rows(stage, num).max()) + extra
    return plan_stage(stage, num, base, k, width)


def steps_of(plan, j):
    turns = [0 if plan.is_constant else t for t in range(int(plan.num_steps[j]))]
    return [plan.rows[j, t][plan.weight[j, t]].tolist() for t in turns]


@quick
@given(sizes, st.integers(1, 3), st.integers(1, 13))
def test_an_epoch_uses_every_row_exactly_once(num, epochs, batch_size):
    stage = stage_of({"epochs": epochs, "batch_size": batch_size})
    plan = planned(stage, num)
    for j, count in enumerate(num):
        rows = [row for step in steps_of(plan, j) for row in step]
        for epoch in range(epochs):
            assert sorted(rows[epoch * count : (epoch + 1) * count]) == list(range(count))
        assert len(rows) == epochs * count


@quick
@given(sizes, works, st.integers(0, 3))
def test_a_plan_is_the_same_alone_in_a_cohort_and_under_padding(num, work, extra):
    stage = stage_of(work)
    together = planned(stage, num, extra=extra)
    for j, count in enumerate(num):
        alone = planned(stage, [count], ids=[j])
        assert steps_of(alone, 0) == steps_of(together, j)
        many = int(alone.num_steps[0])
        assert torch.equal(alone.keys[0, :many], together.keys[j, :many])


@quick
@given(sizes, works)
def test_rows_are_counted_as_they_are_used(num, work):
    stage = stage_of(work)
    plan = planned(stage, num)
    used = sum(len(step) for j in range(len(num)) for step in steps_of(plan, j))
    assert count_rows(stage, torch.tensor(num)) == used


@quick
@given(sizes, works, st.integers(0, 20))
def test_rows_lie_inside_the_split(num, work, base):
    plan = planned(stage_of(work), num, base=[base] * len(num))
    for j, count in enumerate(num):
        assert all(base <= row < base + count for step in steps_of(plan, j) for row in step)
    padding = plan.rows[~plan.weight]
    assert bool((padding == base).all()) or not len(padding)


def test_a_batch_larger_than_the_client_is_all_its_rows_in_stored_order():
    for batch_size in (5, 9, None):
        plan = planned(stage_of({"steps": 3, "batch_size": batch_size}), [5, 2])
        assert steps_of(plan, 0) == [list(range(5))] * 3
        assert steps_of(plan, 1) == [[0, 1]] * 3


def test_rounds_seeds_clients_and_passes_give_different_plans():
    stage = stage_of({"epochs": 2, "batch_size": 3})
    first = steps_of(planned(stage, [12]), 0)
    assert first[:4] != first[4:]
    assert first != steps_of(planned(stage, [12], round=1), 0)
    assert first != steps_of(planned(stage, [12], seed=1), 0)
    assert first != steps_of(planned(stage, [12], ids=[1]), 0)


@quick
@given(sizes)
def test_groups_hold_every_client_once_and_little_padding(num):
    parts = groups(torch.tensor(num))
    assert sorted(torch.cat(parts).tolist()) == list(range(len(num)))
    for part in parts:
        members = [num[j] for j in part.tolist()]
        assert min(members) >= 0.75 * max(members)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("work", [{"batch_size": 4}, {"batch_size": None, "steps": 5}])
def test_padding_stays_under_a_seventh_of_the_work_where_shapes_are_few(sigma, work):
    rng = np.random.default_rng(0)
    data = clients_of(torch.from_numpy(np.exp(rng.normal(4.5, sigma, 300))).long() + 1)
    phase = phase_of(stage_of(work))
    for cohort in (20, 100, 300):
        ids = torch.from_numpy(rng.choice(300, cohort, replace=False)).sort().values
        done = useful = 0
        for block in Blocks(phase, ids, data, keys.key(0), 512, few_shapes=True):
            plan, size = block.plans[0], len(block.ids)
            active = (plan.num_steps > torch.arange(plan.steps).unsqueeze(1)).sum(1)
            done += plan.rows.shape[2] * sum(min(size, padded(n)) for n in active.tolist())
            useful += count_rows(phase.stages[0], block.num)
        assert done - useful <= 0.15 * done, f"{1 - useful / done:.1%} of {cohort}"


def test_blocks_of_any_size_hold_the_same_plans():
    data, phase = labelled(), phase_of(stage_of({"steps": 4, "batch_size": 3}))
    found = []
    for size in (1, 2, 100):
        plans = {}
        for block in Blocks(phase, torch.arange(11), data, keys.key(0), size):
            for j, i in enumerate(block.ids.tolist()):
                plans[i] = steps_of(block.plans[0], j)
        found.append(plans)
    assert found[0] == found[1] == found[2]


def test_cohorts_are_sorted_unique_and_a_function_of_seed_and_round():
    data = labelled()
    made = problem(methods()["fedavg"])
    population = Simulation(parse("fedavg").build(made.setting), data).population
    for sampling in ("fixed", "bernoulli", "weighted"):
        rounds = [draw_round(t, population, 4, sampling, 3) for t in range(30)]
        again = draw_round(7, population, 4, sampling, 3)
        assert torch.equal(rounds[7].ids, again.ids)
        for round in rounds:
            assert torch.equal(round.ids, round.ids.unique())
        assert len({tuple(round.ids.tolist()) for round in rounds}) > 15
        total = [int(round.multiplicity.sum()) for round in rounds]
        if sampling == "bernoulli":
            assert len(set(total)) > 1
        else:
            assert set(total) == {4}
    assert any(
        int(draw_round(t, population, 4, "weighted", 3).multiplicity.max()) > 1 for t in range(30)
    )


def test_an_empty_cohort_is_skipped_and_changes_nothing():
    spec = parse("pflmf:rank=2:participation=bernoulli")
    made = problem(spec.method)
    algorithm = spec.build(made.setting)
    simulation = Simulation(algorithm, made.data, seed=1)
    state = run(algorithm, simulation, rounds=0, cohort=1, seed=1)
    while len(draw_round(state.round, simulation.population, 1, "bernoulli", 1).ids):
        state = run(algorithm, simulation, rounds=state.round + 1, cohort=1, seed=1, state=state)
    before = numbers(state, simulation)
    state = run(algorithm, simulation, rounds=state.round + 1, cohort=1, seed=1, state=state)
    assert state.empty_rounds == 1
    compare(numbers(state, simulation), before, 0.0, "an empty round")


def test_a_client_drawn_twice_counts_twice():
    spec = parse("fedavg")
    made = problem(spec.method)
    algorithm = spec.build(made.setting)
    phase = algorithm.rounds[0]
    simulation = Simulation(algorithm, made.data)
    server = algorithm.init_server(keys.key(0), simulation.population)
    ids = torch.tensor([1, 4])
    once = make_round(0, ids, simulation.population)
    twice = make_round(0, ids, simulation.population, torch.tensor([2, 1]))
    broadcast = phase.broadcast(server, once)
    one = simulation.exchange(phase, broadcast, once).reduction
    two = simulation.exchange(phase, broadcast, twice).reduction
    alone = make_round(0, ids[:1], simulation.population)
    extra = simulation.exchange(phase, broadcast, alone).reduction
    for a, b, c in zip(
        one.total.params.values(),
        two.total.params.values(),
        extra.total.params.values(),
        strict=True,
    ):
        torch.testing.assert_close(b, a + c, rtol=1e-12, atol=1e-12)
    assert float(two.weight) == float(one.weight + extra.weight)


def test_lost_uploads_are_neither_counted_nor_committed():
    spec = parse("fedrep")
    made = problem(spec.method)
    algorithm = spec.build(made.setting)

    def lost(round, ids):
        return ids == ids[0]

    whole, some = (Simulation(algorithm, made.data, seed=3, lost=f) for f in (None, lost))
    ids = draw_round(0, whole.population, 4, "fixed", 3).ids
    states = [run(algorithm, s, rounds=1, cohort=4, seed=3) for s in (whole, some)]
    assert some.store.written.nonzero()[:, 0].tolist() == ids[1:].tolist()
    assert states[1].costs.bytes_up * 4 == states[0].costs.bytes_up * 3
    for name, value in whole.store.to_named().items():
        assert torch.equal(value[ids[1:]], some.store.to_named()[name][ids[1:]])
