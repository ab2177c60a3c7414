"""The only training loop, and what it needs to know of the clients: almost nothing.

A ``Federation`` carries a broadcast to a cohort and brings the reduction back. Whether the clients
are simulated in this process or live on devices is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm, Phase
from handspan.core.data import Population, Round
from handspan.core.errors import HandspanError


@dataclass
class Costs:
    """What a run has spent, beside time."""

    rows: int = 0
    forward_rows: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            rows=self.rows + other.rows,
            forward_rows=self.forward_rows + other.forward_rows,
            bytes_up=self.bytes_up + other.bytes_up,
            bytes_down=self.bytes_down + other.bytes_down,
        )


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """Outcome of one exchange: the reduction, or the reason for which it was abandoned."""

    reduction: Any
    costs: Costs
    abandoned: str | None = None


class Federation(Protocol):
    """The clients, as the loop sees them."""

    population: Population

    def exchange(self, phase: Phase, broadcast: Any, round: Round) -> Exchanged:
        """Carry a broadcast to the clients of a round and reduce what comes back."""
        ...

    def commit(self) -> None:
        """Make the private states of this round the stored ones."""
        ...

    def discard(self) -> None:
        """Forget the private states of this round."""
        ...


@dataclass
class RunState:
    """All that a run is: the server's record, progress, and what it has spent and seen.

    Private states live in the federation's store and are saved beside this.
    """

    server: Any
    round: int = 0
    is_set_up: bool = False
    costs: Costs = field(default_factory=Costs)
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    empty_rounds: int = 0
    abandoned_rounds: int = 0


Hook = Callable[[RunState], bool | None]
"""Called after every round with the state; returns True to stop the run."""


def draw_round(
    index: int, population: Population, cohort: int | float, sampling: str, seed: int
) -> Round:
    """Draw the cohort of a round: a pure function of the seed and the round's number.

    ``cohort`` is a count, or a fraction of all clients when it is a float; with Bernoulli
    sampling it is the probability with which each client takes part.
    """
    k = keys.key(seed, "round", index)
    rng = keys.generator(keys.fold(k, "cohort"))
    n = int(population.num_clients)
    size = cohort_size(cohort, n)
    multiplicity = None
    if sampling == "bernoulli":
        ids = torch.from_numpy((rng.random(n) < size / n).nonzero()[0])
    elif sampling == "weighted":
        weight = population.num_examples.double().numpy()
        drawn = torch.from_numpy(rng.choice(n, size, replace=True, p=weight / weight.sum()))
        ids, multiplicity = torch.unique(drawn, sorted=True, return_counts=True)
    else:
        ids = torch.from_numpy(rng.choice(n, size, replace=False, shuffle=False)).sort().values
    return make_round(
        index, ids, population, multiplicity, keys.uniform(keys.fold(k, "draws"), (8,))
    )


def make_round(
    index: int,
    ids: Tensor,
    population: Population,
    multiplicity: Tensor | None = None,
    draws: Tensor | None = None,
) -> Round:
    """Describe a round with a given cohort."""
    return Round(
        index=torch.tensor(index),
        ids=ids,
        num_examples=population.num_examples[ids],
        multiplicity=torch.ones_like(ids) if multiplicity is None else multiplicity,
        draws=torch.zeros(8, dtype=torch.float64) if draws is None else draws,
    )


def cohort_size(cohort: int | float, num_clients: int) -> int:
    """Resolve ``--cohort``: a float is a fraction of the clients, an int a count."""
    if isinstance(cohort, float):
        if not 0 < cohort <= 1:
            raise HandspanError(f"cohort {cohort} is no fraction: give one in (0, 1], or a count")
        return max(1, round(cohort * num_clients))
    if cohort < 1:
        raise HandspanError(f"cohort {cohort} is too small: at least one client must take part")
    if cohort > num_clients:
        raise HandspanError(
            f"a cohort of {cohort} does not fit a federation of {num_clients} clients: "
            f"give at most {num_clients}"
        )
    return cohort


def run(
    algorithm: Algorithm,
    federation: Federation,
    *,
    rounds: int,
    cohort: int | float,
    seed: int = 0,
    state: RunState | None = None,
    hooks: Sequence[Hook] = (),
) -> RunState:
    """Train until ``rounds`` are done, the method has finished, or a hook says stop.

    Every round is a pure function of the seed, its number and the state before it, so a run that
    is resumed from a saved state continues as if it had never stopped.
    """
    state = state or start(algorithm, federation, seed)
    if not state.is_set_up:
        everyone = torch.arange(int(federation.population.num_clients))
        _play(algorithm.setup, federation, state, make_round(0, everyone, federation.population))
        if state.abandoned_rounds:
            raise HandspanError("the set-up round was abandoned: no client could be reached")
        state.is_set_up = True
    while state.round < rounds and not algorithm.done(state.server):
        round = draw_round(state.round, federation.population, cohort, algorithm.sampling, seed)
        if len(round.ids):
            _play(algorithm.rounds, federation, state, round)
        else:  # a weighted mean of nothing must never erase the model
            state.empty_rounds += 1
        state.round += 1
        if any([hook(state) for hook in hooks]):
            break
    return state


def start(algorithm: Algorithm, federation: Federation, seed: int) -> RunState:
    """State before the first round."""
    return RunState(server=algorithm.init_server(keys.key(seed, "init"), federation.population))


def _play(phases: Sequence[Phase], federation: Federation, state: RunState, round: Round) -> None:
    """Run the phases of one round; server and private states change only if all succeed."""
    server = state.server
    try:
        for phase in phases:
            if not phase.when(server, round):
                continue
            outcome = federation.exchange(phase, phase.broadcast(server, round), round)
            state.costs = state.costs + outcome.costs
            if outcome.abandoned is not None:
                federation.discard()
                state.abandoned_rounds += 1
                return
            assert phase.combine is not None
            server = phase.combine(server, outcome.reduction, round)
    except BaseException:
        federation.discard()
        raise
    federation.commit()
    state.server = server
