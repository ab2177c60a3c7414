"""What the estimators share: rows to a federation and back, and what was sent."""

from __future__ import annotations

import numbers
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import check_random_state
from torch import Tensor

from handspan.core.data import Csr, FederatedData
from handspan.core.errors import HandspanError
from handspan.core.federation import RunState, run
from handspan.data.inputs import ClientIds, encode_ids
from handspan.fitting import Problem, make_simulation, set_up
from handspan.simulation.engine import choose_engine, num_threads
from handspan.simulation.federation import Simulation


class SmallClientWarning(UserWarning):
    """Clients so small that a single upload shows their rows."""


@dataclass(frozen=True)
class Grouped:
    """Rows sorted by client, and how to bring results back into the given order."""

    data: FederatedData
    order: np.ndarray
    ids: ClientIds
    groups: np.ndarray  # (n,) id of each client as given

    def restore(self, rows: Any) -> np.ndarray:
        """Bring one entry per row back into the given order."""
        rows = np.asarray(rows)
        back = np.empty_like(rows)
        back[self.order] = rows
        return back


def by_client(X: Any, groups: Any, y: Any = None) -> Grouped:
    """Put the rows of a table client after client; without groups there is one client."""
    count = X.shape[0]
    groups = np.zeros(count, dtype=np.int64) if groups is None else groups
    try:
        ids = encode_ids(groups, count)
    except HandspanError as error:
        raise ValueError(f"groups do not fit X: {error}") from error
    order = np.argsort(ids.codes, kind="stable")
    sizes = np.bincount(ids.codes, minlength=ids.num_clients)
    first = np.searchsorted(ids.codes[order], np.arange(ids.num_clients))
    num, none = torch.from_numpy(sizes), torch.zeros(ids.num_clients, dtype=torch.int64)
    data = FederatedData(
        x=as_rows(X[order]),
        y=None if y is None else torch.from_numpy(np.ascontiguousarray(y[order])),
        offsets=torch.cat([none[:1], num.cumsum(0)]),
        num_train=num,
        num_validation=none,
        num_test=none,
        names=ids.names,
    )
    return Grouped(data, order, ids, np.asarray(groups)[order[first]])


def as_rows(X: Any) -> Tensor | Csr:
    """Rows as the engines take them; compressed ones in canonical form and never dense."""
    if not sparse.issparse(X):
        return torch.from_numpy(np.ascontiguousarray(X))
    X = sparse.csr_array(X)
    if not X.has_canonical_format:
        X = X.copy()
        X.sum_duplicates()
    return Csr(
        indptr=torch.from_numpy(X.indptr.astype(np.int64)),
        indices=torch.from_numpy(X.indices.astype(np.int64)),
        values=torch.from_numpy(X.data),
        num_columns=torch.tensor(X.shape[1]),
    )


@dataclass(frozen=True)
class Trained:
    """A finished run of an estimator."""

    problem: Problem
    state: RunState
    simulation: Simulation

    def communication(self, paper: str, size: int) -> dict[str, Any]:
        """Numbers and bytes that were sent, and what the paper counts.

        ``paper`` is a formula for the numbers of one round, in M, K and m (clients of a round).
        """
        costs, rounds = self.state.costs, self.state.round
        setting = self.problem.setting
        width = torch.finfo(setting.dtype).bits // 8
        symbols = {"M": setting.row_shape[0], "K": size, "m": setting.cohort}
        return {
            "rounds": rounds,
            "bytes_up": costs.bytes_up,
            "bytes_down": costs.bytes_down,
            "numbers_up": costs.bytes_up // width,
            "paper_numbers_up": rounds * eval(paper, {"__builtins__": {}}, symbols),
        }


def train(
    method: str,
    data: FederatedData,
    *,
    cohort: float | int,
    rounds: int,
    engine: str,
    random_state: Any,
    dtype: np.dtype[Any],
    settings: dict[str, Any],
    **options: Any,
) -> Trained:
    """Run a method; what users did wrong is a ``ValueError``, as in scikit-learn."""
    is_count = isinstance(cohort, numbers.Integral)
    cohort = min(int(cohort), data.num_clients) if is_count else float(cohort)
    seed = int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
    try:
        problem, _ = set_up(
            method,
            data,
            rounds=rounds,
            cohort=cohort,
            seed=seed,
            dtype=str(dtype),
            engine=engine,
            device="cpu",
            settings=settings,
            **options,
        )
        choice = choose_engine(problem.algorithm, problem.data, engine=engine, cohort=cohort)
        with num_threads(choice.threads):
            simulation = make_simulation(problem, choice)
            state = run(problem.algorithm, simulation, rounds=rounds, cohort=cohort, seed=seed)
    except HandspanError as error:
        raise ValueError(str(error)) from error
    return Trained(problem, state, simulation)


def warn_of_small_clients(data: FederatedData, num_components: int) -> None:
    """Say what leaks where a client has no more rows than components."""
    small = int((data.num_train <= num_components).sum())
    if small and data.num_clients > 1:
        warnings.warn(
            f"{small} of {data.num_clients} clients have no more rows than the {num_components} "
            "components: a single upload shows their rows; use secure aggregation or join them",
            SmallClientWarning,
            stacklevel=4,
        )
