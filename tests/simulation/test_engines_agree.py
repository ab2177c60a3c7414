"""The same numbers on every engine, for every block size, interrupted or not."""

import dataclasses
import functools

import pytest
import torch

from handspan.core.federation import run
from handspan.core.records import to_named
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import methods, parse
from handspan.simulation.federation import Simulation
from handspan.testing.case import compare, numbers
from handspan.testing.playing import Unrecorded, in_blocks, watched
from handspan.testing.toys import problem

WORK = LocalWork(steps=3, batch_size=2, learning_rate=0.1, sgd=Sgd(momentum=0.5), adapt_steps=2)
PLAIN = dataclasses.replace(WORK, sgd=Sgd())  # linear models refuse momentum: they solve
SIZES = (1, 4, 7, 4, 9, 4, 7, 2, 4, 7, 4)
TEXTS = {
    "pflmf": "pflmf:rank=3",
    "ifca": "ifca:k=2",
    "fedmgs": "fedmgs:num_components=3",
}
MORE = ("pflmf:rank=2:scaled=true:affine=true:factor=head:v_for_basis=new", "fedrep+ft:ft_steps=3")


@functools.cache
def build(text, dtype=torch.float64, sparse=False):
    spec = parse(text)
    work = PLAIN if spec.method.problem == "regression" else WORK
    made = problem(spec.method, work=work, sizes=SIZES, dtype=dtype, sparse=sparse, rounds=20)
    return made, spec.build(made.setting)


@functools.cache
def trained(
    text,
    engine,
    block_size=32,
    rounds=20,
    dtype=torch.float64,
    sparse=False,
    is_recorded=True,
):
    made, algorithm = build(text, dtype, sparse)
    simulation = Simulation(algorithm, made.data, seed=5, engine=engine, block_size=block_size)
    if is_recorded:
        share_recordings(simulation, text, dtype, sparse)
    else:
        simulation.executor.recorder = Unrecorded()
    state = run(algorithm, simulation, rounds=rounds, cohort=5, seed=5)
    return numbers(state, simulation, made.setting.task)


_RECORDINGS = {}


def share_recordings(simulation, *what):
    """Runs of one algorithm replay the same steps: record them once."""
    recorder = simulation.executor.recorder
    is_stacked = simulation.executor.name == "stacked"
    simulation.executor.recorder = _RECORDINGS.setdefault((is_stacked, *what), recorder)


def texts():
    return [*(TEXTS.get(name, name) for name in methods()), *MORE]


@pytest.mark.parametrize("text", texts())
def test_loop_and_stacked_agree_over_twenty_rounds(text):
    compare(trained(text, "stacked"), trained(text, "loop"), 1e-10, "stacked against loop")


@pytest.mark.parametrize("text", texts())
def test_a_run_through_bytes_is_the_same_run(text):
    compare(trained(text, "wire"), trained(text, "loop"), 1e-10, "wire against loop")


@pytest.mark.parametrize("text", texts())
def test_block_sizes_change_no_bit(text):
    _, algorithm = build(text)
    is_shared = any(phase.unbatched for phase in (*algorithm.rounds, *algorithm.personal))
    tolerance = 1e-10 if is_shared or algorithm.serving[1] else 0.0
    for block_size in (2, 3):
        got = trained(text, "stacked", block_size, 3)
        compare(got, trained(text, "stacked", 100, 3), tolerance, f"blocks of {block_size}")


@pytest.mark.parametrize("text", texts())
def test_single_precision_agrees_as_far_as_it_goes(text):
    loop, stacked = (
        trained(text, engine, 32, 5, torch.float32, is_recorded=False)
        for engine in ("loop", "stacked")
    )
    # Balanced factors take square roots of small singular values: half of the digits are lost.
    tolerance = 5e-3 if text == "lrs_linear" else 1e-4
    compare(stacked, loop, tolerance, "in float32")


@pytest.mark.parametrize("text", texts())
@pytest.mark.parametrize("inside, block_size", [("loop", 1), ("stacked", 32)])
def test_workers_give_the_bits_of_the_engine_inside(text, inside, block_size):
    got, wanted = (
        trained(text, engine, size, 5, torch.float32, is_recorded=False)
        for engine, size in (("workers", block_size), (inside, 32))
    )
    compare(got, wanted, 0.0, f"workers against {inside}")


@pytest.mark.parametrize("text", texts())
def test_recordings_of_steps_change_nothing(text):
    plain = trained(text, "loop", is_recorded=False)
    compare(trained(text, "loop"), plain, 1e-10, "recorded against plain")


@pytest.mark.parametrize("text", ["fedrep", "fedmgs:num_components=3"])
@pytest.mark.parametrize("engine", ["loop", "stacked", "workers"])
def test_a_resumed_run_changes_no_bit(text, engine):
    made, algorithm = build(text)
    simulation = Simulation(algorithm, made.data, seed=5, engine=engine)
    state = run(algorithm, simulation, rounds=2, cohort=5, seed=5)
    resumed = Simulation(algorithm, made.data, seed=5, engine=engine)
    resumed.store.load_named({k: v.clone() for k, v in simulation.store.to_named().items()})
    state = run(algorithm, resumed, rounds=3, cohort=5, seed=5, state=state)
    got = numbers(state, resumed, made.setting.task)
    compare(got, trained(text, engine, 32, 3), 0.0, "resumed")


def test_compressed_rows_give_the_numbers_of_dense_ones_on_every_engine():
    dense = trained("fedmgs:num_components=3", "loop")
    for engine in ("loop", "stacked", "wire"):
        got = trained("fedmgs:num_components=3", engine, sparse=True)
        compare(got, dense, 1e-10, engine)


def test_rows_of_a_client_fit_their_block_without_a_flat_twin():
    made, algorithm = build("fedmgs:num_components=3")

    def plain(phases):
        return tuple(dataclasses.replace(phase, cohort_update=None) for phase in phases)

    plain_one = dataclasses.replace(
        algorithm, setup=plain(algorithm.setup), rounds=plain(algorithm.rounds)
    )
    for block_size in (1, 2, 100):
        simulation = Simulation(
            plain_one, made.data, seed=5, engine="stacked", block_size=block_size
        )
        simulation.executor.recorder = Unrecorded()
        state = run(plain_one, simulation, rounds=3, cohort=5, seed=5)
        wanted = trained("fedmgs:num_components=3", "loop", 32, 3)
        compare(numbers(state, simulation), wanted, 1e-10, f"blocks of {block_size}")


@pytest.mark.parametrize("text", ["fedavg", "fedrep", "fedavg+ft:ft_steps=2"])
def test_labelled_rows_in_compressed_form_are_trained_and_served_on_every_engine(text):
    made, algorithm = build(text)
    from handspan.testing.toys import to_csr

    sparse = dataclasses.replace(made.data, x=to_csr(made.data.x))
    for engine in ("loop", "stacked", "workers"):
        simulation = Simulation(algorithm, sparse, seed=5, engine=engine)
        simulation.executor.recorder = Unrecorded()
        state = run(algorithm, simulation, rounds=3, cohort=5, seed=5)
        got = numbers(state, simulation, made.setting.task)
        compare(got, trained(text, "loop", 32, 3), 1e-10, engine)


def test_a_recording_tells_two_leaves_apart_that_were_one_tensor():
    from handspan.simulation.tracing import record

    same = torch.ones(2)
    replay = record(lambda a, b: [a + 1, b * 2], [same, same])
    assert [t.tolist() for t in replay(torch.zeros(2), torch.ones(2))] == [[1, 1], [2, 2]]


def test_a_recording_of_a_step_that_writes_in_place_can_be_replayed():
    from handspan.simulation.tracing import record

    replay = record(lambda x: [torch.zeros(2).add_(x)], [torch.ones(2)])
    assert [replay(torch.ones(2))[0].tolist() for _ in range(2)] == [[1, 1], [1, 1]]
    replay = record(lambda x: [(x + 1).mul_(5), x + 1], [torch.ones(2)])
    assert [t.tolist() for t in replay(torch.ones(2))] == [[10, 10], [2, 2]]


def test_steps_on_validation_rows_agree():
    made, algorithm = build("fedrep")
    phase = algorithm.rounds[0]
    stages = tuple(dataclasses.replace(stage, rows="all") for stage in phase.stages)
    other = dataclasses.replace(
        algorithm, rounds=(dataclasses.replace(phase, stages=stages),), adapt=None
    )
    seen, *_ = watched(other, made.data, rounds=1, cohort=5, seed=5)
    executor = Simulation(other, made.data, seed=5, engine="stacked").executor
    together = in_blocks(other, made.data, seen[0], executor, 5)
    for j, i in enumerate(seen[0].ids.tolist()):
        state, _ = seen[0].update(other, made.data, j, 5)
        alone = {f"private {name}": value for name, value in to_named(state).items()}
        compare({k: together[i][k] for k in alone}, alone, 1e-10, f"client {i}")


def test_rows_of_a_batch_are_positions_inside_the_client_on_every_engine():
    """Validation rows come after training rows, and say so."""
    from handspan.core.algorithm import Algorithm, Phase, Stage
    from handspan.core.records import Empty, Record

    class Seen(Record):
        rows: torch.Tensor

    def step(b, k, batch):
        return Seen(rows=k.rows + (batch.rows * batch.weight).sum().reshape(1))

    phase = Phase(
        name="look",
        broadcast=lambda server, round: Empty(),
        begin=lambda b, c, data: Seen(rows=torch.zeros(1, dtype=torch.float64)),
        stages=(Stage(step=step, rows="validation", steps=1),),
        end=lambda b, k, data: (Empty(), k),
        combine=lambda server, reduction, round: Seen(rows=reduction.total.rows),
    )
    made, _ = build("fedavg")
    data = made.data.subset(torch.tensor([1, 2, 4, 5]))
    algorithm = Algorithm(
        name="look",
        init_server=lambda key, population: Seen(rows=torch.zeros(1, dtype=torch.float64)),
        init_client=lambda key, about: Empty(),
        rounds=(phase,),
        model=None,
    )
    num, extra = data.num_train.tolist(), data.num_validation.tolist()
    wanted = sum(n + j for n, m in zip(num, extra, strict=True) for j in range(m))
    for engine in ("loop", "stacked"):
        simulation = Simulation(algorithm, data, engine=engine)
        state = run(algorithm, simulation, rounds=1, cohort=4)
        assert float(state.server.rows) == wanted, engine
