"""Without its parts span is a method that is known; with them it finds what is planted."""

import dataclasses

import pytest
import torch

from handspan.evaluation.clustering import clustering_scores
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.numerics.spanning.schedule import COMMON, PERSONAL, Schedule
from handspan.testing.case import compare
from handspan.testing.references import Reference
from handspan.testing.turned import turned

OFF = "race=false:cut=false:shrink=false:prior=false:width=3"
MOMENTUM = LocalWork(steps=6, batch_size=3, learning_rate=0.1, sgd=Sgd(momentum=0.5))


def factorised(options, work=MOMENTUM, **more):
    """pFL-MF on the head, from span's start; both split the steps, span the other way round."""
    spanned = Reference(f"span:{OFF}:{options[0]}", work, **more)
    start = spanned.first_server

    def build(spec, setting):
        algorithm = spec.build(setting)

        def init_server(key, population):
            first = algorithm.init_server(key, population)
            basis = {n: rows[-len(first.basis[n]) :] for n, rows in start.basis.items()}
            return dataclasses.replace(first, basis=basis, body=start.body)

        return dataclasses.replace(algorithm, init_server=init_server)

    base = "pflmf:rank=3:factor=head:v_for_basis=new:weights=examples"
    steps = ":personal_steps=2:shared_steps=4"
    return spanned, Reference(f"{base}{steps}:{options[1]}", work, build=build, **more)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (("scaled=false:offset=false", "scaled=false"), 1e-12),
        (("scaled=false", "scaled=false:affine=true"), 1e-12),
        # The ridge of U^T U is relative to its diagonal here, and absolute there.
        (("offset=false", "scaled=true"), 1e-6),
        (("offset=true", "scaled=true:affine=true"), 1e-6),
    ],
)
def test_without_its_decisions_span_is_pfl_mf_with_the_new_coordinates(options, tolerance):
    # Nobody holds rows out: span would train on them, and pFL-MF is given the data without.
    data = turned(0, is_held_out=False)
    got, wanted = factorised(options, data=data, rounds=5, cohort=7)
    basis = {n: rows[-len(wanted.server.basis[n]) :] for n, rows in got.server.basis.items()}
    compare(basis, dict(wanted.server.basis), tolerance, "basis")
    compare(dict(got.server.body), dict(wanted.server.body), tolerance, "body")
    pair = [{"v": run.clients.coordinates} for run in (got, wanted)]
    compare(*pair, tolerance, "coordinates")
    compare({"outputs": got.served}, {"outputs": wanted.served}, tolerance, "served")


def test_where_one_model_wins_span_is_fedavg_in_the_rounds_that_train_it():
    options = {"rounds": 20, "cohort": 7, "seed": 0, "data": turned(0, num_groups=1, skew=1.5)}
    got = Reference("span:prior=false", **options)
    race = Schedule.of(20, race=True, cut=True, shrink=True).races[-1]

    def build(spec, setting):
        """FedAvg that rests in odd rounds of the race, and then trains on all rows."""
        algorithm = spec.build(setting)
        (phase,) = algorithm.rounds
        (stage,) = phase.stages

        def during(name, rows, when):
            stages = (dataclasses.replace(stage, rows=rows),)
            return dataclasses.replace(phase, name=name, stages=stages, when=when)

        def is_race(server, round):
            return int(round.index) < race and int(round.index) % 2 == 0

        rounds = (
            during("race", "train", is_race),
            during("common", "all", lambda server, round: int(round.index) >= race),
        )
        return dataclasses.replace(algorithm, rounds=rounds)

    wanted = Reference("fedavg", build=build, **options)
    assert int(got.server.mode) == COMMON
    compare(dict(got.server.common.params), dict(wanted.server.params), 0.0, "one model")
    compare({"outputs": got.served}, {"outputs": wanted.served}, 1e-12, "served")
    averaged = Reference("span:average=0.25:prior=false", **options).server
    assert float(averaged.averaged) == 5, "the last quarter of the rounds"


def found(run):
    """Mode, rank, and the adjusted Rand index of the groups."""
    everyone = torch.arange(run.data.num_clients)
    parts = [mine for _, _, mine in run.simulation.serve(run.server, everyone, run.state.round)]
    labels = torch.cat([run.algorithm.cluster(mine) for mine in parts])
    scores = clustering_scores(run.data.groups, labels)
    rank = run.algorithm.describe(run.server)["rank"]
    return int(run.server.mode), rank, scores["ari"], len(set(labels.tolist()))


PLANTED = LocalWork(steps=15, batch_size=None, learning_rate=0.3)


def planted(groups, seed, text="span"):
    data = turned(seed, num_clients=24, rows=24, num_groups=groups)
    options = {"rounds": 40, "cohort": 8, "seed": seed, "engine": "stacked"}
    return Reference(text, PLANTED, data=data, **options)


@pytest.mark.parametrize("seed", [5, 7])
def test_planted_groups_and_their_rank_are_found(seed):
    assert found(planted(3, seed)) == (PERSONAL, 3.0, 1.0, 3)


def test_where_nothing_is_planted_one_model_serves_all():
    _, rank, _, groups = found(planted(1, 0))
    assert (rank, groups) == (1.0, 1)
