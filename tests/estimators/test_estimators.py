"""The estimators are what scikit-learn expects, and ``groups`` reaches them."""

import numpy as np
import pytest
import sklearn
from scipy import sparse
from scipy.optimize import nnls
from sklearn.metrics import adjusted_rand_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from handspan.estimators import (
    FederatedClustering,
    FederatedLinearRepresentation,
    FederatedNMF,
)
from handspan.estimators.base import SmallClientWarning

FAST = {"max_iter": 5, "random_state": 0}


@parametrize_with_checks(
    [
        FederatedNMF(**FAST),
        FederatedClustering(random_state=0, max_iter=15),
        FederatedLinearRepresentation(**FAST),
    ]
)
def test_scikit_learn_is_content(estimator, check):
    check(estimator)


def table(seed=0, clients=6, rows=12):
    """Rows of three components, on six clients."""
    rng = np.random.default_rng(seed)
    label = np.arange(clients * rows) % 3
    X = np.kron(np.eye(3), np.ones(4))[label] * rng.uniform(1, 2, (len(label), 1))
    return X + 0.01 * rng.random(X.shape), label, np.repeat(np.arange(clients), rows)


@pytest.mark.parametrize("method", ["fedmgs", "fedmavg"])
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix], ids=["dense", "sparse"])
def test_clusters_are_found_in_the_order_of_the_rows(form, method):
    X, label, groups = table()
    shuffled = np.random.default_rng(1).permutation(len(X))
    X, label, groups = X[shuffled], label[shuffled], groups[shuffled]
    model = FederatedClustering(3, method=method, max_iter=60, random_state=0)
    found = model.fit(form(X), groups=groups).labels_
    assert adjusted_rand_score(label, found) == 1.0
    assert (model.predict(form(X)) == found).all()


def test_communication_depends_on_the_groups():
    X, _, groups = table()
    alone = FederatedNMF(3, **FAST).fit(X).communication_
    shared = FederatedNMF(3, **FAST).fit(X, groups=groups).communication_
    per_round = 6 * (12 * 3 + 3 * 3)
    assert shared["paper_numbers_up"] == 5 * per_round
    # Beside the rounds: once four numbers of each client, and everybody's sums.
    assert shared["numbers_up"] == 5 * per_round + 6 * 4 + per_round
    assert shared["numbers_up"] == 6 * alone["numbers_up"]


def test_groups_are_routed_through_pipelines_and_searches():
    X, _, groups = table()
    with sklearn.config_context(enable_metadata_routing=True):
        model = FederatedNMF(3, **FAST).set_fit_request(groups=True)
        pipeline = make_pipeline(MaxAbsScaler(), model)
        routed = pipeline.fit(X, groups=groups)[-1].communication_
        alone = make_pipeline(MaxAbsScaler(), FederatedNMF(3, **FAST).set_fit_request(groups=False))
        assert routed["bytes_up"] == 6 * alone.fit(X)[-1].communication_["bytes_up"]
        search = GridSearchCV(pipeline, {"federatednmf__n_components": [1, 3]}, cv=2)
        search.fit(X, groups=groups)
    assert search.best_params_ == {"federatednmf__n_components": 3}
    assert search.best_estimator_[-1].communication_["bytes_up"] == routed["bytes_up"]


def test_a_transform_is_the_non_negative_least_squares_solution():
    X, _, groups = table()
    model = FederatedNMF(3, max_iter=50, random_state=0).fit(X, groups=groups)
    H = model.transform(X[:5])
    for row, h in zip(X, H, strict=False):
        np.testing.assert_allclose(h, nnls(model.components_.T, row)[0], atol=1e-8)
    assert model.score(X) > -0.01


def test_regressions_share_a_subspace():
    rng = np.random.default_rng(0)
    basis, heads = np.linalg.qr(rng.normal(size=(8, 2)))[0], rng.normal(size=(10, 2))
    groups = np.repeat(np.arange(10), 30)
    X = rng.normal(size=(300, 8))
    y = ((X @ basis) * heads[groups]).sum(1) + 2.0
    model = FederatedLinearRepresentation(2, max_iter=200, random_state=0)
    model.fit(X, y, groups=groups)
    assert model.score(X, y, groups=groups) > 0.999
    assert model.transform(X).shape == (300, 2)
    assert model.score(X, y) < 0.9  # one regression for all cannot do it
    with pytest.raises(ValueError, match="took no part in fit"):
        model.predict(X[:1], groups=[77])


MISTAKES = {
    "groups do not fit X": lambda m, X, g: m.fit(X, groups=g[:-1]),
    "ask for fewer": lambda m, X, g: m.set_params(n_components=99).fit(X, groups=g),
    "Negative values": lambda m, X, g: m.fit(X - 1, groups=g),
    "contains NaN": lambda m, X, g: m.fit(np.where(X > 1.5, np.nan, X), groups=g),
    "has no setting": lambda m, X, g: m.set_params(settings={"sped": 1}).fit(X, groups=g),
    "wants|at least|must be": lambda m, X, g: m.set_params(settings={"row_steps": 0}).fit(X),
}


@pytest.mark.parametrize("told", MISTAKES)
def test_mistakes_are_told(told):
    X, _, groups = table()
    with pytest.raises(ValueError, match=told):
        MISTAKES[told](FederatedNMF(3, **FAST), X, groups)


def test_a_column_of_zeros_and_rows_of_zeros_are_taken():
    X, _, groups = table()
    X[:, 2] = 0
    X[5] = 0
    model = FederatedNMF(3, **FAST).fit(X, groups=groups)
    assert np.isfinite(model.components_).all() and np.isfinite(model.transform(X)).all()


def test_duplicate_and_unsorted_entries_are_summed():
    X, _, groups = table()
    given = sparse.csr_array(X)
    doubled = sparse.csr_array(
        (
            np.repeat(given.data / 2, 2),
            np.repeat(given.indices, 2),
            2 * given.indptr,
        ),
        shape=X.shape,
    )
    found = [FederatedNMF(3, **FAST).fit(x, groups=groups).components_ for x in (given, doubled)]
    np.testing.assert_allclose(*found, rtol=1e-12)


def test_small_clients_are_warned_of():
    X, _, _ = table()
    with pytest.warns(SmallClientWarning, match="2 of 3 clients have no more rows than the 3"):
        FederatedNMF(3, **FAST).fit(X[:20], groups=np.r_[0, 0, 1, 1, np.full(16, 2)])
