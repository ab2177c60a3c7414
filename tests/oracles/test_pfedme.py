import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.core.records import take
from handspan.numerics.local_work import LocalWork
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.pfedme import pfedme, proximal_point
from handspan.testing.playing import step_rows
from handspan.testing.quadratics import QuadraticTask, quadratic
from handspan.testing.references import Reference, arrays, close

CASES = (
    ({"prox_weight": 2.0, "inner_steps": 3}, LocalWork(steps=9, batch_size=3), 0.5, "loop"),
    (
        {
            "prox_weight": 4.0,
            "inner_steps": 2,
            "outer_learning_rate": 0.1,
            "server_mixing": 1.5,
            "weights": "examples",
        },
        LocalWork(epochs=1, batch_size=4),
        0.1,
        "stacked",
    ),
)
TARGETS = torch.tensor([[1.0, -2.0], [0.3, 0.8], [-1.0, 0.5]]).double()


@pytest.mark.parametrize(("options", "work", "eta", "engine"), CASES)
def test_pfedme_is_algorithm_1_of_its_paper(options, work, eta, engine):
    text = ":".join(["pfedme", *(f"{name}={value}" for name, value in options.items())])
    run = Reference(text, work, engine=engine)
    rate = run.work["learning_rate"]
    given = {**options, "outer_learning_rate": eta, "learning_rate": rate}
    close(run.server.params, pfedme(*run.rows, models.gradient, run.start, **given))


@pytest.mark.parametrize("steps", [0, 4])
def test_a_client_is_served_its_proximal_point_of_the_last_model(steps):
    run = Reference(
        f"pfedme:prox_weight=2:personal_steps={steps}", LocalWork(steps=5, batch_size=3)
    )
    phase, index = run.algorithm.personal[0], run.rounds
    (_, _, served), *_ = run.simulation.serve(run.server, torch.arange(11), index)
    w = arrays(run.server.params)
    for i in (0, 3, 7):
        x, y = run.rows[0][i]
        rows = step_rows(run.data, phase, 0, i, round=index, seed=run.seed)[0] if steps else []
        assert len(rows) == steps
        rows = [part.numpy() for part in rows]
        slopes = [lambda p, r=r, x=x, y=y: models.gradient(p, x[r], y[r]) for r in rows]
        close(take(served, i).params, proximal_point(w, w, slopes, 2.0, 0.1))


def test_local_steps_are_gradients_and_not_iterations():
    stage = Reference("pfedme:inner_steps=4", LocalWork(steps=9)).algorithm.rounds[0].stages[0]
    assert (stage.steps, stage.models) == (2, 4)


def test_with_exact_points_it_is_fedavg_with_a_smaller_rate():
    """T2 (Q1): the rate is eta lambda/(1 + lambda), and theta_i = (a_i + lambda w)/(1 + lambda)."""
    pull, eta = 3.0, 0.1
    exact = LocalWork(steps=2, batch_size=None, learning_rate=1 / (1 + pull))  # one step suffices
    run = Reference(
        f"pfedme:prox_weight={pull}:inner_steps=1:outer_learning_rate={eta}:personal_steps=1",
        exact,
        rounds=3,
        cohort=3,
        data=quadratic(TARGETS),
        task=QuadraticTask(w=torch.tensor([0.5, 0.5]).double()),
    )
    shrink = (1 - eta * pull / (1 + pull)) ** 2
    w = torch.tensor([0.5, 0.5]).double()
    for _ in range(3):
        w = (TARGETS + shrink * (w - TARGETS)).mean(0)
    close(run.server.params["w"], w.numpy(), 1e-13)
    (_, _, served), *_ = run.simulation.serve(run.server, torch.arange(3), 3)
    close(served.params["w"], ((TARGETS + pull * w) / (1 + pull)).numpy(), 1e-13)


def test_steps_that_overshoot_are_refused():
    with pytest.raises(HandspanError, match="overshoots"):
        parse("pfedme:prox_weight=15:outer_learning_rate=0.1")
    with pytest.raises(HandspanError, match="prox_weight must be above 0"):
        parse("pfedme:prox_weight=0")
