import pytest

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.perfedsi import perfedsi
from handspan.testing.references import Reference, close


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("weights", "work"),
    [
        ("uniform", None),
        ("examples", None),
        ("uniform", LocalWork(epochs=1, batch_size=3, sgd=Sgd(momentum=0.5))),
    ],
)
def test_perfedsi_is_a_plain_mean_of_models_that_read_side_information(weights, work, engine):
    run = Reference(f"perfedsi:weights={weights}", work, engine=engine)
    clients, cohorts, batches = run.rows
    side = list(run.data.side.numpy())
    wanted = perfedsi(
        clients,
        side,
        cohorts,
        batches,
        models.gradient_side,
        run.start,
        weights=weights,
        **run.work,
    )
    close(run.server.params, wanted)
