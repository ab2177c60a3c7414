"""Worker processes: the same numbers whatever happens to them, and nothing left behind."""

import dataclasses
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from handspan.cli import app
from handspan.core.errors import HandspanError
from handspan.core.federation import draw_round, run, start
from handspan.disk import unpack
from handspan.numerics.local_work import LocalWork
from handspan.registry import parse
from handspan.simulation.crew import Notice, crew
from handspan.simulation.federation import Simulation
from handspan.simulation.reduction import CHUNK, Postprocessor, Reduction
from handspan.simulation.tracing import Unrecorded
from handspan.testing.case import compare, numbers
from handspan.testing.toys import problem

WORK = LocalWork(steps=2, batch_size=2, learning_rate=0.1, adapt_steps=2)
SEED, COHORT = 5, 6


@functools.cache
def build(text="fedrep", clients=8):
    spec = parse(text)
    sizes = tuple(2 + j * j % 7 for j in range(clients))
    made = problem(spec.method, work=WORK, sizes=sizes, rounds=20)
    return made, spec.build(made.setting)


def federation(
    text="fedrep", engine="workers", block_size=1, *, clients=8, computes="cohort", **options
):
    made, algorithm = build(text, clients)
    data = dataclasses.replace(made.data)  # as if it were other data
    phases = [dataclasses.replace(phase, computes=computes) for phase in algorithm.rounds]
    algorithm = dataclasses.replace(algorithm, rounds=tuple(phases))
    made_one = Simulation(
        algorithm, data, seed=SEED, engine=engine, block_size=block_size, **options
    )
    made_one.executor.recorder = Unrecorded()
    if engine == "workers":
        made_one.executor.patience = 1 << 30  # however slow this machine is
    return made_one


def train(simulation, rounds, cohort=COHORT):
    state = run(simulation.algorithm, simulation, rounds=rounds, cohort=cohort, seed=SEED)
    return numbers(state, simulation, build()[0].setting.task)


@functools.cache
def looped(rounds):
    return train(federation(engine="loop"), rounds)


def phase_with(simulation, step):
    """The first phase of rounds, with another step on batches."""
    phase = simulation.algorithm.rounds[0]
    stages = tuple(dataclasses.replace(stage, step=step) for stage in phase.stages)
    return dataclasses.replace(phase, stages=stages)


def exchange(simulation, phase):
    """One exchange of the phase; what it raises comes out."""
    state = start(simulation.algorithm, simulation, SEED)
    round = draw_round(0, simulation.population, COHORT, "fixed", SEED)
    broadcast = phase.broadcast(state.server, round)
    return list(simulation.run_blocks(phase, broadcast, round.ids, 0))


@pytest.fixture
def murderous(monkeypatch):
    """A federation one of whose workers is killed at work, in every round."""
    simulation, victims = federation(), []
    read, commit = simulation.store.read, simulation.commit
    reads = iter(range(1 << 30))

    def reading(ids):
        nonlocal reads
        if next(reads) == 3:  # both have something to do
            victims.append(crew().pids[len(victims) % len(crew().pids)])
            os.kill(victims[-1], signal.SIGKILL)
        return read(ids)

    def committing():
        nonlocal reads
        reads = iter(range(1 << 30))
        commit()

    monkeypatch.setattr(simulation.store, "read", reading)
    monkeypatch.setattr(simulation, "commit", committing)
    return simulation, victims


def test_a_worker_killed_in_each_of_twenty_rounds_changes_no_bit(murderous):
    simulation, victims = murderous
    got = train(simulation, 20)
    assert len(set(victims)) >= 20
    compare(got, looped(20), 0.0, "with killed workers")


def test_a_killed_nursery_is_replaced():
    simulation = federation()
    train(simulation, 1)
    nursery = crew()._nursery[0]
    nursery.kill()
    nursery.wait()
    for pid in crew().pids:
        os.kill(pid, signal.SIGKILL)
    compare(train(federation(), 2), looped(2), 0.0, "after a new nursery")


@pytest.mark.parametrize("computes", ["cohort", "all"])
@pytest.mark.parametrize(
    "text, inside, block_size, num_sums",
    [
        ("fedavg", "loop", 1, 5),  # four chunks and the rest
        ("fedavg", "stacked", 5, 5),
        ("pflmf:rank=2", "loop", 1, 5),
        ("pflmf:rank=2", "stacked", 5, 0),  # a product of the whole block would change
    ],
)
def test_sums_made_by_workers_have_the_bits_of_sums_made_here(
    text, inside, block_size, num_sums, computes, monkeypatch
):
    """Chunks of uploads are cut and added alike; only their sums travel."""
    sums, add_sum = [], Reduction.add_sum

    def adding(reduction, chunk):
        sums.append(chunk)
        add_sum(reduction, chunk)

    monkeypatch.setattr(Reduction, "add_sum", adding)
    got, wanted = (
        train(one, 1, cohort=4 * CHUNK + 6)
        for one in (
            federation(text, "workers", block_size, clients=150, computes=computes),
            federation(text, inside, 5, clients=150, computes=computes),
        )
    )
    assert len(sums) == num_sums and all(chunk.num_bytes for chunk in sums)
    compare(got, wanted, 0.0, "sums")


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_no_bit(workers):
    compare(train(federation(workers=workers), 2), looped(2), 0.0, f"{workers} workers")


def test_federations_of_several_threads_share_the_workers():
    with ThreadPoolExecutor(3) as pool:
        for got in pool.map(lambda _: train(federation(), 2), range(3)):
            compare(got, looped(2), 0.0, "beside others")


def test_a_mistake_in_a_worker_is_told_with_its_place_and_ends_nothing():
    simulation = federation()

    def step(broadcast, working, batch):
        raise ValueError("no such luck")

    with pytest.raises(ValueError, match="no such luck") as caught:
        exchange(simulation, phase_with(simulation, step))
    assert "in step" in caught.value.__notes__[0]
    compare(train(federation(), 2), looped(2), 0.0, "after a mistake")


def test_a_mistake_that_cannot_travel_is_told_in_words():
    simulation = federation()

    class OddError(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} and {second}")

    def step(broadcast, working, batch):
        raise OddError("this", "that")

    with pytest.raises(RuntimeError, match="OddError: this and that"):
        exchange(simulation, phase_with(simulation, step))


def test_clients_on_which_every_worker_dies_are_told():
    simulation = federation()

    def step(broadcast, working, batch):
        os._exit(1)

    with pytest.raises(HandspanError, match="3 worker processes died on the same clients"):
        exchange(simulation, phase_with(simulation, step))


def test_a_mistake_of_this_process_leaves_the_workers_free():
    def upload(uploads, ids, round):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        train(federation(postprocessors=[Postprocessor(upload=upload)]), 1)
    compare(train(federation(), 2), looped(2), 0.0, "after Ctrl-C")
    assert caught.tb is not None  # its frames were alive all the time


def mapped():
    """How many memories workers map, and how many files this process has open."""
    known = [Path(f"/proc/{pid}/maps") for pid in crew().pids]
    maps = "".join(path.read_text() for path in known if path.exists())
    return maps.count("memfd:handspan"), len(os.listdir("/dev/fd"))


def test_shared_memory_goes_with_those_who_need_it():
    found = []
    gc.freeze()  # what there is already need not be searched
    for _ in range(10):
        train(federation(), 1)  # others' memory is let go of on this occasion
        gc.collect()
        found.append(mapped())
    gc.unfreeze()
    slots = 2 * 4  # that each worker may come to use
    assert max(maps for maps, _ in found) <= found[0][0] + slots
    assert max(files for _, files in found) <= found[0][1] + slots


def test_records_larger_than_the_memory_that_was_there_find_their_place():
    made, _ = build()
    for width in (1, 50, 1, 400):
        tensor = torch.arange(float(width), dtype=made.data.x.dtype)
        assert echoed(tensor).equal(tensor)


@dataclasses.dataclass(frozen=True)
class Echo:
    """Work that returns what it is given."""

    def run(self, *values):
        return values


def echoed(tensor):
    notice = Notice.of(Echo())
    tasks = [lambda: (tensor, 1), lambda: (tensor, 2)]
    (first, _), (second, _) = crew().run(2, [notice], tasks)
    crew().retire(notice)
    assert (first[1], second[1]) == (1, 2)
    assert first[0].equal(second[0])
    return first[0]


def test_a_run_is_interrupted_cleanly_and_goes_on(tmp_path):
    """Ctrl-C: one sentence, a folder to resume from, and no process left."""
    rounds = 300  # a machine that is busy must not finish them first
    command = ["run", "fedrep", "--clients", "10", "--rounds", str(rounds), "--eval-every", "0"]
    command += ["--steps", "1", "--engine", "workers", "--workers", "2", "--out", str(tmp_path)]
    command += ["--checkpoint-seconds", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "handspan.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    checkpoint = tmp_path / "checkpoint.safetensors"
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    # Workers hold these pipes as well: that they end means that all are gone.
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130, complaint
    assert complaint == "interrupted; run goes on with --resume, compare by itself\n"
    _, progress = unpack(checkpoint)
    assert 0 < progress["round"] < rounds
    assert not (tmp_path / "summary.json").exists()
    finished = handspan_run(*command, "--resume")
    assert finished["rounds"] == rounds and finished["engine"] == "2 workers, 1 thread"
    command[command.index("workers") : command.index("workers") + 3] = ["loop"]
    command[command.index(str(tmp_path))] = str(tmp_path / "undisturbed")
    undisturbed = handspan_run(*command, "--threads", "1")
    for name in ("engine", "seconds", "seconds_total"):
        del finished[name], undisturbed[name]
    assert finished == undisturbed


def handspan_run(*command):
    """Summary of ``handspan run``."""
    app(list(command), standalone_mode=False)
    return json.loads((Path(command[command.index("--out") + 1]) / "summary.json").read_text())
