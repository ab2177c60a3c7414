"""Captured steps: on the CPU by a tape that replays operations on fixed memory, as a GPU does."""

import dataclasses
import functools
from collections import OrderedDict

import pytest
import torch
from torch import nn

from handspan.core import keys
from handspan.core.algorithm import Stage
from handspan.core.federation import run
from handspan.models.convert import task_from_module
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.simulation import captured
from handspan.simulation.captured import Stations, padded, settle
from handspan.simulation.federation import Simulation
from handspan.simulation.graphs import CudaGraphs
from handspan.simulation.plans import plan_stage
from handspan.simulation.tracing import Recorder
from handspan.testing.case import compare, numbers
from handspan.testing.playing import Unrecorded
from handspan.testing.tape import TapeGraphs
from handspan.testing.toys import problem

DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
SIZES = (24, 23, 19, 24, 21, 18, 20, 2)  # one group that ends step by step, and a small client
EPOCHS = LocalWork(epochs=2, batch_size=5, sgd=Sgd(momentum=0.5), adapt_steps=2)
STEPS = LocalWork(steps=3, batch_size=4, adapt_steps=2)
WHOLE = LocalWork(steps=4, batch_size=None, adapt_steps=2)


def network():
    """Everything that looks at more than its own row: running statistics and random masks."""
    layers = {
        "first": nn.Linear(4, 6),
        "norm": nn.BatchNorm1d(6),
        "relu": nn.ReLU(),
        "drop": nn.Dropout(0.4),
        "head": nn.Linear(6, 3),
    }
    return nn.Sequential(OrderedDict(layers))


@functools.cache
def build(text, work, device="cpu"):
    spec = parse(text)
    made = problem(spec.method, work=work, sizes=SIZES, rounds=20, cohort=6)
    task = task_from_module(network, num_outputs=3, dtype=torch.float64, device=device)
    setting = dataclasses.replace(made.setting, task=task, device=torch.device(device))
    return made.data.to(device, torch.float64), spec.build(setting), task


@functools.cache
def recorder(phases):
    made = Recorder()
    made._patience = 2
    return made


class Run:
    """A few rounds on the stacked engine, captured or plain."""

    def __init__(self, problem, graphs=None, block_size=512, rounds=3):
        data, algorithm, task = problem
        simulation = Simulation(algorithm, data, seed=5, engine="stacked", block_size=block_size)
        # Runs of one problem share recordings; without graphs, steps run as they are written.
        simulation.executor.recorder = (
            Unrecorded() if graphs is None else recorder(algorithm.rounds)
        )
        self.stations = None if graphs is None else Stations(data, graphs)
        simulation.executor.stations = self.stations
        state = run(algorithm, simulation, rounds=rounds, cohort=6, seed=5)
        self.numbers = numbers(state, simulation, task)
        self.block_size = simulation.executor.block_size

    @property
    def graphs(self):
        """Sizes of the graphs of each station."""
        return [sorted(station.works) for station in self.stations._stations.values()]


@pytest.fixture
def narrow(monkeypatch):
    """Let blocks become smaller as soon as a client has finished."""
    monkeypatch.setattr(captured, "_STEPS_BEFORE_NARROWING", 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("text", "work"),
    [("fedrep", EPOCHS), ("pflmf:rank=2", STEPS), ("ifca:k=2", WHOLE), ("fedavg+ft", STEPS)],
)
def test_captured_steps_give_the_numbers_of_plain_ones(text, work, device, narrow):
    graphs = TapeGraphs() if device == "cpu" else CudaGraphs()
    made = build(text, work, device)
    got = Run(made, graphs)
    assert got.graphs
    compare(got.numbers, Run(made).numbers, 1e-10, "captured against plain")


@pytest.mark.parametrize("threshold", [0, 1 << 30])  # blocks become smaller at once, or never
def test_finished_clients_keep_their_state_while_others_go_on(threshold, monkeypatch):
    monkeypatch.setattr(captured, "_STEPS_BEFORE_NARROWING", threshold)
    made = build("local", EPOCHS)
    got = Run(made, graphs := TapeGraphs())
    assert (max(map(len, got.graphs)) >= 3) == (threshold == 0), "sizes of blocks"
    assert graphs.replays > 10
    compare(got.numbers, Run(made).numbers, 1e-10, "captured against plain")


@pytest.mark.parametrize("most", ["_MOST_STATIONS", "_FEW_SIZES"])
def test_few_stations_and_rounded_sizes_change_no_bit(most, monkeypatch, narrow):
    made = build("fedavg", STEPS)
    wanted = Run(made, TapeGraphs())
    monkeypatch.setattr(captured, most, 1)
    got = Run(made, TapeGraphs(), block_size=3)
    if most == "_MOST_STATIONS":
        assert len(got.graphs) == 1 < len(wanted.graphs)
    compare(got.numbers, wanted.numbers, 0.0, most)


def test_what_cannot_be_captured_runs_without_a_graph():
    class Refusing(TapeGraphs):
        def capture(self, work):
            raise RuntimeError("operation not permitted when stream is capturing")

    made = build("fedavg", STEPS)
    compare(Run(made, Refusing()).numbers, Run(made, TapeGraphs()).numbers, 0.0, "refused")


def test_a_block_that_does_not_fit_runs_in_halves():
    class Small(TapeGraphs):
        refused = 0

        def warm_up(self, work):
            if work.args[0] > 3:  # clients
                self.refused += 1
                raise torch.OutOfMemoryError("out of memory")
            super().warm_up(work)

    made = build("fedavg", STEPS)
    got = Run(made, graphs := Small())
    assert graphs.refused == 1, "the engine should remember what fits"
    assert got.block_size == 3
    compare(got.numbers, Run(made, TapeGraphs()).numbers, 0.0, "in halves")


def test_a_tape_keeps_memory_and_forgets_everything_else():
    place, scale = torch.zeros(3), 2.0

    def work():
        place.add_(torch.ones(3) * scale)

    replay = TapeGraphs().capture(work)
    assert place.tolist() == [0, 0, 0], "capturing must do nothing"
    scale = 5.0
    replay()
    assert place.tolist() == [2, 2, 2]
    place = torch.zeros(3)
    replay()
    assert place.tolist() == [0, 0, 0], "the tape must write to the first memory"
    lost = []
    TapeGraphs().capture(lambda: lost.append(torch.ones(2) * 3))()
    assert bool(lost[0].isnan().all()), "temporary memory must not be relied upon"
    with pytest.raises(RuntimeError, match="not permitted"):
        TapeGraphs().capture(lambda: place.sum().item())


def test_values_settle_wherever_they_lie():
    a, b, c = (torch.full((2,), float(j)) for j in range(3))
    settle([a, b, c], [b, a, c])
    assert [t.tolist() for t in (a, b, c)] == [[1, 1], [0, 0], [2, 2]]
    settle([a, b, c], [c * 2, b, a])
    assert [t.tolist() for t in (a, b, c)] == [[4, 4], [0, 0], [1, 1]]


def test_rounded_sizes_are_few_and_waste_little():
    sizes = [padded(count) for count in range(1, 1025)]
    assert len(set(sizes)) < 70
    assert all(2 <= max(2, count) <= size for count, size in enumerate(sizes, 1))
    assert sum(sizes) < 1.06 * sum(range(1, 1025))


def test_steps_are_full_exactly_where_no_row_is_padding():
    num, ids = torch.tensor([9, 8, 12]), torch.arange(3)
    for batch_size, count in ((4, 4), (3, 6), (1, 24), (16, 0)):
        stage = Stage(step=lambda b, k, batch: k, epochs=2, batch_size=batch_size)
        width = int(num.clamp(max=batch_size).max())
        plan = plan_stage(stage, num, 0 * num, keys.fold(keys.key(0), ids), width)
        assert torch.equal(plan.is_full, plan.weight.all(2).all(0))
        assert int(plan.is_full.sum()) == count, batch_size
