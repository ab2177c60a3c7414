"""Rounds per second of a plain PyTorch client loop and of handspan's engines, side by side.

``python -m benchmarks.engine [--quick] [--models mlp,cnn_bench] [--device auto]``. All of a cell is
measured interleaved, so that what else the machine does hits everybody alike; the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.plain_loop import PlainFedAvg, random_batches
from benchmarks.problems import Problem, describe_machine, make_problem, synthetic_images
from handspan.core import keys
from handspan.core.data import FederatedData
from handspan.core.federation import RunState, draw_round, run, start
from handspan.models.zoo import make_model
from handspan.numerics.local_work import LocalWork
from handspan.simulation.engine import EngineChoice, choose_engine, num_threads
from handspan.simulation.federation import Simulation
from handspan.simulation.plans import Blocks
from handspan.simulation.precision import multiplying

CLIENTS, ROWS, SHAPE, CLASSES = 100, 525, (28, 28), 10
RATE = 0.05
WARM_UP, HOPELESS = 2, 4.0  # rounds before it counts; factor behind the best that ends a race
LEAST, LEAST_SMALL = 0.9, 1.2  # what auto must reach, in all cells and on the MLP at batch 10
LEAST_GPU = {("mlp", 100, 10): 100.0, ("cnn_bench", 100, 10): 25.0}  # on an H200


@dataclass(frozen=True)
class Cell:
    """One setting in which everybody is timed."""

    model: str
    cohort: int
    batch_size: int
    steps: int
    on_gpu: bool = False

    @property
    def bar(self) -> float:
        """Least ratio of auto to the plain loop."""
        if self.on_gpu:
            return LEAST_GPU.get((self.model, self.cohort, self.batch_size), 1.0)
        return LEAST_SMALL if (self.model, self.batch_size) == ("mlp", 10) else LEAST


def cell_problem(cell: Cell, data: FederatedData) -> Problem:
    """FedAvg on the cell's network."""
    work = LocalWork(steps=cell.steps, batch_size=cell.batch_size, learning_rate=RATE)
    return make_problem("fedavg", data, cohort=cell.cohort, model=cell.model, work=work)


class Plain:
    """The plain loop on a cell, with a number of threads."""

    def __init__(self, problem: Problem, cell: Cell, threads: int) -> None:
        self.cell, self.threads, self.data = cell, threads, problem.data
        assert problem.task is not None and isinstance(problem.data.x, Tensor)
        assert problem.data.y is not None
        module = make_model(cell.model, SHAPE, CLASSES)().to(problem.data.x.device)
        params, _ = problem.task.init(keys.key(0, "init"))
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(params[name])
        self.loop = PlainFedAvg(module, problem.data.x, problem.data.y, RATE)

    def round(self, index: int) -> None:
        """Train a round on batches of its own."""
        cell = self.cell
        cohort = torch.randperm(CLIENTS)[: cell.cohort].tolist()
        device = self.data.x.device  # type: ignore[union-attr]
        with num_threads(self.threads):
            self.loop.train_round(
                [
                    (
                        rows.to(device)
                        for rows in random_batches(ROWS * i, ROWS, cell.batch_size, cell.steps)
                    )
                    for i in cohort
                ],
                [1.0] * len(cohort),
            )


class Engine:
    """handspan on a cell."""

    def __init__(self, problem: Problem, cell: Cell, choice: EngineChoice) -> None:
        self.problem, self.cell, self.choice = problem, cell, choice
        self.simulation = Simulation(
            problem.algorithm,
            problem.data,
            engine=choice.engine,
            block_size=choice.block_size,
        )
        self.state: RunState = start(problem.algorithm, self.simulation, 0)

    def round(self, index: int) -> None:
        """Train the next round."""
        with num_threads(self.choice.threads):
            self.state = run(
                self.problem.algorithm,
                self.simulation,
                rounds=self.state.round + 1,
                cohort=self.cell.cohort,
                state=self.state,
            )


def planned(problem: Problem, cell: Cell, index: int) -> Iterator[Iterator[Tensor]]:
    """Batches of handspan's own plan for each client of a round, in order of ids."""
    simulation = Simulation(problem.algorithm, problem.data)
    ids = draw_round(index, simulation.population, cell.cohort, "fixed", 0).ids
    k = keys.key(0, "plan", index)
    found: dict[int, Iterator[Tensor]] = {}
    for block in Blocks(problem.algorithm.rounds[0], ids, problem.data, k, len(ids)):
        plan = block.plans[0]
        for j, client in enumerate(block.ids.tolist()):
            steps = zip(plan.rows[j], plan.weight[j], strict=True)
            found[client] = iter(
                [rows[real] + problem.data.offsets[client] for rows, real in steps]
            )
    return iter([found[client] for client in ids.tolist()])


def check_same_training(problem: Problem, cell: Cell) -> float:
    """Train both on the same batches; returns the relative difference of the losses."""
    plain = Plain(problem, cell, 1)
    plain.loop.train_round(list(planned(problem, cell, 0)), [1.0] * cell.cohort)
    index = torch.arange(0, CLIENTS * ROWS, 25)
    expected = plain.loop.loss(index)
    worst = 0.0
    for choice in (
        EngineChoice(engine="loop", block_size=32, threads=1),
        EngineChoice(engine="stacked", block_size=8, threads=1),
    ):
        engine = Engine(problem, cell, choice)
        engine.round(0)
        names = [name for name, _ in plain.loop.module.named_parameters()]
        plain.loop.model = [engine.state.server.params[name] for name in names]
        worst = max(worst, abs(plain.loop.loss(index) - expected) / expected)
    return worst


def measure(cell: Cell, data: FederatedData, device: str, repeats: int) -> float:
    """Time a cell, print its line, and return the ratio of auto to the better plain loop."""
    problem = cell_problem(cell, data)
    difference = check_same_training(problem, cell)
    available = 1 if cell.on_gpu else torch.get_num_threads()
    begin = time.perf_counter()
    auto = choose_engine(problem.algorithm, problem.data, cohort=cell.cohort)
    calibration = time.perf_counter() - begin
    size = 512 if cell.on_gpu else 8
    choices = {
        "loop": EngineChoice(engine="loop", block_size=32, threads=1),
        "stacked": EngineChoice(engine="stacked", block_size=size, threads=1),
        "auto": auto,
    }
    contenders: dict[str, Plain | Engine] = {
        f"plain-{threads}": Plain(problem, cell, threads) for threads in sorted({1, available})
    }
    contenders |= {name: Engine(problem, cell, choice) for name, choice in choices.items()}
    times = interleaved({name: one.round for name, one in contenders.items()}, repeats, device)
    plain = min(median for name, median in times.items() if name.startswith("plain"))
    ratio = plain / times["auto"]
    rates = "".join(f"{1 / seconds:>9.2f}" for seconds in times.values())
    verdict = "ok" if ratio >= cell.bar and difference < 1e-4 else "MISSED"
    print(
        f"{cell.model:<10}{cell.cohort:>6}{cell.batch_size:>6}{rates}"
        f"{ratio:>8.2f}{cell.bar:>6.1f} {verdict:<7}{difference:>9.0e}{calibration:>7.2f}  {auto}",
        flush=True,
    )
    return ratio


def interleaved(
    contenders: dict[str, Callable[[int], None]], repeats: int, device: str
) -> dict[str, float]:
    """Median seconds of a round of each, everybody's turn in each repeat."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + WARM_UP):
        for name, train in contenders.items():
            if repeat >= WARM_UP and min(times[name]) > HOPELESS * min(map(min, times.values())):
                continue  # threads that wait for each other can take a hundred times as long
            _wait(device)
            begin = time.perf_counter()
            train(repeat)
            _wait(device)
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values[WARM_UP:] or values) for name, values in times.items()}


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def cells(models: list[str], quick: bool, device: str) -> list[Cell]:
    """Everything on a GPU; on a CPU the larger cells train fewer steps, or not at all (quick)."""
    on_gpu = device != "cpu"
    steps = {"mlp": 10, "cnn_bench": 10} if on_gpu else {"mlp": 20, "cnn_bench": 4}
    found = [
        Cell(model, cohort, batch_size, steps.get(model, 10), on_gpu)
        for model in models
        for cohort in (10, 100)
        for batch_size in (10, 64)
    ]
    if quick:
        found = [cell for cell in found if cell.cohort == 10]
    return found


def main() -> int:
    """Measure all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="cohort 10 only")
    parser.add_argument("--models", default="mlp,cnn_bench")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    print(describe_machine(device))
    data = synthetic_images(CLIENTS, ROWS, device)
    threads = sorted({1, torch.get_num_threads() if device == "cpu" else 1})
    names = [*(f"plain-{n}" for n in threads), "loop", "stacked", "auto"]
    print(
        f"{'model':<10}{'cohort':>6}{'batch':>6}{''.join(f'{name:>9}' for name in names)}"
        f"{'ratio':>8}{'bar':>6} {'':<7}{'loss':>9}{'calib':>7}  rounds/s; auto's choice"
    )
    missed = 0
    with multiplying("float32"):
        for cell in cells(options.models.split(","), options.quick, device):
            missed += measure(cell, data, device, options.repeats) < cell.bar
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
