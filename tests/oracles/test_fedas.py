import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.core.records import take
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.fedas import fedas
from handspan.testing.references import Reference, arrays, close
from handspan.testing.toys import ToyTask

HEAD = ("head.weight", "head.bias")


def whole(run, i):
    """Body and head of a client, as they are stored."""
    client = take(run.clients, i)
    return arrays({**client.body.shared, **client.own.personal})


@pytest.mark.parametrize(
    ("text", "options", "work"),
    [
        ("fedas", {}, None),
        ("fedas:align_learning_rate=0.5", {"align_learning_rate": 0.5}, None),
        ("fedas:align_epochs=0:trace_power=0.5", {"align": False, "trace_power": 0.5}, None),
        (
            "fedas:align_epochs=3:align_learning_rate=0.3",
            {"align_learning_rate": 0.3},
            LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.5, weight_decay=0.1)),
        ),
        (
            "fedas:align_learning_rate=1",
            {"align_learning_rate": 1.0},
            LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True)),
        ),
    ],
)
def test_fedas_is_the_method_of_its_paper(text, options, work):
    run = Reference(text, work)
    body, own, is_trained = fedas(
        *run.rows,
        models.gradient,
        models.features,
        models.gradient_features,
        run.start,
        HEAD,
        **{"align_learning_rate": 0.01, **options},
        **run.work,
    )
    close(run.server.shared, body)
    assert run.clients.is_trained.tolist() == is_trained
    for i, model in enumerate(own):
        close(whole(run, i), model)


def test_a_client_is_served_what_its_last_training_left():
    run = Reference("fedas")
    for ids, b, mine in run.simulation.serve(run.server, torch.arange(11), 4):
        for j, i in enumerate(ids.tolist()):
            close(run.algorithm.model(b, take(mine, j)).params, whole(run, i))


def test_a_new_client_trains_the_shared_body_with_its_first_head():
    work = LocalWork(steps=3, batch_size=None, adapt_steps=4, learning_rate=0.3)
    run = Reference("fedas", work, rounds=1)
    fresh = run.clients.is_trained.tolist().index(0)
    body = arrays(run.server.shared)
    run.simulation.adapt(run.server, torch.tensor([fresh]), 9)
    x, y = run.rows[0][fresh]
    own = {**body, **{name: run.start[name] for name in HEAD}}
    for _ in range(4):
        slope = models.gradient(own, x, y)
        own = {name: value - 0.3 * slope[name] for name, value in own.items()}
    close(whole(run, fresh), own)


class AllHead(ToyTask):
    head = ("head.bias", "head.weight", "hidden.bias", "hidden.weight")


class NoHead(ToyTask):
    head = ()


@pytest.mark.parametrize("task", [AllHead(), NoHead()])
def test_a_model_without_head_or_without_body_is_refused(task):
    with pytest.raises(HandspanError, match="fedas needs a model with a last layer"):
        Reference("fedas", task=task)


@pytest.mark.parametrize("name", ["align_epochs", "align_learning_rate", "trace_power"])
def test_what_cannot_be_meant_is_refused(name):
    with pytest.raises(HandspanError, match=f"{name} must be at least 0"):
        parse(f"fedas:{name}=-1")
