import pytest

from handspan.models.convert import task_from_module
from handspan.models.zoo import make_model
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.fedper import fedper
from handspan.testing.references import Reference, close

WORK = LocalWork(epochs=1, batch_size=3, sgd=Sgd(momentum=0.5))
HEAD = ("head.weight", "head.bias")


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(("text", "weights"), [("", "uniform"), (":weights=examples", "examples")])
def test_srph_shares_the_representation_and_keeps_the_head(text, weights, engine):
    run = Reference(f"sr-ph{text}", WORK, engine=engine)
    base = {name: value for name, value in run.start.items() if name not in HEAD}
    heads = [{name: run.start[name] for name in HEAD}] * 11
    base, own = fedper(*run.rows, models.gradient, base, heads, weights=weights, **run.work)
    close(run.server.shared, base)
    for i, head in enumerate(own):
        close({name: value[i] for name, value in run.clients.personal.items()}, head)


def test_other_parts_can_be_personal():
    task = task_from_module(make_model("omniglot", (16, 16), 3))
    spec = parse("srph:personal=head+conv4.*")
    setting = Reference("srph", rounds=0, task=task).setting
    server = spec.build(setting).init_server(Reference("srph", rounds=0).key, None)
    assert "conv3.weight" in server.shared and "conv4.weight" not in server.shared
