"""The ray engine: two actors on this machine, one of them lost, the same numbers."""

import dataclasses

import pytest
import ray

from handspan.core.errors import HandspanError
from handspan.core.federation import draw_round, run, start
from handspan.numerics.local_work import LocalWork
from handspan.registry import parse
from handspan.simulation import ray_cluster
from handspan.simulation.federation import Simulation
from handspan.simulation.tracing import Unrecorded
from handspan.testing.case import compare, numbers
from handspan.testing.toys import problem

WORK = LocalWork(steps=2, batch_size=2, learning_rate=0.1, adapt_steps=2)
SEED, COHORT, ROUNDS = 5, 6, 4

# Ray leaves sockets and files to the end of the process.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True, scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def federation(text, engine="ray", **options):
    spec = parse(text)
    made = problem(spec.method, work=WORK, sizes=(2, 3, 6, 4, 4, 5, 3, 2), rounds=20)
    simulation = Simulation(
        spec.build(made.setting), made.data, seed=SEED, engine=engine, block_size=1, **options
    )
    simulation.executor.recorder = Unrecorded()
    return simulation, made.setting.task


def train(simulation, task, rounds=ROUNDS):
    state = run(simulation.algorithm, simulation, rounds=rounds, cohort=COHORT, seed=SEED)
    return numbers(state, simulation, task)


@pytest.mark.parametrize("text", ["fedavg", "fedrep", "local", "ifca+ft:k=2", "fedmgs"])
def test_actors_give_the_bits_of_the_loop(text):
    got = train(*federation(text))
    compare(got, train(*federation(text, "loop")), 0.0, "on a cluster")


def test_a_lost_actor_changes_no_bit(monkeypatch):
    simulation, task = federation("fedrep")
    read, lost = simulation.store.read, []

    def reading(ids):
        actors = simulation.executor.actors
        if len(actors) == 2 and len(lost) < 3:
            lost.append(actors[len(lost) % 2])
            ray.kill(lost[-1])
        return read(ids)

    monkeypatch.setattr(simulation.store, "read", reading)
    got = train(simulation, task)
    assert len(lost) == 3
    compare(got, train(*federation("fedrep", "loop")), 0.0, "with lost actors")


def test_records_stay_where_they_were_computed(monkeypatch):
    """Of clients that an actor has had, nothing travels down."""
    simulation, _ = federation("fedrep", workers=1)
    sent, ask = [], ray_cluster._Shift._ask

    def asking(shift, actor, place, task):
        sent.append(int((~simulation.executor.holds(place, shift._members[task])).sum()))
        return ask(shift, actor, place, task)

    monkeypatch.setattr(ray_cluster._Shift, "_ask", asking)
    run(simulation.algorithm, simulation, rounds=3, cohort=8, seed=SEED)
    first = len(sent) // 3
    assert sum(sent[:first]) == 8 and sum(sent[first:]) == 0


def test_an_abandoned_round_is_forgotten_by_actors_too():
    """What was staged and discarded is not taken for the stored record."""
    rounds = []

    def lost(round, ids):
        rounds.append(int(round.index))
        return ids >= (0 if int(round.index) == 1 else 99)

    got = train(*federation("fedalt", lost=lost))
    wanted = train(*federation("fedalt", "loop", lost=lost))
    assert 1 in rounds
    compare(got, wanted, 0.0, "after an abandoned round")


def test_discarded_records_travel_again():
    simulation, _ = federation("fedrep", workers=1)
    state = start(simulation.algorithm, simulation, SEED)
    round = draw_round(0, simulation.population, COHORT, "fixed", SEED)
    phase = simulation.algorithm.rounds[0]
    for _ in range(2):
        simulation.exchange(phase, phase.broadcast(state.server, round), round)
        assert simulation.executor.holds(0, round.ids).all()
        simulation.discard()
        assert not simulation.executor.holds(0, round.ids).any()


def test_a_mistake_in_an_actor_is_told():
    simulation, _ = federation("fedavg")

    def step(broadcast, working, batch):
        raise ValueError("no such luck")

    phase = simulation.algorithm.rounds[0]
    stages = tuple(dataclasses.replace(stage, step=step) for stage in phase.stages)
    state = start(simulation.algorithm, simulation, SEED)
    round = draw_round(0, simulation.population, COHORT, "fixed", SEED)
    broadcast = phase.broadcast(state.server, round)
    changed = dataclasses.replace(phase, stages=stages)
    with pytest.raises(ValueError, match="no such luck") as caught:
        list(simulation.run_blocks(changed, broadcast, round.ids, 0))
    assert "in step" in caught.value.__notes__[0]


def test_clients_on_which_every_actor_is_lost_are_told(monkeypatch):
    simulation, task = federation("fedavg")
    monkeypatch.setattr(ray_cluster, "_MOST_DEATHS", 1)
    read = simulation.store.read

    def reading(ids):
        for actor in simulation.executor.actors:
            ray.kill(actor)
        return read(ids)

    monkeypatch.setattr(simulation.store, "read", reading)
    with pytest.raises(HandspanError, match="actors were lost on the same clients"):
        train(simulation, task)


@pytest.mark.parametrize("text", ["fedper+ft", "span"])
def test_models_that_are_served_between_rounds_change_no_bit(text):
    def evaluated(engine):
        simulation, task = federation(text, engine)
        state = None
        for rounds in range(1, ROUNDS + 1):
            state = run(
                simulation.algorithm,
                simulation,
                rounds=rounds,
                cohort=COHORT,
                seed=SEED,
                state=state,
            )
            numbers(state, simulation, task)  # serves everybody
        return numbers(state, simulation, task)

    compare(evaluated("ray"), evaluated("loop"), 0.0, "evaluated between rounds")
