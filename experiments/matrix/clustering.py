"""Table I of Wang and Chang: clustering accuracy of federated, distributed and central methods.

``python -m experiments.matrix.clustering tdt2 --data-folder data --out runs/tdt2.jsonl`` runs all
methods from the same starts (SNCP, FedMAvg and FedMGS from the same W and H, the others with the
same seeds) and writes a line for each run; runs that are there are not run again. With ``--show``
it only prints the table of what is there, with paired tests over the starts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from experiments.matrix.tables import TABLES, Table
from handspan.baselines import (
    Clustering,
    ball_growing,
    central_kmeans,
    distributed_coreset,
    kmeans_parallel,
    sncp,
)
from handspan.core.federation import run, start
from handspan.estimators.base import by_client
from handspan.evaluation.clustering import clustering_scores
from handspan.fitting import make_simulation, set_up
from handspan.simulation.engine import choose_engine

ROUNDS = 500
FEDERATED = {
    "FedMAvg (m=10)": ("fedmavg", 10, {"row_steps": 10, "shared_steps": 5}),
    "FedMAvg (m=100)": ("fedmavg", 100, {"row_steps": 10, "shared_steps": 5}),
    "FedMGS (m=10)": ("fedmgs", 10, {"row_steps": 100, "shared_steps": 100}),
    "FedMGS (m=100)": ("fedmgs", 100, {"row_steps": 10, "shared_steps": 100}),
}
DISTRIBUTED: dict[str, Callable[[Table, int], Clustering]] = {
    # As in the paper's comparison: 20 K candidates a round, ten rounds, no steps on the data.
    "KM||": lambda t, s: kmeans_parallel(
        t.x, t.owner, t.num_classes, oversampling=20 * t.num_classes, rounds=10, seed=s
    ),
    "BEL": lambda t, s: distributed_coreset(
        t.x, t.owner, t.num_classes, samples=len(t.y) // 2, starts=1, seed=s
    ),
    "CAL": lambda t, s: ball_growing(
        t.x, t.owner, t.num_classes, outliers=2 * 256 / len(np.unique(t.owner)), seed=s
    ),
    "k-means++": lambda t, s: central_kmeans(t.x, t.num_classes, seed=s),
}
PUBLISHED = {
    "tdt2": {"KM||": 32.6, "BEL": 33.3, "CAL": 32.5, "FedMAvg (m=10)": 47.2}
    | {"FedMAvg (m=100)": 52.1, "FedMGS (m=10)": 51.5, "FedMGS (m=100)": 53.5},
    "mnist": {"KM||": 46.8, "BEL": 46.1, "CAL": 46.6, "FedMAvg (m=10)": 48.8}
    | {"FedMAvg (m=100)": 40.0, "FedMGS (m=10)": 50.0, "FedMGS (m=100)": 49.1},
    "synthetic": {"KM||": 69.4, "BEL": 38.7, "CAL": 63.6, "FedMAvg (m=10)": 86.2}
    | {"FedMAvg (m=100)": 85.5, "FedMGS (m=10)": 88.4, "FedMGS (m=100)": 87.7},
}
PIPE, ESCAPED = "|", "\\|"
METHODS = [*DISTRIBUTED, "SNCP", *FEDERATED]


def begun(table: Table, method: str, cohort: int, settings: dict[str, Any], seed: int) -> Any:
    """Problem, simulation, state after the set-up, and the order of the rows."""
    grouped = by_client(table.x, table.owner)
    problem, _ = set_up(
        method,
        grouped.data,
        rounds=ROUNDS,
        cohort=cohort,
        seed=seed,
        engine="steady",
        device="cpu",
        settings={"num_components": table.num_classes, **settings},
    )
    choice = choose_engine(problem.algorithm, problem.data, engine="steady", cohort=cohort)
    simulation = make_simulation(problem, choice)
    state = start(problem.algorithm, simulation, seed)
    state = run(problem.algorithm, simulation, rounds=0, cohort=cohort, seed=seed, state=state)
    return problem, simulation, state, grouped


def federated(table: Table, name: str, seed: int) -> dict[str, Any]:
    """Run a federated method from start number ``seed``."""
    method, cohort, settings = FEDERATED[name]
    problem, simulation, state, grouped = begun(table, method, cohort, settings, seed)
    state = run(problem.algorithm, simulation, rounds=ROUNDS, cohort=cohort, seed=seed, state=state)
    everyone = torch.arange(problem.data.num_clients)
    found = simulation.row_labels(state.server, everyone, state.round)
    size, width = table.num_classes, table.x.shape[1]
    paper = size * width + (size * size if method == "fedmgs" else 0)
    return {
        "labels": grouped.restore(found.numpy()),
        "rounds": state.round,
        "objective": float(state.server.objective),
        "numbers_up": state.costs.bytes_up // 4,
        "paper_numbers_up": state.round * cohort * paper,
    }


def central_sncp(table: Table, seed: int) -> dict[str, Any]:
    """Run SNCP from the same W and H."""
    _, simulation, state, grouped = begun(table, "fedmgs", 10, {}, seed)
    everyone = torch.arange(grouped.data.num_clients)
    rows = grouped.restore(simulation.store.read_flat(everyone).rows.numpy())
    basis = state.server.basis.numpy().astype(np.float32)
    return {"labels": sncp(table.x, basis, rows).labels}


def one(table: Table, name: str, seed: int) -> dict[str, Any]:
    """Run one method once; scores and costs."""
    begin = time.perf_counter()
    if name in FEDERATED:
        found = federated(table, name, seed)
    elif name == "SNCP":
        found = central_sncp(table, seed)
    else:
        clustering = DISTRIBUTED[name](table, seed)
        found = {"labels": clustering.labels, "numbers_up": clustering.numbers_up}
    labels = torch.from_numpy(np.asarray(found.pop("labels")).astype(np.int64))
    scores = clustering_scores(torch.from_numpy(table.y), labels)
    seconds = time.perf_counter() - begin
    return {"method": name, "start": seed, **scores, **found, "seconds": round(seconds, 2)}


def read(path: Path) -> list[dict[str, Any]]:
    """Runs that are there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summarise(runs: list[dict[str, Any]], name: str) -> str:
    """The table as markdown, and the paired tests."""
    by_method = {
        m: {r["start"]: 100 * r["clustering_accuracy"] for r in runs if r["method"] == m}
        for m in METHODS
    }
    lines = [
        "| method | published | accuracy % | NMI | starts | numbers up | s a run |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, scores in by_method.items():
        mine = [r for r in runs if r["method"] == method]
        if not mine:
            continue
        values = np.array(list(scores.values()))
        nmi = 100 * np.mean([r["nmi"] for r in mine])
        sent = np.mean([r.get("numbers_up", 0) for r in mine])
        seconds = np.median([r["seconds"] for r in mine])
        lines.append(
            f"| {method.replace(PIPE, ESCAPED)} | {PUBLISHED[name].get(method, '-')} | "
            f"{values.mean():.1f} ± "
            f"{values.std(ddof=1) if len(values) > 1 else 0:.1f} | {nmi:.1f} | {len(values)} | "
            f"{sent:.3g} | {seconds:.1f} |"
        )
    for ours in ("FedMGS (m=10)", "FedMGS (m=100)"):
        for rival in ("KM||", "BEL", "CAL"):
            common = sorted(by_method[ours].keys() & by_method[rival].keys())
            if len(common) < 6:
                continue
            gain = np.array([by_method[ours][s] - by_method[rival][s] for s in common])
            p = stats.wilcoxon(gain).pvalue
            against = f"{ours} - {rival.replace(PIPE, ESCAPED)}"
            lines.append(f"\n{against}: {gain.mean():+.1f} points, p = {p:.2g} (Wilcoxon)")
    return "\n".join(lines)


def main() -> int:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.matrix.clustering")
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data-folder", default="data")
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--out", required=True, help="file of the runs, one line each")
    parser.add_argument("--show", action="store_true", help="run nothing")
    options = parser.parse_args()
    path = Path(options.out)
    if not options.show:
        path.parent.mkdir(parents=True, exist_ok=True)
        table = TABLES[options.table](Path(options.data_folder))
        done = {(r["method"], r["start"]) for r in read(path)}
        for seed in range(options.starts):
            for name in options.methods.split(","):
                if (name, seed) in done:
                    continue
                with path.open("a") as file:
                    file.write(json.dumps(one(table, name, seed)) + "\n")
    print(summarise(read(path), options.table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
