import pytest
import torch

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.fedprox import fedprox
from handspan.testing.quadratics import QuadraticTask, quadratic
from handspan.testing.references import Reference, close

CASES = (
    ({}, None, "loop"),
    ({"prox_weight": 1.5, "weights": "uniform"}, None, "stacked"),
    ({"prox_weight": 0.7}, LocalWork(steps=4, batch_size=3, sgd=Sgd(momentum=0.5)), "loop"),
    (
        {"prox_weight": 0.3},
        LocalWork(epochs=2, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True, weight_decay=0.1)),
        "loop",
    ),
)


@pytest.mark.parametrize(("options", "work", "engine"), CASES)
def test_fedprox_is_algorithm_2_of_its_paper(options, work, engine):
    text = ":".join(["fedprox", *(f"{name}={value}" for name, value in options.items())])
    run = Reference(text, work, engine=engine)
    wanted = fedprox(
        *run.rows, models.gradient, run.start, **{"prox_weight": 0.1, **options}, **run.work
    )
    close(run.server.params, wanted)


def test_on_a_quadratic_the_local_steps_end_where_the_sheet_says():
    """T2: A = h I, K steps: w = p + (1 - eta (h + mu))^K (w^t - p), p = (h a + mu w^t)/(h + mu)."""
    eta, h, mu, steps = 0.1, 2.0, 0.7, 5
    start, a = torch.tensor([[1.0, -2.0], [0.3, 0.8]]).double()
    work = LocalWork(steps=steps, batch_size=None, learning_rate=eta)
    run = Reference(
        f"fedprox:prox_weight={mu}",
        work,
        rounds=1,
        cohort=1,
        data=quadratic(a.unsqueeze(0), torch.full((1, 2), h).double()),
        task=QuadraticTask(w=start),
    )
    p = (h * a + mu * start) / (h + mu)
    close(run.server.params["w"], (p + (1 - eta * (h + mu)) ** steps * (start - p)).numpy(), 1e-13)
