"""Time and memory against the sizes of a federation: ``python -m benchmarks.scaling [PART...]``.

Parts: ``cohort`` (10 to 10,000 clients a round), ``clients`` (up to a million registered ones, with
ten coordinates or a head in private each), ``spill`` (10,000 whole private models, kept on disk),
``parameters`` (models of up to 100 million numbers), ``rank`` (pFL-MF with 1 to 50 columns) and
where it is asked for ``ray`` (what Ray costs, beside workers of this machine; needs Ray). Peak
memory belongs to a process, so every size runs in one of its own; ranks, of which only times
are compared, take turns in one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import million
from benchmarks.problems import (
    Problem,
    describe_machine,
    equal_clients,
    judge,
    make_problem,
    measure_apart,
    peak_bytes,
    synthetic_images,
)
from benchmarks.rank import Contender
from handspan import fitting
from handspan.core.federation import RunState, run, start
from handspan.numerics.local_work import LocalWork
from handspan.simulation.engine import EngineChoice, num_threads

_HELD = ("RssAnon", "RssShmem")
Claim = tuple[str, str, bool]
COHORTS = (10, 100, 1000, 10_000)
REGISTERED = (10_000, 100_000, 1_000_000)
PRIVATE = ("pflmf:rank=10", "fedrep")
PARAMETERS = (100_000, 1_000_000, 10_000_000, 100_000_000)
RANKS = (1, 5, 10, 20, 50)
MOST_EXPONENT, MOST_BYTES = 1.05, 24 << 30
MOST_OF_RANK, MOST_OF_BASIS_STEP = 1.2, 1.1
SPILLED = 10_000
MOST_RESIDENT = 0.3  # of the spilled records may be held in memory at once


class Runner:
    """A federation that trains round after round."""

    def __init__(
        self, problem: Problem | fitting.Problem, choice: EngineChoice, cohort: int
    ) -> None:
        self.problem, self.choice, self.cohort = problem, choice, cohort
        self.simulation = choice.simulation(problem.algorithm, problem.data)
        self.state: RunState = start(problem.algorithm, self.simulation, 0)

    def round(self) -> None:
        """Train the next round."""
        with num_threads(self.choice.threads):
            self.state = run(
                self.problem.algorithm,
                self.simulation,
                rounds=self.state.round + 1,
                cohort=self.cohort,
                state=self.state,
            )


def in_turns(works: Sequence[Callable[[], None]], warm_up: int, repeats: int) -> list[float]:
    """Median seconds of each, everybody's turn in each repeat."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(warm_up + repeats):
        for found, work in zip(times, works, strict=True):
            begin = time.perf_counter()
            work()
            found.append(time.perf_counter() - begin)
    return [statistics.median(found[warm_up:]) for found in times]


# -- what runs in a process of its own ----------------------------------------------------------


def measure_cohort(engine: str, cohort: int) -> dict[str, float]:
    """FedAvg with so many clients a round, 20 rows of 16 features each."""
    x, y, _ = million.synthetic_rows(COHORTS[-1])
    data = equal_clients(torch.from_numpy(x), torch.from_numpy(y), COHORTS[-1], 10)
    work = LocalWork(steps=4, batch_size=10)
    problem = make_problem("fedavg", data, cohort=cohort, model="mlp", work=work)
    choice = EngineChoice(engine=engine, block_size=32, threads=1, workers=2)
    (seconds,) = in_turns([Runner(problem, choice, cohort).round], 3, 5)
    return {"seconds": seconds, "bytes": peak_bytes()}


def measure_clients(method: str, clients: int) -> dict[str, float]:
    """A federation with so many registered clients: set-up, rounds of a thousand."""
    million.set_up(*million.synthetic_rows(2 * million.COHORT), method)
    rows = million.synthetic_rows(clients)
    begin = time.perf_counter()
    federation = million.set_up(*rows, method)
    set_up = time.perf_counter() - begin
    seconds = statistics.median(million.time_rounds(federation))
    return {
        "set_up": set_up,
        "seconds": seconds,
        "records": federation.simulation.store.num_bytes(),
        "bytes": peak_bytes(),
    }


class Watch(threading.Thread):
    """Watches how much memory this process holds that no file stands behind."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        """Look every few milliseconds."""
        while True:
            status = Path("/proc/self/status").read_text().splitlines()
            held = sum(int(line.split()[1]) for line in status if line.startswith(_HELD))
            self.peak = max(self.peak, held * 1024)
            time.sleep(0.02)


def measure_spill(method: str, clients: int) -> dict[str, float]:
    """Whole private MLPs on images, in files of the run folder, while most take part."""
    data = synthetic_images(clients, 10)
    rounds = 20
    watch = Watch()
    watch.start()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        begin = time.perf_counter()
        result = fitting.fit(
            method,
            data,
            model="mlp",
            rounds=rounds,
            cohort=clients // rounds,
            steps=1,
            batch_size=10,
            eval_every=0,
            metrics=["accuracy"],
            store="disk",
            engine="loop",
            threads=1,
            out=Path(folder) / "run",
            checkpoint_seconds=0,
        )
        written = int(result.simulation.store.written.sum())
        return {
            "seconds": time.perf_counter() - begin,
            "records": result.simulation.store.num_bytes(),
            "written": written,
            "held": watch.peak,
        }


def measure_parameters(count: int) -> dict[str, float]:
    """FedAvg with two clients a round on an MLP of so many parameters."""
    width = round((-794 + math.sqrt(794**2 + 4 * count)) / 2)

    def network() -> nn.Module:
        hidden = nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))

    problem, _ = fitting.set_up(
        "fedavg", synthetic_images(4, 20), model=network, cohort=2, steps=2, batch_size=10
    )
    choice = EngineChoice(engine="loop", block_size=1, threads=1)
    (seconds,) = in_turns([Runner(problem, choice, 2).round], 2, 3)
    model = (784 + 1 + width + 1 + 10) * width + 10
    return {"seconds": seconds, "bytes": peak_bytes(), "parameters": model}


def measure_engine(engine: str, method: str) -> dict[str, float]:
    """The MLP on images, batches of 10, one epoch, two processes."""
    data, work = synthetic_images(100, 525), LocalWork(epochs=1, batch_size=10)
    problem = make_problem(method, data, cohort=20, model="mlp", work=work)
    choice = EngineChoice(engine=engine, block_size=1, threads=1, workers=2)
    (seconds,) = in_turns([Runner(problem, choice, 20).round], 3, 5)
    return {"seconds": seconds}


def measure_rank(batch_size: int, repeats: int) -> dict[str, list[float]]:
    """pFL-MF of all parameters of the MLP: whole rounds, and the steps on the basis alone."""
    last = Contender(RANKS[-1], batch_size=batch_size or None)
    choice = last.choice  # the same for all
    ranks = [*(Contender(rank, choice, batch_size or None) for rank in RANKS[:-1]), last]
    rounds = in_turns([one.round for one in ranks], 1, repeats)
    return {
        "rounds": rounds,
        "basis_steps": in_turns([one.basis_steps for one in ranks], 1, repeats),
    }


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "cohort": measure_cohort,
    "clients": measure_clients,
    "spill": measure_spill,
    "parameters": measure_parameters,
    "rank": measure_rank,
    "engine": measure_engine,
}


def apart(part: str, *arguments: Any) -> dict[str, Any]:
    """Measure in a process of its own."""
    return measure_apart("benchmarks.scaling", "--measure", json.dumps([part, *arguments]))


# -- tables and claims --------------------------------------------------------------------------


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of a straight line through the points, both axes logarithmic."""
    x, y = ([math.log(value) for value in axis] for axis in (sizes, values))
    return statistics.linear_regression(x, y).slope


def cohort(repeats: int) -> list[Claim]:
    """Seconds of a round are linear in the clients that take part."""
    claims: list[Claim] = []
    for engine in ("stacked", "workers"):
        found = [apart("cohort", engine, size) for size in COHORTS]
        for size, one in zip(COHORTS, found, strict=True):
            told = f"{1e3 * one['seconds']:9.1f} ms a round, {one['bytes'] / 2**20:6.0f} MiB"
            print(f"{engine}, {size:6} clients a round: {told}", flush=True)
        slope = exponent(COHORTS, [one["seconds"] for one in found])
        last = exponent(COHORTS[-2:], [one["seconds"] for one in found[-2:]])
        told = f"{engine}: time ~ cohort^{slope:.2f}, {last:.2f} at the end"
        is_linear = max(slope, last) <= MOST_EXPONENT
        claims.append((told, f"at most {MOST_EXPONENT}", is_linear))
    return claims


def clients(repeats: int) -> list[Claim]:
    """A million registered clients in the memory of a workstation."""
    claims: list[Claim] = []
    for method in PRIVATE:
        for size in REGISTERED:
            one = apart("clients", method, size)
            print(
                f"{method}, {size:9} clients: set-up {one['set_up']:6.1f} s, "
                f"{1e3 * one['seconds']:7.1f} ms a round of {million.COHORT}, records "
                f"{one['records'] / 2**30:5.2f} GiB, peak {one['bytes'] / 2**30:5.2f} GiB",
                flush=True,
            )
        told = f"{method}: {one['bytes'] / 2**30:.1f} GiB for {REGISTERED[-1]} clients"
        claims.append((told, "at most 24 GiB", one["bytes"] <= MOST_BYTES))
    return claims


def spill(repeats: int) -> list[Claim]:
    """Private records that are larger than what stays in memory."""
    few, one = (apart("spill", "local", size) for size in (SPILLED // 20, SPILLED))
    # Rows and the rest of the process grow as well: that counts against the records, too.
    held = (one["held"] - few["held"]) / (one["records"] - few["records"])
    for size, found in ((SPILLED // 20, few), (SPILLED, one)):
        print(
            f"local, {size} whole MLPs: {found['records'] / 2**30:.2f} GiB of records, "
            f"{found['written']} written, at most {found['held'] / 2**30:.2f} GiB of memory, "
            f"{found['seconds']:.0f} s for 20 rounds",
            flush=True,
        )
    told = f"memory over records on disk {100 * held:5.0f} %"
    return [(told, f"at most {100 * MOST_RESIDENT:.0f} %", held <= MOST_RESIDENT)]


def parameters(repeats: int) -> list[Claim]:
    """Time and memory are linear in the model, once it is large."""
    found = [apart("parameters", size) for size in PARAMETERS]
    for one in found:
        print(
            f"{one['parameters']:11} parameters: {1e3 * one['seconds'] / 4:9.2f} ms a local step, "
            f"peak {one['bytes'] / 2**30:6.2f} GiB",
            flush=True,
        )
    slope = exponent(
        [one["parameters"] for one in found[1:]], [one["seconds"] for one in found[1:]]
    )
    told = f"time ~ parameters^{slope:.2f}, from a million on"
    peak = found[-1]["bytes"]
    return [
        (told, "printed", True),
        (f"100 million parameters: {peak / 2**30:.1f} GiB", "at most 24 GiB", peak <= MOST_BYTES),
    ]


def rank(repeats: int) -> list[Claim]:
    """A wide basis costs hardly more than a narrow one."""
    claims: list[Claim] = []
    for batch_size in (0, 32):
        found = apart("rank", batch_size, repeats)
        name = f"batches of {batch_size}" if batch_size else "full batches"
        for width, seconds, steps in zip(RANKS, found["rounds"], found["basis_steps"], strict=True):
            told = f"{1e3 * seconds:8.1f} ms a round, {1e3 * steps:8.1f} ms its steps on the basis"
            print(f"{name}, rank {width:3}: {told}", flush=True)
        whole, step = (found[key][-1] / found[key][0] for key in ("rounds", "basis_steps"))
        is_bounded = batch_size == 0
        claims += [
            (
                f"{name}: rank 50 over rank 1 {whole:5.2f}",
                f"at most {MOST_OF_RANK}" if is_bounded else "printed",
                whole <= MOST_OF_RANK or not is_bounded,
            ),
            (
                f"{name}: basis steps alone {step:5.2f}",
                f"at most {MOST_OF_BASIS_STEP}",
                step <= MOST_OF_BASIS_STEP,
            ),
        ]
    return claims


def ray(repeats: int) -> list[Claim]:
    """What actors cost, beside workers that share this machine's memory."""
    claims: list[Claim] = []
    for method in ("fedavg", "local"):
        loop, workers, actors = (
            apart("engine", engine, method)["seconds"] for engine in ("loop", "workers", "ray")
        )
        print(
            f"{method}, 20 clients a round: loop {1e3 * loop:.0f} ms, two workers "
            f"{1e3 * workers:.0f} ms, two actors {1e3 * actors:.0f} ms",
            flush=True,
        )
        each = 1e3 * (actors - workers) / 20
        claims.append((f"{method}: actors over workers {each:.2f} ms a client", "printed", True))
    return claims


PARTS: dict[str, Callable[[int], list[Claim]]] = {
    "cohort": cohort,
    "clients": clients,
    "spill": spill,
    "parameters": parameters,
    "rank": rank,
    "ray": ray,
}


def main() -> int:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="by default all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        part, *arguments = json.loads(options.measure)
        print(json.dumps(MEASURES[part](*arguments)))
        return 0
    print(describe_machine())
    claims: list[Claim] = []
    for part in options.part or [part for part in PARTS if part != "ray"]:
        claims += PARTS[part](options.repeats)
    return judge(*claims)


if __name__ == "__main__":
    raise SystemExit(main())
