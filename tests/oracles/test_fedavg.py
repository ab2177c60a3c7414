import pytest

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.fedavg import fedavg
from handspan.testing.references import Reference, close

SERVERS = (
    {},
    {"weights": "uniform"},
    {"server_learning_rate": 0.5},
    {"server_momentum": 0.7, "server_learning_rate": 0.5},
    {"server_optimizer": "adam", "server_learning_rate": 0.1},
    {"server_optimizer": "yogi", "server_learning_rate": 0.1, "tau": 0.01},
    {"server_optimizer": "yogi", "beta1": 0.5, "beta2": 0.7, "weights": "uniform"},
)
WORKS = (
    LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.5)),
    LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True, weight_decay=0.01)),
)


def check(options, work, **more):
    text = ":".join(["fedavg", *(f"{name}={value}" for name, value in options.items())])
    run = Reference(text, work, **more)
    wanted = fedavg(*run.rows, models.gradient, run.start, **run.work, **options)
    close(run.server.params, wanted)


@pytest.mark.parametrize("options", SERVERS, ids=str)
def test_fedavg_and_its_server_optimisers_are_those_of_the_papers(options):
    check(options, None, rounds=6)


@pytest.mark.parametrize("work", WORKS)
def test_fedavg_averages_clients_that_train_with_momentum(work):
    check({}, work)


def test_fedavg_is_the_same_when_blocks_are_stacked():
    check({}, WORKS[0], engine="stacked")
