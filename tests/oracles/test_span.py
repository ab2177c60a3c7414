from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.numerics.spanning.schedule import Schedule
from handspan.testing.oracles import models
from handspan.testing.oracles.centres import Centres
from handspan.testing.oracles.span import Span
from handspan.testing.oracles.span_clients import Client, Server
from handspan.testing.references import Reference, arrays, close, oracle_clients
from handspan.testing.turned import turned

MODES = ("race", "personal", "common")


@dataclass(frozen=True, kw_only=True)
class Watched(Span):
    """The oracle, and what it decides."""

    seen: list = field(default_factory=list)

    def judge(self, s, *rest):
        new = super().judge(s, *rest)
        told = (new.mode, "told" if new.temperature else "not told")
        self.seen.append("undecided" if new.mode == "race" else told)
        return new

    def cut(self, s, *rest):
        new = super().cut(s, *rest)
        self.seen.append(f"{s.rank} to {new.rank}")
        return new

    def weigh(self, s, *rest):
        new = super().weigh(s, *rest)
        centres = [int((one.centres.count > 0).sum()) for one in (s, new)]
        self.seen.append((f"{centres[0]} to {centres[1]}", new.own))
        return new


class Twin:
    """A run of span on a toy, and the oracle's of the same."""

    def __init__(self, text="span", work=None, **options):
        self.run = run = Reference(text, work, **options)
        config, data = run.spec.config, run.data
        schedule = Schedule.of(run.rounds, race=config.race, cut=config.cut, shrink=config.shrink)
        self.rows = oracle_clients(data, "all")
        _, cohorts, batches = run.rows
        sgd = run.setting.work.sgd
        self.oracle = Watched(
            rows=self.rows,
            num_train=data.num_train.tolist(),
            batches=batches,
            gradient=models.gradient,
            predict=models.predict,
            num_classes=3,
            bias="head.bias" if config.prior else None,
            rate=self.rate,
            momentum=sgd.momentum,
            nesterov=sgd.nesterov,
            rounds=run.rounds,
            races=schedule.races,
            cuts=schedule.cuts,
            shrink=schedule.shrink,
            **{
                n: getattr(config, n) for n in ("scaled", "offset", "damping", "average", "weights")
            },
        )
        self.first = first = run.first_server
        clients = [Client(v=v) for v in run.first_clients.coordinates.numpy()]
        self.server, self.clients = self.oracle.run(server(first), clients, cohorts)

    def rate(self, t):
        work, rounds = self.run.setting.work, self.run.rounds
        if work.schedule == "cosine" and t < rounds:
            return work.learning_rate * 0.5 * (1 + np.cos(np.pi * t / rounds))
        return work.learning_rate

    def agree(self, tolerance=1e-8):
        got, wanted = server(self.run.server), self.server
        assert (got.mode, got.rank, got.averaged) == (wanted.mode, wanted.rank, wanted.averaged)
        assert (got.temperature, got.own) == (wanted.temperature, wanted.own)
        for name in ("common", "body", "basis", "moments"):
            close(getattr(got, name), getattr(wanted, name), tolerance)
        if got.averaged:
            close(got.average, wanted.average, tolerance)
        there = wanted.centres.count > 0
        close(got.centres.count, wanted.centres.count, tolerance)
        close(got.centres.mean[there], wanted.centres.mean[there], tolerance)
        close(got.centres.variance[there], wanted.centres.variance[there], tolerance)
        for ours, theirs in zip(got.cuts, wanted.cuts, strict=True):
            close(ours[0], theirs[0], tolerance)
            close(ours[1], theirs[1], tolerance)
        stored = self.run.clients
        for i, client in enumerate(self.clients):
            width = len(client.v)
            close(stored.coordinates[i][:width], client.v, tolerance)
            assert not stored.coordinates[i][width:].any()
            assert (int(stored.seen[i]), int(stored.centre[i])) == (client.seen, client.centre)
        self.serves(tolerance)

    def serves(self, tolerance):
        data, wanted = self.run.data, []
        for i, (x, _) in enumerate(oracle_clients(data, "test")):
            wanted.append(models.predict(self.oracle.served(self.server, self.clients[i], i), x))
        close(self.run.served, np.concatenate(wanted), tolerance)


def server(s):
    """The server's record as the oracle has it."""
    c, cuts = s.centres, int(s.num_cuts)
    return Server(
        common=arrays(s.common.params),
        body=arrays(s.body),
        basis=arrays(s.basis),
        centres=Centres(c.count.numpy().copy(), c.mean.numpy().copy(), c.variance.numpy().copy()),
        moments=s.moments.numpy().copy(),
        mode=MODES[int(s.mode)],
        rank=int(s.rank),
        average=arrays(s.average.params),
        averaged=int(s.averaged),
        cuts=[
            (m.numpy(), v.numpy()) for m, v in zip(s.matrices[:cuts], s.shifts[:cuts], strict=True)
        ],
        temperature=float(s.temperature),
        own=float(s.own),
    )


MOMENTUM = LocalWork(steps=4, batch_size=3, learning_rate=0.2, sgd=Sgd(momentum=0.5))
NESTEROV = LocalWork(
    epochs=1,
    batch_size=4,
    learning_rate=0.3,
    schedule="cosine",
    sgd=Sgd(momentum=0.5, nesterov=True),
)
LONG = LocalWork(steps=9, batch_size=None, learning_rate=0.5)
EAGER = LocalWork(steps=15, batch_size=None, learning_rate=1.0)
UNDECIDED = ["undecided", "undecided"]
CASES = {  # method, local work, seed, data, and what has to be decided
    "personal heads win and are told": (
        "span",
        None,
        2,
        {"skew": 1.0},
        [*UNDECIDED, ("personal", "told"), "4 to 2", "2 to 1", ("2 to 2", 0.0)],
    ),
    "one model for all, but not before coordinates are weighed": (
        "span",
        None,
        2,
        {},
        [*UNDECIDED, ("personal", "told"), "4 to 1", "1 to 1", ("2 to 1", 0.0)],
    ),
    "one model for all, averaged and told": (
        "span:average=0.5",
        NESTEROV,
        4,
        {"skew": 1.0},
        [*UNDECIDED, ("common", "told")],
    ),
    "one model for all, not told": (
        "span:average=0:weights=uniform",
        None,
        0,
        {"num_groups": 1, "skew": 1.5},
        [*UNDECIDED, ("common", "not told")],
    ),
    "clients keep their own coordinates": (
        "span",
        None,
        0,
        {},
        [*UNDECIDED, ("personal", "not told"), "4 to 4", "4 to 3", ("2 to 1", 1.0)],
    ),
    "nobody has rows to spare": (
        "span",
        None,
        0,
        {"is_held_out": False},
        [*UNDECIDED, ("common", "not told")],
    ),
    "nobody has rows to spare, and there is no race": (
        "span:race=false",
        None,
        0,
        {"is_held_out": False},
        ["4 to 4", "4 to 4", ("2 to 2", 1.0)],
    ),
    "a dormant direction comes back": (
        "span:race=false:width=3:prior=false",
        None,
        2,
        {"skew": 1.0},
        ["3 to 1", "1 to 3", ("2 to 1", 1.0)],
    ),
    "no offset, with momentum": (
        "span:offset=false:race=false:width=3",
        MOMENTUM,
        0,
        {"skew": 1.0},
        ["3 to 2", "2 to 2", ("2 to 1", 1.0)],
    ),
    "plain steps": (
        "span:scaled=false",
        None,
        1,
        {},
        [*UNDECIDED, ("personal", "not told"), "4 to 2", "2 to 2", ("2 to 2", 0.25)],
    ),
    "plain steps without offset": (
        "span:scaled=false:offset=false:race=false:width=3",
        None,
        1,
        {},
        ["3 to 3", "3 to 3", ("2 to 2", 0.0)],
    ),
    "what is personal is no head": (
        "span:factor=hidden.*:race=false:width=3:weights=uniform",
        None,
        0,
        {"num_groups": 2, "noise": 0.4},
        ["3 to 1", "1 to 1", ("2 to 1", 0.0)],
    ),
    "four centres become three": (
        "span:race=false:width=3:groups=4",
        LONG,
        0,
        {"num_clients": 16, "noise": 0.3},
        ["3 to 2", "2 to 3", ("4 to 3", 0.75)],
    ),
    "one model for all wins at once": (
        "span",
        EAGER,
        0,
        {"num_groups": 1, "noise": 0.1},
        [("common", "not told")],
    ),
    "personal heads win at once": (
        "span",
        EAGER,
        3,
        {"noise": 0.1},
        [("personal", "told"), "4 to 4", "4 to 4", ("5 to 5", 0.75)],
    ),
    "nothing is decided": (
        "span:race=false:cut=false:shrink=false:factor=all:width=2",
        NESTEROV,
        0,
        {},
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_span_equals_its_definition_over_all_phases(case):
    text, work, seed, data, decided = CASES[case]
    rounds, cohort = {LONG: (26, 8), EAGER: (40, 8)}.get(work, (20, 7))
    twin = Twin(text, work, rounds=rounds, cohort=cohort, seed=seed, data=turned(seed, **data))
    assert twin.oracle.seen == decided
    twin.agree()


def test_span_is_the_same_when_blocks_are_stacked():
    twin = Twin(rounds=20, cohort=7, seed=2, data=turned(2, skew=1.0), engine="stacked")
    twin.agree()


@pytest.mark.parametrize("rounds", [1, 2, 3, 7])
def test_short_runs_are_those_of_the_definition(rounds):
    Twin(rounds=rounds).agree()


@pytest.mark.parametrize("text", ["span", "span:race=false", "span:race=false:shrink=false"])
def test_a_new_client_starts_at_the_centre_that_fits_its_rows(text):
    # Full batches: the steps of adapting see all rows in stored order.
    work = LocalWork(steps=3, batch_size=None, learning_rate=0.2, adapt_steps=2)
    twin = Twin(text, work, rounds=20, cohort=7, seed=2, data=turned(2))
    run, ids = twin.run, torch.tensor([3, 11])
    run.simulation.adapt(run.server, ids, run.state.round)
    assert twin.server.mode == "personal"
    for i in ids.tolist():
        rows = np.arange(len(twin.rows[i][1]))
        twin.clients[i] = twin.oracle.adapted(twin.server, i, [rows, rows])
    twin.agree()
