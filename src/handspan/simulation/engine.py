"""``--engine auto``: time a few warm steps of each way to run, and take the fastest.

One thread is tried first, and more only where they win clearly. The choice never changes the
algorithm, only the clock; it is stored with the run and a resumed run takes it over.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Phase, Stage
from handspan.core.data import Csr, FederatedData, Round
from handspan.core.errors import HandspanError
from handspan.core.federation import draw_round, start
from handspan.core.records import num_bytes, take
from handspan.simulation.federation import Simulation
from handspan.simulation.plans import step_counts

_BLOCKS_CPU = (4, 8, 16, 32, 64)
_BLOCKS_GPU = (32, 128, 512)
_SHORT, _LONG = 1, 4  # steps timed; their difference is free of what a phase costs once
_ATTEMPTS = 4  # the first one records
_SECONDS = 0.08  # an attempt as long as this is steady enough: no other follows
_ALL_SECONDS = 1.5  # after which no further way is tried
# Threads wait for each other, badly so on a machine that does other work as well: they must win
# clearly.
_LEAST_GAIN_OF_THREADS = 1.25
_remembered: dict[Any, EngineChoice] = {}


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """How a run is executed.

    Attributes
    ----------
    engine, block_size, threads
        As chosen.
    milliseconds
        Measured time of one client's round, for each candidate; empty where nothing was timed.
    """

    engine: str
    block_size: int
    threads: int
    milliseconds: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        blocks = f" in blocks of {self.block_size}" if self.engine == "stacked" else ""
        return f"{self.engine}{blocks}, {self.threads} thread{'s' * (self.threads > 1)}"


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Compute with so many threads, and restore the process's number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_engine(
    algorithm: Algorithm,
    data: FederatedData,
    *,
    engine: str = "auto",
    block_size: int | None = None,
    threads: int | None = None,
    cohort: int | float,
    seed: int = 0,
    name: str = "",
) -> EngineChoice:
    """Settle engine, block size and threads; what is given is kept."""
    available = threads or torch.get_num_threads()
    on_gpu = not isinstance(data.x, Csr) and data.x.device.type == "cuda"
    if engine != "auto":
        default = 32 if not on_gpu else 512
        return EngineChoice(engine=engine, block_size=block_size or default, threads=available)
    if all(phase.cohort_update is not None for phase in algorithm.rounds):
        return EngineChoice(engine="stacked", block_size=block_size or 32, threads=threads or 1)
    if isinstance(data.x, Csr) and any(s.sparse for p in algorithm.rounds for s in p.stages):
        return EngineChoice(engine="loop", block_size=block_size or 32, threads=threads or 1)
    simulation = Simulation(algorithm, data, seed=seed)
    state = start(algorithm, simulation, seed)
    round = draw_round(0, simulation.population, cohort, "fixed", seed)
    key = (
        name,
        str(data.row_shape),
        len(round.ids),
        on_gpu,
        threads,
        available,
        block_size,
        num_bytes(state.server),
        _shapes(algorithm, data, round.ids),
    )
    if key not in _remembered:
        contest = _Contest(algorithm, data, state.server, round, seed)
        sizes = [block_size] if block_size else _BLOCKS_GPU if on_gpu else _BLOCKS_CPU
        _remembered[key] = contest.decide(sizes, threads or 1, threads or available)
    return _remembered[key]


class _Contest:
    """Times ways to run on a few clients of a round."""

    def __init__(
        self, algorithm: Algorithm, data: FederatedData, server: Any, round: Round, seed: int
    ) -> None:
        self._algorithm, self._data, self._seed = algorithm, data, seed
        self._server, self._round = server, round
        self._timings: list[tuple[float, EngineChoice]] = []
        self._begin = time.perf_counter()

    def decide(self, sizes: Sequence[int], least: int, most: int) -> EngineChoice:
        """Try the loop, then growing blocks while they help, then the best with more threads."""
        self._try("loop", 32, least)
        self._begin = time.perf_counter()  # what the first recording loads is not its fault
        count, worse = len(self._round.ids), 0
        for size in sorted({min(size, count) for size in sizes}):
            best = self._best[0]
            if size < 2 or worse == 2 or self._is_late:  # larger blocks will not turn it round
                break
            worse = worse + 1 if self._try("stacked", size, least) > best else 0
        best, chosen = self._best
        if most > least and not self._is_late:
            self._try_threads(best, most)
            faster, other = self._best
            chosen = other if best > _LEAST_GAIN_OF_THREADS * faster else chosen
        measured = tuple((str(way), 1e3 * seconds) for seconds, way in self._timings)
        return dataclasses.replace(chosen, milliseconds=measured)

    def _try_threads(self, best: float, threads: int) -> None:
        """Try more threads, first on what does best without them."""
        blocks = [pair for pair in self._timings if pair[1].engine == "stacked"]
        ways = [self._timings[0], *sorted(blocks, key=lambda pair: pair[0])[:1]]
        for seconds, way in sorted(ways, key=lambda pair: pair[0]):
            # Threads at most divide the time; and a block so far behind is not tried.
            if seconds < threads * best:
                self._try(way.engine, way.block_size, threads)

    @property
    def _best(self) -> tuple[float, EngineChoice]:
        return min(self._timings, key=lambda pair: pair[0])

    @property
    def _is_late(self) -> bool:
        return time.perf_counter() - self._begin > _ALL_SECONDS

    def _try(self, engine: str, block_size: int, threads: int) -> float:
        way = EngineChoice(engine=engine, block_size=block_size, threads=threads)
        limit = min((seconds for seconds, _ in self._timings), default=float("inf"))
        with num_threads(threads):
            seconds = self._time_client(way, limit)
        self._timings.append((seconds, way))
        return seconds

    def _time_client(self, way: EngineChoice, limit: float) -> float:
        """Seconds of one client's part of a round, from warm steps."""
        simulation = Simulation(
            self._algorithm,
            self._data,
            seed=self._seed,
            engine=way.engine,
            block_size=way.block_size,
        )
        simulation.executor.recorder.record_at_once()  # warm: what a long run will replay
        total = 0.0
        for phase in self._algorithm.rounds:
            ids = self._sample(way)
            broadcast = phase.broadcast(self._server, self._round)
            if phase.per_client:
                place = torch.searchsorted(self._round.ids, ids)
                values = {n: take(getattr(broadcast, n), place) for n in phase.per_client}
                broadcast = dataclasses.replace(broadcast, **values)
            judge = min if way.threads == 1 else max  # threads have to be steady as well
            short = judge(_times(simulation, _shortened(phase, _SHORT), broadcast, ids))
            steps = _mean_steps(phase, self._data, ids) / max(1, len(phase.stages))
            if short / len(ids) > 3 * limit:  # so slow that more steps need not be seen
                return total + short / len(ids) * max(1.0, steps)
            long = judge(_times(simulation, _shortened(phase, _LONG), broadcast, ids))
            per_step = max(0.0, long - short) / (_LONG - _SHORT)
            once = max(0.0, short - per_step * _SHORT)
            total += (once + per_step * steps) / len(ids)
        return total

    def _sample(self, way: EngineChoice) -> Tensor:
        """Clients of one block: those of middling size, in order of ids."""
        count, ids = (way.block_size if way.engine == "stacked" else 4), self._round.ids
        order = self._data.num_train[ids].argsort(stable=True)
        first = max(0, (len(ids) - count) // 2)
        return ids[order[first : first + count].sort().values]


def _shortened(phase: Phase, steps: int) -> Phase:
    def cut(stage: Stage) -> Stage:
        if stage.forward_only:
            return stage
        return dataclasses.replace(stage, steps=steps, epochs=None)

    return dataclasses.replace(phase, stages=tuple(cut(stage) for stage in phase.stages))


def _mean_steps(phase: Phase, data: FederatedData, ids: Tensor) -> float:
    return sum(
        float(step_counts(stage, data.span(stage.rows)[1][ids]).double().mean())
        for stage in phase.stages
        if not stage.forward_only
    )


def _times(simulation: Simulation, phase: Phase, broadcast: Any, ids: Tensor) -> list[float]:
    """Seconds of a phase in some attempts, after one that does not count."""
    times: list[float] = []
    for attempt in range(_ATTEMPTS):
        begin = time.perf_counter()
        for _ in simulation.run_blocks(phase, broadcast, ids, 0):
            pass
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        times += [seconds] if attempt else []
        if attempt and seconds > _SECONDS:
            break
    return times


def _shapes(algorithm: Algorithm, data: FederatedData, ids: Tensor) -> str:
    widths = [
        (stage.batch_size, stage.steps, stage.epochs)
        for phase in algorithm.rounds
        for stage in phase.stages
    ]
    return f"{widths} {int(data.num_train[ids].double().mean())}"


def check_engine(name: str) -> None:
    """Refuse an unknown engine."""
    if name not in ("auto", "loop", "stacked", "wire"):
        raise HandspanError(f"unknown engine {name!r}: choose auto, loop or stacked")
