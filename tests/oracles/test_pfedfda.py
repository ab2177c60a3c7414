import itertools

import numpy as np
import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.numerics.gaussian_head import Gaussians, head
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.pfedfda import (
    choose_beta,
    label_prior,
    local_estimate,
    pfedfda,
)
from handspan.testing.references import Reference, close
from handspan.testing.toys import ToyTask

HEAD = ("head.weight", "head.bias")
GRID = [(j / 20, j / 20) for j in range(21)]
PAIRS = list(itertools.product(np.arange(11) / 10, repeat=2))
# Large clients: classes have rows enough for folds, and some clients have none.
SIZES = (1, 12, 3, 15, 4, 2, 9, 20, 3, 8, 14)
CASES = (
    ("", {}, GRID, None),
    (":betas=pair", {}, PAIRS, LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5))),
    (":beta=0.3:weights=uniform", {"weights": "uniform"}, [(0.3, 0.3)], None),
    (
        ":folds=3:ridge=0.01:shrinkage=0.2",
        {"folds": 3, "ridge": 0.01, "shrinkage": 0.2},
        GRID,
        LocalWork(steps=2, batch_size=None, sgd=Sgd(weight_decay=0.1)),
    ),
)


def served(run):
    """Heads that all clients are served, as arrays in the order of clients."""
    ids = torch.arange(run.data.num_clients)
    parts = [mine.head for _, _, mine in run.simulation.serve(run.server, ids, run.rounds)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize(("text", "options", "candidates", "work"), CASES)
def test_pfedfda_is_the_algorithm_of_its_paper(text, options, candidates, work):
    run = Reference(f"pfedfda{text}", work, sizes=SIZES)
    means = run.first_server.known.means.numpy()
    shared, known, heads = pfedfda(
        *run.rows,
        models.gradient,
        models.features,
        run.start,
        HEAD,
        means,
        candidates,
        **run.work,
        **options,
    )
    close(run.server.shared, shared)
    close(run.server.known.means, known[0])
    close(run.server.known.covariance, known[1])
    got = served(run)
    for i, wanted in enumerate(heads):
        close({name: value[i] for name, value in got.items()}, wanted, 1e-9)


def test_clients_choose_their_own_beta():
    run = Reference("pfedfda", sizes=SIZES)
    shared = {name: value.numpy() for name, value in run.server.shared.items()}
    known = (run.server.known.means.numpy(), run.server.known.covariance.numpy())
    chosen = set()
    for x, y in run.rows[0]:
        prior = label_prior(y, 3, 1e-4)
        z = models.features(shared, x)
        chosen.add(choose_beta(z, y, known, prior, GRID, 2, 1.0, 1e-4))
    assert (0.0, 0.0) in chosen and len(chosen) > 2, "the cases above exercise the choice"


def test_the_softmax_of_the_head_is_the_posterior_of_the_gaussian_model():
    rng = np.random.default_rng(0)
    means, factor = rng.normal(size=(3, 4)), rng.normal(size=(4, 4))
    covariance, prior = factor @ factor.T + 0.1 * np.eye(4), np.array([0.2, 0.5, 0.3])
    known = Gaussians(means=torch.tensor(means), covariance=torch.tensor(covariance))
    weight, bias = head(known, torch.tensor(prior), 0.0)
    z = rng.normal(size=4)
    away = z - means
    density = prior * np.exp(-0.5 * np.einsum("cd,de,ce->c", away, np.linalg.inv(covariance), away))
    close(torch.softmax(weight @ torch.tensor(z) + bias, 0), density / density.sum(), 1e-12)


class OnlyHead(ToyTask):
    """No hidden layer: the features are the rows."""

    def __init__(self, **options):
        super().__init__(**options)
        self.shapes = {"head.weight": (3, 4), "head.bias": (3,)}
        self.names = tuple(self.shapes)

    def features(self, params, buffers, x, side):
        return x


def test_without_a_body_the_means_settle_where_their_blend_says():
    # mu_g -> sum p_i beta mu_i / sum p_i beta; with one beta that is the mean of the local means,
    # where an absent class has the global mean: only those who have the class count.
    run = Reference("pfedfda:beta=0.5", rounds=80, cohort=11, sizes=SIZES, task=OnlyHead())
    wanted, weight = np.zeros((3, 4)), np.zeros((3, 1))
    for x, y in run.rows[0]:
        for c in set(y.tolist()):
            wanted[c] += len(y) * x[y == c].mean(axis=0)
            weight[c] += len(y)
    close(run.server.known.means, wanted / weight)


def test_beta_one_is_local_and_beta_zero_is_global_discriminant_analysis():
    one, zero = (Reference(f"pfedfda:beta={b}", rounds=0, task=OnlyHead()) for b in (1, 0))
    x, y = one.rows[0][7]
    first = one.first_server.known.means.numpy()
    mu, sigma = local_estimate(x, y, first, 1.0)
    sigma = (1 - 1e-4) * sigma + 1e-4 * np.trace(sigma) / 4 * np.eye(4)
    close(served(one)["head.weight"][7], np.linalg.solve(sigma, mu.T).T, 1e-9)
    close(served(zero)["head.weight"][7], first, 1e-12)


def test_a_new_client_is_served_without_a_gradient():
    run = Reference("pfedfda")
    costs = run.simulation.personal_costs(run.server, torch.tensor([3]), 4)
    assert run.algorithm.adapt is None
    assert costs.rows == 0 and costs.forward_rows == 9


class NoBias(ToyTask):
    head = ("head.weight",)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (NoBias(), "one linear layer with bias"),
        (type("R", (ToyTask,), {"kind": "regression"})(), "class labels"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(task, message):
    with pytest.raises(HandspanError, match=message):
        Reference("pfedfda", task=task)


@pytest.mark.parametrize(
    "setting",
    [
        "beta=1.5",
        "folds=1",
        "betas=three",
        "ridge=0",
        "shrinkage=2",
        "weights=all",
        "beta=0:folds=3",
    ],
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(HandspanError):
        parse(f"pfedfda:{setting}")
