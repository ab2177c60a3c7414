import pytest

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.lgfedavg import lgfedavg
from handspan.testing.references import Reference, close

HEAD = ("head.weight", "head.bias")
CASES = (
    ("", HEAD, {}, None, "loop"),
    (":weights=uniform", HEAD, {"weights": "uniform"}, None, "stacked"),
    (
        ":shared=head+hidden.bias",
        (*HEAD, "hidden.bias"),
        {},
        LocalWork(epochs=2, batch_size=4, sgd=Sgd(momentum=0.5, weight_decay=0.1)),
        "loop",
    ),
)


@pytest.mark.parametrize(("text", "top", "options", "work", "engine"), CASES)
def test_lgfedavg_shares_the_top_layers_and_keeps_the_encoder(text, top, options, work, engine):
    run = Reference(f"lgfedavg{text}", work, engine=engine)
    shared, own = lgfedavg(*run.rows, models.gradient, run.start, top, **run.work, **options)
    close(run.server.shared, shared)
    for i, model in enumerate(own):
        local = {name: value for name, value in model.items() if name not in top}
        close({name: value[i] for name, value in run.clients.personal.items()}, local)


def test_a_client_is_served_its_own_encoder_and_the_latest_top():
    run = Reference("lgfedavg")
    x = run.data.x[-1:].numpy()  # a test row of the last client
    model = {k: v.numpy() for k, v in run.server.shared.items()}
    model |= {k: v[-1].numpy() for k, v in run.clients.personal.items()}
    close(run.served[-1:], models.predict(model, x))
