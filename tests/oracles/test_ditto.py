import pytest
import torch

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.ditto import ditto
from handspan.testing.quadratics import QuadraticTask, quadratic
from handspan.testing.references import Reference, close

CASES = (
    ({}, None, "loop"),
    ({"prox_weight": 0.3, "weights": "uniform"}, None, "stacked"),
    (
        {"prox_weight": 2.0},
        LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True, weight_decay=0.1)),
        "loop",
    ),
)
TARGETS = torch.tensor([[1.0, -2.0], [0.3, 0.8], [-1.0, 0.5]]).double()


@pytest.mark.parametrize(("options", "work", "engine"), CASES)
def test_ditto_is_algorithm_1_of_its_paper(options, work, engine):
    text = ":".join(["ditto", *(f"{name}={value}" for name, value in options.items())])
    run = Reference(text, work, engine=engine)
    w, v = ditto(
        *run.rows, models.gradient, run.start, **{"prox_weight": 1.0, **options}, **run.work
    )
    close(run.server.params, w)
    for i, own in enumerate(v):
        close({name: value[i] for name, value in run.clients.params.items()}, own)


def test_steps_end_where_the_sheet_says():
    """T2 (Q1): v = p + (1 - eta (1 + lambda))^s (v_old - p), p = (a + lambda w) / (1 + lambda)."""
    start, eta, pull = torch.tensor([0.5, 0.5]).double(), 0.1, 0.7
    run = Reference(
        f"ditto:prox_weight={pull}:personal_steps=4:shared_steps=2",
        LocalWork(batch_size=None, learning_rate=eta),
        rounds=1,
        cohort=3,
        data=quadratic(TARGETS),
        task=QuadraticTask(w=start),
    )
    p = (TARGETS + pull * start) / (1 + pull)
    close(run.clients.params["w"], (p + (1 - eta * (1 + pull)) ** 4 * (start - p)).numpy(), 1e-13)


def test_personal_models_end_between_their_own_optimum_and_the_mean():
    """T2 (Q1): v_i ends at (a_i + lambda mean a) / (1 + lambda); so does a new client."""
    options = {"cohort": 3, "data": quadratic(TARGETS), "task": QuadraticTask(w=0 * TARGETS[0])}
    work = LocalWork(batch_size=None, learning_rate=0.3, adapt_steps=60)
    run = Reference("ditto:prox_weight=2", work, rounds=40, **options)
    wanted = (TARGETS + 2 * TARGETS.mean(0)) / 3
    close(run.clients.params["w"], wanted.numpy(), 1e-9)
    new = Reference("ditto:prox_weight=2", work, rounds=0, **options)
    assert new.state.round == 0
    new.simulation.adapt(run.server, torch.arange(3), 40)
    close(new.clients.params["w"], wanted.numpy(), 1e-9)


def test_a_new_client_starts_at_the_shared_model():
    run, still = Reference("ditto"), LocalWork(learning_rate=0.0, adapt_steps=1)
    new = Reference("ditto", still, rounds=0)
    new.simulation.adapt(run.server, torch.arange(11), 4)
    for name, value in run.server.params.items():
        close(new.clients.params[name], value.expand(11, *value.shape).numpy(), 0.0)
