"""Centres found by sums are those that one would find with all coordinates at hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from handspan.numerics import mixture
from handspan.numerics.mixture import (
    Centres,
    merged,
    moved,
    nearest,
    one_centre,
    split,
    sum_by_centre,
    updated,
)
from handspan.testing.oracles import centres as oracle

EYE = torch.eye(2, dtype=torch.float64)
GRAM = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)


def centres(count, mean, variance=None):
    mean = torch.tensor(mean, dtype=torch.float64)
    variance = torch.ones_like(mean) if variance is None else torch.tensor(variance)
    return Centres(
        count=torch.tensor(count, dtype=torch.float64), mean=mean, variance=variance.double()
    )


def blobs(seed, *means, each=40, spread=0.1):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(
        np.concatenate([m + spread * rng.normal(size=(each, len(m))) for m in means])
    )


def choices(points, found, gram=EYE):
    return torch.stack([nearest(v, found.mean, found.count > 0, gram) for v in points])


def lloyd(points, found, gram=EYE):
    ones = torch.ones(len(points), dtype=torch.float64)
    return updated(found, sum_by_centre(choices(points, found, gram), points, ones))


def there(found):
    kept = found.count > 0
    order = found.mean[kept][:, 0].argsort()
    return found.count[kept][order], found.mean[kept][order], found.variance[kept][order]


def test_lloyds_steps_by_sums_are_k_means(monkeypatch):
    monkeypatch.setattr(mixture, "_MEMORY", 0.0)
    points = blobs(0, [0, 0], [1, 1], [2, 0], spread=0.6)
    found = centres([1, 1, 1], [[0, 0.5], [1, 0], [2, 1]])
    means = found.mean.numpy().copy()
    x = points.numpy()
    for _ in range(10):
        found = lloyd(points, found)
        owner = ((x[:, None] - means) ** 2).sum(2).argmin(1)
        means = np.array([x[owner == j].mean(0) for j in range(3)])
    np.testing.assert_allclose(found.mean, means, rtol=1e-12)
    np.testing.assert_allclose(found.count, np.bincount(owner))
    inside = [x[owner == j].var(0) for j in range(3)]
    np.testing.assert_allclose(found.variance, inside, rtol=1e-9)


def test_clients_that_send_nothing_do_not_count():
    points = torch.tensor([[1.0, 0.0], [3.0, 0.0], [100.0, 0.0]], dtype=torch.float64)
    choice = torch.tensor([[1.0, 0.0]] * 3)
    sums = sum_by_centre(choice, points, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    assert sums.count.tolist() == [2, 0]
    assert sums.total.tolist() == [[4, 0], [0, 0]]
    assert sums.square.tolist() == [[10, 0], [0, 0]]


@pytest.mark.parametrize("seed", range(3))
def test_all_steps_are_those_of_the_oracle(seed):
    rng = np.random.default_rng(seed)
    found = one_centre(4, 2, torch.device("cpu"))
    wanted = oracle.Centres(*(t.numpy().copy() for t in (found.count, found.mean, found.variance)))
    for step in range(6):
        points = torch.from_numpy(rng.normal(size=(9, 2)) + 3 * rng.integers(0, 2, (9, 1)))
        owner = choices(points, found, GRAM).argmax(1).tolist()
        own = {j: [v.numpy() for v, o in zip(points, owner, strict=True) if o == j] for j in owner}
        found, wanted = lloyd(points, found, GRAM), oracle.updated(wanted, own)
        if step % 2:
            found, wanted = split(found, GRAM, 4.0), oracle.split(wanted, GRAM.numpy())
        if step == 5:
            found = merged(found, GRAM, 4.0)
            wanted = oracle.merged(wanted, GRAM.numpy(), 4.0)
        np.testing.assert_allclose(found.count, wanted.count, rtol=1e-12)
        kept = wanted.count > 0
        np.testing.assert_allclose(found.mean[kept], wanted.mean[kept], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(
            found.variance[kept], wanted.variance[kept], rtol=1e-9, atol=1e-12
        )


def test_the_nearest_centre_is_that_of_the_nearest_model():
    found = centres([1, 1, 0], [[1, 0], [0, 1.2], [0, 0]])
    v = torch.zeros(2, dtype=torch.float64)
    assert nearest(v, found.mean, found.count > 0, EYE).tolist() == [1, 0, 0]
    assert nearest(v, found.mean, found.count > 0, GRAM).tolist() == [0, 1, 0], "2 > 1.44"
    tied = centres([1, 1], [[1, 0], [-1, 0]])
    assert nearest(v, tied.mean, tied.count > 0, EYE).tolist() == [1, 0]
    lost = torch.full((2,), math.nan, dtype=torch.float64)
    assert nearest(lost, found.mean, found.count > 0, EYE).tolist() == [1, 0, 0]


def test_a_centre_that_nobody_is_near_to_is_given_up_and_its_place_used_again():
    points, found = blobs(1, [5, 0]), centres([10, 1], [[5, 0], [-5, 0]])
    rounds = 0
    while bool((found.count > 0).all()):
        found, rounds = lloyd(points, found), rounds + 1
    assert rounds == 6, "0.8^6 is below 0.3"
    found = split(found, EYE, 4.0)
    assert bool((found.count > 0).all())
    assert bool((found.mean[:, 0] > 4).all())


def test_the_last_centre_stays_whatever_happens():
    found = centres([0.01, 0], [[5, 0], [0, 0]])
    nothing = sum_by_centre(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1).double())
    assert (updated(found, nothing).count > 0).tolist() == [True, False]


def test_a_normal_distribution_is_split_into_its_halves():
    points = blobs(2, [1, 2], each=4000, spread=1.0) * torch.tensor([3.0, 1.0])
    found = centres([4000.0, 0], [[3, 2], [9, 9]], [[9, 1], [9, 9]])
    count, mean, variance = there(split(found, EYE, 4.0))
    left = points[points[:, 0] < 3]
    assert count.tolist() == [2000, 2000]
    np.testing.assert_allclose(mean[0], left.mean(0), atol=0.1)
    np.testing.assert_allclose(variance[0], left.var(0), rtol=0.1)
    np.testing.assert_allclose(mean.mean(0), [3, 2], err_msg="the two have the mean of the one")


def test_small_centres_and_points_are_not_split():
    few = split(centres([3.9, 0], [[0, 0], [0, 0]]), EYE, 4.0)
    point = split(centres([100, 0], [[0, 0], [0, 0]], [[0, 0], [0, 0]]), EYE, 4.0)
    assert few.count.tolist() == [3.9, 0] and point.count.tolist() == [100, 0]


def test_the_axis_of_a_split_is_the_widest_between_models():
    wide = centres([8, 0], [[0, 0], [0, 0]], [[1, 4], [0, 0]])
    assert bool(split(wide, EYE, 4.0).mean[0, 1] < 0)
    stretched = torch.diag(torch.tensor([9.0, 1.0], dtype=torch.float64))
    assert bool(split(wide, stretched, 4.0).mean[0, 0] < 0)


@pytest.mark.parametrize("each", [15, 60])
@pytest.mark.parametrize("seed", range(4))
def test_tight_clusters_are_found_and_kept_without_being_counted(seed, each):
    points = blobs(seed, [0, 0], [3, 0], [0, 3], each=each)
    found = one_centre(8, 2, torch.device("cpu"))
    for _ in range(4):
        for _ in range(3):
            found = lloyd(points, found)
        found = split(found, EYE, 4.0)
    assert int((found.count > 0).sum()) > 3
    for _ in range(30):  # until those that nobody is near to are forgotten
        found = lloyd(points, found)
    found = merged(found, EYE, 6.0)
    owner = choices(points, found).argmax(1)
    assert [len(set(part.tolist())) for part in owner.split(each)] == [1, 1, 1]
    assert len(set(owner.tolist())) == 3 == int((found.count > 0).sum())


@pytest.mark.parametrize("seed", range(6))
def test_the_halves_of_one_normal_distribution_are_merged(seed):
    points = blobs(seed, [1.0, -2.0], each=400, spread=1.0)
    found = split(lloyd(points, one_centre(2, 2, torch.device("cpu"))), EYE, 4.0)
    for _ in range(20):
        found = lloyd(points, found)
    assert int((found.count > 0).sum()) == 2
    assert int((merged(found, EYE, 2.8).count > 0).sum()) == 1
    assert int((merged(found, EYE, 2.0).count > 0).sum()) == 2


def test_merging_keeps_count_mean_and_variance_of_all():
    found = centres([30, 10], [[0, 0], [2, 4]], [[1, 1], [3, 1]])
    one = merged(found, EYE, 1e9)
    assert one.count.tolist() == [40, 0]
    np.testing.assert_allclose(one.mean[0], [0.5, 1])
    np.testing.assert_allclose(one.variance[0], [0.75 + 0.25 * 7 - 0.25, 1 + 0.25 * 16 - 1])


def test_nothing_is_merged_at_zero_and_the_least_separate_pair_first():
    found = centres([9, 9, 9], [[0, 0], [10, 0], [13, 0]])
    assert merged(found, EYE, 0.0).count.tolist() == [9, 9, 9]
    assert merged(found, EYE, 4.0).count.tolist() == [9, 18, 0]


def test_what_is_apart_does_not_depend_on_the_coordinates():
    """Distances are those between models: with v -> v / 2 and U -> 2 U nothing changes."""
    found = centres([9, 5], [[0, 0], [3, 1]])
    half = Centres(count=found.count, mean=found.mean / 2, variance=found.variance / 4)
    for apart in (2.0, 2.8, 3.2, 4.0):
        a, b = merged(found, EYE, apart), merged(half, 4 * EYE, apart)
        assert torch.equal(a.count, b.count)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_centres_move_with_the_coordinates(seed):
    rng = np.random.default_rng(seed)
    points = torch.from_numpy(rng.normal(size=(12, 3)))
    matrix, shift = (torch.from_numpy(rng.normal(size=size)) for size in ((3, 3), (3,)))
    matrix[1] = 0.0  # a direction that was dropped
    matrix[:, 1:] = matrix[:, 1:] * torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    found = lloyd(points, one_centre(1, 3, torch.device("cpu")), torch.eye(3).double())
    new = moved(found, matrix, shift)
    np.testing.assert_allclose(new.mean, found.mean @ matrix.T + shift)
    np.testing.assert_allclose(new.variance, found.variance @ (matrix**2).T)
