"""One method on its toy problem, with what the checks of the contract need of it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm
from handspan.core.federation import RunState, run
from handspan.core.method import Method
from handspan.core.records import tensors
from handspan.core.task import Task
from handspan.numerics.local_work import LocalWork
from handspan.registry import MethodSpec, parse
from handspan.simulation.federation import Simulation
from handspan.testing.playing import Exchange, Unrecorded, watched
from handspan.testing.toys import Problem, problem

SEED, COHORT = 3, 3


class Case:
    """A method built for its toy problem; runs and exchanges are computed once and shared.

    Parameters
    ----------
    method
        A method, a text that names one (``pflmf:rank=2``), or what the registry makes of it.
    work
        Local work; that of the toys by default.
    seed
        Seed of runs.
    watched_rounds
        Rounds of the run whose exchanges are looked at.
    """

    def __init__(
        self,
        method: Method | MethodSpec | str,
        *,
        work: LocalWork | None = None,
        seed: int = SEED,
        watched_rounds: int = 2,
    ) -> None:
        if isinstance(method, str):
            method = parse(method)
        if isinstance(method, Method):
            method = MethodSpec(text=method.name, method=method, config=method.config())
        self.spec = method
        self.work = work
        self.seed = seed
        self.cohort = COHORT
        self.watched_rounds = watched_rounds

    def problem(self, **options: Any) -> Problem:
        """Return the toy problem, or another one of the same kind."""
        return problem(self.spec.method, **{"work": self.work, "cohort": COHORT, **options})

    def build(self, made: Problem) -> Algorithm:
        """Compose the algorithm for a problem."""
        return self.spec.build(made.setting)

    @cached_property
    def made(self) -> Problem:
        """The toy problem."""
        return self.problem()

    @cached_property
    def algorithm(self) -> Algorithm:
        """The method built for it."""
        return self.build(self.made)

    def simulation(
        self, engine: str = "loop", *, is_recorded: bool = False, **options: Any
    ) -> Simulation:
        """Return a fresh federation, by default one that records no steps: short runs gain none."""
        options = {"seed": self.seed, **options}
        made = Simulation(self.algorithm, self.made.data, engine=engine, **options)
        if not is_recorded:
            made.executor.recorder = Unrecorded()
        return made

    def train(
        self,
        rounds: int,
        simulation: Simulation | None = None,
        *,
        algorithm: Algorithm | None = None,
        state: RunState | None = None,
        cohort: int | None = None,
    ) -> tuple[RunState, Simulation]:
        """Run some rounds; returns the state and the federation."""
        simulation = simulation or self.simulation()
        state = run(
            algorithm or self.algorithm,
            simulation,
            rounds=rounds,
            cohort=cohort or self.cohort,
            seed=self.seed,
            state=state,
        )
        return state, simulation

    @cached_property
    def watched(self) -> tuple[list[Exchange], Any, Simulation]:
        """A short run on the loop engine, exchange by exchange."""
        return watched(
            self.algorithm,
            self.made.data,
            rounds=self.watched_rounds,
            cohort=self.cohort,
            seed=self.seed,
        )

    @property
    def exchanges(self) -> list[Exchange]:
        """Exchanges of that run, with adapting and personal phases."""
        return self.watched[0]


def numbers(state: RunState, simulation: Simulation, task: Task | None = None) -> dict[str, Tensor]:
    """All that a run has produced, by name: server, private records and, with a task, outputs."""
    result = {f"server {j}": tensor.clone() for j, tensor in enumerate(tensors(state.server))}
    named = simulation.store.to_named()
    result |= {f"client {name}": tensor.clone() for name, tensor in named.items()}
    algorithm = simulation.algorithm
    if task is not None and (algorithm.model is not None or algorithm.predict is not None):
        everyone = torch.arange(simulation.data.num_clients)
        parts = simulation.predictions(state.server, everyone, state.round, task)
        result["outputs"] = torch.cat([outputs for _, outputs in parts])
    return result


def compare(
    got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float, message: str
) -> None:
    """Fail unless the numbers agree: bitwise at tolerance 0, else relative to each tensor."""
    assert got.keys() == wanted.keys(), f"{message}: {sorted(got)} against {sorted(wanted)}"
    for name, value in got.items():
        other = wanted[name]
        same = value.shape == other.shape and value.dtype == other.dtype
        assert same, f"{message}: {name} is {value.dtype} {tuple(value.shape)}, not " + (
            f"{other.dtype} {tuple(other.shape)}"
        )
        if torch.equal(value, other):
            continue
        size = other.double().abs().nan_to_num().amax().clamp(min=1e-300)
        error = float(((value.double() - other.double()).abs() / size).amax())
        assert error <= tolerance, f"{message}: {name} differs by {error:.1e} (at most {tolerance})"
