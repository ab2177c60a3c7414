"""span in runs: saved at any moment, with lost rounds, with extras, and for new clients."""

import dataclasses
from functools import partial

import pytest
import torch

from handspan.core.data import Batch
from handspan.core.federation import RunState, run
from handspan.core.records import map_tensors, take, tensors
from handspan.evaluation.newcomers import first_rows
from handspan.numerics.label_prior import log_prior
from handspan.numerics.local_work import LocalWork
from handspan.numerics.spanning.schedule import COMMON, PERSONAL, RACE, Schedule
from handspan.simulation.federation import Simulation
from handspan.simulation.loop import through_bytes
from handspan.testing.case import compare, numbers
from handspan.testing.playing import Unrecorded, watched
from handspan.testing.references import Reference
from handspan.testing.turned import turned

ROUNDS = 20
TOLD = {"rounds": ROUNDS, "cohort": 7, "seed": 2, "data": turned(2, skew=1.0)}  # cut, split, merged


def going_on(reference, simulation, state, until):
    return run(
        reference.algorithm,
        simulation,
        rounds=until,
        cohort=reference.cohort,
        seed=reference.seed,
        state=state,
    )


def simulated(reference, **options):
    made = Simulation(reference.algorithm, reference.data, seed=reference.seed, **options)
    made.executor.recorder = Unrecorded()
    return made


def test_a_run_saved_and_resumed_after_every_round_is_the_run():
    reference = Reference("span", **TOLD)
    state, modes, simulation = None, [], None
    for t in range(1, ROUNDS + 1):
        fresh = simulated(reference)
        if state is not None:
            private = {n: v.clone() for n, v in simulation.store.to_named().items()}
            fresh.store.load_named(private)
            state = RunState(server=through_bytes(state.server), round=state.round, is_set_up=True)
        simulation = fresh
        state = going_on(reference, simulation, state, t)
        s = state.server
        modes.append((int(s.mode), int(s.num_cuts), int(s.weighed)))
    assert set(modes) == {(RACE, 0, 0), (PERSONAL, 0, 0), (PERSONAL, 1, 0), (PERSONAL, 2, 0)} | {
        (PERSONAL, 2, 1)
    }
    task = reference.setting.task
    wanted = numbers(reference.state, reference.simulation, task)
    compare(numbers(state, simulation, task), wanted, 0.0, "saved after every round")


@pytest.mark.parametrize("what", ["judge", "cut", "weigh", "all of them"])
def test_what_a_lost_round_would_have_decided_is_decided_in_the_next(what):
    schedule = Schedule.of(ROUNDS, race=True, cut=True, shrink=True)
    due = {"judge": [schedule.races[-1]], "cut": list(schedule.cuts), "weigh": [schedule.shrink]}
    gone = due.get(what, [t for rounds in due.values() for t in rounds])
    reference = Reference("span", **TOLD)

    def lost(round, ids):
        return torch.full_like(ids, int(round.index) in gone, dtype=torch.bool)

    simulation = simulated(reference, lost=lost)
    state = going_on(reference, simulation, None, ROUNDS)
    assert state.abandoned_rounds == len(gone)
    s = state.server
    decided = (int(s.mode), int(s.num_cuts), int(s.weighed))
    assert decided in [(PERSONAL, 2, 1), (COMMON, 2, 1), (COMMON, 0, 0)]


def test_a_client_that_missed_both_cuts_has_the_model_that_it_had():
    reference = Reference("span:race=false:shrink=false:width=3", **{**TOLD, "cohort": 2})
    first = reference.first_clients
    schedule = Schedule.of(ROUNDS, race=False, cut=True, shrink=False)
    state = going_on(reference, reference.simulation, None, schedule.cuts[-1] + 1)
    stored = reference.simulation.store.read(torch.arange(20))
    absent = [i for i in range(20) if torch.equal(stored.coordinates[i], first.coordinates[i])]
    assert absent and int(state.server.num_cuts) == 2
    ids = torch.tensor(absent)
    wanted = first.coordinates[ids]
    for matrix, shift in zip(state.server.matrices, state.server.shifts, strict=True):
        wanted = wanted @ matrix.T + shift
    for _, _, served in reference.simulation.serve(state.server, ids, state.round):
        torch.testing.assert_close(served.coordinates, wanted, rtol=1e-12, atol=1e-12)


# -- extras --------------------------------------------------------------------------------------


def test_the_prior_of_an_extra_comes_on_top_of_the_told_one():
    plain, extra = Reference("span", **TOLD), Reference("span+prior", **TOLD)
    assert float(plain.server.temperature) == 1.0
    data = plain.data
    terms = torch.stack(
        [log_prior(n, plain.setting.scalar, 1.0, 1.0, None) for n in data.label_counts]
    )
    owner = torch.repeat_interleave(torch.arange(data.num_clients), data.num_test)
    torch.testing.assert_close(extra.served, plain.served + terms[owner])


def test_fine_tuning_starts_at_what_is_served():
    still = Reference("span+ft:ft_steps=2:ft_learning_rate=0", **TOLD).served
    torch.testing.assert_close(still, Reference("span", **TOLD).served)
    moved = Reference("span+ft:ft_steps=2:ft_learning_rate=0.1", **TOLD).served
    assert not torch.allclose(moved, still)


def test_the_gate_serves_own_models_and_those_of_span_whichever_fits():
    gated = Reference("span+gate:gate_evidence=1", **TOLD)
    everyone, chosen = torch.arange(20), []
    for _, _, mine in gated.simulation.serve(gated.server, everyone, gated.state.round):
        chosen += mine.choice.tolist()
    assert len(set(chosen)) > 1 and bool(gated.served.isfinite().all())


# -- new clients ---------------------------------------------------------------------------------

WORK = LocalWork(steps=15, batch_size=None, learning_rate=0.3, adapt_steps=10)


@pytest.fixture(scope="module")
def trained():
    """A run that has found three planted groups, and clients that took no part."""
    made = {"rows": 24, "num_groups": 3}
    members = turned(5, num_clients=24, **made)
    reference = Reference("span", WORK, rounds=40, cohort=8, seed=5, engine="stacked", data=members)
    assert int(reference.server.mode) == PERSONAL
    assert int((reference.server.centres.count > 0).sum()) == 3
    return reference, turned(5, num_clients=48, **made).subset(torch.arange(24, 48))


def newcomers(trained, count):
    """Accuracy of new clients that were given so many rows, and what they are served."""
    reference, guests = trained
    given, everyone = first_rows(guests, count), torch.arange(24)
    simulation = Simulation(reference.algorithm, given, seed=7)
    simulation.executor.recorder = Unrecorded()
    server, at, task = reference.server, reference.state.round, reference.setting.task
    simulation.adapt(server, everyone, at)
    outputs = torch.cat([o for _, o in simulation.predictions(server, everyone, at, task)])
    ((_, _, served),) = simulation.serve(server, everyone, at)
    return accuracy(outputs, given), served


def accuracy(outputs, data):
    first, count = data.span("test")
    rows = [data.y[o + f : o + f + n] for o, f, n in zip(data.offsets, first, count, strict=False)]
    return float((outputs.argmax(1) == torch.cat(rows)).double().mean())


def test_new_clients_reach_what_members_have(trained):
    reference = trained[0]
    members = accuracy(reference.served, reference.data)
    nothing, few, all_rows = (newcomers(trained, count) for count in (0, 4, None))
    assert members > 0.9
    assert nothing[0] < few[0] < members + 0.05
    assert all_rows[0] > members - 0.05


def test_new_clients_with_rows_are_in_the_group_of_their_kind(trained):
    reference, guests = trained
    everyone = torch.arange(24)
    ((_, _, served),) = reference.simulation.serve(reference.server, everyone, 40)
    group = dict(zip(reference.data.groups.tolist(), served.centre.tolist(), strict=True))
    _, found = newcomers(trained, None)
    assert found.centre.tolist() == [group[g] for g in guests.groups.tolist()]


def test_new_clients_without_rows_have_the_mean_of_the_centres(trained):
    centres = trained[0].server.centres
    mean = centres.count @ centres.mean / centres.count.sum()
    _, found = newcomers(trained, 0)
    torch.testing.assert_close(found.coordinates, mean.expand(24, -1), rtol=1e-9, atol=1e-9)


def test_where_one_model_won_new_clients_have_it_at_once():
    common = {**TOLD, "seed": 0, "data": turned(0, num_groups=1)}
    reference = Reference("span:prior=false", **common)
    assert int(reference.server.mode) == COMMON
    model = reference.algorithm.shared_model(reference.server)
    for count in (0, 3):
        simulation = Simulation(reference.algorithm, first_rows(reference.data, count), seed=7)
        simulation.executor.recorder = Unrecorded()
        everyone = torch.arange(20)
        simulation.adapt(reference.server, everyone, ROUNDS)
        for _, b, mine in simulation.serve(reference.server, everyone, ROUNDS):
            for j in range(20):
                got = reference.algorithm.model(b, map_tensors(lambda t, j=j: t[j], mine))
                compare(dict(got.params), dict(model.params), 0.0, f"client {j}, {count} rows")
            assert not mine.centre.any()


# -- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["span", "span:race=false", "span+gate:race=false"])
def test_counts_of_the_cpu_meet_what_lies_on_the_device(text):
    """Blocks run where tensors are on a device, and counts and keys of clients are not.

    The device has no memory here: operations check types, shapes and places, and do nothing.
    """
    made = Reference(text, rounds=6, cohort=3)
    seen, _, _ = watched(made.algorithm, made.data, rounds=4, cohort=3, seed=3)
    setting = dataclasses.replace(made.setting, device=torch.device("meta"))
    there = made.spec.build(setting)
    phases = {phase.name: phase for phase in (*there.rounds, *there.personal, there.adapt)}
    data, pair = made.data, torch.arange(2)
    batch = Batch(
        x=data.x[:6].view(2, 3, -1),
        y=data.y[:6].view(2, 3),
        weight=torch.ones(2, 3).double(),
        key=torch.zeros(2, dtype=torch.int64),
        rows=torch.arange(6).view(2, 3),
    )
    batch = on_device(batch)
    for exchange in {exchange.phase.name: exchange for exchange in seen}.values():
        phase, broadcast = phases[exchange.phase.name], on_device(exchange.broadcast)
        about = take(exchange.about, pair)
        about = dataclasses.replace(about, side=None, label_counts=on_device(about.label_counts))
        k = in_blocks(phase.begin, broadcast, on_device(take(exchange.clients, pair)), about)
        for stage in phase.stages:
            k = in_blocks(stage.step, broadcast, k, batch)
            if stage.finish is not None:
                k = in_blocks(stage.finish, broadcast, k)
        end = in_blocks(partial(sent, phase), broadcast, k, about)
        assert {tensor.device.type for tensor in end} == {"meta"}, phase.name


def sent(phase, *given):
    """All tensors of what a phase ends with; some phases send nothing."""
    return [tensor for part in phase.end(*given) if part is not None for tensor in tensors(part)]


def on_device(record):
    return map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), record)


def in_blocks(function, broadcast, *given):
    return torch.vmap(function, in_dims=(None, *[0] * len(given)))(broadcast, *given)
