"""The race of a model with side information against one without."""

import dataclasses

import pytest
import torch

from handspan.core import keys
from handspan.core.federation import make_round
from handspan.numerics.local_work import LocalWork
from handspan.numerics.side_race import GATE, OPEN, PLAIN, SIDE
from handspan.testing.case import compare
from handspan.testing.references import Reference
from handspan.testing.toys import NUM_SIDE, ToyTask, labelled

SIZES = (40,) * 12


class Gated(ToyTask):
    """The toy network with a gate on its side information."""

    def init(self, key):
        params, buffers = super().init(key)
        return params, {**buffers, GATE: torch.ones((), dtype=self.dtype)}

    def features(self, params, buffers, x, side):
        return super().features(params, buffers, x, buffers[GATE] * side)


def clients(tells):
    """Rows whose commoner labels z tells, or not; z is drawn in both cases."""
    data = labelled(sizes=SIZES, num_groups=1)
    side = keys.normal(keys.key(1, "z"), (len(SIZES), NUM_SIDE), torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(SIZES)), data.offsets.diff())
    rare, common = (torch.where(side[owner, 0] > 0, *pair) for pair in ((0, 2), (2, 0)))
    return dataclasses.replace(
        data,
        side=side,
        y=torch.where(data.y == rare, common, data.y) if tells else data.y,
        num_train=data.num_train - 16,
        num_validation=data.num_validation + 16,
    )


def raced(tells, engine="loop"):
    work = LocalWork(steps=8, batch_size=8, learning_rate=0.3)
    return Reference(
        "perfedsi:gate=true",
        work,
        rounds=12,
        cohort=6,
        data=clients(tells),
        task=Gated(side_width=2),
        engine=engine,
    )


def test_side_information_that_tells_is_kept():
    run = raced(True)
    assert int(run.server.mode) == SIDE
    assert run.algorithm.describe(run.server) == {"reads_side": 1.0}
    assert float(run.algorithm.shared_model(run.server).buffers[GATE]) == 1


def test_side_information_that_says_nothing_is_ignored():
    run = raced(False)
    assert int(run.server.mode) == PLAIN
    model = run.algorithm.shared_model(run.server)
    assert float(model.buffers[GATE]) == 0
    x = run.data.x[:5]
    outputs = [
        run.setting.task.predict(model.params, model.buffers, x, z) for z in run.data.side[:2]
    ]
    assert torch.equal(*outputs)


def test_both_are_trained_until_half_way_and_the_winner_alone_from_then_on():
    halfway = raced(True)
    schedule = halfway.algorithm.rounds
    server = halfway.first_server
    assert int(server.mode) == OPEN

    def played(server, index):
        found = make_round(index, torch.arange(6), halfway.simulation.population)
        return [phase.name for phase in schedule if phase.when(server, found)]

    assert played(server, 0) == played(server, 5) == ["race_side", "race_plain"]
    assert "judge" in played(server, 6)
    decided = dataclasses.replace(server, mode=torch.tensor(SIDE))
    assert played(decided, 6) == played(decided, 11) == ["train"]
    assert schedule[-1].stages[0].rows == "all" and schedule[1].stages[0].rows == "train"


def test_until_half_way_the_plain_model_is_fedavg_with_a_closed_gate():
    """Same cohorts and starts; on full batches, since plans depend on the name of a phase."""
    work = LocalWork(steps=2, batch_size=None, learning_rate=0.3)
    data = clients(True)
    zero = dataclasses.replace(data, side=torch.zeros_like(data.side))
    options = {"rounds": 3, "cohort": 6}
    half = Reference("perfedsi:gate=true", work, data=data, task=Gated(side_width=2), **options)
    state = half.first_server
    for index in range(2):  # of three rounds the first is raced; here two are, by hand
        found = make_round(index, torch.arange(12), half.simulation.population)
        phase = half.algorithm.rounds[2]
        outcome = half.simulation.exchange(phase, phase.broadcast(state, found), found)
        half.simulation.commit()
        state = phase.combine(state, outcome.reduction, found)
    wanted = Reference(
        "perfedsi", work, data=zero, task=ToyTask(side_width=2), rounds=2, cohort=12, seed=3
    )
    compare(dict(state.plain.params), dict(wanted.server.params), 1e-12, "closed gate")


@pytest.mark.parametrize("tells", [True, False])
def test_engines_agree_on_the_race(tells):
    one, other = raced(tells), raced(tells, engine="stacked")
    assert int(one.server.mode) == int(other.server.mode)
    for name in ("side", "plain"):
        pair = (dict(getattr(run.server, name).params) for run in (one, other))
        compare(*pair, 1e-10, name)
