"""A contest of the ways to run an algorithm: warm steps of each are timed on a few clients."""

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
from handspan.core.data import FederatedData, Round
from handspan.core.records import take
from handspan.simulation.federation import Simulation
from handspan.simulation.plans import step_counts
from handspan.simulation.tracing import Unrecorded

_SHORT, _LONG = 1, 4  # steps timed; their difference is free of what a phase costs once
_ATTEMPTS = 3
_SECONDS = 0.08  # attempts as long as this are steady enough: no other follows
_HOPELESS = 2.0  # a way whose steps are slower by this factor is not looked at more closely
# Threads wait for each other, badly so on a machine that does other work as well: they must win
# clearly, in their worst attempt.
_LEAST_GAIN_OF_THREADS = 1.1
_QUICK = 1.0  # a run that plain steps finish in so many seconds is worth no timing
_SHARE = 0.05  # of a run's time may be spent on timing
_LEAST_SECONDS, _MOST_SECONDS = 0.3, 2.0  # though so much at least, and at most


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


class Contest:
    """Times ways to run on a few clients of a round.

    Parameters
    ----------
    algorithm, data, seed
        What is to be run.
    server, round
        A server's record and a round to try it on.
    rounds
        Length of the run: what it may gain bounds what the contest may take. None: a long one.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        data: FederatedData,
        server: Any,
        round: Round,
        seed: int,
        rounds: int | None,
    ) -> None:
        self._algorithm, self._data, self._seed = algorithm, data, seed
        self._server, self._round, self._rounds = server, round, rounds
        self._timings: list[tuple[float, EngineChoice]] = []
        self._simulations: dict[Any, Simulation] = {}
        self._steps: dict[str, float] = {}  # shortest step of a client so far, by phase
        self._begin, self._budget = 0.0, _MOST_SECONDS

    def decide(self, sizes: Sequence[int], least: int, most: int) -> EngineChoice:
        """Try the loop, alone and with more threads, then growing blocks while they help."""
        if self._rounds is not None:
            expected = self._rounds * self._plain_seconds(least)
            if expected < _QUICK:
                return EngineChoice(engine="loop", block_size=32, threads=least)
            self._budget = min(_MOST_SECONDS, max(_LEAST_SECONDS, _SHARE * expected))
        self._try("loop", 32, least)
        self._begin = time.perf_counter()  # what the first recording loads is not its fault
        if most > least:
            self._try("loop", 32, most)
        self._try_blocks(sizes, least, most)
        alone, chosen = self._best(least)
        if alone > _LEAST_GAIN_OF_THREADS * self._best(most)[0]:
            chosen = self._best(most)[1]
        measured = tuple((str(way), 1e3 * seconds) for seconds, way in self._timings)
        return dataclasses.replace(chosen, milliseconds=measured)

    def _try_blocks(self, sizes: Sequence[int], least: int, most: int) -> None:
        """Growing blocks, then the best of them with more threads."""
        found: list[tuple[float, int]] = []
        worse = 0
        for size in sorted({min(size, len(self._round.ids)) for size in sizes}):
            best, _ = self._best(least)
            if size < 2 or worse == 2 or self._is_late:  # larger blocks will not turn it round
                break
            found.append((self._try("stacked", size, least), size))
            worse = worse + 1 if found[-1][0] > best else 0
        if most == least or not found or self._is_late:
            return
        seconds, size = min(found)
        if seconds < most * self._best(most)[0]:
            self._try("stacked", size, most)  # threads at most divide the time

    def _best(self, threads: int) -> tuple[float, EngineChoice]:
        """Fastest way so far that takes no more threads."""
        known = [pair for pair in self._timings if pair[1].threads <= threads]
        return min(known, key=lambda pair: pair[0])

    @property
    def _is_late(self) -> bool:
        return time.perf_counter() - self._begin > self._budget

    def _try(self, engine: str, block_size: int, threads: int) -> float:
        way = EngineChoice(engine=engine, block_size=block_size, threads=threads)
        with num_threads(threads):
            seconds = self._time_client(way)
        self._timings.append((seconds, way))
        return seconds

    def _plain_seconds(self, threads: int) -> float:
        """Seconds of a round as steps take that are not recorded; rather too many."""
        simulation = Simulation(self._algorithm, self._data, seed=self._seed)
        simulation.executor.recorder = Unrecorded()
        ids, total = self._sample(1), 0.0
        with num_threads(threads):
            for phase in self._algorithm.rounds:
                work = (simulation, _shortened(phase, 1), self._broadcast(phase, ids), ids)
                seconds = min(_time(*work), _time(*work))  # the first loads what it needs
                total += seconds * max(1.0, _mean_steps(phase, self._data, self._round.ids))
        return total * len(self._round.ids)

    def _time_client(self, way: EngineChoice) -> float:
        """Seconds of one client's part of a round, from warm steps."""
        simulation = self._simulation(way)
        ids, total = self._sample(way.block_size if way.engine == "stacked" else 4), 0.0
        for phase in self._algorithm.rounds:
            broadcast, short_phase = self._broadcast(phase, ids), _shortened(phase, _SHORT)
            steps = _mean_steps(phase, self._data, ids) / max(1, len(phase.stages))
            best = self._steps.get(phase.name, float("inf"))
            known = simulation.executor.recorder.num_recordings
            short = _time(simulation, short_phase, broadcast, ids)  # wakes the threads up
            is_recorded = simulation.executor.recorder.num_recordings == known
            if not is_recorded or short / len(ids) <= _HOPELESS * best:
                short = _times(simulation, short_phase, broadcast, ids, way.threads)
            self._steps[phase.name] = min(best, short / len(ids))
            if short / len(ids) > _HOPELESS * best:  # more steps need not be seen
                total += short / len(ids) * max(1.0, steps)
                continue
            long = _times(simulation, _shortened(phase, _LONG), broadcast, ids, way.threads)
            per_step = max(0.0, long - short) / (_LONG - _SHORT)
            once = max(0.0, short - per_step * _SHORT)
            total += (once + per_step * steps) / len(ids)
        return total

    def _simulation(self, way: EngineChoice) -> Simulation:
        """Return a federation that runs this way; recordings serve any number of threads."""
        key = way.engine, way.block_size
        if key not in self._simulations:
            made = Simulation(
                self._algorithm,
                self._data,
                seed=self._seed,
                engine=way.engine,
                block_size=way.block_size,
            )
            made.executor.recorder.record_at_once()  # warm: what a long run will replay
            self._simulations[key] = made
        return self._simulations[key]

    def _broadcast(self, phase: Phase, ids: Tensor) -> Any:
        broadcast = phase.broadcast(self._server, self._round)
        if phase.per_client:
            place = torch.searchsorted(self._round.ids, ids)
            values = {n: take(getattr(broadcast, n), place) for n in phase.per_client}
            broadcast = dataclasses.replace(broadcast, **values)
        return broadcast

    def _sample(self, count: int) -> Tensor:
        """Clients of middling size, in order of ids."""
        ids = self._round.ids
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


def _times(
    simulation: Simulation, phase: Phase, broadcast: Any, ids: Tensor, threads: int
) -> float:
    """Seconds of a phase once it is warm: of threads, which have to be steady, in the worst try."""
    recorder, times = simulation.executor.recorder, list[float]()
    while len(times) < _ATTEMPTS and sum(times) < _SECONDS:
        known = recorder.num_recordings
        seconds = _time(simulation, phase, broadcast, ids)
        if recorder.num_recordings == known:  # nothing was recorded meanwhile
            times.append(seconds)
    return min(times) if threads == 1 else max(times)


def _time(simulation: Simulation, phase: Phase, broadcast: Any, ids: Tensor) -> float:
    # What else the machine does must not count; but threads, and a GPU, have to be waited for.
    is_alone = torch.get_num_threads() == 1 and simulation.data.device.type == "cpu"
    clock = time.thread_time if is_alone else time.perf_counter
    begin = clock()
    for _ in simulation.run_blocks(phase, broadcast, ids, 0):
        pass
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - begin
