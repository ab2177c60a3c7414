"""Sums and products on a shared basis, against one direction at a time."""

import pytest
import torch

from handspan.core import keys
from handspan.numerics import averaging, low_rank

SHAPES = {"bias": (2,), "weight": (2, 5)}


def basis(rank=3):
    k = keys.key(0, "basis")
    return {name: keys.normal(keys.fold(k, name), (rank, *s)) for name, s in SHAPES.items()}


def test_a_model_is_a_sum_of_directions():
    v = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    got, rows = low_rank.compose(basis(), v), basis()
    for name in SHAPES:
        wanted = sum(v[k] * rows[name][k] for k in range(3))
        torch.testing.assert_close(got[name], wanted, rtol=1e-12, atol=0)


def test_a_map_makes_row_k_of_the_entries_of_its_row_k():
    matrix = torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, -1.0]], dtype=torch.float64)  # cuts to two
    got, rows = low_rank.apply_map(matrix, basis()), basis()
    for name, shape in SHAPES.items():
        assert got[name].shape == (2, *shape)
        first = rows[name][0] + 2 * rows[name][1]
        second = 3 * rows[name][1] - rows[name][2]
        torch.testing.assert_close(got[name], torch.stack([first, second]), rtol=1e-12, atol=1e-12)


def test_products_go_over_all_parameters():
    rows = basis()
    flat = torch.cat([rows[name].flatten(1) for name in SHAPES], 1)
    torch.testing.assert_close(low_rank.gram(rows), flat @ flat.T, rtol=1e-12, atol=1e-12)


def test_a_change_is_added_in_the_type_of_the_basis_however_it_is_cut(monkeypatch):
    rows = {name: value.float() for name, value in basis(5).items()}
    change = {name: 7.0 * value for name, value in basis(5).items()}
    for cached in (1, 20, 10**6):
        monkeypatch.setattr(averaging, "_CACHED", cached)
        got = averaging.moved_by_mean(rows, change, torch.tensor(3.0, dtype=torch.float64))
        for name, value in rows.items():
            assert torch.equal(got[name], value + (change[name] / 3.0).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outer_products_are_summed_with_their_weights_in_double_precision(dtype):
    k = keys.key(1)
    deltas = {name: keys.normal(keys.fold(k, name), (4, *s), dtype) for name, s in SHAPES.items()}
    v = keys.normal(k, (4, 3), dtype)
    weights = torch.tensor([1.0, 0.0, 2.0, 5.0], dtype=torch.float64)
    got = low_rank.outer_sums(deltas, v, weights)
    for name, shape in SHAPES.items():
        wanted = torch.zeros(3, *shape, dtype=torch.float64)
        for j in range(4):
            for row in range(3):
                wanted[row] += weights[j] * v[j, row].double() * deltas[name][j].double()
        torch.testing.assert_close(got[name], wanted, rtol=1e-12, atol=1e-12)
