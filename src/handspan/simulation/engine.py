"""``--engine auto``: time a few warm steps of each way to run, and take the fastest.

The choice never changes the algorithm, only the clock; it is stored with the run and a resumed run
takes it over.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Phase, Stage
from handspan.core.data import Csr, FederatedData
from handspan.core.errors import HandspanError
from handspan.core.federation import draw_round, start
from handspan.core.records import num_bytes, take
from handspan.simulation.federation import Simulation

_BLOCKS_CPU = (4, 8, 16, 32, 64)
_BLOCKS_GPU = (32, 128, 512)
_SHORT, _LONG = 1, 4  # steps timed; their difference is free of what a phase costs once
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
        return EngineChoice(engine="stacked", block_size=block_size or 32, threads=available)
    if isinstance(data.x, Csr) and any(s.sparse for p in algorithm.rounds for s in p.stages):
        return EngineChoice(engine="loop", block_size=block_size or 32, threads=available)
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
        _remembered[key] = _calibrate(
            algorithm, data, state.server, round, seed, block_size, threads, available, on_gpu
        )
    return _remembered[key]


def _calibrate(
    algorithm: Algorithm,
    data: FederatedData,
    server: Any,
    round: Any,
    seed: int,
    block_size: int | None,
    threads: int | None,
    available: int,
    on_gpu: bool,
) -> EngineChoice:
    timings: list[tuple[float, EngineChoice]] = []
    worse = 0
    for candidate in _candidates(len(round.ids), block_size, threads, available, on_gpu):
        with num_threads(candidate.threads):
            seconds = _time_client(algorithm, data, server, round, seed, candidate)
        best = min((t for t, _ in timings), default=float("inf"))
        timings.append((seconds, candidate))
        if candidate.engine == "stacked":
            worse = worse + 1 if seconds > 1.3 * best else 0
            if worse == 2:  # larger blocks will not turn it round
                break
    chosen = min(timings, key=lambda pair: pair[0])[1]
    measured = tuple((str(candidate), 1e3 * seconds) for seconds, candidate in timings)
    return dataclasses.replace(chosen, milliseconds=measured)


def _candidates(
    size: int, block_size: int | None, threads: int | None, available: int, on_gpu: bool
) -> list[EngineChoice]:
    loops = sorted({available} if threads else {1, available})
    found = [EngineChoice(engine="loop", block_size=32, threads=n) for n in loops]
    sizes = _BLOCKS_GPU if on_gpu else _BLOCKS_CPU
    chosen = [block_size] if block_size else sorted({min(size, block) for block in sizes})
    return found + [
        EngineChoice(engine="stacked", block_size=block, threads=available)
        for block in chosen
        if block > 1
    ]


def _time_client(
    algorithm: Algorithm,
    data: FederatedData,
    server: Any,
    round: Any,
    seed: int,
    candidate: EngineChoice,
) -> float:
    """Seconds of one client's part of a round, from warm steps."""
    simulation = Simulation(
        algorithm, data, seed=seed, engine=candidate.engine, block_size=candidate.block_size
    )
    simulation.executor.recorder.record_at_once()  # warm: what a long run will replay
    total = 0.0
    for phase in algorithm.rounds:
        ids = _sample(round.ids, data, candidate)
        broadcast = phase.broadcast(server, round)
        if phase.per_client:
            place = torch.searchsorted(round.ids, ids)
            values = {n: take(getattr(broadcast, n), place) for n in phase.per_client}
            broadcast = dataclasses.replace(broadcast, **values)
        timed = {
            steps: _best(simulation, _shortened(phase, steps), broadcast, ids)
            for steps in (_SHORT, _LONG)
        }
        per_step = max(0.0, timed[_LONG] - timed[_SHORT]) / (_LONG - _SHORT)
        once = max(0.0, timed[_SHORT] - per_step * _SHORT)
        steps = _mean_steps(phase, data, ids) / max(1, len(phase.stages))
        total += (once + per_step * steps) / len(ids)
    return total


def _sample(ids: Tensor, data: FederatedData, candidate: EngineChoice) -> Tensor:
    """Clients of one block: those of middling size, in order of ids."""
    count = candidate.block_size if candidate.engine == "stacked" else 4
    order = data.num_train[ids].argsort(stable=True)
    first = max(0, (len(ids) - count) // 2)
    return ids[order[first : first + count].sort().values]


def _shortened(phase: Phase, steps: int) -> Phase:
    def cut(stage: Stage) -> Stage:
        if stage.forward_only:
            return stage
        return dataclasses.replace(stage, steps=steps, epochs=None)

    return dataclasses.replace(phase, stages=tuple(cut(stage) for stage in phase.stages))


def _mean_steps(phase: Phase, data: FederatedData, ids: Tensor) -> float:
    from handspan.simulation.plans import step_counts

    return sum(
        float(step_counts(stage, data.span(stage.rows)[1][ids]).double().mean())
        for stage in phase.stages
        if not stage.forward_only
    )


def _best(simulation: Simulation, phase: Phase, broadcast: Any, ids: Tensor) -> float:
    best = float("inf")
    for attempt in range(4):  # the first one records
        begin = time.perf_counter()
        for _ in simulation.run_blocks(phase, broadcast, ids, 0):
            pass
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if attempt:
            best = min(best, time.perf_counter() - begin)
    return best


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
