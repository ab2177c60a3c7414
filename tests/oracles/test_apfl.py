import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.apfl import apfl
from handspan.testing.references import Reference, arrays, close

CASES = (
    ("mix=0.3", {"mix": 0.3}, None),
    ("mix=0.6:weights=examples", {"mix": 0.6, "weights": "examples"}, None),
    ("weights=uniform", {"mix": 0.5}, None),
    ("adaptive=true", {"mix": 0.01, "adaptive": True}, None),
    (
        "adaptive=true:mix=0.9:mix_every=step",
        {"mix": 0.9, "adaptive": True, "mix_every": "step"},
        LocalWork(steps=5, batch_size=3, learning_rate=1.5),
    ),
    ("mix=0.3", {"mix": 0.3}, LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.5))),
    (
        "adaptive=true:mix=0.4:mix_every=step",
        {"mix": 0.4, "adaptive": True, "mix_every": "step"},
        LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True)),
    ),
    ("mix=0.3", {"mix": 0.3}, LocalWork(steps=2, batch_size=None, sgd=Sgd(weight_decay=0.1))),
)


@pytest.mark.parametrize(("text", "options", "work"), CASES)
def test_apfl_is_algorithm_1_of_its_paper(text, options, work):
    run = Reference(f"apfl:{text}", work)
    server, own, mixes = apfl(*run.rows, models.gradient, run.start, **run.work, **options)
    close(run.server.params, server)
    for i, model in enumerate(own):
        close({name: value[i] for name, value in run.clients.params.items()}, model)
    close(run.clients.mix, mixes)
    moved = (run.clients.mix - run.first_clients.mix).abs() > 1e-6
    assert bool(moved.any()) == options.get("adaptive", False)


def test_a_clipped_share_stays_in_its_range():
    work = LocalWork(steps=5, batch_size=3, learning_rate=3.0)
    run = Reference("apfl:adaptive=true:mix=0.95:mix_every=step", work)
    mixes = run.clients.mix
    assert bool(((mixes == 0) | (mixes == 1)).any())
    assert bool(((mixes >= 0) & (mixes <= 1)).all())


def test_a_client_is_served_the_mixture_with_the_new_shared_model():
    run = Reference("apfl:mix=0.3")
    for ids, b, mine in run.simulation.serve(run.server, torch.arange(11), run.state.round):
        assert len(ids) == 11
        for i in ids.tolist():
            own = {name: value[i] for name, value in run.clients.params.items()}
            wanted = {k: 0.3 * v + 0.7 * run.server.params[k] for k, v in own.items()}
            mixed = {name: value[i] for name, value in mine.params.items()}
            close(mixed, arrays(own))
            client = type(mine)(params=own, buffers={}, mix=mine.mix[i])
            close(run.algorithm.model(b, client).params, arrays(wanted))


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_new_client_starts_at_the_shared_model_which_stays(adaptive):
    work = LocalWork(steps=3, batch_size=None, adapt_steps=3, learning_rate=0.2)
    run = Reference(f"apfl:mix=0.4:adaptive={str(adaptive).lower()}", work)
    shared, i = arrays(run.server.params), int(run.data.num_train.argmax())
    first = float(run.clients.mix[i])
    run.simulation.adapt(run.server, torch.tensor([i]), 9)
    x, y = run.rows[0][i]
    own, mix = dict(shared), first
    for _ in range(3):
        blend = {name: mix * own[name] + (1 - mix) * shared[name] for name in own}
        slope = models.gradient(blend, x, y)
        change = sum(float(((own[name] - shared[name]) * slope[name]).sum()) for name in own)
        own = {name: own[name] - 0.2 * mix * slope[name] for name in own}
        mix = min(1.0, max(0.0, mix - 0.2 * change)) if adaptive else mix
    close({name: value[i] for name, value in run.clients.params.items()}, own)
    close(run.clients.mix[i], mix)
    assert (abs(mix - first) > 1e-6) == adaptive


@pytest.mark.parametrize("wrong", ["mix=1.5", "mix=-0.1", "mix_every=epoch", "weights=median"])
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(HandspanError, match=f"{wrong.split('=')[0]} must"):
        parse(f"apfl:{wrong}")
