import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.fedmtl import fedmtl
from handspan.testing.references import Reference, arrays, close

LEARNED = "relation=learned:relation_weight=0.01:relation_every=2"
CASES = (
    ("", {"relation_weight": 0.05}, None),
    ("relation_weight=0.5:shrinkage=0.1", {"relation_weight": 0.5, "shrinkage": 0.1}, None),
    (LEARNED, {"relation_weight": 0.01, "relation_every": 2}, None),
    (
        f"{LEARNED}:relation_floor=0.5",
        {"relation_weight": 0.01, "relation_every": 2, "relation_floor": 0.5},
        LocalWork(steps=2, batch_size=None),
    ),
    (
        "relation_weight=0.3",
        {"relation_weight": 0.3},
        LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.5, weight_decay=0.1)),
    ),
    (
        "relation_weight=0.3",
        {"relation_weight": 0.3},
        LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True)),
    ),
)


@pytest.mark.parametrize(("text", "options", "work"), CASES)
def test_fedmtl_descends_the_objective_of_its_paper(text, options, work):
    run = Reference(f"fedmtl:{text}" if text else "fedmtl", work)
    own, relation = fedmtl(*run.rows, models.gradient, run.start, **options, **run.work)
    for i, model in enumerate(own):
        close({name: value[i] for name, value in run.clients.params.items()}, model)
        close({name: value[i] for name, value in run.server.models.params.items()}, model)
    close(run.server.relation, relation, 1e-8)


def test_a_new_client_is_held_near_the_mean_of_all():
    work = LocalWork(steps=3, batch_size=None, adapt_steps=3, learning_rate=0.2)
    run = Reference("fedmtl:relation_weight=0.4:shrinkage=0.1", work)
    mean = arrays({name: value.mean(0) for name, value in run.server.models.params.items()})
    i = int(run.data.num_train.argmax())
    run.simulation.adapt(run.server, torch.tensor([i]), 9)
    x, y = run.rows[0][i]
    own = dict(mean)
    for _ in range(3):
        slope = models.gradient(own, x, y)
        own = {k: v - 0.2 * (slope[k] + 0.8 * (v - mean[k]) + 0.2 * v) for k, v in own.items()}
    close({name: value[i] for name, value in run.clients.params.items()}, own)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("relation=graph", "relation must be mean or learned"),
        ("relation_weight=-1", "relation_weight must be at least 0"),
        ("shrinkage=-1", "shrinkage must be at least 0"),
        ("relation_every=0", "relation_every must be at least 1"),
        ("relation_floor=0", "relation_floor must lie in"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong, told):
    with pytest.raises(HandspanError, match=told):
        parse(f"fedmtl:{wrong}")
