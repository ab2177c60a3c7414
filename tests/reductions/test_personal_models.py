"""What methods with personal models become at the ends of their settings."""

import pytest
import torch

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.case import compare, numbers
from handspan.testing.references import Reference, close
from handspan.testing.toys import QuadraticTask, quadratic

FULL = LocalWork(steps=3, batch_size=None, learning_rate=0.2, sgd=Sgd(momentum=0.5))


def outputs(run):
    return {"outputs": numbers(run.state, run.simulation, run.setting.task)["outputs"]}


@pytest.mark.parametrize("text", ["mix=0", "mix=0.7", "adaptive=true", "mix=1"])
def test_the_shared_model_of_apfl_is_that_of_fedavg_bit_for_bit(text):
    apfl, fedavg = Reference(f"apfl:{text}"), Reference("fedavg:weights=uniform")
    compare(dict(apfl.server.params), dict(fedavg.server.params), 0.0, "shared model")


def test_apfl_that_mixes_nothing_in_is_fedavg():
    apfl = Reference("apfl:mix=0")
    compare(outputs(apfl), outputs(Reference("fedavg:weights=uniform")), 0.0, "served")
    compare(dict(apfl.clients.params), dict(apfl.first_clients.params), 0.0, "own models")


def test_apfl_that_mixes_nothing_else_in_is_local():
    apfl, local = Reference("apfl:mix=1", FULL), Reference("local", FULL)
    compare(dict(apfl.clients.params), dict(local.clients.params), 1e-12, "own models")
    compare(outputs(apfl), outputs(local), 1e-12, "served")


def test_one_step_of_apfl_moves_its_own_model_by_the_share_of_the_slope():
    targets = torch.tensor([[1.0, 3.0], [-2.0, 0.5], [4.0, -1.0]], dtype=torch.float64)
    options = {
        "work": LocalWork(steps=1, batch_size=None, learning_rate=0.3),
        "cohort": 3,
        "data": quadratic(targets),
        "task": QuadraticTask(w=torch.tensor([0.2, -0.4], dtype=torch.float64)),
    }
    before, after = (Reference("apfl:mix=0.25", rounds=rounds, **options) for rounds in (2, 3))
    own, shared = before.clients.params["w"], before.server.params["w"]
    mixed = 0.25 * own + 0.75 * shared
    close(after.clients.params["w"], (own - 0.3 * 0.25 * (mixed - targets)).numpy(), 1e-12)
    close(after.server.params["w"], (shared - 0.3 * (shared - targets.mean(0))).numpy(), 1e-12)


def test_l2gd_without_regularization_is_local_while_the_coin_says_so():
    cohort, rounds = 11, 4
    for p, trains in ((1e-12, 4), (0.7, 1)):  # the coins of seed 5: local, pull, ...
        l2gd = Reference(
            f"l2gd:regularization=0:pull_probability={p}", seed=5, cohort=cohort, rounds=rounds
        )
        local = Reference("local", seed=5, cohort=cohort, rounds=trains)
        compare(dict(l2gd.clients.own.params), dict(local.clients.params), 0.0, f"p={p}")


def test_l2gd_stands_still_on_average_at_its_optimum():
    """x_i = (a_i + lambda abar) / (1 + lambda), where a new client ends that starts at abar."""
    targets = torch.tensor([[1.0, 3.0], [-2.0, 0.5], [4.0, -1.0]], dtype=torch.float64)
    mean, strength, p, everyone = targets.mean(0), 0.6, 0.3, torch.arange(3)
    changes = []
    for seed in (3, 5):  # the coin of the first round says pull, and train
        run = Reference(
            f"l2gd:regularization={strength}:pull_probability={p}",
            LocalWork(steps=1, batch_size=None, learning_rate=0.3, adapt_steps=80),
            rounds=1,
            cohort=3,
            seed=seed,
            data=quadratic(targets),
            task=QuadraticTask(w=mean),
        )
        run.simulation.adapt(run.first_server, everyone, 0)
        optimum = run.simulation.store.read(everyone).own.params["w"]
        close(optimum, ((targets + strength * mean) / (1 + strength)).numpy())
        changes.append(run.clients.own.params["w"] - optimum)
        assert float(changes[-1].abs().max()) > 0.1
    pulled, trained = changes
    close(p * pulled + (1 - p) * trained, torch.zeros(3, 2).numpy())


@pytest.mark.parametrize("strength", [2, 1e6])
def test_a_pull_of_l2gd_leaves_the_mean_and_a_full_one_leaves_nothing_else(strength):
    text = f"l2gd:regularization={strength}"
    before, after = (Reference(text, seed=2, rounds=rounds, cohort=11) for rounds in (3, 4))
    for name, new in after.clients.own.params.items():  # round 3 of this seed is a pull
        mean = before.clients.own.params[name].mean(0).numpy()
        close(new.mean(0), mean, 1e-12)
        close(after.server.mean.params[name], mean, 1e-12)
        spread = float((new - new.mean(0)).abs().max())
        assert spread < 1e-12 if strength > 2 else spread > 1e-3
