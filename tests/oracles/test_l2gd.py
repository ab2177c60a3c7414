import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.core.federation import draw_round
from handspan.core.records import num_bytes
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.l2gd import l2gd
from handspan.testing.references import Reference, arrays, close


def coins(run):
    """Draw the coin of each round as anybody can, from the round alone."""
    p, population = run.spec.config.pull_probability, run.simulation.population
    rounds = [draw_round(t, population, run.cohort, "fixed", run.seed) for t in range(run.rounds)]
    return [bool(round.draws[0] < p) for round in rounds]


def wanted(run):
    config = run.spec.config
    clients, _, batches = run.rows
    return l2gd(
        clients,
        coins(run),
        batches,
        models.gradient,
        run.start,
        regularization=config.regularization,
        pull_probability=config.pull_probability,
        **run.work,
    )


@pytest.mark.parametrize(
    ("text", "work", "seed"),
    [
        ("l2gd", None, 2),
        ("l2gd:regularization=3:pull_probability=0.4", None, 2),
        ("l2gd:regularization=30", None, 1),  # c is cut to 1
        ("l2gd:pull_probability=0.8", LocalWork(steps=1, batch_size=None), 0),
        ("l2gd", LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.5, weight_decay=0.1)), 2),
        ("l2gd", LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True)), 2),
    ],
)
def test_l2gd_is_algorithm_1_of_its_paper(text, work, seed):
    run = Reference(text, work, rounds=9, seed=seed)
    own, mean, contacts = wanted(run)
    for i, model in enumerate(own):
        close({name: value[i] for name, value in run.clients.own.params.items()}, model)
    close(run.server.mean.params, mean)
    assert contacts >= 2 and len(set(coins(run))) == 2
    assert run.state.costs.bytes_up == contacts * 11 * num_bytes(run.server.mean)


def test_only_a_pull_after_local_steps_sends_models():
    run = Reference("l2gd:pull_probability=0.95", rounds=9, seed=5)
    assert coins(run) == [False] + [True] * 8  # one contact, seven pulls towards the mean kept
    model, scalar = num_bytes(run.server.mean), run.setting.scalar.element_size()
    costs = run.state.costs
    assert costs.bytes_up == 11 * model
    assert costs.bytes_down == 11 * (model + 9 * scalar)


def test_a_new_client_is_held_back_near_the_mean():
    work = LocalWork(steps=3, batch_size=None, adapt_steps=3, learning_rate=0.2)
    run = Reference("l2gd:regularization=0.7", work, rounds=6, seed=2)
    mean, i = arrays(run.server.mean.params), int(run.data.num_train.argmax())
    run.simulation.adapt(run.server, torch.tensor([i]), 9)
    x, y = run.rows[0][i]
    own = dict(mean)
    for _ in range(3):
        slope = models.gradient(own, x, y)
        own = {k: v - 0.2 * (slope[k] + 0.7 * (v - mean[k])) for k, v in own.items()}
    close({name: value[i] for name, value in run.clients.own.params.items()}, own)
    close({name: value[i] for name, value in run.clients.mean.params.items()}, mean)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("regularization=-1", "regularization must be at least 0"),
        ("pull_probability=0", "pull_probability must lie between 0 and 1"),
        ("pull_probability=1", "pull_probability must lie between 0 and 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong, told):
    with pytest.raises(HandspanError, match=told):
        parse(f"l2gd:{wrong}")
