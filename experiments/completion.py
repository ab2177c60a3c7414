"""Figure 3 of PerFedSI, matrix completion: ``python -m experiments.completion``.

20 clients have seen 5 of 16 ratings each, always the same; U*, V* are orthonormal of rank 2, the
rows of Z (k numbers a client) have norm 1. One entry a step, 5 steps a round, all clients, step
size 1. Told is the squared distance from the planted ratings, over their square; without side
information a client's id stands in its place. ``--sweep`` varies k and counts rounds.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import handspan
from handspan.core.data import FederatedData
from handspan.models.side_info import join_side

ITEMS, CLIENTS, RANK, SEEN = 16, 20, 2, 5


class Sum(nn.Module):
    """H of the model: the sum of the masked features."""

    def forward(self, x: Tensor) -> Tensor:
        """Add up."""
        return x.sum(-1, keepdim=True)


def base() -> nn.Module:
    """G(e_i) = U^T e_i, and the sum behind it."""
    return nn.Sequential(nn.Linear(ITEMS, RANK, bias=False), Sum())


def planted(width: int, informed: bool, seed: int) -> tuple[FederatedData, Tensor]:
    """Draw ratings, what is seen of them, and the side information."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(n, RANK)))[0] for n in (ITEMS, width))
    z = rng.normal(size=(CLIENTS, width))
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    truth = torch.from_numpy(u @ v.T @ z.T)
    drawn = [torch.from_numpy(rng.permutation(ITEMS)[: SEEN + 1]) for _ in range(CLIENTS)]
    picks, five = torch.stack(drawn), torch.full((CLIENTS,), SEEN)  # and one to test on
    data = FederatedData(
        x=torch.eye(ITEMS, dtype=torch.float64)[picks.flatten()],
        y=truth.T.gather(1, picks).flatten(),
        offsets=(SEEN + 1) * torch.arange(CLIENTS + 1),
        num_train=five,
        num_validation=0 * five,
        num_test=five // SEEN,
        side=torch.from_numpy(z) if informed else torch.eye(CLIENTS, dtype=torch.float64),
    )
    return data, truth


def distances(width: int, informed: bool, seed: int, rounds: list[int]) -> list[float]:
    """Relative squared distance from the planted ratings after so many rounds."""
    data, truth = planted(width, informed, seed)
    assert data.side is not None
    inputs = data.side.shape[1]
    encoder = partial(nn.Linear, inputs, RANK, bias=False)
    rows = torch.eye(ITEMS)
    model = join_side(base, inputs, form="mask", join="1", side_encoder=encoder, rows=rows)
    options: dict[str, Any] = {
        "cohort": CLIENTS, "steps": 5, "batch_size": 1, "learning_rate": 1.0, "dtype": "float64",
        "engine": "stacked", "threads": 1, "eval_every": 0, "device": "cpu", "seed": seed,
    }  # fmt: skip
    found: list[float] = []
    for count in rounds:
        params = handspan.fit("perfedsi", data, model=model, rounds=count, **options).state.server
        guess = params.params["base.0.weight"].T @ params.params["encoder.weight"] @ data.side.T
        found.append(float((guess - truth).square().sum() / truth.square().sum()))
    return found


def main() -> None:
    """Print one line for each seed, or for each k."""
    parser = argparse.ArgumentParser(prog="python -m experiments.completion", description=__doc__)
    parser.add_argument("--rounds", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sweep", type=int, nargs="*", help="k to try, instead of 4")
    options = parser.parse_args()
    for width in options.sweep or [4]:
        for seed in range(options.seeds):
            z = planted(width, True, seed)[0].side
            assert z is not None
            conditioning = float(torch.linalg.cond(z))
            for informed in (True, False) if options.sweep is None else (True,):
                found = distances(width, informed, seed, options.rounds)
                told = ", ".join(
                    f"{count}: {d:.1e}" for count, d in zip(options.rounds, found, strict=True)
                )
                name = "z " if informed else "id"
                print(
                    f"k {width} seed {seed} cond(Z) {conditioning:4.1f} {name}  {told}", flush=True
                )


if __name__ == "__main__":
    main()
