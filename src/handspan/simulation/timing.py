"""A contest of the ways to run an algorithm: warm steps of each are timed on a few clients."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Phase, Stage
from handspan.core.data import FederatedData, Round
from handspan.core.records import take
from handspan.simulation.federation import Simulation
from handspan.simulation.plans import step_counts
from handspan.simulation.threads import num_threads
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
_LEAST_SECONDS, _MOST_SECONDS = 0.3, 4.0  # though so much at least, and at most
# Seconds that workers must be able to save: what it takes to start and to try them, twice.
_LEAST_SAVED_BY_WORKERS = 6.0
_TASKS_OF_A_WORKER = 4  # when they are tried
_WARM_UPS = {"loop": 1, "stacked": 1, "workers": 3}  # some workers are later than others


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """How a run is executed.

    Attributes
    ----------
    engine, block_size, threads
        As chosen.
    workers
        Processes of the engine of that name, or actors of ``ray``.
    milliseconds
        Measured time of one client's round, for each candidate; empty where nothing was timed.
    """

    engine: str
    block_size: int
    threads: int
    workers: int = 1
    milliseconds: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        apart = {"workers": f"{self.workers} workers", "ray": f"{self.workers} ray workers"}
        is_stacked = self.engine == "stacked" or (self.engine in apart and self.block_size > 1)
        name = apart.get(self.engine, self.engine)
        blocks = f" in blocks of {self.block_size}" if is_stacked else ""
        return f"{name}{blocks}, {self.threads} thread{'s' * (self.threads > 1)}"

    @staticmethod
    def told(description: Mapping[str, Any]) -> EngineChoice:
        """Return what ``description`` described."""
        names = ("engine", "block_size", "threads", "workers")
        return EngineChoice(**{name: description[name] for name in names if name in description})

    def description(self, device: torch.device) -> dict[str, Any]:
        """Say how a run is executed, in the words of its folder."""
        return {
            "engine": self.engine,
            "block_size": self.block_size,
            "threads": self.threads,
            "workers": self.workers,
            "device": device.type,
            "torch": torch.__version__,
        }

    def simulation(self, algorithm: Algorithm, data: FederatedData, **options: Any) -> Simulation:
        """Return a federation that runs this way."""
        return Simulation(
            algorithm,
            data,
            engine=self.engine,
            block_size=self.block_size,
            workers=self.workers,
            **options,
        )


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

    def decide(self, sizes: Sequence[int], least: int, most: int, workers: int = 1) -> EngineChoice:
        """Try the loop, alone and with more threads, growing blocks while they help, workers."""
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
        if workers > 1 and least == 1:
            self._try_workers(workers)
        alone, chosen = self._best(least)
        if alone > _LEAST_GAIN_OF_THREADS * self._best(most, workers)[0]:
            chosen = self._best(most, workers)[1]
        measured = tuple((str(way), 1e3 * seconds) for seconds, way in self._timings)
        return dataclasses.replace(chosen, milliseconds=measured)

    def _try_blocks(self, sizes: Sequence[int], least: int, most: int) -> None:
        """Growing blocks, then the best of them with more threads."""
        found: list[tuple[float, int]] = []
        worse = 0
        for size in sorted({min(size, len(self._round.ids)) for size in sizes}):
            best, _ = self._best(least)
            # Larger blocks will not turn it round, or threads could not be tried any more.
            if size < 2 or worse == 2 or self._has_spent(0.5):
                break
            found.append((self._try("stacked", size, least), size))
            worse = worse + 1 if found[-1][0] > best else 0
        if most == least or not found or self._has_spent(1.0):
            return
        seconds, size = min(found)
        if seconds < most * self._best(most)[0]:
            self._try("stacked", size, most)  # threads at most divide the time

    def _try_workers(self, workers: int) -> None:
        """The loop inside, and the blocks that are fastest alone, where a long run repays it."""
        seconds, way = self._best(1)
        if self._rounds is not None:
            total = self._rounds * len(self._round.ids) * seconds
            if total * (1 - 1 / workers) < _LEAST_SAVED_BY_WORKERS:
                return
        self._try("workers", 1, 1, workers)
        largest = len(self._round.ids) // workers  # everybody has a block
        if way.engine == "stacked" and largest > 1:
            self._try("workers", min(way.block_size, largest), 1, workers)

    def _best(self, threads: int, workers: int = 1) -> tuple[float, EngineChoice]:
        """Fastest way so far that takes no more threads and workers."""
        known = [
            pair
            for pair in self._timings
            if pair[1].threads <= threads and pair[1].workers <= workers
        ]
        return min(known, key=lambda pair: pair[0])

    def _has_spent(self, share: float) -> bool:
        """Whether so much of the time for trials is over."""
        return time.perf_counter() - self._begin > share * self._budget

    def _try(self, engine: str, block_size: int, threads: int, workers: int = 1) -> float:
        way = EngineChoice(engine=engine, block_size=block_size, threads=threads, workers=workers)
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
        ids, total = self._sample(_clients(way)), 0.0
        for phase in self._algorithm.rounds:
            broadcast, short_phase = self._broadcast(phase, ids), _shortened(phase, _SHORT)
            steps = _mean_steps(phase, self._data, ids) / max(1, len(phase.stages))
            best = self._steps.get(phase.name, float("inf"))
            known = simulation.executor.recorder.num_recordings
            for _ in range(_WARM_UPS[way.engine]):
                short = _time(simulation, short_phase, broadcast, ids)
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
            made = way.simulation(self._algorithm, self._data, seed=self._seed)
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


def _clients(way: EngineChoice) -> int:
    """How many clients a way is tried on."""
    if way.engine == "loop":
        return 4
    return way.block_size * (_TASKS_OF_A_WORKER * way.workers if way.engine == "workers" else 1)


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
    # What else the machine does must not count; but others, and a GPU, have to be waited for.
    is_alone = torch.get_num_threads() == 1 and simulation.data.device.type == "cpu"
    is_alone = is_alone and simulation.executor.name != "workers"
    clock = time.thread_time if is_alone else time.perf_counter
    begin = clock()
    for _ in simulation.run_blocks(phase, broadcast, ids, 0):
        pass
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - begin
