"""Grouped convolutions as matrix products: the same numbers, and no convolution is left."""

import pytest
import torch
from torch.nn import functional

from handspan.models.convert import task_from_module
from handspan.models.zoo import make_model
from handspan.simulation import convolutions, rewriting
from handspan.simulation.convolutions import Grouped
from handspan.simulation.tracing import record

CASES = [  # inputs, outputs, kernel, stride, padding, groups
    (1, 4, (5, 5), (1, 1), (0, 0), 3),
    (3, 5, (3, 3), (1, 1), (1, 1), 4),
    (2, 4, (3, 2), (2, 1), (1, 0), 2),
    (4, 2, (1, 1), (2, 2), (0, 0), 3),
]


@pytest.mark.parametrize("case", CASES)
def test_products_of_patches_are_the_convolution_and_its_gradients(case):
    inputs, outputs, kernel, stride, padding, groups = case
    torch.manual_seed(0)
    size, batch = (11, 9), 6
    x = torch.randn(batch, groups * inputs, *size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(groups * outputs, inputs, *kernel, dtype=torch.float64, requires_grad=True)
    wanted = functional.conv2d(x, weight, None, stride, padding, 1, groups)
    grad = torch.randn_like(wanted)
    rows_grad, weight_grad = torch.autograd.grad(wanted, (x, weight), grad)
    made = Grouped(batch, groups, inputs, outputs, size, kernel, stride, padding)
    with torch.no_grad():
        patches = made.patches(x)
        assert patches.shape == made.patches_shape
        for got, value in (
            (made.forward(patches, weight), wanted),
            (made.rows_grad(grad, weight), rows_grad),
            (made.weight_grad(grad, patches), weight_grad),
        ):
            assert got.is_contiguous(), "what follows was recorded on such a layout"
            torch.testing.assert_close(got, value)


def targets(replay):
    return {str(node.target) for node in replay._nodes}


@pytest.mark.parametrize("most", [convolutions._MOST_BYTES, 0])
def test_a_recorded_step_of_many_networks_has_products_where_patches_fit(most, monkeypatch):
    monkeypatch.setattr(convolutions, "_MOST_BYTES", most)
    task = task_from_module(make_model("cnn_bench", (8, 8), 3), dtype=torch.float64)
    params, _ = task.init(torch.tensor(0))
    names, generator = list(params), torch.Generator().manual_seed(0)
    stacked = [
        p.unsqueeze(0) + 0.1 * torch.randn(3, *p.shape, generator=generator)
        for p in params.values()
    ]
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64, generator=generator)
    y = torch.tensor([[0, 1], [2, 2], [1, 0]])

    def step(*leaves):
        *weights, x, y = leaves

        def loss(weights, x, y):
            outputs = task.predict(dict(zip(names, weights, strict=True)), {}, x, None)
            return task.row_loss(outputs, y).mean()

        return list(torch.vmap(torch.func.grad(loss))(weights, x, y))

    leaves = [*stacked, x, y]
    plain = record(step, leaves, fuse=True)
    monkeypatch.setattr(rewriting, "_is_on_gpu", lambda graph: True)
    made = record(step, leaves, fuse=True)
    for got, value in zip(made(*leaves), plain(*leaves), strict=True):
        torch.testing.assert_close(got, value)
    assert any("convolution" in name for name in targets(plain))
    assert any("convolution" in name for name in targets(made)) == (most == 0)
    taken = sum(getattr(node.target, "__name__", "") == "patches" for node in made._nodes)
    assert taken == (2 if most else 0), "forward and backward should share their patches"
