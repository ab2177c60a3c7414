"""A worker process: learns, runs and forgets what its parent tells it, until the parent hangs up.

``python -m handspan.simulation.worker DESCRIPTOR`` starts no worker but the nursery: a process that
has imported everything and nothing else, and forks into a worker whenever it is asked to. So torch
is imported once, a worker starts in milliseconds, and what they share lies in memory once. The
nursery has a single thread and has never computed anything, which is what makes forking safe.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch

from handspan.simulation.shared import Line

READY, DONE, FAILED = "ready", "done", "failed"  # what a worker says
LEARN, FORGET, RUN = "learn", "forget", "run"  # what it is told


def main(descriptor: int) -> None:
    """Fork into a worker for each pair of descriptors that arrives."""
    # Slow to import, and the first step of every worker needs it.
    import torch.fx.experimental.proxy_tensor  # noqa: F401

    control, children = Connection(descriptor), set[int]()
    while True:
        try:
            control.recv_bytes()
            line, lifeline = (reduction.recv_handle(control) for _ in range(2))
        except (EOFError, OSError):
            break
        child = os.fork()
        if not child:
            _live(control, line, lifeline)
        os.close(line)
        os.close(lifeline)
        gone = {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
        children = children - gone | {child}
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _live(control: Connection, line: int, lifeline: int) -> None:
    """Be a worker; never returns."""
    try:
        control.close()
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
        torch.set_num_threads(1)
        gc.freeze()  # what is there before the first task stays, and need not be searched
        serve(Line(line, gc.collect))  # cycles would keep large memory mapped
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _end_with_parent(lifeline: int) -> None:
    """Wait until the parent lets go of its end, be it because it was killed."""
    with contextlib.suppress(OSError):
        os.read(lifeline, 1)
    os._exit(0)


def serve(line: Line) -> None:
    """Do what the line says until it ends."""
    known: dict[int, Any] = {}

    def look_up(name: tuple[Any, ...]) -> Any:
        value = known[name[0]]
        for step in name[1:]:
            value = getattr(value, step) if isinstance(step, str) else value[step]
        return value

    line.post((READY, os.getpid()), 0)
    turn = 0
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            told, name, value = line.receive(look_up)
            if told == LEARN:
                known[name] = value
            elif told == FORGET:
                known.pop(name, None)
            else:
                # Two slots: the parent may still read the last result but one.
                line.post(_attempt(known[name], value), turn % 2)
                turn += 1


def _attempt(work: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    begin = time.perf_counter()
    try:
        result = work.run(*arguments)
    except Exception as error:
        return FAILED, _portable(error), traceback.format_exc()
    return DONE, result, time.perf_counter() - begin


def _portable(error: Exception) -> Exception:
    """Return the error, or one that says the same where it cannot travel."""
    import cloudpickle

    try:
        return pickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
