"""What Figures 1 to 5 of Wang and Chang say of convergence, one by one, on a small synthetic table.

``python -m experiments.matrix.claims`` plants 2000 rows of 200 columns in 10 classes, -3 dB, over
100 clients: balanced and alike (Case 1), or by k-means (Case 2). The penalty stays as it begins.
Told is the objective F after 100 rounds, as a share of |X|^2 / N, mean of three starts.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np

from experiments.matrix.tables import similar
from handspan.core.federation import run
from handspan.estimators.base import by_client
from handspan.fitting import make_simulation, set_up
from handspan.simulation.engine import choose_engine

ROWS, COLUMNS, CLASSES, CLIENTS, ROUNDS, STARTS = 2000, 200, 10, 100, 100, 3


def rows() -> np.ndarray:
    """X = WH + E with one-hot H of random scale."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, CLASSES, ROWS)
    signal = rng.normal(size=(CLASSES, COLUMNS))[label] * rng.uniform(0.5, 1.5, (ROWS, 1))
    noise = rng.normal(size=signal.shape)
    return signal + noise * np.linalg.norm(signal) / np.linalg.norm(noise) * 10 ** (3 / 20)


X = rows()
OWNERS = {1: np.arange(ROWS) % CLIENTS, 2: similar(X)}


def objective(case: int, text: str, cohort: int, rounds: int = ROUNDS) -> float:
    """F over |X|^2 / N after so many rounds, mean over starts; from the rows themselves."""
    found = []
    for seed in range(STARTS):
        full = f"{text}:num_components={CLASSES}:penalty_growth=1:stop_tolerance=0"
        data = by_client(X, OWNERS[case]).data
        problem, _ = set_up(
            full, data, rounds=rounds, cohort=cohort, seed=seed, dtype="float64", device="cpu"
        )
        choice = choose_engine(problem.algorithm, problem.data, engine="steady", cohort=cohort)
        simulation = make_simulation(problem, choice)
        state = run(problem.algorithm, simulation, rounds=rounds, cohort=cohort, seed=seed)
        found.append(float(state.server.objective / (state.server.square_norm / ROWS)))
    return float(np.mean(found))


def tell(claim: str, names: list[str], values: list[float], *, falls: bool = True) -> None:
    """Print the numbers, and whether they fall from left to right (or are alike)."""
    if falls:
        holds = all(a >= b for a, b in itertools.pairwise(values))
    else:
        holds = max(values) - min(values) <= 0.01 * min(values)
    shown = ", ".join(f"{n} {v:.4f}" for n, v in zip(names, values, strict=True))
    print(f"{'holds' if holds else 'FAILS'}: {claim}: {shown}", flush=True)


def main() -> int:
    """Check the claims."""
    fixed = "fedmavg:row_steps=10:schedule=constant:shared_steps"
    names = ["Q2=1", "Q2=5", "Q2=20"]
    alike = [objective(1, f"{fixed}={q}", 100) for q in (1, 5, 20)]
    tell("1a: alike clients, a larger constant Q2 is faster", names, alike)
    apart = [objective(2, f"{fixed}={q}", 10) for q in (20, 5)]
    less = objective(2, "fedmavg:row_steps=10:shared_steps=5", 10)
    tell(
        "1b, c: clients that differ, m=10: constant Q2 leaves floors, diminishing goes below",
        ["Q2=20", "Q2=5", "Q-hat=5"],
        [*apart, less],
    )
    rows_only = [objective(2, f"fedmavg:row_steps={q}:shared_steps=5", 10) for q in (1, 10)]
    tell("1d: a larger Q1 is faster", ["Q1=1", "Q1=10"], rows_only)
    idle = [objective(2, f"fedmavg:idle_clients={i}", 10) for i in ("freeze", "compute")]
    tell("2a: PCC beats PCP", ["PCP", "PCC"], idle)
    palm = [objective(2, f"fedpalm:pairs={q}", 100) for q in (10, 1)]
    tell("2b: FedPALM is good at Q=2 only", ["Q=20", "Q=2"], palm)
    grid = {
        (m, a, b): objective(2, f"fedmgs:row_steps={a}:shared_steps={b}", m)
        for m, a, b in [
            *((100, a, b) for a, b in ((1, 1), (10, 1), (10, 10), (10, 100))),
            *((10, a, b) for a, b in ((1, 1), (10, 10), (10, 100), (100, 10), (100, 100))),
        ]
    }
    pick = [(100, 1, 1), (100, 10, 1), (100, 10, 10), (100, 10, 100)]
    shown = [f"Q=({a},{b})" for _, a, b in pick]
    tell("3d: m=100, larger Q2 is faster; (1,1) is slowest", shown, [grid[p] for p in pick])
    pick = [(10, 1, 1), (10, 10, 10), (10, 100, 10), (10, 100, 100)]
    shown = [f"Q=({a},{b})" for _, a, b in pick]
    tell("3e: m=10, larger Q2 helps with Q1=100", shown, [grid[p] for p in pick])
    same = [objective(case, "fedmgs:row_steps=10:shared_steps=10", 100) for case in (1, 2)]
    tell("4: FedMGS m=100 is the same in both cases", ["1", "2"], same, falls=False)
    tell("5: FedMGS goes below FedMAvg, m=10", ["FedMAvg", "FedMGS"], [less, grid[10, 10, 10]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
