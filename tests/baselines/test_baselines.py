"""The identities of the papers, on small tables."""

import numpy as np
import pytest
from scipy import sparse

from handspan.baselines import (
    ball_growing,
    central_kmeans,
    central_nmf,
    distributed_coreset,
    kmeans_parallel,
    sncp,
)
from handspan.baselines.ball_growing import summary
from handspan.baselines.coreset import client_coreset, largest_remainders, usable
from handspan.baselines.rows import nearest, rows_of_clients
from handspan.evaluation.clustering import clustering_accuracy
from handspan.testing.oracles.palm import palm


def table(seed=0, rows=90):
    rng = np.random.default_rng(seed)
    label = np.arange(rows) % 3
    centres = 6 * np.eye(3, 5)
    return centres[label] + rng.normal(size=(rows, 5)) ** 2 * 0.2, label, rng.integers(0, 7, rows)


def accuracy(label, found):
    import torch

    return clustering_accuracy(torch.from_numpy(label), torch.from_numpy(found))


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "run",
    [
        lambda x, owner: kmeans_parallel(x, owner, 3, oversampling=6, lloyd=3),
        lambda x, owner: distributed_coreset(x, owner, 3, samples=30),
        lambda x, owner: ball_growing(x, owner, 3, outliers=0),
        lambda x, owner: central_kmeans(x, 3),
    ],
    ids=["km||", "bel", "cal", "kmeans"],
)
def test_clusters_that_nobody_could_miss_are_found(run, form):
    x, label, owner = table()
    assert accuracy(label, run(form(x), owner).labels) == 1.0


def test_candidates_do_not_depend_on_how_rows_are_distributed():
    x, _, owner = table()
    found = [kmeans_parallel(x, o, 3, oversampling=6) for o in (owner, owner * 0, np.arange(90))]
    assert all(np.array_equal(f.centres, found[0].centres) for f in found)
    assert found[1].numbers_up < found[0].numbers_up < found[2].numbers_up


def test_with_endless_oversampling_all_rows_are_candidates():
    x, _, owner = table()
    everything = kmeans_parallel(x, owner, 3, oversampling=1e12, rounds=1)
    assert everything.numbers_up == 5 + 89 * 5 + 7 + 7 * 90


def test_weights_of_a_coreset_add_up_to_the_rows_and_keep_costs_on_average():
    x, *_ = table()
    centres, others = x[[0, 1, 4]], np.array([[1.0] * 5, [5.0] * 5])
    true = nearest(x, others)[1].sum()
    found = []
    for seed in range(400):
        points, weights = client_coreset(x, centres, 12, np.random.default_rng(seed))
        assert weights.sum() == pytest.approx(90)
        found.append(nearest(points, others)[1] @ weights)
    assert np.mean(found) == pytest.approx(true, abs=4 * np.std(found) / 20)


def test_without_samples_a_coreset_is_the_centres_with_the_sizes_of_their_cells():
    x, *_ = table()
    points, weights = client_coreset(x, x[:3], 0, np.random.default_rng(0))
    assert points is not None and (points == x[:3]).all()
    assert weights.tolist() == np.bincount(nearest(x, x[:3])[0]).tolist()


def test_shares_add_up():
    assert largest_remainders(np.array([1.0, 1, 1]), 4).tolist() == [2, 1, 1]
    assert largest_remainders(np.array([0.0, 5]), 3).tolist() == [0, 3]
    assert usable(np.array([-1.0, 2, 2]), 3).tolist() == [0, 1.5, 1.5]


@pytest.mark.parametrize("outliers", [0, 1, 4])
def test_weights_of_a_summary_add_up_to_the_rows(outliers):
    x, *_ = table()
    kept, weight = summary(x, 3, outliers, 2.0, 0.45, np.random.default_rng(0))
    assert weight.sum() == 90 and (weight >= 1).all() and len(set(kept)) == len(kept)


def test_a_client_with_few_rows_is_its_own_summary():
    x, *_ = table()
    kept, weight = summary(x[:16], 3, 2, 2.0, 0.45, np.random.default_rng(0))
    assert sorted(kept) == list(range(16)) and (weight == 1).all()


def test_rows_of_clients_are_all_rows_once():
    parts = rows_of_clients(np.array([2, 0, 2, 5, 0]))
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2], [3]]


def test_sncp_is_palm_with_one_step_each_and_clusters():
    x, label, _ = table()
    rng = np.random.default_rng(3)
    basis, rows = rng.random((5, 3)), rng.random((90, 3))
    square = (x**2).sum() / 90
    found = sncp(x, basis, rows, iterations=4, growth=1.0, stop=0)
    W, *_ = palm(x.T, basis, rows.T, rounds=4, q1=1, q2=1, rho=1e-8 * square, nu=1e-10 * square)
    np.testing.assert_allclose(found.centres, W.T, rtol=1e-10)
    assert accuracy(label, sncp(x, basis, rows).labels) == 1.0


def test_central_nmf_tells_its_objective():
    x, *_ = table()
    components, objective = central_nmf(x, 3)
    assert components.shape == (3, 5) and 0 < objective < (x**2).sum() / 90
