import pytest
import torch

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.ifca import choose, ifca
from handspan.testing.references import Reference, arrays, close


def unstacked(stacked, k):
    return [arrays({name: value[j] for name, value in stacked.items()}) for j in range(k)]


@pytest.mark.parametrize(
    ("options", "weights", "work"),
    [
        ("k=3", "uniform", None),
        ("k=2:upload=sum", "uniform", None),
        ("k=3:weights=examples", "examples", LocalWork(epochs=1, batch_size=3)),
        ("k=4", "uniform", LocalWork(steps=3, batch_size=2, sgd=Sgd(momentum=0.5))),
    ],
)
def test_ifca_is_option_two_of_its_paper(options, weights, work):
    run = Reference(f"ifca:{options}", work)
    k = run.spec.config.k
    starts = unstacked(run.first_server.models.params, k)
    wanted, choices = ifca(
        *run.rows, models.gradient, models.loss, starts, weights=weights, **run.work
    )
    for got, model in zip(unstacked(run.server.models.params, k), wanted, strict=True):
        close(got, model)
    assert len({j for chosen in choices for j in chosen.values()}) > 1


def test_a_client_is_served_the_model_that_fits_its_training_rows_best():
    run = Reference("ifca:k=3")
    final = unstacked(run.server.models.params, 3)
    for ids, _, mine in run.simulation.serve(run.server, torch.arange(11), run.state.round):
        for j, i in enumerate(ids.tolist()):
            x, y = run.rows[0][i]
            assert int(mine.choice[j].argmax()) == choose(final, models.loss, x, y)


def test_of_equal_models_the_first_is_chosen():
    run = Reference("ifca:k=3", rounds=0)
    models_ = run.first_server.models
    same = type(models_)(
        params={k: v[:1].expand_as(v).clone() for k, v in models_.params.items()}, buffers={}
    )
    server = type(run.first_server)(models=same)
    for _, _, mine in run.simulation.serve(server, torch.arange(11), 0):
        assert mine.choice.argmax(1).tolist() == [0] * 11
