"""Mutational signatures of tumours that stay in their hospitals: federated against central NMF.

``python -m experiments.matrix.signatures --data-folder data --out runs/signatures`` factorises the
96 kinds of mutations of ``tcga_sbs96.npz``, each tumour scaled to sum 1 (one has 39,688 mutations,
the median 83), over one hospital for each cancer type and over random hospitals, ten of 32 a round,
from independent random starts. Only changes of HH^T and XH^T leave a hospital. Signatures are
matched by the Hungarian method on cosines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from handspan.baselines import central_nmf
from handspan.estimators import FederatedNMF

ROUNDS, COHORT = 600, 10
STEPS = {"row_steps": 50, "shared_steps": 100}


def tumours(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that sum to 1, the cancer type of each, and the names of the kinds of mutations."""
    d = np.load(folder / "tcga_sbs96.npz")
    x = d["x"].astype(np.float64)
    keep = x.sum(axis=1) > 0
    return x[keep] / x[keep].sum(axis=1, keepdims=True), d["y"][keep], d["mutation_type"]


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Mean cosine of matched signatures."""
    unit = [c / np.linalg.norm(c, axis=1, keepdims=True) for c in (first, second)]
    table = unit[0] @ unit[1].T
    return float(table[linear_sum_assignment(-table)].mean())


def federated(x: np.ndarray, hospitals: np.ndarray, size: int, seed: int) -> dict[str, Any]:
    """One start; objective |X - HW|^2 / N after the best H for the final W."""
    model = FederatedNMF(
        size, max_iter=ROUNDS, cohort=COHORT, random_state=seed, settings=STEPS, tol=0
    ).fit(x, groups=hospitals)
    return {"components": model.components_, "objective": -model.score(x)}


def compare(x: np.ndarray, hospitals: np.ndarray, size: int, starts: int) -> dict[str, Any]:
    """Independent starts on both sides."""
    begin = time.perf_counter()
    ours = [federated(x, hospitals, size, 1000 + s) for s in range(starts)]
    seconds = (time.perf_counter() - begin) / starts
    theirs = [central_nmf(x, size, seed=s, iterations=5000, tolerance=1e-8) for s in range(starts)]
    cross = [cosine(o["components"], c) for o, (c, _) in zip(ours, theirs, strict=True)]
    within = [cosine(a[0], b[0]) for a, b in itertools.combinations(theirs, 2)]
    best = min(ours, key=lambda o: o["objective"])
    other = min(theirs, key=lambda c: c[1])
    every = [cosine(o["components"], c) for o in ours for c, _ in theirs]
    return {
        "components": size,
        "starts": starts,
        "least_cosine": min(cross),
        "mean_cosine": float(np.mean(every)),
        "central_to_central": float(np.mean(within)),
        "best_cosine": cosine(best["components"], other[0]),
        "objective_federated": best["objective"],
        "objective_central": other[1],
        "seconds_a_start": round(seconds, 1),
        "best": best["components"].tolist(),
    }


def picture(signatures: np.ndarray, names: np.ndarray, path: Path) -> None:
    """Bars of each signature, coloured by substitution, scaled to sum 1."""
    from matplotlib.figure import Figure

    kinds = [str(name)[2:5] for name in names]  # A[C>A]A: C>A
    order = np.argsort(kinds, kind="stable")
    colours = dict(zip(sorted(set(kinds)), ["C0", "k", "C3", "0.7", "C2", "C6"], strict=True))
    figure = Figure(figsize=(9, 1.1 * len(signatures) + 0.6), layout="constrained")
    axes = figure.subplots(len(signatures), 1, sharex=True, squeeze=False)[:, 0]
    for k, axis in enumerate(axes):
        share = signatures[k][order] / signatures[k].sum()
        axis.bar(range(len(order)), share, color=[colours[kinds[i]] for i in order])
        axis.set_ylabel(str(k + 1))
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xticks([8 + 16 * i for i in range(6)], sorted(colours))
    figure.savefig(path, dpi=150)


def main() -> int:
    """Run both numbers of components over both kinds of hospitals."""
    parser = argparse.ArgumentParser(prog="python -m experiments.matrix.signatures")
    parser.add_argument("--data-folder", default="data")
    parser.add_argument("--out", required=True)
    parser.add_argument("--starts", default="5,20", help="for K = 5 and K = 10")
    options = parser.parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    x, types, names = tumours(Path(options.data_folder))
    apart = {"types": types, "random": np.random.default_rng(0).integers(0, 32, len(types))}
    for size, starts in zip((5, 10), map(int, options.starts.split(",")), strict=True):
        for name, hospitals in apart.items():
            path = out / f"{name}-{size}.json"
            if not path.exists():
                path.write_text(json.dumps(compare(x, hospitals, size, starts)))
            found = json.loads(path.read_text())
            picture(np.array(found.pop("best")), names, path.with_suffix(".png"))
            print(name, json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
