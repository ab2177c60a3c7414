"""A million registered clients: set-up, rounds of 1000, memory.

``python -m benchmarks.million [--clients 1000000]``. Each client has 20 rows of 16 features and a
private state of rank 10. Set-up goes the way of ``handspan.fit``: split and scale the rows, hash
them, choose the engine. Peak memory is that of the whole process, synthetic rows included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.problems import describe_machine, judge, peak_bytes
from handspan import fitting
from handspan.core.data import FederatedData
from handspan.core.federation import RunState, run, start
from handspan.simulation.engine import EngineChoice, choose_engine, num_threads
from handspan.simulation.federation import Simulation

ROWS, FEATURES, CLASSES, COHORT = 20, 16, 10, 1000
WARM_UP, ROUNDS = 3, 9
MOST_SECONDS, MOST_BYTES, MOST_ROUND, MOST_OBJECTS = 60.0, 6 << 30, 0.5, 10_000


@dataclass(frozen=True)
class Federation:
    """A million clients, ready to train."""

    problem: fitting.Problem
    simulation: Simulation
    state: RunState
    choice: EngineChoice


def synthetic_rows(clients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, labels and owners: ten linear classes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients * ROWS, FEATURES), dtype=np.float32)
    directions = rng.standard_normal((FEATURES, CLASSES), dtype=np.float32)
    y = np.concatenate([(part @ directions).argmax(1) for part in np.array_split(x, 100)])
    return x, y, np.repeat(np.arange(clients, dtype=np.int32), ROWS)


def set_up(
    x: np.ndarray, y: np.ndarray, owner: np.ndarray, method: str = "pflmf:rank=10"
) -> Federation:
    """Everything that comes before the first round."""
    data = FederatedData.from_arrays(x, y, groups=owner, num_classes=CLASSES)
    problem, _ = fitting.set_up(method, data, cohort=COHORT, model="mlp", batch_size=None)
    choice = choose_engine(problem.algorithm, problem.data, cohort=COHORT)
    simulation = fitting.make_simulation(problem, choice)
    return Federation(problem, simulation, start(problem.algorithm, simulation, 0), choice)


def time_rounds(federation: Federation) -> list[float]:
    """Seconds of warm rounds."""
    state, times = federation.state, []
    with num_threads(federation.choice.threads):
        for index in range(WARM_UP + ROUNDS):
            begin = time.perf_counter()
            state = run(
                federation.problem.algorithm,
                federation.simulation,
                rounds=index + 1,
                cohort=COHORT,
                state=state,
            )
            times.append(time.perf_counter() - begin)
    return times[WARM_UP:]


def main() -> int:
    """Measure, and compare with what is promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.million", description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000)
    options = parser.parse_args()
    print(describe_machine())
    print(f"{options.clients} clients, {ROWS} rows x {FEATURES} features, pflmf:rank=10 on an MLP")
    set_up(*synthetic_rows(2 * COHORT))  # what this imports late is no client's
    x, y, owner = synthetic_rows(options.clients)
    objects, begin = sys.getallocatedblocks(), time.perf_counter()
    federation = set_up(x, y, owner)
    seconds, added = time.perf_counter() - begin, sys.getallocatedblocks() - objects
    times = time_rounds(federation)
    median, peak = statistics.median(times), peak_bytes()
    print(f"rounds from {min(times):.3f} to {max(times):.3f} s, {federation.choice}")
    return judge(
        (f"set-up              {seconds:8.1f} s", "below 60 s", seconds < MOST_SECONDS),
        (f"peak memory         {peak / 2**30:8.2f} GiB", "below 6 GiB", peak < MOST_BYTES),
        (f"round of {COHORT}       {median:8.3f} s", "below 0.5 s", median < MOST_ROUND),
        (f"new Python objects  {added:8d}", "below 10000", added < MOST_OBJECTS),
    )


if __name__ == "__main__":
    raise SystemExit(main())
