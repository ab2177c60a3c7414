"""Ratings of people who keep them: federated completion against the same model trained centrally.

``python -m experiments.matrix.ratings --data-folder data`` takes the fixed split of
``mc_flixster.npz``; ridge and K are chosen on a tenth of the training ratings. Then 300 users are
held out altogether and folded in from 0, 5 and 20 of their ratings.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from handspan.baselines import central_completion
from handspan.estimators import FederatedMatrixCompletion

GRID = [(k, ridge) for k in (2, 5, 10, 20) for ridge in (0.2, 0.4, 0.8)]
ROUNDS = 100


def table(shape: tuple[int, ...], rows: Any, columns: Any, values: Any) -> Any:
    """Ratings as CSR."""
    return sparse.csr_array((values.astype(np.float64), (rows, columns)), shape=shape)


def rmse(fitted: np.ndarray, truth: np.ndarray) -> float:
    """Root of the mean squared error."""
    return float(np.sqrt(np.mean((fitted - truth) ** 2)))


def federated(x: Any, k: int, ridge: float, seed: int, cohort: float) -> FederatedMatrixCompletion:
    """Every user a client."""
    return FederatedMatrixCompletion(
        k, ridge=ridge, max_iter=ROUNDS, cohort=cohort, random_state=seed
    ).fit(x)


def choose(x: Any) -> tuple[int, float]:
    """K and ridge of least error on a tenth of the training ratings."""
    coo, rng = x.tocoo(), np.random.default_rng(0)
    aside = rng.random(len(coo.data)) < 0.1
    train = table(x.shape, coo.row[~aside], coo.col[~aside], coo.data[~aside])
    scores = {}
    for k, ridge in GRID:
        model = federated(train, k, ridge, 0, 1.0)
        fitted = model.predict(train, (coo.row[aside], coo.col[aside]))
        scores[k, ridge] = rmse(fitted, coo.data[aside])
        print(f"K {k:2} ridge {ridge}: validation RMSE {scores[k, ridge]:.4f}", flush=True)
    return min(scores, key=scores.__getitem__)


def newcomers(x: Any, k: int, ridge: float) -> None:
    """Hold 300 users with more than 25 ratings out, and fold them in."""
    rng = np.random.default_rng(1)
    busy = np.flatnonzero(np.diff(x.indptr) > 25)
    new = rng.choice(busy, min(300, len(busy)), replace=False)
    keep = np.setdiff1d(np.arange(x.shape[0]), new)
    model = federated(x[keep], k, ridge, 0, 1.0)
    for count in (0, 5, 20):
        fitted, truth = [], []
        for user in new:
            row = sparse.csr_array(x[[user]])
            order = rng.permutation(len(row.data))
            given, asked = order[:count], order[20:]
            known = table(row.shape, np.zeros(count, int), row.indices[given], row.data[given])
            at = (np.zeros(len(asked), int), row.indices[asked])
            fitted.append(model.predict(known, at))
            truth.append(row.data[asked])
        score = rmse(np.concatenate(fitted), np.concatenate(truth))
        print(f"{len(new)} new users, {count:2} ratings given: RMSE {score:.4f}", flush=True)


def main() -> int:
    """Choose, train on both sides, fold in."""
    parser = argparse.ArgumentParser(prog="python -m experiments.matrix.ratings")
    parser.add_argument("--data-folder", default="data")
    options = parser.parse_args()
    d = np.load(Path(options.data_folder) / "mc_flixster.npz")
    x = table(tuple(d["shape"]), d["train_u"], d["train_i"], d["train_r"])
    test, truth = (d["test_u"], d["test_i"]), d["test_r"].astype(np.float64)
    print(f"mean of the training ratings: RMSE {rmse(x.data.mean(), truth):.4f}")
    k, ridge = choose(x)
    for seed in range(3):
        begin = time.perf_counter()
        rows, columns, mean = central_completion(x, k, ridge=ridge, sweeps=50, seed=seed)
        fitted = (rows[test[0], :-1] * columns[test[1], :-1]).sum(1)
        central = rmse(fitted + rows[test[0], -1] + columns[test[1], -1] + mean, truth)
        middle = time.perf_counter()
        scores = [
            rmse(federated(x, k, ridge, seed, cohort).predict(x, test), truth)
            for cohort in (1.0, 0.2)
        ]
        print(
            f"seed {seed}, K {k}, ridge {ridge}: central {central:.4f} ({middle - begin:.0f} s), "
            f"federated {scores[0]:.4f}, a fifth of the users a round {scores[1]:.4f}",
            flush=True,
        )
    newcomers(x, k, ridge)
    return 0


if __name__ == "__main__":
    sys.exit(main())
