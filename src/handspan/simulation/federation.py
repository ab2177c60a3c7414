"""A federation whose clients are simulated on this machine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm, Cohort, Phase, Reduced, Stacked
from handspan.core.data import Batch, ClientData, FederatedData, Population, Round
from handspan.core.federation import Costs, Exchanged, make_round
from handspan.core.records import Empty, concatenate, map_tensors, num_bytes, take
from handspan.simulation import profile
from handspan.simulation.about import client_data
from handspan.simulation.batching import select_axis
from handspan.simulation.executors import Executor, make_executor
from handspan.simulation.jobs import upload_bytes
from handspan.simulation.plans import count_rows
from handspan.simulation.precision import multiplying
from handspan.simulation.reduction import PartialSum, Postprocessor, Reduction
from handspan.simulation.store import ClientStore
from handspan.simulation.workers import WorkersExecutor

# Clients whose served models are alive at once during evaluation.
_SERVED_TOGETHER = 64


class Simulation:
    """All clients of a data set in this process; implements ``Federation``.

    Parameters
    ----------
    algorithm, data, seed
        What to run, on whom, with which randomness.
    engine, block_size
        How: ``loop``, ``stacked``, ``workers``, ``ray`` or ``wire``, and the clients per block. A
        block size of 1 lets workers run the loop inside.
    workers
        Processes of the engine of that name, or actors of ``ray``.
    precision
        Of products on a GPU: ``float32``, or ``tf32``.
    make_store
        Makes the place where private records live; in memory by default.
    postprocessors
        Changes of uploads and reductions, in order.
    lost
        (Round, ids) -> True for clients whose upload does not arrive; for tests and studies.
    least
        A round in which less than this share of the uploads arrives is abandoned.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        data: FederatedData,
        *,
        seed: int = 0,
        engine: str = "loop",
        block_size: int = 32,
        workers: int = 2,
        precision: str = "float32",
        make_store: Callable[..., ClientStore] = ClientStore,
        postprocessors: Sequence[Postprocessor] = (),
        lost: Callable[[Round, Tensor], Tensor] | None = None,
        least: float = 0.5,
    ) -> None:
        self.algorithm = algorithm
        self.data = data
        self.seed = seed
        self.precision = precision
        self.population = Population(
            num_clients=torch.tensor(data.num_clients),
            num_examples=data.num_train,
            groups=data.groups,
        )
        self.executor: Executor = make_executor(
            engine, algorithm, data, seed=seed, block_size=block_size, workers=workers
        )
        self.store = make_store(self.initial, data.num_train, algorithm.per_row)
        self._post = tuple(postprocessors)
        self._lost = lost
        self._least = least

    # -- clients -----------------------------------------------------------------------------

    def about(self, ids: Tensor) -> ClientData:
        """Return what the clients' functions know of them."""
        return client_data(self.algorithm, self.data, self.seed, ids)

    def initial(self, ids: Tensor) -> Any:
        """Private records of clients that have never taken part."""
        return self.algorithm.init_client(keys.key(self.seed, "init"), self.about(ids))

    # -- training ----------------------------------------------------------------------------

    def exchange(self, phase: Phase, broadcast: Any, round: Round) -> Exchanged:
        """Carry a broadcast to the clients, run their part, reduce what comes back."""
        everyone = phase.computes == "all" or phase.uploads == "all"
        ids = torch.arange(self.data.num_clients) if everyone else round.ids
        costs = self._costs(phase, broadcast, ids)
        expected = len(ids) if phase.uploads == "all" else len(round.ids)
        if self._lost is not None:  # what did not arrive is not committed at home either
            place = ~self._lost(round, ids)
            broadcast, ids = select_axis(broadcast, phase.per_client, place), ids[place]
        weights = self._weights(phase, ids, round)
        arrived = int((weights > 0).sum())
        if arrived < max(1, self._least * expected):
            return Exchanged(
                reduction=None, costs=costs, abandoned=f"only {arrived} uploads arrived"
            )
        if phase.cohort_update is not None and self.executor.is_stacked:
            reduction, size = self._flat(phase, broadcast, ids, weights)
        else:
            reduction, size = self._blocks(phase, broadcast, ids, weights, round)
        for post in self._post:
            reduction = post.reduction(reduction, round)
        costs.bytes_up = size * arrived
        return Exchanged(reduction=reduction, costs=costs)

    def commit(self) -> None:
        """Make the staged private records the stored ones."""
        self.store.commit()

    def discard(self) -> None:
        """Forget the staged private records."""
        self.store.discard()

    def _weights(self, phase: Phase, ids: Tensor, round: Round) -> Tensor:
        """Weight of each computing client's upload; 0 where none is sent or none arrives."""
        weights = phase.weight(self.data.num_train[ids]).to(torch.float64)
        if phase.uploads == "cohort":
            place = torch.searchsorted(round.ids, ids).clamp(max=len(round.ids) - 1)
            is_member = round.ids[place] == ids
            weights = torch.where(is_member, weights * round.multiplicity[place], 0.0)
        return weights

    def _blocks(
        self, phase: Phase, broadcast: Any, ids: Tensor, weights: Tensor, round: Round
    ) -> tuple[Any, int]:
        reduction, size = Reduction(phase, ids, weights), 0
        # Sums may be made elsewhere where nobody has to see single uploads.
        shown = None if self._post or phase.reduce == "stack" else weights
        run = self.run_blocks(phase, broadcast, ids, int(round.index), weights=shown)
        with closing(run):  # workers must not be kept waiting by a mistake made here
            for part, states, uploads in profile.during("steps", run):
                if isinstance(uploads, PartialSum):
                    reduction.add_sum(uploads)
                    size = uploads.num_bytes
                    continue
                self.store.stage(part, states)
                if uploads is None:  # their sum follows
                    continue
                for post in self._post:
                    uploads = post.upload(uploads, part, round)
                size = upload_bytes(phase, uploads)
                with profile.part("reduce"):
                    reduction.add(part, uploads)
        with profile.part("reduce"):
            return reduction.result(), size

    def run_blocks(
        self,
        phase: Phase,
        broadcast: Any,
        ids: Tensor,
        index: int,
        clients: Any = None,
        weights: Tensor | None = None,
    ) -> Generator[tuple[Tensor, Any, Any], None, None]:
        """Run a phase for the given clients, block by block, in canonical order.

        Yields ids, private records and uploads. Where ``weights`` are given, a ``PartialSum`` may
        come in the place of uploads.
        """

        def read(part: Tensor) -> Any:
            if clients is None:
                return self.store.read(part)
            return take(clients, torch.searchsorted(ids, part))

        k = keys.key(self.seed, "plan", index)
        if isinstance(self.executor, WorkersExecutor):
            versions = self.store.versions if clients is None else None
            yield from self.executor.run_blocks(phase, broadcast, ids, k, read, weights, versions)
            return
        for block in self.executor.blocks(phase, ids, k):
            received = select_axis(broadcast, phase.per_client, torch.searchsorted(ids, block.ids))
            about = self.about(block.ids)
            mine = read(block.ids)
            with multiplying(self.precision):
                result = self.executor.run(phase, received, mine, about, block)
            yield block.ids, *result

    def _flat(self, phase: Phase, broadcast: Any, ids: Tensor, weights: Tensor) -> tuple[Any, int]:
        """Run the hand-written twin of a phase on the cohort's flat rows."""
        assert phase.cohort_update is not None
        rows, num = self._flat_rows(ids)
        cohort = Cohort(
            x=rows,
            segment=torch.repeat_interleave(torch.arange(len(ids)), num).to(self.data.device),
            num=num,
            weights=weights,
        )
        states = self.store.read_flat(ids)
        with multiplying(self.precision):
            states, total = phase.cohort_update(broadcast, states, cohort)
        self.store.stage_flat(ids, states)
        sent = weights > 0
        if phase.reduce == "stack":  # then it gives the uploads of all, side by side
            uploads = take(total, sent)
            size = num_bytes(uploads) // max(1, int(sent.sum()))
            return Stacked(uploads=uploads, ids=ids[sent], weights=weights[sent]), size
        reduction = Reduced(
            total=map_tensors(lambda tensor: tensor.to(torch.float64), total),
            weight=weights[sent].sum(),
            count=sent.sum().to(torch.float64),
        )
        return reduction, num_bytes(total)

    def _flat_rows(self, ids: Tensor) -> tuple[Any, Tensor]:
        num = self.data.num_train[ids]
        if len(ids) == self.data.num_clients and int(num.sum()) == self.data.num_rows:
            return self.data.x, num  # everybody, all rows: no copy
        start = torch.repeat_interleave(self.data.offsets[ids] - (num.cumsum(0) - num), num)
        index = (start + torch.arange(int(num.sum()))).to(self.data.device)
        x = self.data.x
        return (x[index] if isinstance(x, Tensor) else x.select(index)), num

    def _costs(self, phase: Phase, broadcast: Any, ids: Tensor) -> Costs:
        costs = Costs()
        for stage in phase.stages:
            rows = count_rows(stage, self.data.span(stage.rows)[1][ids])
            if stage.forward_only:
                costs.forward_rows += rows
            else:
                costs.rows += rows
        each = num_bytes(broadcast)
        for name in phase.per_client:
            size = num_bytes(getattr(broadcast, name))
            each -= size - size // max(1, len(ids))
        costs.bytes_down = each * len(ids)
        return costs

    # -- serving -----------------------------------------------------------------------------

    def serve(
        self, server: Any, ids: Tensor, index: int, clients: Any = None
    ) -> Iterator[tuple[Tensor, Any, Any]]:
        """Blocks (ids, B, D) of clients ready to be scored: their personal phases have run."""
        deploy = self.algorithm.serving[0]
        for start in range(0, len(ids), _SERVED_TOGETHER):
            part = ids[start : start + _SERVED_TOGETHER]
            round = make_round(index, part, self.population)
            mine = (
                self.store.read(part)
                if clients is None
                else take(clients, slice(start, start + _SERVED_TOGETHER))
            )
            for phase in self.algorithm.personal:
                if not phase.when(server, round):
                    continue
                mine = self.run_private(phase, phase.broadcast(server, round), part, index, mine)
            yield part, deploy(server, round), mine

    def run_private(
        self, phase: Phase, broadcast: Any, ids: Tensor, index: int, clients: Any
    ) -> Any:
        """Run a phase that uploads nothing; returns the new records in the order of ids."""
        done = [
            (part, states)
            for part, states, _ in self.run_blocks(phase, broadcast, ids, index, clients)
        ]
        order = torch.cat([part for part, _ in done]).argsort()
        return take(concatenate([states for _, states in done]), order)

    def personal_costs(self, server: Any, ids: Tensor, index: int) -> Costs:
        """Return what the personal phases cost the given clients, once."""
        costs, round = Costs(), make_round(index, ids, self.population)
        for phase in self.algorithm.personal:
            if not phase.when(server, round):
                continue
            for stage in phase.stages:
                rows = count_rows(stage, self.data.span(stage.rows)[1][ids])
                costs += Costs(forward_rows=rows) if stage.forward_only else Costs(rows=rows)
        return costs

    def adapt(self, server: Any, ids: Tensor, index: int) -> Costs:
        """Fit private records of new clients with the shared state frozen, and store them."""
        phase = self.algorithm.adapt
        if phase is None:
            return Costs()
        round = make_round(index, ids, self.population)
        broadcast = phase.broadcast(server, round)
        costs = self._costs(phase, broadcast, ids)
        with closing(self.run_blocks(phase, broadcast, ids, index)) as run:
            for part, states, _ in run:
                self.store.stage(part, states)
        self.store.commit()
        return costs

    def predictions(
        self, server: Any, ids: Tensor, index: int, task: Any, rows: str = "test"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs of the personal models on a split, block by block, in the order of ids."""
        _, unbatched, per_client = self.algorithm.serving

        outputs = partial(personal_outputs, self.algorithm, task)
        for part, broadcast, mine in self.serve(server, ids, index):
            with torch.no_grad(), multiplying(self.precision):
                found = self.executor.predict(
                    outputs,
                    broadcast,
                    mine,
                    self.about(part),
                    part,
                    rows,
                    unbatched,
                    per_client,
                )
            yield part, found

    def row_labels(self, server: Any, ids: Tensor, index: int) -> Tensor:
        """Component of each training row, in the order of the clients."""
        assert self.algorithm.labels is not None
        deploy, _, _ = self.algorithm.serving
        parts: list[Tensor] = []
        for start in range(0, len(ids), _SERVED_TOGETHER):
            part = ids[start : start + _SERVED_TOGETHER]
            broadcast = deploy(server, make_round(index, part, self.population))
            x, num = self._flat_rows(part)
            weight = torch.ones(int(num.sum()), device=self.data.device)
            batch = Batch(x=x, y=None, weight=weight, key=torch.tensor(0), rows=weight.long())
            clients = self.store.read_flat(part)
            with multiplying(self.precision):
                parts.append(self.algorithm.labels(broadcast, clients, batch))
        return torch.cat(parts)

    def shared_predictions(
        self, server: Any, ids: Tensor, task: Any, rows: str = "test"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs of the global model on a split, block by block."""
        assert self.algorithm.shared_model is not None
        model = self.algorithm.shared_model(server)

        outputs = partial(_shared_outputs, task)
        for start in range(0, len(ids), _SERVED_TOGETHER):
            part = ids[start : start + _SERVED_TOGETHER]
            with torch.no_grad(), multiplying(self.precision):
                found = self.executor.predict(
                    outputs,
                    model,
                    Empty(),
                    self.about(part),
                    part,
                    rows,
                    frozenset({"params", "buffers"}),
                )
            yield part, found


# Not closures in the methods above: those would take the whole federation along to workers.
def personal_outputs(
    algorithm: Algorithm, task: Any, broadcast: Any, client: Any, x: Any, side: Any
) -> Tensor:
    """Outputs for rows of one client whose personal phases have run."""
    if algorithm.predict is not None:
        return algorithm.predict(broadcast, client, x, side)
    assert algorithm.model is not None
    model = algorithm.model(broadcast, client)
    return task.predict(model.params, model.buffers, x, side)


def _shared_outputs(task: Any, model: Any, client: Any, x: Any, side: Any) -> Tensor:
    return task.predict(model.params, model.buffers, x, side)
