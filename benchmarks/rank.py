"""What a higher rank costs pFL-MF: round time, peak memory, and the basis step alone.

``python -m benchmarks.rank``: everything factorised, an MLP, 100 clients x 525 rows, full local
batches, K = K_U = 5, cohorts of 20. Rounds of the two ranks take turns; memory is that of a process
of its own for each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

from benchmarks.problems import (
    Problem,
    describe_machine,
    judge,
    make_problem,
    measure_apart,
    peak_bytes,
    synthetic_images,
)
from handspan.core.federation import RunState, draw_round, run, start
from handspan.numerics.local_work import LocalWork
from handspan.simulation.engine import EngineChoice, choose_engine, num_threads

CLIENTS, ROWS, COHORT, STEPS = 100, 525, 20, 5
LOW, HIGH = 1, 50
WARM_UP, REPEATS = 2, 9
MOST_WHOLE, MOST_STEP = 1.3, 1.1


class Contender:
    """pFL-MF of one rank; without a choice of the engine it makes its own."""

    def __init__(
        self, rank: int, choice: EngineChoice | None = None, batch_size: int | None = None
    ) -> None:
        data = synthetic_images(CLIENTS, ROWS)
        work = LocalWork(batch_size=batch_size, learning_rate=0.05)
        text = f"pflmf:rank={rank}:personal_steps={STEPS}:shared_steps={STEPS}"
        self.problem: Problem = make_problem(text, data, cohort=COHORT, model="mlp", work=work)
        algorithm = self.problem.algorithm
        self.choice = choice or choose_engine(algorithm, data, cohort=COHORT)
        self.simulation = self.choice.simulation(algorithm, data)
        self.state: RunState = start(algorithm, self.simulation, 0)

    def round(self) -> None:
        """Train the next round."""
        with num_threads(self.choice.threads):
            self.state = run(
                self.problem.algorithm,
                self.simulation,
                rounds=self.state.round + 1,
                cohort=COHORT,
                state=self.state,
            )

    def basis_steps(self) -> None:
        """Take the steps on U of a round, and nothing else."""
        phase = self.problem.algorithm.rounds[0]
        alone = dataclasses.replace(phase, stages=(phase.stages[1],))
        round = draw_round(0, self.simulation.population, COHORT, "fixed", 0)
        broadcast = alone.broadcast(self.state.server, round)
        with num_threads(self.choice.threads):
            for _ in self.simulation.run_blocks(alone, broadcast, round.ids, 0):
                pass


def ratio(low: Callable[[], None], high: Callable[[], None]) -> tuple[float, float, float]:
    """Median seconds of both, in turns, and how they compare."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM_UP + REPEATS):
        for found, work in zip(times, (low, high), strict=True):
            begin = time.perf_counter()
            work()
            found.append(time.perf_counter() - begin)
    first, second = (statistics.median(found[WARM_UP:]) for found in times)
    return first, second, second / first


def tell_peak(rank: int) -> None:
    """Print the peak memory of a few rounds, for the process that asked."""
    contender = Contender(rank)
    for _ in range(3):
        contender.round()
    print(json.dumps({"peak": peak_bytes(), "engine": str(contender.choice)}))


def main() -> int:
    """Measure, and compare with what is promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank", description=__doc__)
    parser.add_argument("--peak", type=int, help="only the peak memory of this rank, as JSON")
    options = parser.parse_args()
    if options.peak is not None:
        tell_peak(options.peak)
        return 0
    print(describe_machine())
    low, high = Contender(LOW), Contender(HIGH)
    print(f"pflmf, all of an MLP; rank {LOW}: {low.choice}; rank {HIGH}: {high.choice}")
    peaks = [measure_apart("benchmarks.rank", "--peak", str(rank)) for rank in (LOW, HIGH)]
    memory = peaks[1]["peak"] / peaks[0]["peak"]
    whole, step = ratio(low.round, high.round), ratio(low.basis_steps, high.basis_steps)
    print(f"peak memory: {', '.join(str(p['peak'] >> 20) + ' MiB, ' + p['engine'] for p in peaks)}")
    print(f"round {whole[0]:.3f} and {whole[1]:.3f} s, basis steps {step[0]:.3f}, {step[1]:.3f} s")
    return judge(
        (f"round time          {whole[2]:8.2f}", f"at most {MOST_WHOLE}", whole[2] <= MOST_WHOLE),
        (f"peak memory         {memory:8.2f}", f"at most {MOST_WHOLE}", memory <= MOST_WHOLE),
        (f"basis steps alone   {step[2]:8.2f}", f"at most {MOST_STEP}", step[2] <= MOST_STEP),
    )


if __name__ == "__main__":
    raise SystemExit(main())
