"""The workers engine: blocks of clients in processes of their own, one thread each.

Inside, a worker is the loop engine (``block_size`` 1) or the stacked one, and so are the numbers.
Data and algorithm go to a worker once. For an exchange it is told the broadcast and the cohort, and
makes the plans itself, as everybody would; for a block it is told the block's number and the
clients' private records. New records and uploads come back; this process stages and adds them in
canonical order. Of a large cohort come back sums in float64, of the chunks in which all engines
add.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Phase
from handspan.core.data import ClientData, FederatedData
from handspan.core.errors import HandspanError
from handspan.core.records import take
from handspan.simulation.crew import Notice, crew
from handspan.simulation.jobs import Exchange, Job, Prediction
from handspan.simulation.plans import Block, Blocks
from handspan.simulation.reduction import CHUNK, PartialSum
from handspan.simulation.shared import Memory
from handspan.simulation.threads import num_threads
from handspan.simulation.tracing import Recorder

_MOST_TOGETHER = 32  # clients of a task, where the loop runs inside
_TASKS_OF_A_WORKER = 4  # at least, where there are clients enough: the last ones end together
_PATIENCE = 3  # exchanges of a phase that may take longer than this process alone would need
Read = Callable[[Tensor], Any]
Versions = Callable[[Tensor], Tensor]


class WorkersExecutor:
    """Runs the blocks of an exchange in worker processes."""

    name = "workers"

    def __init__(
        self,
        algorithm: Algorithm,
        data: FederatedData,
        seed: int,
        block_size: int,
        workers: int,
    ) -> None:
        if data.device.type != "cpu":
            raise HandspanError(f"the {self.name} engine computes on the CPU: add --device cpu")
        if os.name != "posix":
            raise HandspanError(f"this system offers no {self.name} engine: choose loop or stacked")
        self.block_size, self.workers = block_size, workers
        self.patience = _PATIENCE
        self._here = Job(algorithm, data, seed, block_size, Recorder())
        self._job: Notice | None = None
        self._phases: list[tuple[Phase, Notice]] = []
        self._down: Memory | None = None
        self._losses: dict[str, int] = {}
        self._sent: list[Notice | Memory] = []  # for the finalizer: must not hold this executor
        weakref.finalize(self, _retire, self._sent)

    @property
    def is_stacked(self) -> bool:
        """Whether the engine inside stacks clients."""
        return self.block_size > 1

    @property
    def recorder(self) -> Recorder:
        """Recordings of this process; each worker has its own, of the same kind."""
        return self._here.executor.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self._here.executor.recorder = recorder

    def run(
        self, phase: Phase, broadcast: Any, clients: Any, about: ClientData, block: Block
    ) -> tuple[Any, Any]:
        """Run a single block, here."""
        return self._here.executor.run(phase, broadcast, clients, about, block)

    def blocks(self, phase: Phase, ids: Tensor, k: Tensor) -> Blocks:
        """Blocks as they run inside."""
        return self._here.executor.blocks(phase, ids, k)

    def run_blocks(
        self,
        phase: Phase,
        broadcast: Any,
        ids: Tensor,
        k: Tensor,
        read: Read,
        weights: Any,
        versions: Versions | None = None,
    ) -> Iterator[tuple[Tensor, Any, Any]]:
        """Run a phase for the given clients: ids, records and uploads, in canonical order.

        ``versions`` tells those of the records that are read, to whom may hold them already.
        """
        if weights is not None and not self._sums_there(phase, weights):
            weights = None
        size = self._size(len(ids))
        exchange = Exchange(self._here, phase, broadcast, ids, k, size, weights)
        tasks = [partial(self._arguments, exchange, task, read) for task in exchange.tasks]
        for task, result in zip(
            exchange.tasks, self._run(phase.name, exchange, tasks), strict=True
        ):
            results, total, size = result
            for part, (states, uploads) in zip(
                exchange.blocks.parts[slice(*task)], results, strict=True
            ):
                yield part.ids, states, uploads
            if exchange.weights is not None:
                yield ids[:0], None, PartialSum(total, size)

    def _sums_there(self, phase: Phase, weights: Tensor) -> bool:
        """Whether workers sum their uploads: where it moves no bit and everybody has chunks."""
        is_one_product = self.is_stacked and phase.unbatched  # of a block, as it is cut
        return not is_one_product and int((weights > 0).sum()) >= 2 * CHUNK * self.workers

    @staticmethod
    def _arguments(exchange: Exchange, task: tuple[int, int], read: Read) -> tuple[Any, ...]:
        return (*task, read(exchange.members(task)))

    def _size(self, count: int) -> int:
        """Clients of a block: the loop gives the same numbers for any."""
        if self.block_size > 1:
            return self.block_size
        return max(1, min(_MOST_TOGETHER, count // (_TASKS_OF_A_WORKER * self.workers)))

    def predict(
        self,
        function: Callable[[Any, Any, Any, Any], Tensor],
        broadcast: Any,
        clients: Any,
        about: ClientData,
        ids: Tensor,
        rows: Any,
        unbatched: frozenset[str],
        per_client: frozenset[str] = frozenset(),
    ) -> Tensor:
        """Outputs of ``function(B, C, x, side)`` for a split's rows of each client, joined."""
        given = (function, broadcast, rows, unbatched, per_client)
        if self.block_size > 1:  # stacked clients share a padded shape
            executor = self._here.executor
            return executor.predict(
                function, broadcast, clients, about, ids, rows, unbatched, per_client
            )
        pieces = torch.arange(len(ids)).split(self._size(len(ids)))
        tasks = [partial(lambda at: (ids[at], at, take(clients, at)), at) for at in pieces]
        return torch.cat(list(self._run("predict", Prediction(self._here, *given), tasks)))

    def _run(
        self, name: str, work: Any, tasks: Sequence[Callable[[], tuple[Any, ...]]]
    ) -> Iterator[Any]:
        """Run tasks in workers, unless this process alone has been shown to be as fast."""
        if len(tasks) < 2 or self._losses.get(name, 0) >= self.patience:
            with num_threads(1):
                for task in tasks:
                    yield work.run(*task())
            return
        begin, busy, aside = time.perf_counter(), 0.0, 0.0
        notices = [*self._job_notices(), *self._phase_notice(work), self._notice(work)]
        for result, seconds in crew().run(self.workers, notices, tasks):
            busy += seconds
            paused = time.perf_counter()
            yield result
            aside += time.perf_counter() - paused
        crew().retire(notices[-1])
        is_slower = time.perf_counter() - begin - aside > busy
        self._losses[name] = self._losses.get(name, 0) + 1 if is_slower else 0

    # -- what workers are told ----------------------------------------------------------------

    def _job_notices(self) -> list[Notice]:
        here = self._here
        if self._job is None and here.algorithm.needs_label_counts:
            here.about(torch.tensor([0]))  # counts labels, once for all workers
        data = _data_notice(here.data)
        if self._job is None:
            job = Job(here.algorithm, here.data, here.seed, here.block_size, self.recorder.fresh())
            self._job = Notice.of(job, refer=self._name)
            self._sent.append(self._job)
        return [data, self._job]

    def _phase_notice(self, work: Any) -> list[Notice]:
        """Tell of phases that are not the algorithm's own; each of them once."""
        if not isinstance(work, Exchange) or self._name(work.phase) is not None:
            return []
        for phase, notice in self._phases:
            if phase is work.phase:
                return [notice]
        self._phases.append((work.phase, Notice.of(work.phase)))
        self._sent.append(self._phases[-1][1])
        return [self._phases[-1][1]]

    def _notice(self, work: Any) -> Notice:
        notice = Notice.of(work, self._down, self._name)
        memory = notice.packed.memory
        if memory is not None and memory is not self._down:
            if self._down is not None:
                crew().retire(self._down)
                self._sent.remove(self._down)
            self._down = memory
            self._sent.append(memory)
        return notice

    def _name(self, value: Any) -> tuple[Any, ...] | None:
        """Name of what workers know: data, the job, its algorithm, and phases."""
        if value is self._here.data:
            return (_data_notice(value).serial,)
        if self._job is None or not isinstance(value, Job | Algorithm | Phase):
            return None
        serial, algorithm = self._job.serial, self._here.algorithm
        if value is self._here:
            return (serial,)
        if value is algorithm:
            return (serial, "algorithm")
        for phase, notice in self._phases:
            if phase is value:
                return (notice.serial,)
        for group in ("setup", "rounds", "personal"):
            for place, phase in enumerate(getattr(algorithm, group)):
                if phase is value:
                    return (serial, "algorithm", group, place)
        return (serial, "algorithm", "adapt") if value is algorithm.adapt else None


_known_data: weakref.WeakKeyDictionary[FederatedData, Notice] = weakref.WeakKeyDictionary()


def _data_notice(data: FederatedData) -> Notice:
    """Tell of data: once, however many algorithms run on them."""
    if data not in _known_data:
        _known_data[data] = Notice.of(data)
        weakref.finalize(data, _retire, [_known_data[data]])
    return _known_data[data]


def _retire(sent: list[Notice | Memory]) -> None:
    """Let workers forget notices, and the memory in which they lie."""
    for one in sent:
        memory = one.packed.memory if isinstance(one, Notice) else None
        crew().retire(*(part for part in (one, memory) if part is not None))
