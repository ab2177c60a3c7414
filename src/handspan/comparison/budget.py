"""What is equal between the methods of a table: rounds, rows or bytes.

A budget of rows or bytes is turned into a number of rounds *before* a run: the first number of
rounds after which so much is spent, set-up and personal phases included. So the schedule of the
step size, and a method that plans by the share of rounds done, see the true number, and the run is
an ordinary one that ``handspan run --rounds R`` repeats.

Rows are counted from the cohorts that will be drawn, without training. Bytes are taken from two
rounds that are really played. Where what a round costs depends on what was learned, the count may
miss: then the run is repeated with a corrected number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Phase
from handspan.core.data import Round
from handspan.core.errors import HandspanError
from handspan.core.federation import Costs, draw_round, make_round, run, start
from handspan.fitting import Problem
from handspan.simulation.federation import Simulation
from handspan.simulation.plans import count_rows

MOST_ROUNDS = 100_000  # where --rounds sets no bound
ATTEMPTS = 6


@dataclass(frozen=True, kw_only=True)
class Budget:
    """So many rows or bytes (up and down) for every run."""

    unit: str
    amount: int

    def __str__(self) -> str:
        return f"{self.unit}:{self.amount}"

    def spent(self, summary: Mapping[str, Any]) -> int:
        """Return what a finished run has spent of it."""
        if self.unit == "rows":
            return int(summary["rows"])
        return int(summary["bytes_up"]) + int(summary["bytes_down"])

    def of(self, costs: Costs) -> int:
        """Return the part of the costs that counts."""
        return costs.rows if self.unit == "rows" else costs.bytes_up + costs.bytes_down


def read_equal(text: str) -> Budget | None:
    """Read ``rounds``, ``rows:N`` or ``bytes:N``; None stands for rounds."""
    unit, separator, number = text.strip().partition(":")
    if unit == "rounds" and not separator:
        return None
    if unit not in ("rows", "bytes") or not separator:
        raise HandspanError(f"--equal takes rounds, rows:N or bytes:N, not {text!r}")
    try:
        amount = int(float(number))
    except (ValueError, OverflowError):
        raise HandspanError(f"--equal {unit}:N takes a number, not {number!r}") from None
    if amount < 1:
        raise HandspanError(f"--equal {unit}:N must be at least 1, not {number}")
    return Budget(unit=unit, amount=amount)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Rounds that a budget pays for, and the dearest of them."""

    rounds: int
    dearest: int


def estimate(set_up: Callable[[int], Problem], budget: Budget, bound: int | None) -> Estimate:
    """Count the rounds after which the budget is spent.

    ``set_up`` makes the problem for a number of rounds, since a method may plan by it.
    """
    rounds = bound or MOST_ROUNDS
    found = Estimate(rounds=0, dearest=0)
    for _ in range(3):  # until the number that was planned with is the one that comes out
        found = _count(set_up(rounds), budget, bound)
        if found.rounds == rounds:
            break
        rounds = found.rounds
    return found


def _count(problem: Problem, budget: Budget, bound: int | None) -> Estimate:
    simulation = Simulation(
        problem.algorithm, problem.data, seed=problem.options.seed, engine=_engine(problem)
    )
    fixed, cost = (_rows if budget.unit == "rows" else _bytes)(simulation, problem, budget)
    total, dearest, most = fixed, 0, bound or MOST_ROUNDS
    for index in range(most):
        spent = cost(_draw(simulation, problem, index))
        total, dearest = total + spent, max(dearest, spent)
        if total >= budget.amount:
            return Estimate(rounds=index + 1, dearest=dearest)
        if index > 100 and total + 2 * dearest * (most - index) < budget.amount:
            break  # no need to count to the end
    if bound is not None:
        return Estimate(rounds=bound, dearest=dearest)
    name = problem.spec.text
    if not dearest:
        raise HandspanError(
            f"{name} spends no {budget.unit}, so that {budget} never ends it: give --rounds "
            "as the most it may train"
        )
    raise HandspanError(
        f"{budget} would take {name} more than {MOST_ROUNDS:,} rounds: give --rounds, or less"
    )


def _draw(simulation: Simulation, problem: Problem, index: int) -> Round:
    options, algorithm = problem.options, problem.algorithm
    return draw_round(
        index, simulation.population, options.cohort, algorithm.sampling, options.seed
    )


def _engine(problem: Problem) -> str:
    """Bytes are played with the way that always works, where none is asked for."""
    return "loop" if problem.options.engine in ("auto", "steady") else problem.options.engine


Counted = tuple[int, Callable[[Round], int]]


def _rows(simulation: Simulation, problem: Problem, budget: Budget) -> Counted:
    """Rows spent beside the rounds, and those of a round, from the cohort alone."""
    algorithm, data = problem.algorithm, simulation.data
    everyone = torch.arange(data.num_clients)
    server = start(algorithm, simulation, problem.options.seed).server

    def rows(phase: Phase, ids: Tensor) -> int:
        return sum(
            count_rows(stage, data.span(stage.rows)[1][ids])
            for stage in phase.stages
            if not stage.forward_only
        )

    def played(phases: Sequence[Phase], round: Round) -> int:
        if not len(round.ids):
            return 0
        return sum(
            rows(phase, everyone if "all" in (phase.computes, phase.uploads) else round.ids)
            for phase in phases
            if phase.when(server, round)
        )

    first = make_round(0, everyone, simulation.population)
    served = simulation.personal_costs(server, everyone, problem.options.rounds)
    fixed = played(algorithm.setup, first) + budget.of(served)
    return fixed, lambda round: played(algorithm.rounds, round)


def _bytes(simulation: Simulation, problem: Problem, budget: Budget) -> Counted:
    """Bytes of the set-up, and of a round by the size of its cohort, from two played rounds."""
    options = problem.options
    sizes: list[int] = []  # of the rounds played: up to the second one that somebody takes part in
    while sum(size > 0 for size in sizes) < 2:
        sizes.append(len(_draw(simulation, problem, len(sizes)).ids))
    costs: list[int] = []
    run(
        problem.algorithm,
        simulation,
        rounds=len(sizes),
        cohort=options.cohort,
        seed=options.seed,
        hooks=(lambda state: costs.append(budget.of(state.costs)),),
    )
    costs += costs[-1:] * (len(sizes) - len(costs))  # the method had finished: nothing more
    each = (costs[-1] - costs[-2]) / sizes[-1]
    fixed = costs[-1] - round(each * sum(sizes))
    return max(0, fixed), lambda drawn: round(each * len(drawn.ids))


def revise(
    attempts: Sequence[tuple[int, int]], budget: Budget, found: Estimate, bound: int | None
) -> int | None:
    """Say with how many rounds to try again, or None where the budget is met.

    ``attempts`` are the runs so far: their rounds, and what each spent.
    """
    rounds, spent = attempts[-1]
    missing = budget.amount - spent
    if (missing <= 0 and is_met(attempts[-1], budget, found)) or len(attempts) >= ATTEMPTS:
        return None
    step = _round_at_most(attempts[-1], found)
    if len(attempts) > 1 and attempts[-1][0] != attempts[-2][0]:
        slope = (attempts[-1][1] - attempts[-2][1]) / (attempts[-1][0] - attempts[-2][0])
        step = slope if slope > 0 else step
    wanted = rounds + (math.ceil(missing / step) if missing > 0 else -int(-missing // step))
    wanted = max(1, min(wanted, bound or MOST_ROUNDS))
    return None if wanted in [tried for tried, _ in attempts] else wanted


def is_met(attempt: tuple[int, int], budget: Budget, found: Estimate) -> bool:
    """Whether a run spent the budget, but for less than its dearest round."""
    return abs(attempt[1] - budget.amount) < _round_at_most(attempt, found)


def _round_at_most(attempt: tuple[int, int], found: Estimate) -> float:
    rounds, spent = attempt
    return max(1, found.dearest, math.ceil(spent / max(1, rounds)))


def nearest_to(attempts: Sequence[tuple[int, int]], budget: Budget) -> int:
    """Return the position of the attempt that spent what is nearest to the budget."""
    return min(range(len(attempts)), key=lambda i: (abs(attempts[i][1] - budget.amount), i))
