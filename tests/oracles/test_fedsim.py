import pytest
import torch

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.fedsim import fedsim
from handspan.testing.quadratics import QuadraticTask, quadratic
from handspan.testing.references import Reference, close

HEAD = ("head.weight", "head.bias")
CASES = (
    ("", HEAD, {}, None, "loop"),
    (":weights=examples:last_steps=2", HEAD, {"weights": "examples"}, None, "stacked"),
    (
        ":personal_learning_rate=0.05:personal=hidden.*",
        ("hidden.weight", "hidden.bias"),
        {"personal_learning_rate": 0.05},
        LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True, weight_decay=0.1)),
        "loop",
    ),
)


@pytest.mark.parametrize(("text", "names", "options", "work", "engine"), CASES)
def test_fedsim_is_algorithm_3_of_its_paper(text, names, options, work, engine):
    run = Reference(f"fedsim{text}", work, engine=engine)
    rows = run.rows
    shared, personal, last = fedsim(
        *rows,
        models.gradient,
        run.start,
        names,
        last_pass=lambda i: rows[2](run.rounds, "last_pass", 0, i),
        **run.work,
        **options,
    )
    close(run.server.shared, shared)
    length = run.spec.config.last_steps or run.setting.work.whole()["steps"]
    assert run.algorithm.personal[0].stages[0].steps == length
    (_, _, mine), *_ = run.simulation.serve(run.server, torch.arange(11), run.rounds)
    for stored, wanted in ((run.clients.personal, personal), (mine.personal, last)):
        for i, own in enumerate(wanted):
            close({name: value[i] for name, value in stored.items()}, own)


def test_both_parts_move_from_the_old_pair():
    """T2: f = 1/2 |u + v - a|^2: v+ = v - gamma_v r, u+ = u - gamma_u r."""
    u, v, a = torch.tensor([[1.0, -2.0], [0.5, 0.5], [0.3, 0.8]]).double()
    run = Reference(
        "fedsim:personal_learning_rate=0.3:last_steps=0",
        LocalWork(steps=1, batch_size=None, learning_rate=0.1),
        rounds=1,
        cohort=1,
        data=quadratic(a.unsqueeze(0)),
        task=QuadraticTask(u=u, v=v),
    )
    r = u + v - a
    close(run.server.shared["u"], (u - 0.1 * r).numpy(), 1e-14)
    close(run.clients.personal["v"][0], (v - 0.3 * r).numpy(), 1e-14)
