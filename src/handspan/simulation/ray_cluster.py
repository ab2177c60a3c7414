"""The ray engine: the work of a worker process, done by actors on a cluster of machines.

An actor is what a worker is, with the same numbers: data and algorithm go to it once, then the
broadcast of each exchange, then blocks. This process stages and commits all private records; its
store is the last committed state, from which the clients of an actor that is lost are done again.
An actor keeps the records of the clients it has had, and they stay with it: what it holds in the
version of the store does not travel to it again.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Phase
from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.core.records import map_tensors, stack, take
from handspan.simulation.jobs import Exchange, Job
from handspan.simulation.workers import Read, Versions, WorkersExecutor

_MOST_DEATHS = 3  # of actors on one task
_AHEAD = 2  # tasks that an actor is given at once: it never waits for the next one
_serials = itertools.count()


class Worker:
    """What lives on the cluster."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self._job = job
        self._kept: dict[int, Any] = {}
        self._work: tuple[int, Any] = (-1, None)

    def exchange(
        self, serial: int, told: Any, first: int, last: int, sent: Any, is_sent: Tensor
    ) -> tuple[Any, float]:
        """Run blocks of an exchange; records that are not sent are those that it kept."""
        begin = time.perf_counter()
        work = self._known(serial, told)
        ids = work.members((first, last))
        done = work.run(first, last, self._whole(ids, sent, is_sent))
        if not self._job.algorithm.per_row:
            for part, (states, _) in zip(work.blocks.parts[first:last], done[0], strict=True):
                self._keep(part.ids, states)
        return done, time.perf_counter() - begin

    def predict(self, serial: int, told: Any, *arguments: Any) -> tuple[Tensor, float]:
        """Outputs of served models."""
        begin = time.perf_counter()
        return self._known(serial, told).run(*arguments), time.perf_counter() - begin

    def _known(self, serial: int, told: Any) -> Any:
        """The work of a serial number, fetched when it is first needed."""
        if self._work[0] != serial:
            work, place = _ray().get(told[0])
            if place is not None:
                group, index = place
                phase = getattr(self._job.algorithm, group)[index]
                work = dataclasses.replace(work, phase=phase)
            self._work = serial, dataclasses.replace(work, job=self._job)
        return self._work[1]

    def _whole(self, ids: Tensor, sent: Any, is_sent: Tensor) -> Any:
        """Records of all clients, of which only some were sent."""
        if bool(is_sent.all()):
            return sent
        place = (is_sent.cumsum(0) - 1).tolist()
        return stack(
            [
                take(sent, place[j]) if is_sent[j] else self._kept[client]  # type: ignore[arg-type]
                for j, client in enumerate(ids.tolist())
            ]
        )

    def _keep(self, ids: Tensor, states: Any) -> None:
        for j, client in enumerate(ids.tolist()):
            self._kept[client] = map_tensors(Tensor.clone, take(states, j))


class RayExecutor(WorkersExecutor):
    """Runs the blocks of an exchange on a Ray cluster."""

    name = "ray"

    def __init__(
        self, algorithm: Algorithm, data: FederatedData, seed: int, block_size: int, workers: int
    ) -> None:
        super().__init__(algorithm, data, seed, block_size, workers)
        self.actors: list[Any] = []
        self._holder = torch.full((data.num_clients,), -1)
        self._held = torch.full((data.num_clients,), -1)  # version
        self._versions: Versions | None = None
        weakref.finalize(self, _dismiss, self.actors)

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
        """Run a phase for the given clients: ids, records and uploads, in canonical order."""
        self._versions = versions
        yield from super().run_blocks(phase, broadcast, ids, k, read, weights)

    def _run(
        self, name: str, work: Any, tasks: Sequence[Callable[[], tuple[Any, ...]]]
    ) -> Iterator[Any]:
        self._hire()
        yield from _Shift(self, work, tasks).run()

    def _hire(self) -> None:
        _connect()
        if not self.actors:
            gc.collect()  # federations that are gone let go of theirs, which occupy the cluster
        while len(self.actors) < self.workers:
            self.actors.append(self._start())

    def _start(self) -> Any:
        here = self._here
        if self._job is None:
            recorder = self.recorder.fresh()
            job = Job(here.algorithm, here.data, here.seed, here.block_size, recorder)
            self._job = _ray().put(job)
        return _ray().remote(num_cpus=1, max_restarts=0)(Worker).remote(self._job)

    def replace(self, place: int) -> None:
        """Start another actor for one that is lost, with all that it held."""
        self.actors[place] = self._start()
        self._holder[self._holder == place] = -1

    def told(self, work: Any) -> Any:
        """What actors must know of a piece of work: all but the job and the algorithm's phases."""
        place = self._place(work.phase) if isinstance(work, Exchange) else None
        changes = {"job": None} if place is None else {"job": None, "phase": None}
        return _ray().put((dataclasses.replace(work, **changes), place))

    def _place(self, phase: Phase) -> tuple[str, int] | None:
        for group in ("setup", "rounds", "personal"):
            for index, known in enumerate(getattr(self._here.algorithm, group)):
                if known is phase:
                    return group, index
        return None

    def holds(self, place: int, ids: Tensor) -> Tensor:
        """Whether an actor holds the records of clients as the store has them."""
        if self._versions is None:
            return torch.zeros(len(ids), dtype=torch.bool)
        return (self._holder[ids] == place) & (self._held[ids] == self._versions(ids))

    def forget(self, ids: Tensor) -> None:
        """Note that what actors hold of these clients may be other than what is stored."""
        self._holder[ids] = -1

    def note(self, place: int, ids: Tensor) -> None:
        """Note that an actor holds what has just been staged."""
        if self._versions is not None and not self._here.algorithm.per_row:
            self._holder[ids], self._held[ids] = place, self._versions(ids)


class _Shift:
    """One run of tasks."""

    def __init__(
        self, executor: RayExecutor, work: Any, tasks: Sequence[Callable[[], tuple[Any, ...]]]
    ) -> None:
        self._executor, self._work, self._tasks = executor, work, tasks
        self._serial, self._told = next(_serials), [executor.told(work)]
        self._members = [work.members(task) for task in getattr(work, "tasks", ())]
        self._waiting = deque(range(len(tasks)))
        self._running: dict[Any, tuple[int, int]] = {}  # promise: task and actor
        self._done: dict[int, tuple[Any, int]] = {}  # result and actor
        self._deaths = [0] * len(tasks)

    def run(self) -> Iterator[Any]:
        for task in range(len(self._tasks)):
            while task not in self._done:
                self._hand_out()
                self._collect()
            self._hand_out()
            result, place = self._done.pop(task)
            yield result
            if self._members:  # by now it is staged
                self._executor.note(place, self._members[task])

    def _hand_out(self) -> None:
        """Give actors tasks, rather of clients that they have had before."""
        for place, actor in enumerate(self._executor.actors):
            busy = sum(running == place for _, running in self._running.values())
            for _ in range(min(_AHEAD - busy, len(self._waiting))):
                task = self._choose(place)
                self._waiting.remove(task)
                self._running[self._ask(actor, place, task)] = task, place

    def _choose(self, place: int) -> int:
        """A task, of the next few, of most clients that the actor holds."""
        if not self._members:
            return self._waiting[0]
        near = itertools.islice(self._waiting, _AHEAD * len(self._executor.actors))
        return max(near, key=lambda t: int(self._executor.holds(place, self._members[t]).sum()))

    def _ask(self, actor: Any, place: int, task: int) -> Any:
        arguments = self._tasks[task]()
        if not self._members:
            return actor.predict.remote(self._serial, self._told, *arguments)
        first, last, records = arguments
        is_sent = ~self._executor.holds(place, self._members[task])
        sent = records if bool(is_sent.all()) else take(records, is_sent)
        self._executor.forget(self._members[task])  # until what becomes of them is staged
        return actor.exchange.remote(self._serial, self._told, first, last, sent, is_sent)

    def _collect(self) -> None:
        """Wait for an actor."""
        ray = _ray()
        (promise,), _ = ray.wait(list(self._running), num_returns=1)
        task, place = self._running.pop(promise)
        try:
            (result, _) = ray.get(promise)
        except ray.exceptions.RayActorError:
            self._bury(task, place)
        except ray.exceptions.RayTaskError as error:
            error.cause.add_note(f"in an actor:\n{error}")
            raise error.cause from None
        else:
            self._done[task] = result, place

    def _bury(self, task: int, place: int) -> None:
        """Start another actor; what the lost one had to do is done again."""
        self._deaths[task] += 1
        if self._deaths[task] == _MOST_DEATHS:
            raise HandspanError(
                f"{_MOST_DEATHS} actors were lost on the same clients: if memory is short take "
                "fewer workers, else choose --engine loop to see what happens"
            )
        lost = [promise for promise, (_, where) in self._running.items() if where == place]
        again = sorted([task, *(self._running.pop(promise)[0] for promise in lost)])
        self._waiting.extendleft(reversed(again))
        self._executor.replace(place)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise HandspanError("the ray engine needs Ray: pip install 'handspan[ray]'") from None
    return ray


def _connect() -> None:
    """Connect to the cluster of RAY_ADDRESS, or of this machine; else start one here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not _ray().is_initialized():
        _ray().init(log_to_driver=False, logging_level="error")


def _dismiss(actors: list[Any]) -> None:
    """Let actors go."""
    if actors and _ray().is_initialized():
        for actor in actors:
            _ray().kill(actor)
