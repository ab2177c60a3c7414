"""Playing a method by hand: what an engine does, one client at a time and in plain sight.

Engines batch, pad, compact, record and replay. The functions here do none of that: they call
``client_update``, the definition, on one client's rows. Checks compare the engines with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm, Phase, Stage, client_update
from handspan.core.data import Batch, ClientData, Csr, FederatedData, Round
from handspan.core.records import Empty, field_names, take, to_named
from handspan.simulation.executors import Executor
from handspan.simulation.federation import Simulation
from handspan.simulation.loop import select_fields
from handspan.simulation.plans import Block, Blocks, batch_rows, plan_stage
from handspan.simulation.stacked import select_axis
from handspan.simulation.tracing import Unrecorded


def step_rows(
    data: FederatedData, phase: Phase, index: int, client: int, *, round: int, seed: int
) -> tuple[list[Tensor], Tensor]:
    """Rows of each step of one client in a stage (positions inside the client), and step keys."""
    stage = phase.stages[index]
    base, num = (part[[client]] for part in data.span(stage.rows))
    ids = torch.tensor([client])
    k = keys.fold(keys.key(seed, "plan", round), phase.name, index, ids)
    plan = plan_stage(stage, num, base, k, max(1, int(batch_rows(stage, num))))
    turns = range(int(plan.num_steps[0]))
    rows = [plan.rows[0, 0 if plan.is_constant else t] for t in turns]
    real = [plan.weight[0, 0 if plan.is_constant else t] for t in turns]
    return [r[w] for r, w in zip(rows, real, strict=True)], plan.keys[0]


def batches_of(
    data: FederatedData,
    phase: Phase,
    client: int,
    about: ClientData,
    *,
    round: int,
    seed: int,
    change: Callable[[Batch], Batch] = lambda batch: batch,
) -> Callable[[int, Stage], Iterator[Batch]]:
    """Batches of one client, for ``client_update``; ``change`` may pad or spoil each of them."""
    start = int(data.offsets[client])

    def batches(index: int, stage: Stage) -> Iterator[Batch]:
        parts, step_keys = step_rows(data, phase, index, client, round=round, seed=seed)
        for rows, k in zip(parts, step_keys, strict=False):
            place = rows + start
            x = data.x.select(place) if isinstance(data.x, Csr) else data.x[place]
            x = x.to_dense() if isinstance(x, Csr) and not stage.sparse else x
            floats = x.values if isinstance(x, Csr) else x
            weight = torch.ones(len(rows), dtype=floats.dtype)
            y = None if data.y is None else data.y[place]
            yield change(Batch(x=x, y=y, weight=weight, key=k, rows=rows, side=about.side))

    return batches


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One exchange of a run, as it was: what went in and what came out.

    ``before``, ``reduction`` and ``after`` are None for phases that upload nothing.
    """

    kind: str
    phase: Phase
    round: Round
    ids: Tensor
    broadcast: Any
    clients: Any
    about: ClientData
    before: Any = None
    reduction: Any = None
    after: Any = None

    @property
    def probe(self) -> int:
        """Position of a client to look at more closely: the second where there are two."""
        return min(1, len(self.ids) - 1)

    @property
    def uploads(self) -> bool:
        """Whether the server takes part: not so in adapting and personal phases."""
        return self.kind in ("setup", "round")

    def one(self, algorithm: Algorithm, j: int) -> tuple[Any, Any, ClientData]:
        """B, C and ClientData of the j-th client, without padding."""
        about = take(self.about, j)
        rows = int(about.num)
        received = select_fields(self.broadcast, self.phase.per_client, lambda f: take(f, j))
        client = select_fields(take(self.clients, j), algorithm.per_row, lambda f: f[:rows])
        return received, client, about

    def update(self, algorithm: Algorithm, data: FederatedData, j: int, seed: int) -> Any:
        """Run ``client_update`` for the j-th client."""
        received, client, about = self.one(algorithm, j)
        index, i = int(self.round.index), int(self.ids[j])
        batches = batches_of(data, self.phase, i, about, round=index, seed=seed)
        return client_update(self.phase, received, client, about, batches)


def watched(
    algorithm: Algorithm, data: FederatedData, *, rounds: int, cohort: int, seed: int
) -> tuple[list[Exchange], Any, Simulation]:
    """Run on the loop engine; return every exchange, the final server record, the simulation.

    The adapting and the personal phases follow at the end, for clients 0, 1, 2, ...
    """
    from handspan.core.federation import make_round, run

    seen: list[Exchange] = []

    class Watching(Simulation):
        def exchange(self, phase: Phase, broadcast: Any, round: Round) -> Any:
            everyone = phase.computes == "all" or phase.uploads == "all"
            ids = torch.arange(self.data.num_clients) if everyone else round.ids
            clients, about = self.store.read(ids), self.about(ids)
            outcome = super().exchange(phase, broadcast, round)
            original = next(
                p for p in (*algorithm.setup, *algorithm.rounds) if p.name == phase.name
            )
            seen.append(
                Exchange(
                    kind="setup" if original in algorithm.setup else "round",
                    phase=original,
                    round=round,
                    ids=ids,
                    broadcast=broadcast,
                    clients=clients,
                    about=about,
                    reduction=outcome.reduction,
                )
            )
            return outcome

    def noting(phase: Phase) -> Phase:
        def combine(server: Any, reduction: Any, round: Round) -> Any:
            assert phase.combine is not None
            after = phase.combine(server, reduction, round)
            seen[-1] = dataclasses.replace(seen[-1], before=server, after=after)
            return after

        return dataclasses.replace(phase, combine=combine)

    noted = dataclasses.replace(
        algorithm,
        setup=tuple(map(noting, algorithm.setup)),
        rounds=tuple(map(noting, algorithm.rounds)),
    )
    simulation = Watching(noted, data, seed=seed)
    simulation.executor.recorder = Unrecorded()
    state = run(noted, simulation, rounds=rounds, cohort=cohort, seed=seed)
    ids = torch.arange(cohort)
    round = make_round(state.round, ids, simulation.population)
    about, mine = simulation.about(ids), simulation.store.read(ids)
    later = [("adapt", algorithm.adapt)] if algorithm.adapt is not None else []
    for kind, phase in [*later, *(("personal", phase) for phase in algorithm.personal)]:
        broadcast = phase.broadcast(state.server, round)
        seen.append(
            Exchange(
                kind=kind,
                phase=phase,
                round=round,
                ids=ids,
                broadcast=broadcast,
                clients=mine,
                about=about,
            )
        )
        if kind == "personal":
            mine = simulation.run_private(phase, broadcast, ids, state.round, mine)
    return seen, state.server, simulation


def in_blocks(
    algorithm: Algorithm,
    data: FederatedData,
    exchange: Exchange,
    executor: Executor,
    seed: int,
    *,
    clients: Any = None,
    is_turned: bool = False,
) -> dict[int, dict[str, Tensor]]:
    """Run an exchange's clients in whole blocks; all numbers by client and name.

    ``clients`` replaces the private records; ``is_turned`` reverses each block.
    """
    phase, found = exchange.phase, dict[int, dict[str, Tensor]]()
    k = keys.key(seed, "plan", int(exchange.round.index))
    for block in Blocks(phase, exchange.ids, data, k, len(exchange.ids)):
        if is_turned:
            block = _turned(block)
        place = torch.searchsorted(exchange.ids, block.ids)
        received = select_axis(exchange.broadcast, phase.per_client, place)
        mine = take(exchange.clients if clients is None else clients, place)
        pair = executor.run(phase, received, mine, take(exchange.about, place), block)
        for j, i in enumerate(block.ids.tolist()):
            found[i] = named_result(algorithm, take_pair(pair, j), int(block.num[j]))
    return found


def take_pair(pair: Any, j: int) -> tuple[Any, Any]:
    """Return private record and upload of the j-th client of a block's result."""
    state, upload = pair if len(pair) == 2 else (pair[0], None)
    return take(state, j), None if upload is None else take(upload, j)


def named_result(algorithm: Algorithm, pair: Any, rows: int) -> dict[str, Tensor]:
    """Name all numbers of a client's result, its per-row fields without padding."""
    state, upload = pair
    if set(field_names(type(state))) >= algorithm.per_row:
        state = select_fields(state, algorithm.per_row, lambda f: f[:rows])
    upload = Empty() if upload is None else upload
    return {
        **{f"private {name}": tensor for name, tensor in to_named(state).items()},
        **{f"upload {name}": tensor for name, tensor in to_named(upload).items()},
    }


def _turned(block: Block) -> Block:
    """Return the same clients in reverse order."""
    plans = tuple(
        dataclasses.replace(
            plan,
            rows=plan.rows.flip(0),
            weight=plan.weight.flip(0),
            keys=plan.keys.flip(0),
            num_steps=plan.num_steps.flip(0),
        )
        for plan in block.plans
    )
    return dataclasses.replace(block, ids=block.ids.flip(0), num=block.num.flip(0), plans=plans)
