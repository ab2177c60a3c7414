import pytest
import torch

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.local import local
from handspan.testing.references import Reference, close

WORKS = {
    "plain": None,
    "momentum": LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.9)),
    "nesterov": LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.9, nesterov=True)),
    "weight decay": LocalWork(epochs=2, batch_size=2, sgd=Sgd(momentum=0.5, weight_decay=0.1)),
    "full batch": LocalWork(steps=3, batch_size=None, learning_rate=0.3),
}


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_local_is_plain_sgd_on_every_client_alone(work):
    run = Reference("local", work)
    wanted = local(*run.rows, models.gradient, run.start, **run.work)
    for i, model in enumerate(wanted):
        close({name: value[i] for name, value in run.clients.params.items()}, model)


def test_local_steps_follow_the_schedule_of_the_learning_rate():
    for schedule, factors in (("exponential", [1, 0.5, 0.25]), ("cosine", [1, 0.75, 0.25])):
        work = LocalWork(steps=1, batch_size=None, schedule=schedule, decay=0.5, learning_rate=0.2)
        run = Reference("local", work, rounds=3, cohort=11)
        clients, cohorts, batches = run.rows
        wanted = [run.start] * len(clients)
        for t, factor in enumerate(factors):
            wanted = local(
                clients,
                [cohorts[t]],
                lambda *at, t=t, rows=batches: rows(t, *at[1:]),
                models.gradient,
                wanted,
                learning_rate=0.2 * factor,
            )
        for i, model in enumerate(wanted):
            close({name: value[i] for name, value in run.clients.params.items()}, model)


def test_local_sends_nothing():
    run = Reference("local")
    assert run.state.costs.bytes_up == 0
    assert not torch.equal(run.clients.params["head.bias"], run.first_clients.params["head.bias"])
