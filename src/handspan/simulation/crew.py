"""Worker processes: started once and kept, replaced when they die, gone with this process.

All engines of this process share one crew. What workers must know (an algorithm and its data, a
phase, a broadcast) is a *notice*, sent to each of them once; a *task* asks for a piece of work on a
known thing. Tasks are handed out one by one, so that a slow worker holds nobody up; results come
back in the order of the tasks.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from handspan.core.errors import HandspanError
from handspan.simulation.shared import Line, Memory, Packed, pack
from handspan.simulation.worker import DONE, FORGET, LEARN, READY, RUN

_MOST_DEATHS = 3  # of workers on one task, or of workers that never got ready
_serials = itertools.count()
Refer = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Notice:
    """Something that workers must know, packed once; workers know it by its serial number."""

    serial: int
    packed: Packed

    @staticmethod
    def of(value: Any, memory: Memory | None = None, refer: Refer = lambda value: None) -> Notice:
        """Pack a value, in the given memory if it is large enough."""
        serial = next(_serials)
        return Notice(serial, pack((LEARN, serial, value), memory, refer))


@dataclass(eq=False)
class _Worker:
    """A process, as this one sees it."""

    line: Line
    lifeline: int
    pid: int | None = None  # None until it is ready
    known: dict[int, Notice] = field(default_factory=dict[int, Notice])
    pending: deque[int] = field(default_factory=deque[int])  # tasks, in the order of sending
    turn: int = 0

    def tell(self, notice: Notice) -> None:
        if notice.serial not in self.known:
            self.line.send(notice.packed)
            self.known[notice.serial] = notice

    def forget(self, notice: Notice) -> None:
        if self.known.pop(notice.serial, None) is not None:
            self.line.send(pack((FORGET, notice.serial, None)))

    def ask(self, task: int, serial: int, arguments: tuple[Any, ...]) -> None:
        self.line.post((RUN, serial, arguments), self.turn % 2)
        self.turn += 1
        self.pending.append(task)

    def end(self) -> None:
        os.close(self.lifeline)
        self.line.close()


class Crew:
    """The worker processes of this process."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._nursery: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._retired: deque[Notice | Memory] = deque()
        self._stillborn = 0
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        """Process numbers of the workers that are ready."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def retire(self, *what: Notice | Memory) -> None:
        """Let workers forget what nobody needs any more, at the next opportunity."""
        self._retired.extend(what)

    def run(
        self,
        count: int,
        notices: Sequence[Notice],
        tasks: Sequence[Callable[[], tuple[Any, ...]]],
    ) -> Iterator[tuple[Any, float]]:
        """Run tasks on ``count`` workers; yields results and their seconds, in order.

        The last notice is the thing to run; a task returns the arguments. Whatever ends this before
        all results are there (an exception, Ctrl-C) ends the workers as well, whatever they are at:
        the next run starts new ones.
        """
        with self._lock:
            shift = _Shift(self, count, notices, tasks)
            try:
                yield from shift.run()
            except BaseException:
                self._end_workers()
                raise

    def hire(self, count: int) -> list[_Worker]:
        """Return so many workers, started if need be, who have forgotten what was retired."""
        while len(self._workers) < count:
            self._workers.append(self._start())
        while self._retired:
            self._forget(self._retired.popleft())
        return self._workers[:count]

    def _forget(self, what: Notice | Memory) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it died: the next to speak to it will notice
                if isinstance(what, Notice):
                    worker.forget(what)
                else:
                    worker.line.forget(what)

    def replace(self, worker: _Worker) -> _Worker:
        """Start another worker for one that has died."""
        self._stillborn = 0 if worker.pid is not None else self._stillborn + 1
        if self._stillborn == _MOST_DEATHS:
            raise HandspanError("worker processes do not start: choose --engine loop")
        worker.end()
        place = self._workers.index(worker)
        self._workers[place] = self._start()
        return self._workers[place]

    def _start(self) -> _Worker:
        (ours, theirs), (read, write) = socket.socketpair(), os.pipe()
        try:
            self._fork(theirs.fileno(), read)
        finally:
            theirs.close()
            os.close(read)
        return _Worker(Line(ours.detach()), write)

    def _fork(self, *descriptors: int) -> None:
        if self._nursery is not None and self._nursery[0].poll() is not None:
            self._dismiss_nursery()  # somebody killed it
        if self._nursery is None:
            self._nursery = _start_nursery()
        control = self._nursery[1]
        control.send_bytes(b"fork")
        for descriptor in descriptors:
            reduction.send_handle(control, descriptor, 0)

    def close(self) -> None:
        """End all workers and wait until they are gone."""
        if os.getpid() != self._owner:  # a fork of this process: they are not its own
            return
        is_idle = not self.pids  # it may still be importing, and has no children yet
        self._end_workers()
        self._dismiss_nursery(is_idle)

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _dismiss_nursery(self, at_once: bool = False) -> None:
        if self._nursery is None:
            return
        process, control = self._nursery
        self._nursery = None
        control.close()
        if at_once:
            process.kill()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Shift:
    """One run of tasks."""

    def __init__(
        self,
        crew: Crew,
        count: int,
        notices: Sequence[Notice],
        tasks: Sequence[Callable[[], tuple[Any, ...]]],
    ) -> None:
        self._crew, self._notices, self._tasks = crew, notices, tasks
        self._workers = crew.hire(min(count, len(tasks)))
        self._waiting = deque(range(len(tasks)))
        self._done: dict[int, tuple[Any, float]] = {}
        self._deaths = dict.fromkeys(range(len(tasks)), 0)

    def run(self) -> Iterator[tuple[Any, float]]:
        for task in range(len(self._tasks)):
            while task not in self._done:
                self._hand_out()
                if task not in self._done:
                    self._collect()
            self._hand_out()  # nobody waits while the result is looked at
            yield self._done.pop(task)

    def _hand_out(self) -> None:
        """Give each worker a task, and a second one while there are plenty."""
        for depth in (0, 1):
            for place, worker in enumerate(self._workers):
                is_enough = depth and len(self._waiting) <= len(self._workers)
                if not self._waiting or is_enough:
                    return
                if worker.pid is None or len(worker.pending) != depth:
                    continue
                task = self._waiting.popleft()
                try:
                    for notice in self._notices:
                        worker.tell(notice)
                    worker.ask(task, self._notices[-1].serial, self._tasks[task]())
                except OSError:  # the line is cut
                    self._waiting.appendleft(task)
                    self._bury(place)

    def _collect(self) -> None:
        """Wait for a worker to say something."""
        lines = {
            worker.line.connection: place
            for place, worker in enumerate(self._workers)
            if worker.pid is None or worker.pending
        }
        for connection in wait(list(lines)):
            place = lines[connection]  # type: ignore[index]
            try:
                self._hear(self._workers[place])
            except (EOFError, OSError):  # nothing, or half a message
                self._bury(place)

    def _hear(self, worker: _Worker) -> None:
        said, value, more = (*worker.line.receive(), None)[:3]
        if said == READY:
            worker.pid = value
        elif said == DONE:
            # The worker may write over it as soon as it is given something else to do.
            self._done[worker.pending.popleft()] = pytree.tree_map(_copied, value), more
        else:
            value.add_note(f"in a worker process:\n{more}")
            raise value

    def _bury(self, place: int) -> None:
        """Start another worker; what the dead one had to do is done again."""
        worker = self._workers[place]
        if worker.pending:
            first = worker.pending[0]
            self._deaths[first] += 1
            if self._deaths[first] == _MOST_DEATHS:
                raise HandspanError(
                    f"{_MOST_DEATHS} worker processes died on the same clients: if memory is "
                    "short lower --threads, else choose --engine loop to see what happens"
                )
        self._waiting.extendleft(reversed(worker.pending))
        self._workers[place] = self._crew.replace(worker)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


# One thread each; and memory that was used once stays, so that it need not be zeroed again (large
# images: 6 % faster).
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
}


def _start_nursery() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        # -P: a file of the working directory must not pass for a module.
        [sys.executable, "-P", "-m", "handspan.simulation.worker", str(theirs.fileno())],
        env={**os.environ, "PYTHONPATH": path, **_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        process_group=0,  # Ctrl-C is for this process, which then ends its workers
    )
    theirs.close()
    return process, Connection(ours.detach())


_crew: Crew | None = None


def crew() -> Crew:
    """Return the crew of this process."""
    global _crew
    if _crew is None or _crew._owner != os.getpid():
        _crew = Crew()
    return _crew
