"""Inductive matrix completion by FedAvg on draws that are stated beforehand to be well-conditioned.

``experiments.completion`` is Figure 3 of PerFedSI, whatever the draw; here draws are chosen.
``python -m experiments.matrix.side_information`` plants L* = U* V*^T Z^T, d = 16 items, M = 20
clients with k = 4 numbers z about each, rank r = 2, and shows each client five fixed entries. With
side information client m predicts e_i^T U V^T z_m; without, z_m is its number alone.

Which draws can be recovered is stated before anything is run: every item is seen at least r + 1
times, and the linear map from changes of U and V to the observed entries is injective at the truth,
up to the turn that both have in common, with a condition number of at most ``--condition``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from handspan.core.federation import RunState, run
from handspan.estimators.base import by_client
from handspan.fitting import set_up
from handspan.simulation.federation import Simulation

ITEMS, CLIENTS, SIDE, RANK, ENTRIES = 16, 20, 4, 2, 5


@dataclass(frozen=True)
class Planted:
    """A draw: the truth, side information, and which entries are seen."""

    truth: np.ndarray  # (ITEMS, CLIENTS)
    left: np.ndarray  # (ITEMS, RANK)
    right: np.ndarray  # (SIDE, RANK)
    side: np.ndarray  # (CLIENTS, SIDE)
    seen: np.ndarray  # (CLIENTS, ENTRIES)


def plant(seed: int) -> Planted:
    """Orthonormal factors, rescaled by sqrt(k); side information of norm 1."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(n, RANK)))[0] for n in (ITEMS, SIDE))
    right = right * np.sqrt(SIDE)
    side = rng.normal(size=(CLIENTS, SIDE))
    side /= np.linalg.norm(side, axis=1, keepdims=True)
    seen = np.stack([rng.choice(ITEMS, ENTRIES, replace=False) for _ in range(CLIENTS)])
    return Planted(left @ right.T @ side.T, left, right, side, seen)


def condition(planted: Planted) -> float:
    """Condition number of the observation of changes of U and V at the truth; inf if not unique."""
    rows = []
    for m, items in enumerate(planted.seen):
        for i in items:
            by_left, by_right = np.zeros((ITEMS, RANK)), np.zeros((SIDE, RANK))
            by_left[i] = planted.right.T @ planted.side[m]
            by_right += np.outer(planted.side[m], planted.left[i])
            rows.append(np.concatenate([by_left.ravel(), by_right.ravel()]))
    values = np.linalg.svd(np.array(rows), compute_uv=False)
    own = (ITEMS + SIDE) * RANK - RANK**2  # the rest is the turn that U and V have in common
    if np.bincount(planted.seen.ravel(), minlength=ITEMS).min() <= RANK or len(values) < own:
        return float("inf")
    return float(values[0] / values[own - 1])


class Bilinear(nn.Module):
    """e_i^T U V^T z: a row is (e_i, z)."""

    def __init__(self, side: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.left = nn.Parameter(torch.randn(ITEMS, RANK, generator=draw).double() / ITEMS**0.5)
        self.right = nn.Parameter(torch.randn(side, RANK, generator=draw).double() / side**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fit of each row."""
        mixed = (x[:, :ITEMS] @ self.left) * (x[:, ITEMS:] @ self.right)
        return mixed.sum(1, keepdim=True)


def error(planted: Planted, side: np.ndarray, rounds: list[int], seed: int) -> list[float]:
    """Relative error of the whole table after so many rounds of FedAvg."""
    item, client = planted.seen.ravel(), np.repeat(np.arange(CLIENTS), ENTRIES)
    rows = np.concatenate([np.eye(ITEMS)[item], side[client]], axis=1)
    data = by_client(rows, client, planted.truth[item, client]).data
    found: list[float] = []

    def watch(state: RunState) -> None:
        if state.round in rounds:
            params = state.server.params
            table = params["left"] @ params["right"].T @ torch.from_numpy(side).T
            gap = np.linalg.norm(table.numpy() - planted.truth)
            found.append(float(gap / np.linalg.norm(planted.truth)))

    problem, _ = set_up(
        "fedavg",
        data,
        model=Bilinear(side.shape[1], seed),
        rounds=max(rounds),
        cohort=1.0,
        epochs=1,
        batch_size=1,
        learning_rate=1.0,
        dtype="float64",
        device="cpu",
    )
    simulation = Simulation(problem.algorithm, problem.data, seed=seed, engine="stacked")
    run(problem.algorithm, simulation, rounds=max(rounds), cohort=1.0, seed=seed, hooks=[watch])
    return found


def main() -> int:
    """Print errors for the draws that are well-conditioned, and for those that are not."""
    parser = argparse.ArgumentParser(prog="python -m experiments.matrix.side_information")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--condition", type=float, default=6.0)
    options = parser.parse_args()
    rounds = [options.rounds * part // 4 for part in (1, 2, 3, 4)]
    kept = [(seed, condition(plant(seed))) for seed in range(200)]
    kept = [(seed, number) for seed, number in kept if number <= options.condition]
    print(f"{len(kept)} of 200 draws have a condition number of at most {options.condition:g}")
    print(f"taken: {[seed for seed, _ in kept[: options.draws]]}; errors after rounds {rounds}")
    for seed, number in kept[: options.draws]:
        planted = plant(seed)
        with_side = error(planted, planted.side, rounds, seed)
        print(f"draw {seed} (condition {number:.1f}), with z:", *(f"{e:.1e}" for e in with_side))
        without = error(planted, np.eye(CLIENTS), rounds, seed)
        print(f"draw {seed}, without z:", *(f"{e:.1e}" for e in without), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
