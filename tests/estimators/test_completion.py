"""Unknown entries are found, new rows folded in, and mistakes told."""

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone

from handspan.baselines import central_completion
from handspan.estimators import FederatedMatrixCompletion


def ratings(seed=0, rows=40, columns=12):
    """A table of rank one with biases, and the half of it that is known."""
    rng = np.random.default_rng(seed)
    full = 3 + rng.normal(size=(rows, 1)) + rng.normal(size=columns)
    full += np.outer(rng.normal(size=rows), rng.normal(size=columns))
    row, column = np.nonzero(rng.random(full.shape) < 0.6)
    return full, sparse.csr_array((full[row, column], (row, column)), shape=full.shape)


@pytest.fixture(scope="module")
def model():
    return FederatedMatrixCompletion(1, ridge=1e-3, max_iter=150, random_state=0).fit(ratings()[1])


def test_unknown_entries_are_found(model):
    full, known = ratings()
    hidden = np.nonzero(known.toarray() == 0)
    left = model.predict(known, hidden) - full[hidden]
    assert np.sqrt(np.mean(left**2)) < 0.15
    np.testing.assert_allclose(model.predict(known)[hidden], model.predict(known, hidden))


def test_it_ends_where_the_central_model_does(model):
    full, known = ratings()
    rows, columns, mean = central_completion(known, 1, ridge=1e-3, sweeps=150)
    fitted = rows[:, :-1] @ columns[:, :-1].T + rows[:, -1:] + columns[:, -1] + mean
    ours = model.predict(known)
    assert np.sqrt(np.mean((ours - fitted) ** 2)) < 0.05 * full.std()


def test_dense_rows_with_nan_are_the_same_table(model):
    _, known = ratings()
    dense = np.where(known.toarray() == 0, np.nan, known.toarray())
    other = clone(model).fit(dense)
    np.testing.assert_allclose(other.components_, model.components_, rtol=1e-8, atol=1e-10)


def test_new_rows_are_folded_in_from_any_number_of_ratings(model):
    full, _ = ratings()
    errors = []
    for count in (0, 3, 12):
        given = np.where(np.arange(12) < count, full, np.nan)
        errors.append(np.sqrt(np.mean((model.predict(given) - full) ** 2)))
    assert errors[0] > errors[1] > errors[2]
    nothing = model.predict(np.full((1, 12), np.nan))[0]
    np.testing.assert_allclose(nothing, model.mean_ + model.item_bias_, rtol=1e-6)


def test_groups_change_what_is_sent():
    _, known = ratings()
    each = FederatedMatrixCompletion(1, max_iter=2, random_state=0).fit(known)
    joined = clone(each).fit(known, groups=np.arange(40) % 5)
    assert each.communication_["bytes_up"] == 8 * joined.communication_["bytes_up"]
    np.testing.assert_allclose(each.components_, joined.components_, rtol=1e-8)


def test_a_stored_zero_is_a_rating():
    known = sparse.csr_array(([0.0, 4.0], ([0, 1], [0, 0])), shape=(2, 2))
    model = FederatedMatrixCompletion(1, max_iter=1, random_state=0).fit(known)
    assert model.mean_ == 2


@pytest.mark.parametrize(
    "spoil, told",
    [
        (lambda x: np.where(x == 0, np.inf, x), "infinit"),
        (lambda x: sparse.csr_array(np.where(x > 4, np.nan, x)), "leave it out"),
    ],
)
def test_mistakes_are_told(spoil, told):
    with pytest.raises(ValueError, match=told):
        FederatedMatrixCompletion(1).fit(spoil(ratings()[1].toarray()))
