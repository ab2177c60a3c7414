"""What clients that were held out are served before they have given a single row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import handspan
from handspan.comparison.outcome import Comparison
from handspan.core import keys
from handspan.evaluation import statistics
from handspan.evaluation.newcomers import first_rows
from handspan.evaluation.protocol import evaluate
from handspan.simulation.engine import num_threads


def scores(folder: Path) -> np.ndarray:
    """Leading score of each held-out client of a run, served without rows."""
    result = handspan.load(folder)
    problem, state = result.problem, result.state
    assert problem.held_out is not None and problem.task is not None
    guests = first_rows(problem.held_out, 0)
    with num_threads(result.choice.threads):
        simulation = result.choice.simulation(
            problem.algorithm, guests, seed=keys.seed_of(keys.key(problem.options.seed, "held out"))
        )
        simulation.adapt(state.server, torch.arange(guests.num_clients), state.round)
        metric = problem.metrics[0]
        found = evaluate(simulation, state.server, state.round, problem.task, [metric])
    return found.clients[f"personal_{metric.name}"].double().numpy()


def zero_shot(found: Comparison, folder: Path, ours: str, rivals: tuple[str, ...]) -> list[str]:
    """Say how our method serves new clients without rows: by itself, and against each rival."""
    rows = {(row["method"], row["seed"]): row for row in found}
    seeds = sorted({seed for _, seed in rows})
    if rows[ours, seeds[0]].get("newcomers") is None:
        return []
    served = {
        name: np.concatenate([scores(folder / rows[name, seed]["cell"]) for seed in seeds])
        for name in (ours, *rivals)
    }
    metric = found[0]["metric"]
    trained = np.mean([rows[ours, seed][f"personal_{metric}_mean"] for seed in seeds])
    told = [
        f"new clients without rows, {ours}: {metric} {np.nanmean(served[ours]):.4f}, "
        f"clients that trained: {trained:.4f}"
    ]
    for name in rivals:
        both = {text: served[text] for text in (ours, name)}
        test = statistics.against_best(both, name)[0]
        if test.difference is None or test.p is None:
            told.append(f"{ours} against {name} on new clients: undefined")
            continue
        told.append(
            f"new clients without rows, {ours} - {name}: {test.difference:+.4f} "
            f"[{test.low:+.4f}, {test.high:+.4f}], p = {test.p:.2g} over {test.pairs} clients"
        )
    return told
