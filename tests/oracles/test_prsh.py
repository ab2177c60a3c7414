import pytest

from handspan.methods.prsh import lower_layers
from handspan.models.convert import task_from_module
from handspan.models.zoo import make_model
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.lgfedavg import lgfedavg
from handspan.testing.references import Reference, close
from handspan.testing.toys import ToyTask

WORK = LocalWork(epochs=1, batch_size=3, sgd=Sgd(momentum=0.5))
HEAD = ("head.weight", "head.bias")


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("text", "top", "weights"),
    [
        ("", HEAD, "uniform"),
        (":weights=examples", HEAD, "examples"),
        (":personal=hidden.weight", (*HEAD, "hidden.bias"), "uniform"),
    ],
)
def test_prsh_keeps_the_lower_layers_and_shares_the_rest(text, top, weights, engine):
    run = Reference(f"pr-sh{text}", WORK, engine=engine)
    shared, own = lgfedavg(*run.rows, models.gradient, run.start, top, weights=weights, **run.work)
    close(run.server.shared, shared)
    for i, model in enumerate(own):
        local = {name: value for name, value in model.items() if name not in top}
        close({name: value[i] for name, value in run.clients.personal.items()}, local)


def test_lower_layers_are_the_first_two_convolutions_where_there_are_any():
    task = task_from_module(make_model("omniglot", (16, 16), 3))
    assert lower_layers(task).split("+") == [
        f"{kind}{i}.{part}"
        for kind in ("conv", "norm")
        for i in (1, 2)
        for part in ("bias", "weight")
    ]
    assert lower_layers(ToyTask()).split("+") == ["hidden.weight", "hidden.bias"]
