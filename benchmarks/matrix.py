"""A round of FedMGS on compressed rows, beside the same arithmetic done centrally.

``python -m benchmarks.matrix data/NAME.npz [--clients 100] [--components 30]``. All clients take
part, so that both do the same: Q1 projected steps on H, Q2 on W. The central side is SciPy and
NumPy on one matrix. Peak memory is that of the whole process before anything is done centrally.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import torch

from benchmarks.problems import describe_machine, judge, peak_bytes
from handspan import fitting
from handspan.core.data import Csr
from handspan.core.federation import RunState, run, start
from handspan.simulation.engine import choose_engine, num_threads
from handspan.simulation.federation import Simulation

WARM_UP, ROUNDS = 1, 9
MOST_RATIO, MOST_DIFFERENCE = 1.5, 1e-4  # the rows are in single precision


class Federated:
    """FedMGS, round by round."""

    def __init__(self, problem: fitting.Problem) -> None:
        self.problem = problem
        cohort = problem.data.num_clients
        self.choice = choose_engine(problem.algorithm, problem.data, engine="auto", cohort=cohort)
        self.simulation: Simulation = fitting.make_simulation(problem, self.choice)
        self.state: RunState = start(problem.algorithm, self.simulation, 0)

    def round(self) -> float:
        """Train the next round; returns the objective."""
        with num_threads(self.choice.threads):
            self.state = run(
                self.problem.algorithm,
                self.simulation,
                rounds=self.state.round + 1,
                cohort=self.problem.data.num_clients,
                state=self.state,
            )
        return float(self.state.server.objective)


class Central:
    """PALM on the whole matrix as one would write it alone, from the federation's own start."""

    def __init__(self, federated: Federated) -> None:
        server = federated.state.server
        config = federated.problem.spec.config
        self.x = whole_matrix(federated.problem.data.x)
        self.steps = config.row_steps, config.shared_steps
        self.penalty, self.shrinkage = float(server.penalty), float(server.shrinkage)
        self.box = float(server.low), float(server.high)
        self.basis = server.basis.numpy().copy()
        everyone = torch.arange(federated.problem.data.num_clients)
        self.rows = federated.simulation.store.read_flat(everyone).rows.numpy().copy()
        self.square_norm = float(server.square_norm)

    def round(self) -> float:
        """Take Q1 projected steps on H and Q2 on W; returns the objective."""
        count, size = len(self.rows), self.basis.shape[1]
        basis, rows = self.basis.astype(self.rows.dtype), self.rows
        ones, eye = np.ones((size, size)), np.eye(size)
        quadratic = 2 * basis.T @ basis / count
        quadratic += (self.penalty * (ones - eye) + self.shrinkage * eye).astype(basis.dtype)
        linear = 2 * (self.x @ basis) / count
        step = 1 / (0.51 * np.linalg.eigvalsh(quadratic)[-1])
        for _ in range(self.steps[0]):
            rows = np.maximum(rows - step * (rows @ quadratic - linear), 0)
        hh, xh = (rows.T @ rows).astype(np.float64), (self.x.T @ rows).astype(np.float64)
        step, basis = count / (1.02 * np.linalg.eigvalsh(hh)[-1]), self.basis
        for _ in range(self.steps[1]):
            basis = np.clip(basis - step * 2 / count * (basis @ hh - xh), *self.box)
        self.rows, self.basis = rows, basis
        fit = self.square_norm - 2 * (basis * xh).sum() + (basis.T @ basis * hh).sum()
        spread = self.penalty * (hh.sum() - hh.trace()) + self.shrinkage * hh.trace()
        return float(fit / count + spread / 2)


def whole_matrix(x: Any) -> Any:
    """Rows of all clients as SciPy knows them."""
    if not isinstance(x, Csr):
        return x.numpy()
    shape = (len(x), int(x.num_columns))
    parts = (x.values.numpy(), x.indices.numpy().astype(np.int32), x.indptr.numpy())
    return scipy.sparse.csr_array(parts, shape=shape)


def open_problem(path: str, clients: int, components: int) -> fitting.Problem:
    """Spread the rows of a file evenly over the clients."""
    options = fitting.DataOptions(data=path, clients=clients)
    data, _ = fitting.open_data(options, 0, "matrix")
    # A penalty that stays, and no early end: every round does the same.
    text = f"fedmgs:num_components={components}:penalty_growth=1:stop_tolerance=0"
    problem, _ = fitting.set_up(text, data, cohort=clients)
    return problem


def timed(round: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a round, and its objective."""
    begin = time.perf_counter()
    objective = round()
    return time.perf_counter() - begin, objective


def main() -> int:
    """Measure, and compare with what is promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix", description=__doc__)
    parser.add_argument("path", help="an .npz file with data, indices, indptr and shape")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--components", type=int, default=30)
    options = parser.parse_args()
    print(describe_machine())
    problem = open_problem(options.path, options.clients, options.components)
    count, width = problem.data.num_rows, problem.data.row_shape[0]
    print(f"{count} rows x {width} columns, {options.clients} clients, {problem.spec.text}")
    federated = Federated(problem)
    federated.round()  # the set-up comes with the first
    central, peak = Central(federated), peak_bytes()
    times = [(timed(federated.round), timed(central.round)) for _ in range(WARM_UP + ROUNDS)]
    ours, theirs = (statistics.median(pair[i][0] for pair in times[WARM_UP:]) for i in (0, 1))
    here, there = (times[-1][i][1] for i in (0, 1))
    difference = abs(here - there) / abs(there)
    dense = count * width * problem.data.x.values.element_size()
    print(f"{federated.choice}; federated {ours:.4f} s, central {theirs:.4f} s a round")
    return judge(
        (
            f"time against central  {ours / theirs:10.2f}",
            f"at most {MOST_RATIO}",
            ours <= MOST_RATIO * theirs,
        ),
        (f"objectives differ by  {difference:10.1e}", "1e-4", difference < MOST_DIFFERENCE),
        (
            f"peak memory           {peak / 2**30:10.2f} GiB",
            f"dense: {dense / 2**30:.2f} GiB",
            peak < dense,
        ),
    )


if __name__ == "__main__":
    raise SystemExit(main())
