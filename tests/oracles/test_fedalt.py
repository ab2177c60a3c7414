import pytest
import torch

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.fedalt import fedalt
from handspan.testing.quadratics import QuadraticTask, quadratic
from handspan.testing.references import Reference, close

HEAD = ("head.weight", "head.bias")
HIDDEN = ("hidden.weight", "hidden.bias")
CASES = (
    ("", HEAD, {}, None, "loop"),
    (":weights=examples:last_steps=2", HEAD, {"weights": "examples"}, None, "stacked"),
    (
        ":personal_learning_rate=0.05:personal_steps=4:shared_steps=2",
        HEAD,
        {"personal_learning_rate": 0.05},
        LocalWork(steps=6, batch_size=3, sgd=Sgd(momentum=0.5)),
        "loop",
    ),
    (
        ":personal=hidden.*",
        HIDDEN,
        {},
        LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True, weight_decay=0.1)),
        "loop",
    ),
)


def served(run):
    """Personal parts with which clients are served."""
    (_, _, mine), *rest = run.simulation.serve(run.server, torch.arange(11), run.rounds)
    assert not rest
    return mine.personal


@pytest.mark.parametrize(("text", "names", "options", "work", "engine"), CASES)
def test_fedalt_is_algorithm_2_of_its_paper(text, names, options, work, engine):
    run = Reference(f"fedalt{text}", work, engine=engine)
    rows = run.rows
    shared, personal, last = fedalt(
        *rows,
        models.gradient,
        run.start,
        names,
        last_pass=lambda i: rows[2](run.rounds, "last_pass", 0, i),
        **run.work,
        **options,
    )
    close(run.server.shared, shared)
    for stored, wanted in ((run.clients.personal, personal), (served(run), last)):
        for i, own in enumerate(wanted):
            close({name: value[i] for name, value in stored.items()}, own)


def test_the_shared_part_follows_the_new_personal_one():
    """T2: f = 1/2 |u + v - a|^2: v+ = v - gamma_v r, u+ = u - gamma_u (1 - gamma_v) r."""
    u, v, a = torch.tensor([[1.0, -2.0], [0.5, 0.5], [0.3, 0.8]]).double()
    run = Reference(
        "fedalt:personal_learning_rate=0.3:personal_steps=1:shared_steps=1:last_steps=0",
        LocalWork(batch_size=None, learning_rate=0.1),
        rounds=1,
        cohort=1,
        data=quadratic(a.unsqueeze(0)),
        task=QuadraticTask(u=u, v=v),
    )
    r = u + v - a
    close(run.server.shared["u"], (u - 0.1 * (1 - 0.3) * r).numpy(), 1e-14)
    close(run.clients.personal["v"][0], (v - 0.3 * r).numpy(), 1e-14)


def test_without_a_last_pass_the_stored_part_is_served():
    run = Reference("fedalt:last_steps=0")
    assert not run.algorithm.personal
    assert Reference("fedalt:last_steps=7").algorithm.personal[0].stages[0].steps == 7
    assert Reference("fedalt").algorithm.personal[0].stages[0].steps == 2
    for name, value in served(run).items():
        close(value, run.clients.personal[name].numpy(), 0.0)
