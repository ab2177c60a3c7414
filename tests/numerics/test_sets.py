"""Projections find the nearest member: the angle to every other member is obtuse."""

import pytest
import torch

from handspan.numerics.factorization import sets

LOW, HIGH = torch.tensor(-0.2).double(), torch.tensor(0.7).double()


def member(name, radius):
    """Random members of a set, some on its boundary."""
    draw = torch.from_numpy(sets_rng().normal(size=(200, 5)))
    if name == "simplex":
        return radius * torch.softmax(4 * draw, -1)
    if name in ("l1", "l2"):
        size = draw.norm(p=int(name[1]), dim=-1, keepdim=True)
        return draw / size * radius * torch.rand(200, 1, dtype=torch.float64).sqrt()
    if name == "non_negative":
        return draw.abs()
    return draw.clamp(LOW, HIGH) if name == "box" else draw


def sets_rng():
    import numpy as np

    torch.manual_seed(1)
    return np.random.default_rng(1)


@pytest.mark.parametrize("radius", [1.0, 2.5])
@pytest.mark.parametrize("name", sets.BASIS_SETS)
def test_a_projection_is_the_nearest_member(name, radius):
    vectors = 2 * torch.from_numpy(sets_rng().normal(size=(50, 5)))
    found = sets.project(name, vectors, radius, LOW, HIGH)
    again = sets.project(name, found, radius, LOW, HIGH)
    torch.testing.assert_close(again, found, rtol=1e-12, atol=1e-12)
    if name == "simplex":
        torch.testing.assert_close(found.sum(1), torch.full((50,), radius).double())
    others = member(name, radius)
    angle = (vectors - found) @ others.T - ((vectors - found) * found).sum(1, keepdim=True)
    assert angle.max() < 1e-9


def test_members_stay_where_they_are():
    inside = torch.tensor([[0.1, 0.2, 0.3]]).double()
    for name in ("l1", "l2", "non_negative", "none", "box"):
        assert torch.equal(sets.project(name, inside, 1.0, LOW, HIGH), inside)


def test_assignment_is_the_nearest_column():
    basis = torch.tensor([[0.0, 4.0], [0.0, 0.0]]).double()
    x = torch.tensor([[1.0, 1.0], [3.0, 0.0]]).double()
    assert sets.assigned(basis, x @ basis).tolist() == [[1, 0], [0, 1]]
