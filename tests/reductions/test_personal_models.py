"""What methods with personal models become at the ends of their settings."""

import pytest

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.case import compare, numbers
from handspan.testing.references import Reference

FULL = LocalWork(steps=3, batch_size=None, learning_rate=0.2, sgd=Sgd(momentum=0.5))


def outputs(run):
    return {"outputs": numbers(run.state, run.simulation, run.setting.task)["outputs"]}


@pytest.mark.parametrize("text", ["mix=0", "mix=0.7", "adaptive=true", "mix=1"])
def test_the_shared_model_of_apfl_is_that_of_fedavg_bit_for_bit(text):
    apfl, fedavg = Reference(f"apfl:{text}"), Reference("fedavg:weights=uniform")
    compare(dict(apfl.server.params), dict(fedavg.server.params), 0.0, "shared model")


def test_apfl_that_mixes_nothing_in_is_fedavg():
    apfl = Reference("apfl:mix=0")
    compare(outputs(apfl), outputs(Reference("fedavg:weights=uniform")), 0.0, "served")
    compare(dict(apfl.clients.params), dict(apfl.first_clients.params), 0.0, "own models")


def test_apfl_that_mixes_nothing_else_in_is_local():
    apfl, local = Reference("apfl:mix=1", FULL), Reference("local", FULL)
    compare(dict(apfl.clients.params), dict(local.clients.params), 1e-12, "own models")
    compare(outputs(apfl), outputs(local), 1e-12, "served")
