import pytest
import torch

from handspan.core import keys
from handspan.core.errors import HandspanError
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.fedala import fedala, learn_weights
from handspan.testing.playing import step_rows
from handspan.testing.references import Reference, arrays, close

HEAD = ("head.weight", "head.bias")
ALL = (*HEAD, "hidden.weight", "hidden.bias")


def drawn(run):
    """Which rows W is learned on: one uniform number for each row of a client, in each round."""
    share = run.spec.config.sample

    def of(round_index, client):
        key = run.simulation.about(torch.tensor([client])).key[0]
        place = torch.arange(int(run.data.num_train[client]))
        key = keys.fold(key, "ala", round_index)
        return (keys.uniform(keys.fold(key, place)) < share).numpy()

    return of


def only(params, i):
    return arrays({name: value[i] for name, value in params.items()})


@pytest.mark.parametrize(
    ("options", "names", "weights", "work"),
    [
        ("", HEAD, "examples", None),
        (":names=all:sample=1", ALL, "examples", None),
        (":names=hidden.*:weights=uniform:sample=0.3", ALL[2:], "uniform", None),
        (":weight_learning_rate=20", HEAD, "examples", LocalWork(steps=2, batch_size=None)),
        ("", HEAD, "examples", LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.5))),
        ("", HEAD, "examples", LocalWork(epochs=1, batch_size=4, sgd=Sgd(weight_decay=0.1))),
    ],
)
def test_fedala_is_the_method_of_its_paper(options, names, weights, work):
    run = Reference(f"fedala{options}", work)
    server, local, mixing = fedala(
        *run.rows,
        models.gradient,
        run.start,
        names,
        drawn(run),
        weight_learning_rate=run.spec.config.weight_learning_rate,
        weights=weights,
        **run.work,
    )
    close(run.server.params, server)
    assert set(run.clients.weights) == set(names)
    for i, own in enumerate(local):
        close(only(run.clients.weights, i), mixing[i])
        assert bool(run.clients.is_trained[i]) == (own is not None)
        if own is not None:
            close(only(run.clients.local, i), {name: own[name] for name in names})
    assert min(float(value.min()) for one in mixing for value in one.values()) < 0.999


def test_a_client_is_served_the_mixture_of_what_it_has_now_and_keeps_nothing_of_it():
    run = Reference("fedala:weight_learning_rate=10", rounds=3)
    shared, before = arrays(run.server.params), run.clients
    (personal,) = run.algorithm.personal
    for ids, _, mine in run.simulation.serve(run.server, torch.arange(11), 3):
        for i in ids.tolist():
            x, y = run.rows[0][i]
            steps, _ = step_rows(run.data, personal, 0, i, round=3, seed=run.seed)
            old = only(before.local, i) if before.is_trained[i] else {k: shared[k] for k in HEAD}
            _, wanted = learn_weights(
                shared,
                old,
                only(before.weights, i),
                models.gradient,
                x,
                y,
                [part.numpy() for part in steps],
                drawn=drawn(run)(3, i),
                weight_learning_rate=10,
            )
            close(only(mine.params, i), wanted)
    close(run.clients.weights["head.bias"], before.weights["head.bias"].numpy(), 0)


def test_a_new_client_trains_from_the_shared_model_and_then_learns_its_weights():
    work = LocalWork(steps=3, batch_size=None, adapt_steps=4, learning_rate=0.3)
    run = Reference("fedala:start_epochs=3:weight_learning_rate=5:sample=1", work)
    shared, i = arrays(run.server.params), int(run.data.num_train.argmax())
    first = only(run.clients.weights, i)
    run.simulation.adapt(run.server, torch.tensor([i]), 9)
    x, y = run.rows[0][i]
    own = dict(shared)
    for _ in range(4):
        slope = models.gradient(own, x, y)
        own = {name: value - 0.3 * slope[name] for name, value in own.items()}
    local = {name: own[name] for name in HEAD}
    weights, _ = learn_weights(
        shared,
        local,
        first,
        models.gradient,
        x,
        y,
        [list(range(len(y)))] * 3,
        drawn=torch.ones(len(y), dtype=torch.bool).numpy(),
        weight_learning_rate=5,
    )
    close(only(run.clients.local, i), local)
    close(only(run.clients.weights, i), weights)
    assert abs(weights["head.bias"] - first["head.bias"]).max() > 1e-3


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("sample=0", "sample must lie in"),
        ("sample=1.2", "sample must lie in"),
        ("weight_learning_rate=-1", "weight_learning_rate must be at least 0"),
        ("start_epochs=0", "start_epochs must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong, told):
    with pytest.raises(HandspanError, match=told):
        parse(f"fedala:{wrong}")


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(HandspanError, match="matches no parameter"):
        Reference("fedala:names=body.*")
