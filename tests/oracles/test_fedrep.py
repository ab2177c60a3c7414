import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.fedrep import fedrep
from handspan.testing.references import Reference, close

HEAD = ("head.weight", "head.bias")
CASES = (
    ("", {}, None),
    (":weights=examples", {"weights": "examples"}, None),
    (":head_learning_rate=0.05", {"head_learning_rate": 0.05}, None),
    (":personal_steps=4:shared_steps=2", {}, None),
    (":personal_epochs=2:shared_epochs=1", {}, LocalWork(batch_size=3, sgd=Sgd(momentum=0.5))),
    (":personal_epochs=2:shared_steps=3", {}, None),
    ("", {}, LocalWork(steps=6, batch_size=3, sgd=Sgd(momentum=0.5))),
    ("", {}, LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True))),
    ("", {}, LocalWork(steps=3, batch_size=None, sgd=Sgd(weight_decay=0.1))),
)


@pytest.mark.parametrize(("text", "options", "work"), CASES)
def test_fedrep_is_algorithm_1_of_its_paper(text, options, work):
    run = Reference(f"fedrep{text}", work)
    shared, heads = fedrep(*run.rows, models.gradient, run.start, HEAD, **run.work, **options)
    close(run.server.shared, shared)
    for i, head in enumerate(heads):
        close({name: value[i] for name, value in run.clients.personal.items()}, head)


def test_steps_are_split_two_to_one_between_head_and_body():
    run = Reference("fedrep", LocalWork(steps=6, batch_size=2))
    stages = run.algorithm.rounds[0].stages
    assert [stage.steps for stage in stages] == [4, 2]


def test_blocks_take_epochs_of_their_own():
    run = Reference("fedrep:personal_epochs=2:shared_epochs=1", LocalWork(steps=6, batch_size=2))
    stages = run.algorithm.rounds[0].stages
    assert [(stage.epochs, stage.steps) for stage in stages] == [(2, None), (1, None)]
    with pytest.raises(HandspanError, match="either personal_steps or personal_epochs"):
        Reference("fedrep:personal_epochs=2:personal_steps=1")
    with pytest.raises(HandspanError, match="shared_epochs must be at least 1"):
        Reference("fedrep:shared_epochs=0")


def test_a_new_client_fits_its_head_with_the_body_fixed():
    work = LocalWork(steps=3, batch_size=None, adapt_steps=3, learning_rate=0.2)
    run = Reference("fedrep", work, rounds=0)
    i = int(run.data.num_train.argmax())
    run.simulation.adapt(run.server, torch.tensor([i]), 9)
    x, y = run.rows[0][i]
    head = {k: v[i].numpy() for k, v in run.first_clients.personal.items()}
    body = {k: v.numpy() for k, v in run.server.shared.items()}
    for _ in range(3):
        slope = models.gradient({**body, **head}, x, y)
        head = {name: head[name] - 0.2 * slope[name] for name in head}
    close({name: value[i] for name, value in run.clients.personal.items()}, head)
    assert run.simulation.store.written.nonzero().flatten().tolist() == [i]
