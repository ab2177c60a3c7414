"""An algorithm is data: a frozen record of pure functions, each written for one client.

A *phase* is one round trip: broadcast, local work, upload, reduction. A *stage* is a run of local
steps inside it. The author writes one step on one batch of one client; gathering rows, padding,
batching over clients, sending and reducing are the engine's work.

The letters below: S server record, B broadcast (down), C client record (private), K local working
state, U upload (up), R reduction of the uploads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from handspan.core.data import ClientData, Population, Round, Rows
from handspan.core.errors import HandspanError
from handspan.core.records import Params, Record, map_tensors


class Reduced(Record):
    """Weighted sum of the uploads that arrived, in float64; means are ``total / weight``."""

    total: Any  # a record or parameters of the uploads' structure
    weight: Tensor  # () sum of weights
    count: Tensor  # () uploads that arrived

    def mean(self, like: Any = None) -> Any:
        """Return the weighted mean, in the types of ``like`` where given."""
        mean = map_tensors(lambda total: total / self.weight, self.total)
        return mean if like is None else map_tensors(lambda m, old: m.to(old), mean, like)


class Stacked(Record):
    """Single uploads side by side, for servers that must see them one by one."""

    uploads: Any  # leading axis: the cohort, in order of ids
    ids: Tensor  # (m,)
    weights: Tensor  # (m,)


def uniform(num_examples: Tensor) -> Tensor:
    """Weigh every client alike."""
    return torch.ones_like(num_examples, dtype=torch.float64)


def by_examples(num_examples: Tensor) -> Tensor:
    """Weigh a client by its number of training rows."""
    return num_examples.to(torch.float64)


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {"uniform": uniform, "examples": by_examples}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Local steps of one kind.

    Attributes
    ----------
    step
        (B, K, Batch) -> K, one step on one batch of one client.
    batch_size
        Rows of a batch; None takes all rows in stored order.
    epochs, steps
        How long: passes over the client's rows, or a number of steps; neither means one pass.
    rows
        Which rows: train, validation, or both ("all"). Never test rows.
    finish
        (B, K) -> K, once after the last step.
    forward_only
        Whether no gradient is taken: such rows are counted apart.
    models
        Models that each row passes through, on average, for the count of rows.
    sparse
        Whether the step takes ``Csr`` rows as they are; otherwise they arrive dense.
    """

    step: Callable[[Any, Any, Any], Any]
    batch_size: int | None = None
    epochs: int | None = None
    steps: int | None = None
    rows: Rows = "train"
    finish: Callable[[Any, Any], Any] | None = None
    forward_only: bool = False
    models: float = 1
    sparse: bool = False


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One round trip between the server and the clients.

    Attributes
    ----------
    name
        Its name in messages and ledgers.
    broadcast
        (S, Round) -> B, all that goes down.
    begin
        (B, C, ClientData) -> K, the local working state (momentum included).
    stages
        Runs of local steps.
    end
        (B, K, ClientData) -> (C, U): the new private record, and all that goes up (or None).
    combine
        (S, R, Round) -> S; None for phases without upload.
    when
        (S, Round) -> bool, whether the phase happens in this round.
    per_client
        Fields of B with a client axis: client j of the cohort receives row j.
    unbatched
        Large shared fields of B: one product per block instead of copies.
    reduce
        ``sum`` (the server learns only the weighted sum), ``stack`` (it sees single uploads), or
        (U block, weights) -> R, additive over blocks.
    wire
        U -> Record that one client really sends, where the engine keeps a leaner form.
    weight
        num_examples -> weights of the sum.
    computes, uploads
        Who works and who sends: the cohort, or all clients.
    cohort_update
        (B, C, Cohort) -> (C, weighted sum of U): hand-written twin for flat data, for phases that
        reduce by ``sum`` (by ``stack``: U of every client); fields of C in ``per_row`` come joined.
        The contract tests the two.
    infers
        What one upload reveals to a server that sees it alone; for the ledger and the docs.
    """

    name: str
    broadcast: Callable[[Any, Round], Any]
    begin: Callable[[Any, Any, ClientData], Any]
    end: Callable[[Any, Any, ClientData], tuple[Any, Any]]
    stages: tuple[Stage, ...] = ()
    combine: Callable[[Any, Any, Round], Any] | None = None
    when: Callable[[Any, Round], bool] = lambda server, round: True
    per_client: frozenset[str] = frozenset()
    unbatched: frozenset[str] = frozenset()
    reduce: Literal["sum", "stack"] | Callable[[Any, Tensor], Any] = "sum"
    wire: Callable[[Any], Record] | None = None
    weight: Callable[[Tensor], Tensor] = uniform
    computes: Literal["cohort", "all"] = "cohort"
    uploads: Literal["cohort", "all"] = "cohort"
    cohort_update: Callable[[Any, Any, Cohort], tuple[Any, Any]] | None = None
    infers: str = "nothing beyond what the sum shows"


class Cohort(Record):
    """Flat rows of a cohort, for ``cohort_update``."""

    x: Any  # (rows, ...) tensor or Csr, client after client
    segment: Tensor  # (rows,) int64: position of the row's client in the cohort
    num: Tensor  # (m,) rows of each client
    weights: Tensor  # (m,) float64; 0 for a client that computes and does not upload


class Model(Record):
    """A model ready to be scored, exported or served."""

    params: Params
    buffers: Params


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A federated method: everything that distinguishes it from any other.

    Attributes
    ----------
    name
        As in the registry.
    init_server
        (key, Population) -> S.
    init_client
        (key, ClientData) -> C for a block of clients: tensors of ClientData have a leading client
        axis, and so has the result. ``key`` is the run's key, common to all clients.
    rounds, setup
        Phases of every round, and those that come once before the first.
    adapt
        Fits a client's private record with the shared state frozen, uploads nothing: for new
        clients. None when there is nothing to fit.
    personal
        Phases from the stored private record to what is scored and served; they store and upload
        nothing. The first is given B of its own broadcast and C, the next the result of the first.
    model
        (B, C) -> Model, where B is the broadcast of ``deploy``.
    deploy
        (S, Round) -> B used by ``model``; by default that of the last phase of ``rounds``.
    shared_model
        S -> Model, or None where the method has no global model.
    predict
        (B, C, x, side) -> outputs, where a model alone does not tell (mixtures).
    cluster
        C after the personal phases -> the client's cluster, for methods that find groups.
    labels
        (B, C, Batch of all training rows) -> component of each row, for clusterings.
    per_row
        Fields of C with one entry per data row.
    needs_label_counts
        Whether ``ClientData.label_counts`` is filled; the counts stay with their client.
    done
        S -> bool, whether the method has nothing left to do.
    sampling, participation
        How cohorts are drawn: ``fixed`` size, ``bernoulli``, ``weighted`` with replacement.
    describe
        S -> numbers for the summary (rank, objective, ...). A spectrum is ``spectrum_1``,
        ``spectrum_2``, ..., the largest first; ``rank`` says where it is cut, and ``spectrum_cut``
        at which level, if there is one.
    """

    name: str
    init_server: Callable[[Tensor, Population], Any]
    init_client: Callable[[Tensor, ClientData], Any]
    rounds: tuple[Phase, ...]
    model: Callable[[Any, Any], Model] | None
    setup: tuple[Phase, ...] = ()
    adapt: Phase | None = None
    personal: tuple[Phase, ...] = ()
    deploy: Callable[[Any, Round], Any] | None = None
    deploy_unbatched: frozenset[str] | None = None
    deploy_per_client: frozenset[str] = frozenset()
    shared_model: Callable[[Any], Model] | None = None
    predict: Callable[[Any, Any, Any, Any], Tensor] | None = None
    cluster: Callable[[Any], Tensor] | None = None
    labels: Callable[[Any, Any, Any], Tensor] | None = None
    per_row: frozenset[str] = frozenset()
    needs_label_counts: bool = False
    done: Callable[[Any], bool] = lambda server: False
    sampling: Literal["fixed", "bernoulli", "weighted"] = "fixed"
    describe: Callable[[Any], dict[str, float]] = field(default=lambda server: {})

    def __post_init__(self) -> None:
        """Fail when built rather than in round 57."""
        for phase in (*self.setup, *self.rounds):
            if phase.combine is None:
                raise HandspanError(f"{self.name}: phase {phase.name!r} needs combine")

    @property
    def serving(self) -> tuple[Callable[[Any, Round], Any], frozenset[str], frozenset[str]]:
        """Broadcast, unbatched and per-client fields with which ``model`` is called."""
        last = self.rounds[-1]
        if self.deploy is None:
            return last.broadcast, last.unbatched, last.per_client
        return self.deploy, self.deploy_unbatched or frozenset(), self.deploy_per_client


def client_update(
    phase: Phase,
    broadcast: Any,
    client: Any,
    data: ClientData,
    batches: Callable[[int, Stage], Any],
) -> tuple[Any, Any]:
    """Run one client's part of a phase, derived from ``begin``, ``stages`` and ``end``.

    ``batches(index, stage)`` iterates over the stage's batches. This is the definition: the loop
    engine and deployments call it, and every other engine must agree with it.
    """
    working = phase.begin(broadcast, client, data)
    for index, stage in enumerate(phase.stages):
        for batch in batches(index, stage):
            working = stage.step(broadcast, working, batch)
        if stage.finish is not None:
            working = stage.finish(broadcast, working)
    return phase.end(broadcast, working, data)
