import json
import os
from contextlib import contextmanager

import numpy as np
import pytest

from handspan import session
from handspan.core.data import FederatedData
from handspan.fitting import execute, set_up
from handspan.session import _Session
from handspan.simulation import store
from handspan.testing.playing import Unrecorded

TERMS = {
    "rounds": 4, "cohort": 0.5, "steps": 3, "batch_size": 4, "momentum": 0.5, "eval_every": 2,
    "engine": "loop", "threads": 1, "seed": 3,
}  # fmt: skip


class Crash(BaseException):
    """The process ends here."""


@pytest.fixture(scope="session")
def federation():
    """Six clients with 8 to 18 rows each."""
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(8 + 2 * i, 5)), rng.integers(0, 3, 8 + 2 * i)) for i in range(6)]
    clients = [(x.astype("float32"), y) for x, y in rows]
    return FederatedData.from_clients(clients, seed=0, num_classes=3)


@pytest.fixture(autouse=True, scope="module")
def nothing_recorded():
    """A recording of a step is worth its time in longer runs only."""
    make = session.make_simulation

    def make_simulation(*arguments):
        made = make(*arguments)
        made.executor.recorder = Unrecorded()
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "make_simulation", make_simulation)
        yield


@pytest.fixture
def terms():
    return dict(TERMS)


@pytest.fixture(scope="session")
def play(federation):
    """Run fedrep, or go on with it: ``play(folder, **options)``."""
    known = {}

    def run(folder, *, hooks=(), resume=True, **options):
        key = tuple(sorted(options.items()))
        if key not in known:
            known[key] = set_up("fedrep", federation, **{**TERMS, **options})
        return execute(*known[key], out=folder, resume=resume, hooks=hooks)

    return run


@pytest.fixture
def contents():
    """All files of a run folder by name, without what tells seconds."""

    def read(folder):
        paths = [path for path in folder.rglob("*") if path.is_file()]
        found = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        found.pop("timing.jsonl")
        summary = json.loads(found["summary.json"])
        found["summary.json"] = {k: v for k, v in summary.items() if not k.startswith("seconds")}
        return found

    return read


@pytest.fixture
def saving_every_round(monkeypatch):
    """Checkpoints by the round, not by the clock."""
    after = _Session.after_round

    def after_round(self, state):
        after(self, state)
        self.save(state)

    monkeypatch.setattr(_Session, "after_round", after_round)


@pytest.fixture
def crash_at(monkeypatch):
    """``with crash_at(n) as moments``: whatever is done to the disk fails from the n-th on."""

    @contextmanager
    def crashing(n):
        moments = []

        def ends():
            moments.append(len(moments))
            return len(moments) > n

        def before(function):
            def act(*arguments, **options):
                if ends():
                    raise Crash
                return function(*arguments, **options)

            return act

        def half(path, rows, values):
            if ends():
                some = len(rows) // 2
                if some:
                    write_at(path, rows[:some], values[:some])
                raise Crash
            write_at(path, rows, values)

        write_at = store._write_at
        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "unlink", "truncate"):
                patch.setattr(os, name, before(getattr(os, name)))
            patch.setattr(store, "_write_at", half)
            yield moments

    crashing.Crash = Crash
    return crashing
