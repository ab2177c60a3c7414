"""Giving an oracle the same rows, cohorts and first values that a run has, as NumPy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm
from handspan.core.data import FederatedData, Rows
from handspan.core.federation import RunState, draw_round, run
from handspan.core.method import Setting
from handspan.core.records import Params
from handspan.core.task import Task
from handspan.numerics.local_work import LocalWork
from handspan.registry import MethodSpec, parse
from handspan.simulation.federation import Simulation
from handspan.testing.case import numbers
from handspan.testing.playing import Unrecorded, step_rows
from handspan.testing.toys import problem

OracleBatches = Callable[[int, str, int, int], list[NDArray[np.int64]]]
Arrays = dict[str, NDArray[np.float64]]


class Reference:
    """A finished run on a toy problem, and all that its oracle must be given.

    Parameters
    ----------
    text
        The method, as a user names it.
    work
        Local work; that of the toys by default.
    rounds, cohort, seed
        Of the run.
    data, task
        Other rows and another model than those of the toy problem.
    build
        (MethodSpec, Setting) -> Algorithm, where it is not the registry's.
    options
        Of the toy problem.
    """

    def __init__(
        self,
        text: str,
        work: LocalWork | None = None,
        *,
        rounds: int = 4,
        cohort: int = 5,
        seed: int = 3,
        engine: str = "loop",
        data: FederatedData | None = None,
        task: Task | None = None,
        build: Callable[[MethodSpec, Setting], Algorithm] = MethodSpec.build,
        **options: Any,
    ) -> None:
        self.spec = parse(text)
        self.rounds, self.cohort, self.seed = rounds, cohort, seed
        self.data, self.setting = problem(
            self.spec.method, work=work, cohort=cohort, rounds=rounds, **options
        )
        if data is not None:
            counts = {"num_clients": data.num_clients, "row_shape": data.row_shape}
            self.data, self.setting = data, dataclasses.replace(self.setting, **counts)
        if task is not None:
            self.setting = dataclasses.replace(self.setting, task=task)
        self.algorithm = build(self.spec, self.setting)
        self.simulation = Simulation(self.algorithm, self.data, seed=seed, engine=engine)
        self.simulation.executor.recorder = Unrecorded()
        self.key = keys.key(seed, "init")

    @cached_property
    def state(self) -> RunState:
        """The run's last state."""
        return run(
            self.algorithm,
            self.simulation,
            rounds=self.rounds,
            cohort=self.cohort,
            seed=self.seed,
        )

    @property
    def server(self) -> Any:
        """The run's last server record."""
        return self.state.server

    @property
    def clients(self) -> Any:
        """Private records of all clients at the end of the run."""
        assert self.state is not None
        return self.simulation.store.read(torch.arange(self.data.num_clients))

    @property
    def first_clients(self) -> Any:
        """Private records before the run."""
        return self.simulation.initial(torch.arange(self.data.num_clients))

    @property
    def first_server(self) -> Any:
        """Server record before the run."""
        return self.algorithm.init_server(self.key, self.simulation.population)

    @property
    def served(self) -> Tensor:
        """Outputs of all clients' models on their test rows."""
        return numbers(self.state, self.simulation, self.setting.task)["outputs"]

    @property
    def start(self) -> Arrays:
        """The task's first parameters."""
        return arrays(self.setting.model.init(self.key)[0])

    @property
    def work(self) -> dict[str, Any]:
        """Local work in the words of the oracles."""
        work: LocalWork = self.setting.work
        return {
            "learning_rate": work.learning_rate,
            "momentum": work.sgd.momentum,
            "nesterov": work.sgd.nesterov,
            "weight_decay": work.sgd.weight_decay,
        }

    @property
    def rows(self) -> tuple[Any, Any, OracleBatches]:
        """Clients, cohorts and batches: the first arguments of most oracles."""
        cohorts = [
            draw_round(
                t, self.simulation.population, self.cohort, self.algorithm.sampling, self.seed
            ).ids.tolist()
            for t in range(self.rounds)
        ]
        batches = oracle_batches(self.algorithm, self.data, self.seed)
        return oracle_clients(self.data), cohorts, batches


def oracle_batches(algorithm: Algorithm, data: FederatedData, seed: int) -> OracleBatches:
    """Give the rows of the engines' plans in the form that the oracles take."""
    phases = {phase.name: phase for phase in (*algorithm.rounds, *algorithm.personal)}

    def batches(round: int, phase: str, stage: int, client: int) -> list[NDArray[np.int64]]:
        rows, _ = step_rows(data, phases[phase], stage, client, round=round, seed=seed)
        return [part.numpy() for part in rows]

    return batches


def oracle_clients(
    data: FederatedData, rows: Rows = "train"
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Rows (x, y) of each client as arrays, by default those for training."""
    assert isinstance(data.x, Tensor)
    first, count = data.span(rows)
    spans = zip((data.offsets[:-1] + first).tolist(), count.tolist(), strict=True)
    y = data.x if data.y is None else data.y
    return [(data.x[a : a + n].numpy(), y[a : a + n].numpy()) for a, n in spans]


def arrays(params: Params) -> Arrays:
    """Parameters as arrays."""
    return {name: tensor.detach().numpy().copy() for name, tensor in params.items()}


def close(got: Any, wanted: Any, tolerance: float = 1e-10) -> None:
    """Fail unless tensors, or parameters, agree with an oracle's arrays."""
    if isinstance(wanted, dict):
        assert set(got) == set(wanted), f"{sorted(got)} against {sorted(wanted)}"
        for name in wanted:
            close(got[name], wanted[name], tolerance)
        return
    value = got.detach().double().numpy() if isinstance(got, Tensor) else np.asarray(got)
    np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=tolerance)
