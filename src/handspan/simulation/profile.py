"""Where the time of a run goes: a stop-watch that costs nothing while nobody holds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

import torch

PARTS = ("plan", "gather", "steps", "reduce", "evaluate", "save")
T = TypeVar("T")
_nothing = nullcontext()


class Profile:
    """Seconds of the parts of a run; a part inside another one is not counted twice.

    On a GPU it is waited for at every change of parts, so a run under a profile is slower.

    Attributes
    ----------
    seconds
        By part, in order of ``PARTS``.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._inside = clock, list[str]()
        self.start()

    @contextmanager
    def measure(self) -> Iterator[Profile]:
        """Measure everything that happens inside, in this thread."""
        token = _current.set(self)
        self.start()
        try:
            yield self
        finally:
            self._switch()
            _current.reset(token)

    def start(self) -> None:
        """Forget what has been measured so far."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._begin = self._last = self._now()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what follows to a part."""
        self._switch()
        self._inside.append(name)
        try:
            yield
        finally:
            self._switch()
            self._inside.pop()

    @property
    def total(self) -> float:
        """Seconds between the beginning and the last change of parts."""
        return self._last - self._begin

    def table(self, rounds: int) -> list[tuple[str, float, float]]:
        """Part, milliseconds a round, share of the whole; what belongs to no part comes last."""
        parts = {**self.seconds, "other": self.total - sum(self.seconds.values())}
        return [
            (name, 1e3 * seconds / max(1, rounds), seconds / max(self.total, 1e-12))
            for name, seconds in parts.items()
        ]

    def _switch(self) -> None:
        now = self._now()
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._last
        self._last = now

    def _now(self) -> float:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self._clock()


_current: ContextVar[Profile | None] = ContextVar("profile", default=None)


def during(name: str, items: Iterator[T]) -> Iterator[T]:
    """Pass on items; the time that it takes to make them counts to a part."""
    while True:
        with part(name):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def part(name: str) -> AbstractContextManager[None]:
    """Count what follows to a part of the profile, if there is one."""
    profile = _current.get()
    return _nothing if profile is None else profile.part(name)


def start() -> None:
    """Let the profile begin here, if there is one: what came before belongs to no round."""
    profile = _current.get()
    if profile is not None:
        profile.start()
