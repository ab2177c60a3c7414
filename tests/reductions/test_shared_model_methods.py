"""Methods with one shared model become FedAvg at special settings."""

import pytest

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
