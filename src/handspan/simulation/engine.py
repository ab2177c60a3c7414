"""``--engine auto``: time a few warm steps of each way to run, and take the fastest.

One thread is tried first, and more only where they win clearly. The choice never changes the
algorithm, only the clock; it is stored with the run and a resumed run takes it over.

Engines and threads agree but for the last digits, and two timings need not come to one choice.
``--engine steady`` looks at no clock: the same command gives the same numbers again.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from handspan.core.algorithm import Algorithm
from handspan.core.data import Csr, FederatedData, Round
from handspan.core.federation import draw_round, start
from handspan.core.records import num_bytes
from handspan.simulation.federation import Simulation
from handspan.simulation.threads import num_threads
from handspan.simulation.timing import Contest, EngineChoice

__all__ = ["EngineChoice", "choose_engine", "num_threads"]
_BLOCKS_CPU = (4, 8, 16, 32, 64)
_STEADY_CPU, _STEADY_GPU = 32, 512  # seldom the fastest block, never far from it
_remembered: dict[Any, EngineChoice] = {}


def choose_engine(
    algorithm: Algorithm,
    data: FederatedData,
    *,
    engine: str = "auto",
    block_size: int | None = None,
    threads: int | None = None,
    workers: int | None = None,
    cohort: int | float,
    rounds: int | None = None,
    seed: int = 0,
    name: str = "",
) -> EngineChoice:
    """Settle engine, block size, threads and workers; what is given is kept.

    ``rounds`` tells how long the run is: a short one is not worth much timing.
    """
    available = threads or torch.get_num_threads()
    on_gpu = not isinstance(data.x, Csr) and data.x.device.type == "cuda"
    size = block_size or (_STEADY_GPU if on_gpu else _STEADY_CPU)
    if engine in ("workers", "ray"):
        return EngineChoice(
            engine=engine,
            block_size=block_size or 1,
            threads=threads or 1,
            workers=workers or available,
        )
    if engine not in ("auto", "steady"):
        return EngineChoice(engine=engine, block_size=size, threads=available)
    # A phase without stages looks at no rows: any form of them suits it.
    is_flat = all(phase.cohort_update is not None for phase in algorithm.rounds if phase.stages)
    if isinstance(data.x, Csr) and any(s.sparse for p in algorithm.rounds for s in p.stages):
        if not is_flat:
            return EngineChoice(engine="loop", block_size=size, threads=threads or 1)
    # On a GPU large blocks win by far: there is nothing to try.
    if engine == "steady" or is_flat or on_gpu:
        name = "stacked" if is_flat or on_gpu or not _is_ragged(data) else "loop"
        return EngineChoice(engine=name, block_size=size, threads=threads or 1)
    simulation = Simulation(algorithm, data, seed=seed)
    state = start(algorithm, simulation, seed)
    round = draw_round(0, simulation.population, cohort, "fixed", seed)
    key = (
        name,
        str(data.row_shape),
        len(round.ids),
        threads,
        workers,
        available,
        block_size,
        num_bytes(state.server),
        _shapes(algorithm, data, round),
        None if rounds is None else rounds.bit_length(),  # runs of a similar length
    )
    if key not in _remembered:
        contest = Contest(algorithm, data, state.server, round, seed, rounds)
        sizes = (block_size,) if block_size else _BLOCKS_CPU
        processes = min(workers or available, len(round.ids))
        _remembered[key] = contest.decide(sizes, threads or 1, available, processes)
    return _remembered[key]


def _is_ragged(data: FederatedData) -> bool:
    """Whether a cohort falls into groups of other widths in every round.

    Then most steps of blocks have a shape that does not come again, and are worth no recording.
    """
    return int(data.num_train.max()) > 4 / 3 * max(1, int(data.num_train.min()))


def _shapes(algorithm: Algorithm, data: FederatedData, round: Round) -> str:
    widths = [
        (stage.batch_size, stage.steps, stage.epochs)
        for phase in algorithm.rounds
        for stage in phase.stages
    ]
    rows = float(data.num_train[round.ids].double().mean())
    return f"{widths} {math.log2(max(1.0, rows)):.0f}"  # clients of a similar size
