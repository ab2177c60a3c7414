import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.core.records import take
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.fedbabu import fedbabu, personalise
from handspan.testing.playing import step_rows
from handspan.testing.quadratics import QuadraticTask, quadratic
from handspan.testing.references import Reference, arrays, close, oracle_clients
from handspan.testing.toys import problem

HEAD = ("head.weight", "head.bias")
CASES = (
    ("", HEAD, {}, None, "loop"),
    (":weights=uniform", HEAD, {"weights": "uniform"}, None, "stacked"),
    (
        ":frozen=head.weight",
        ("head.weight",),
        {},
        LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True, weight_decay=0.1)),
        "loop",
    ),
)


@pytest.mark.parametrize(("text", "head", "options", "work", "engine"), CASES)
def test_fedbabu_averages_bodies_under_a_frozen_head(text, head, options, work, engine):
    run = Reference(f"fedbabu{text}", work, engine=engine)
    wanted = fedbabu(*run.rows, models.gradient, run.start, head, **run.work, **options)
    close(run.server.params, wanted)
    for name in head:  # T1: bit-identical after any number of rounds
        close(run.server.params[name], run.start[name], 0.0)


@pytest.mark.parametrize(
    ("text", "names", "rate", "steps"),
    [("", None, 0.2, 20), (":tune_steps=3:tune_learning_rate=0.05:tune_names=head", HEAD, 0.05, 3)],
)
def test_a_client_is_served_the_model_tuned_on_its_rows(text, names, rate, steps):
    run = Reference(f"fedbabu{text}")
    phase, index = run.algorithm.personal[0], run.rounds
    assert phase.stages[0].steps == steps
    (_, _, tuned), *_ = run.simulation.serve(run.server, torch.arange(11), index)
    start, given = arrays(run.server.params), oracle_clients(run.data, "all")
    for i in (0, 3, 7):
        rows, _ = step_rows(run.data, phase, 0, i, round=index, seed=run.seed)
        wanted = personalise(
            *given[i],
            start,
            models.gradient,
            [part.numpy() for part in rows],
            learning_rate=rate,
            names=list(start) if names is None else names,
        )
        close(take(tuned, i).model.params, wanted)


def test_without_tuning_everybody_is_served_the_body_and_the_first_head():
    run = Reference("fedbabu:tune_steps=0")
    (_, _, served), *_ = run.simulation.serve(run.server, torch.arange(11), run.rounds)
    for i in range(11):
        close(take(served, i).model.params, arrays(run.server.params), 0.0)


def test_the_body_makes_up_for_the_frozen_head():
    """T2: f_i = 1/2 |u + v - a_i|^2 with v frozen: the fixed point is u = mean a - v."""
    a = torch.tensor([[1.0, -2.0], [0.3, 0.8], [-1.0, 0.5]]).double()
    v = torch.tensor([0.5, 0.7]).double()
    work = LocalWork(steps=3, batch_size=None, learning_rate=0.5)
    task = QuadraticTask(u=torch.zeros(2).double(), v=v)
    run = Reference("fedbabu", work, rounds=20, cohort=3, data=quadratic(a), task=task)
    close(run.server.params["u"], (a.mean(0) - v).numpy(), 1e-12)


def test_settings_of_a_tuning_that_never_happens_are_refused():
    with pytest.raises(HandspanError, match="tune_names belongs to tune_steps above 0"):
        parse("fedbabu:tune_steps=0:tune_names=head")


def test_a_head_that_is_not_there_is_refused():
    for text, told in (("frozen=nowhere.*", "matches no"), ("tune_names=x.*", "tune_names='x")):
        spec = parse(f"fedbabu:{text}")
        with pytest.raises(HandspanError, match=told):
            spec.build(problem(spec.method).setting)
