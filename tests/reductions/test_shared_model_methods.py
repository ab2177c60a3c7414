"""Methods whose server has one whole model become FedAvg, and others, at special settings."""

import dataclasses

import pytest

from handspan.methods import fedbabu
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.case import compare
from handspan.testing.references import Reference

WORK = LocalWork(steps=4, batch_size=3, learning_rate=0.2, sgd=Sgd(momentum=0.5))
ONE_STEP = LocalWork(steps=1, batch_size=3, learning_rate=0.2)


def model(text, work=WORK, **options):
    return dict(Reference(text, work, **options).server.params)


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_fedprox_without_pull_is_fedavg(weights):
    got = model(f"fedprox:prox_weight=0:weights={weights}")
    compare(got, model(f"fedavg:weights={weights}"), 0.0, "mu = 0")


def test_with_one_local_step_every_pull_gives_fedavg():
    got = model("fedprox:prox_weight=7", ONE_STEP)
    compare(got, model("fedavg", ONE_STEP), 0.0, "one step")


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_first_round_of_scaffold_is_fedavg_with_uniform_weights(option):
    got = model(f"scaffold:option={option}", rounds=1)
    compare(got, model("fedavg:weights=uniform", rounds=1), 1e-12, "zero controls")


def times(factor, work=WORK):
    """As many steps after a method has divided them."""
    return dataclasses.replace(work, steps=factor * work.steps)


@pytest.mark.parametrize(("variant", "gradients"), [("FO", 2), ("HF", 4)])
def test_perfedavg_without_personal_step_is_fedavg(variant, gradients):
    text = f"perfedavg:variant={variant}:inner_learning_rate=0:batches=same"
    compare(model(text, times(gradients)), model("fedavg:weights=uniform"), 0.0, "alpha = 0")


def test_pfedme_in_one_whole_iteration_is_fedprox():
    full = dataclasses.replace(WORK, batch_size=None)
    wanted = model("fedprox:prox_weight=2:weights=uniform", full)
    compare(model("pfedme:prox_weight=2:inner_steps=4", full), wanted, 1e-12, "R = 1, eta = 1/mu")


def test_the_shared_track_of_ditto_is_fedavg_whatever_the_pull():
    for pull in (0, 3):
        got = model(f"ditto:prox_weight={pull}:shared_steps=4")
        compare(got, model("fedavg"), 0.0, f"lambda = {pull}")


def test_ditto_without_pull_is_local():
    full = dataclasses.replace(WORK, batch_size=None)
    got = Reference("ditto:prox_weight=0:personal_steps=4", full)
    wanted = Reference("local", full)
    compare(dict(got.clients.params), dict(wanted.clients.params), 0.0, "lambda = 0")
    compare({"outputs": got.served}, {"outputs": wanted.served}, 1e-12, "served")


def test_fedbabu_without_head_is_fedavg():
    def build(spec, setting):
        return fedbabu.assemble(setting, spec.config, frozenset())

    got = dict(Reference("fedbabu", WORK, build=build).server.params)
    compare(got, model("fedavg"), 0.0, "all body")


def test_fedbabu_is_a_method_of_two_parts_whose_head_does_not_move():
    body = Reference("fedbabu", WORK).server.params
    other = Reference("fedsim:personal_learning_rate=0:weights=examples", WORK).server.shared
    compare({name: body[name] for name in other}, dict(other), 0.0, "head step 0")
