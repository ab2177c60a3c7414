"""Batch norm over real rows, keyed dropout, recurrent cells."""

import pytest
import torch
from torch import nn
from torch.func import vmap

from handspan.core import keys
from handspan.core.data import Batch
from handspan.core.task import value_and_grad
from handspan.models.convert import task_from_module
from handspan.models.recurrent import CellGRU, CellLSTM

F64 = torch.float64


def loss_of(task, params, buffers, x, weight=None, key=1):
    weight = torch.ones(len(x), dtype=F64) if weight is None else weight
    batch = Batch(
        x=x,
        y=torch.arange(len(x)) % 2,
        weight=weight,
        key=keys.key(key),
        rows=torch.arange(len(x)),
    )
    return value_and_grad(lambda p: task.loss(p, buffers, batch), params)


@pytest.mark.parametrize("filler", [float("nan"), 1e30])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_ignores_padding_rows_whatever_stands_in_them(filler, momentum):
    task = task_from_module(
        lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.Linear(3, 2)), dtype=F64
    )
    params, buffers = task.init(keys.key(0))
    x = keys.normal(keys.key(4), (5, 3))
    weight = torch.tensor([1.0] * 5 + [0.0] * 2, dtype=F64)
    padded = torch.cat([x, torch.full((2, 3), filler, dtype=F64)])
    plain = loss_of(task, params, buffers, x)
    found = loss_of(task, params, buffers, padded, weight)
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves(plain), leaves(found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_running_statistics_follow_torch_over_several_steps(momentum):
    module = nn.Sequential(nn.BatchNorm2d(2, momentum=momentum), nn.Flatten(), nn.Linear(18, 2))
    task = task_from_module(module, keep_weights=True, dtype=F64)
    module.double()
    params, buffers = task.init(keys.key(0))
    assert ("0.num_batches_tracked" in buffers) == (momentum is None)
    for step in range(3):
        x = keys.normal(keys.key(step), (4, 2, 3, 3)) * (step + 1)
        before = {name: tensor.clone() for name, tensor in buffers.items()}
        new = loss_of(task, params, buffers, x)[1]
        assert all(torch.equal(before[name], buffers[name]) for name in buffers)
        buffers = new
        module(x)
        for name, tensor in buffers.items():
            expected = dict(module.named_buffers())[name].double()
            torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-13)


def test_a_single_real_row_is_finite_and_leaves_the_variance_alone():
    task = task_from_module(
        nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), dtype=F64, sample=torch.ones(1, 3)
    )
    params, buffers = task.init(keys.key(0))
    value, new, gradient = loss_of(task, params, buffers, torch.ones(1, 3, dtype=F64))
    assert all(bool(t.isfinite().all()) for t in (value, *new.values(), *gradient.values()))
    assert torch.equal(new["0.running_var"], buffers["0.running_var"])
    assert not torch.equal(new["0.running_mean"], buffers["0.running_mean"])


class Echo(nn.Module):
    """Shows a layer's output as the model's."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.layer(x) * self.scale


def dropped(layer, x, key, weight=None):
    """Output of a dropout layer in training: the loss is the identity of one row each."""
    seen = {}

    def loss(outputs, y):
        seen["outputs"] = outputs
        return outputs.flatten(1).sum(1)

    task = task_from_module(Echo(layer), loss=loss, dtype=F64, num_outputs=1, keep_weights=True)
    params, buffers = task.init(keys.key(0))
    weight = torch.ones(len(x), dtype=F64) if weight is None else weight
    batch = Batch(x=x, y=x, weight=weight, key=key, rows=torch.arange(len(x)))
    task.loss(params, buffers, batch)
    assert torch.equal(task.predict(params, buffers, x, None), x)
    return seen["outputs"]


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
def test_dropout_keeps_the_mean_and_depends_on_the_key(p):
    x = torch.ones(200, 100, dtype=F64)
    first, again, other = (dropped(nn.Dropout(p), x, keys.key(k)) for k in (1, 1, 2))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (p in (0.0, 1.0))
    # Five standard errors of the mean of 20,000 entries.
    error = 5.0 * (p / (1.0 - p) / 20000) ** 0.5 if p < 1 else 0.0
    assert abs(float(first.mean()) - (1.0 if p < 1 else 0.0)) <= error
    if p == 0.3:
        assert set(first.unique().tolist()) == {0.0, 1.0 / 0.7}


def test_channel_dropout_drops_whole_channels():
    for layer, shape in ((nn.Dropout1d, (20, 9, 4)), (nn.Dropout2d, (20, 9, 3, 3))):
        out = dropped(layer(0.5), torch.ones(shape, dtype=F64), keys.key(3)).flatten(2)
        assert torch.equal(out.amin(2), out.amax(2))
        assert 0.3 < float((out == 0).double().mean()) < 0.7


def test_padding_rows_leave_the_masks_of_real_rows():
    x = torch.ones(6, 30, dtype=F64)
    padded = torch.cat([x, torch.zeros(3, 30, dtype=F64)])
    weight = torch.tensor([1.0] * 6 + [0.0] * 3, dtype=F64)
    alone = dropped(nn.Dropout(0.5), x, keys.key(1))
    assert torch.equal(dropped(nn.Dropout(0.5), padded, keys.key(1), weight)[:6], alone)


def test_a_dropout_layer_used_twice_draws_two_masks():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return torch.cat([self.drop(x), self.drop(x)], 1)

    seen = {}

    def loss(outputs, y):
        seen["outputs"] = outputs
        return outputs.sum(1)

    task = task_from_module(Echo(Twice()), loss=loss, dtype=F64, num_outputs=1, keep_weights=True)
    params, buffers = task.init(keys.key(0))
    x = torch.ones(9, 9, dtype=F64)
    batch = Batch(x=x, y=x, weight=x[:, 0], key=keys.key(0), rows=torch.arange(9))
    task.loss(params, buffers, batch)
    first, second = seen["outputs"].chunk(2, 1)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("recurrent", [False, True])
def test_dropout_stacked_equals_dropout_alone(recurrent):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 6, 2, batch_first=True, dropout=0.4) if recurrent else None
            self.drop = nn.Dropout(0.3)
            self.head = nn.Linear(6 if recurrent else 4, 2)

        def forward(self, x):
            x = x.mean(1) if self.lstm is None else self.lstm(x)[0][:, -1]
            return self.head(self.drop(x))

    x = keys.normal(keys.key(0), (5, 3, 4))
    task = task_from_module(Net, dtype=F64, sample=x)
    params, buffers = task.init(keys.key(0))
    ks = keys.fold(keys.key(9), torch.arange(4))

    def loss(k):
        ones = torch.ones(5, dtype=F64)
        y = torch.zeros(5, dtype=torch.int64)
        return task.loss(params, buffers, Batch(x=x, y=y, weight=ones, key=k, rows=y))[0]

    stacked = vmap(loss, randomness="error")(ks)
    alone = torch.stack([loss(k) for k in ks])
    torch.testing.assert_close(stacked, alone, rtol=1e-14, atol=2e-16)
    assert len(set(stacked.tolist())) == 4


def test_attention_dropout_is_keyed_too():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    x = keys.normal(keys.key(0), (4, 5, 8))
    task = task_from_module(
        nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 2)), dtype=F64, sample=x
    )
    params, buffers = task.init(keys.key(0))
    values = [float(loss_of(task, params, buffers, x, key=k)[0]) for k in (1, 1, 2)]
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize(("kind", "cell"), [(nn.LSTM, CellLSTM), (nn.GRU, CellGRU)])
def test_recurrent_cells_return_the_states_and_take_them(kind, cell):
    layer = kind(3, 4, 2, bidirectional=True).double()
    x = keys.normal(keys.key(0), (5, 2, 3))
    expected, states = layer(x)
    again, later = layer(x, states)
    layer.__class__ = cell
    found, found_states = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_states, states, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x, states), (again, later), rtol=1e-12, atol=1e-12)


def test_masks_of_attention_follow_torch():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = keys.normal(keys.key(0), (3, 4, 8))
    causal = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
    padding = torch.tensor([[False, False, False, True]] * 3)

    def outputs():
        return layer(x, x, x, attn_mask=causal, key_padding_mask=padding), layer(
            x, x, x, attn_mask=causal.double() * -3.0, average_attn_weights=False
        )

    expected = outputs()
    from handspan.models.attention import PlainAttention

    layer.__class__ = PlainAttention
    torch.testing.assert_close(outputs(), expected, rtol=1e-12, atol=1e-12)


def test_masks_of_other_keys_layers_and_positions_are_independent():
    from handspan.models.layers import keep_mask
    from handspan.models.skeleton import ForwardContext

    masks = []
    for k in range(5):
        context = ForwardContext()
        context.key = keys.key(k)
        masks += [keep_mask(context, (200, 100), 0.5).double() * 2 - 1 for _ in range(2)]
    flat = torch.stack(masks).flatten(1)
    size = flat.shape[1]
    # Five standard errors, over some hundred correlations.
    products = (flat @ flat.t() / size).fill_diagonal_(0.0)
    assert float(products.abs().max()) < 5.0 / size**0.5
    for lag in (1, 2, 64, 100, 200):
        assert float((flat[:, lag:] * flat[:, :-lag]).mean(1).abs().max()) < 5.0 / size**0.5


def test_a_single_client_takes_torch_s_fused_kernel():
    layer = nn.LSTM(3, 4, 2, batch_first=True).double()
    x = keys.normal(keys.key(0), (5, 2, 3))
    layer.__class__ = CellLSTM
    fused, states = layer(x)
    cells, cell_states = vmap(layer)(x.unsqueeze(0))
    torch.testing.assert_close(fused, cells[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states, tuple(s[0] for s in cell_states), rtol=1e-12, atol=1e-12)
