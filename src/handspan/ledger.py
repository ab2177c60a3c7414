"""What each method sends, keeps and costs, counted on the default model from its own records.

Nothing here is told by hand but the words and formulas of ``Method``; a test holds the formulas
against the counts.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from handspan.core import keys
from handspan.core.algorithm import Algorithm, Phase, Stage
from handspan.core.data import FederatedData, Population, Round
from handspan.core.federation import draw_round, make_round
from handspan.core.method import Method, Setting
from handspan.core.records import num_bytes, take, tensors
from handspan.options import TrainingOptions
from handspan.preparing import prepare
from handspan.registry import MethodSpec, methods
from handspan.simulation.federation import Simulation
from handspan.simulation.plans import count_rows
from handspan.simulation.reduction import Postprocessor
from handspan.simulation.tracing import Unrecorded

ROWS = 100
"""Training rows of the client whose work is counted."""
_COHORT, _WIDTH_OF_SIDE = 2, 4


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What one client sends in one phase.

    Attributes
    ----------
    phase, is_once
        Its name, and whether it comes before the first round alone.
    numbers, num_bytes
        How much, without compression.
    formula
        The same in symbols, where the method states it.
    """

    phase: str
    is_once: bool
    numbers: int
    num_bytes: int
    formula: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the ledger.

    Attributes
    ----------
    method
        As registered.
    sent
        Phases in which something is sent.
    shown
        Phases in which the server must see single uploads; in the others sums suffice it, so that
        secure aggregation applies.
    has_own_broadcast
        Whether each client is sent something of its own.
    newcomers
        What a new client does before it is served.
    rows, forward_rows
        Rows whose gradient a client with ``ROWS`` rows takes in a round, and rows it only passes
        through a model, in the round with the most work.
    """

    method: Method
    sent: tuple[Sent, ...]
    shown: tuple[str, ...]
    has_own_broadcast: bool
    newcomers: str
    rows: int
    forward_rows: int


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All methods that handspan brings, on the default model."""
    own = [m for m in methods().values() if m.build.__module__.startswith("handspan.")]
    return tuple(entry(method) for method in own)


def entry(method: Method) -> Entry:
    """Count one method on the default model."""
    spec = MethodSpec(text=method.name, method=method, config=method.config())
    options = TrainingOptions(
        device="cpu", engine="loop", model="mlp_batchnorm" if method.needs_norm else None
    )
    problem = prepare(spec, options, _rows_for(method))
    algorithm = problem.algorithm
    phases = (*algorithm.setup, *algorithm.rounds)
    # One step is enough for what is sent; the work of a round is counted on the whole plan.
    short = dataclasses.replace(problem.setting, work=TrainingOptions(steps=1).work())
    uploads = first_uploads(spec.build(short), problem.data)
    rows, forward_rows = _work(algorithm, problem.setting, problem.data)
    return Entry(
        method=method,
        sent=tuple(
            Sent(
                phase=phase.name,
                is_once=phase in algorithm.setup,
                numbers=sum(tensor.numel() for tensor in tensors(upload)),
                num_bytes=num_bytes(upload),
                formula=method.numbers.get(phase.name, ""),
            )
            for phase in phases
            if tensors(upload := uploads[phase.name][1])
        ),
        shown=tuple(p.name for p in phases if not _sums_suffice(p, *uploads[p.name])),
        has_own_broadcast=any(phase.per_client for phase in phases),
        newcomers=_newcomers(algorithm),
        rows=rows,
        forward_rows=forward_rows,
    )


@functools.cache
def _digits() -> FederatedData:
    from handspan.data import load_data

    return load_data("digits", partition="permuted:5", num_clients=100, seed=0)


@functools.cache
def _rounds(count: int, cohort: int, sampling: str) -> tuple[Round, ...]:
    data = _digits()
    population = Population(
        num_clients=torch.tensor(data.num_clients), num_examples=data.num_train, groups=data.groups
    )
    return tuple(draw_round(index, population, cohort, sampling, 0) for index in range(count))


def _rows_for(method: Method) -> FederatedData:
    """Digits, in the form that the method takes."""
    data = _digits()
    if method.needs_side:
        data = dataclasses.replace(data, side=torch.zeros(data.num_clients, _WIDTH_OF_SIDE))
    if method.problem == "regression":
        assert data.y is not None
        data = dataclasses.replace(data, y=data.y.float(), num_classes=None)
    return data


def first_uploads(algorithm: Algorithm, data: FederatedData) -> dict[str, tuple[Any, Any]]:
    """What one client uploads in each phase, played once in order, and what of it is sent."""
    seen: dict[str, tuple[Any, Any]] = {}
    phase = algorithm.rounds[0]

    def note(uploads: Any, ids: Any, round: Any) -> Any:
        upload = None if uploads is None else take(uploads, 0)
        sent = upload if phase.wire is None or upload is None else phase.wire(upload)
        seen.setdefault(phase.name, (upload, sent))
        return uploads

    simulation = Simulation(algorithm, data, postprocessors=[Postprocessor(upload=note)])
    simulation.executor.recorder = Unrecorded()
    population = simulation.population
    server = algorithm.init_server(keys.key(0, "init"), population)
    everyone = make_round(0, torch.arange(data.num_clients), population)
    drawn = draw_round(0, population, _COHORT, "fixed", 0)
    for phase in (*algorithm.setup, *algorithm.rounds):
        round = everyone if phase in algorithm.setup else drawn
        outcome = simulation.exchange(phase, phase.broadcast(server, round), round)
        simulation.commit()
        assert phase.combine is not None
        server = phase.combine(server, outcome.reduction, round)
    return seen


def _sums_suffice(phase: Phase, upload: Any, sent: Any) -> bool:
    """Whether the server needs sums alone; a reduction of its own takes what ``wire`` sends."""
    if phase.reduce == "stack":
        return False
    return phase.reduce == "sum" or type(sent) is not type(upload)


def _work(algorithm: Algorithm, setting: Setting, data: FederatedData) -> tuple[int, int]:
    """Rows and forward rows of a client in the round with the most work."""
    server = algorithm.init_server(keys.key(0, "init"), Simulation(algorithm, data).population)
    found = {(0, 0)}
    for round in _rounds(setting.rounds, setting.cohort, algorithm.sampling):
        played = [phase for phase in algorithm.rounds if phase.when(server, round)]
        found.add(_rows_of(stage for phase in played for stage in phase.stages))
    return max(found)


def _rows_of(stages: Any) -> tuple[int, int]:
    counts = [0, 0]
    for stage in stages:
        counts[stage.forward_only] += count_rows(stage, torch.tensor([ROWS]))
    return counts[0], counts[1]


def _newcomers(algorithm: Algorithm) -> str:
    """What a new client does before it is served, in words."""
    if algorithm.model is None and algorithm.predict is None:
        return "not served"
    fits = () if algorithm.adapt is None else algorithm.adapt.stages
    chosen = [stage for phase in algorithm.personal for stage in phase.stages]
    trained = [_told(stage) for stage in (*fits, *chosen) if not stage.forward_only]
    if trained:
        return ", then ".join(dict.fromkeys(trained))
    if fits or chosen:
        return "one look at its rows"
    return "nothing to fit" if algorithm.adapt is None else "closed form"


def _told(stage: Stage) -> str:
    if stage.steps is not None:
        return f"{stage.steps} step{'s' * (stage.steps != 1)}"
    epochs = stage.epochs or 1
    return f"{epochs} pass{'es' * (epochs != 1)}"


UPLOADS = ("method", "leaves the client", "numbers", "bytes", "one upload shows", "stays")
"""Head of the table of what is sent."""
COSTS = ("method", "paper", "sums suffice", "own broadcast", "new clients", "rows a round")
"""Head of the table of what it takes."""


def uploads() -> list[tuple[str, ...]]:
    """Lines of the table of what is sent."""
    return [
        (
            line.method.name,
            line.method.uploads,
            _each(line.sent, lambda sent: sent.formula or f"{sent.numbers:,}"),
            _each(line.sent, lambda sent: f"{sent.num_bytes:,}"),
            line.method.inferable,
            line.method.private,
        )
        for line in entries()
    ]


def costs() -> list[tuple[str, ...]]:
    """Lines of the table of what it takes."""
    return [
        (
            line.method.name,
            line.method.paper,
            _sums_told(line),
            "yes" if line.has_own_broadcast else "no",
            line.newcomers,
            f"{line.rows:,}" + (f" + {line.forward_rows:,} forward" if line.forward_rows else ""),
        )
        for line in entries()
    ]


def explained() -> str:
    """How the two tables were counted, and what the symbols stand for."""
    method = methods()["fedavg"]
    spec = MethodSpec(text="fedavg", method=method, config=method.config())
    options = TrainingOptions(device="cpu")
    setting = prepare(spec, options, _rows_for(method)).setting
    params, _ = setting.model.init(keys.key(0))
    size = sum(value.numel() for value in params.values())
    head = sum(params[name].numel() for name in setting.model.head)
    return (
        f"Counted at the default settings on the default model, the mlp for digits in "
        f"{options.dtype}: d = {size:,} numbers, of which h = {head:,} in its head and "
        f"b = {size - head:,} below (perfedsi: with {_WIDTH_OF_SIDE} numbers of side information; "
        f"fedbn: mlp_batchnorm, with v numbers in its normalisation). c outputs, f inputs of the "
        f"head, p entries of a row; other names are settings. Without a formula stands the count. "
        f"Rows are those whose gradient a client with {ROWS} training rows takes, in the round "
        f"with the most work; every model counts apart, rows that only pass forward are named."
    )


def _sums_told(line: Entry) -> str:
    if not line.sent:
        return "nothing is sent"
    if not line.shown:
        return "yes"
    rest = {sent.phase for sent in line.sent} - set(line.shown)
    return f"all but {', '.join(line.shown)}" if rest else "no"


def _each(sent: tuple[Sent, ...], told: Any) -> str:
    """Tell of all phases, by name where they differ; what comes once stands last."""
    if not sent:
        return "0"
    once = [f"once {told(each)}" for each in sent if each.is_once]
    often = {told(each): each for each in sent if not each.is_once}
    if len(often) < 2:
        return "; ".join([*often, *once])
    return "; ".join([*(f"{each.phase} {text}" for text, each in often.items()), *once])
