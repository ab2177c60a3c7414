"""A converted module computes what the module computes, for one client and for stacked ones."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.func import grad_and_value, vmap
from torch.nn import functional

from handspan.core import keys
from handspan.core.data import Batch
from handspan.core.records import map_tensors, stack
from handspan.core.task import value_and_grad
from handspan.models.convert import task_from_module

F64 = torch.float64


def make_batch(x, y, weight=None, side=None, key=1):
    weight = torch.ones(len(x), dtype=F64) if weight is None else weight
    return Batch(x=x, y=y, weight=weight, key=keys.key(key), rows=torch.arange(len(x)), side=side)


def normal(*shape, key=0):
    return keys.normal(keys.key(key, "x"), shape)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 5)
        self.decoder = nn.Linear(5, 7, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.body(self.embedding(x))).mean(1))


class Sequence(nn.Module):
    def __init__(self, layer, width):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        output = self.layer(x)
        output = output[0] if isinstance(output, tuple) else output
        return self.head(output[:, -1])


class OwnLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.LSTMCell(4, 5)
        self.second = nn.GRUCell(5, 5)
        self.third = nn.RNNCell(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        states = second = third = None
        for step in x.unbind(1):
            states = self.first(step, states)
            second = self.second(states[0], second)
            third = self.third(second, third)
        return self.head(third)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def image(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


TOKENS = "tokens"
CASES = {
    "linear": (lambda: nn.Linear(6, 3), (6,)),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), (6,)),
    "conv1d": (lambda: image(nn.Conv1d(2, 4, 3), nn.GELU(), nn.MaxPool1d(2)), (2, 8)),
    "conv2d": (lambda: image(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), (2, 8, 8)),
    "conv3d": (lambda: image(nn.Conv3d(1, 2, 2), nn.ReLU(), nn.AvgPool3d(2)), (1, 4, 4, 4)),
    "transposed": (lambda: image(nn.ConvTranspose2d(2, 2, 2)), (2, 3, 3)),
    "avgpool": (lambda: image(nn.Conv2d(2, 3, 2), nn.AvgPool2d(2)), (2, 6, 6)),
    "adaptive": (lambda: image(nn.Conv2d(2, 3, 2), nn.AdaptiveAvgPool2d(1)), (2, 6, 6)),
    "groupnorm": (lambda: image(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), (2, 5, 5)),
    "instancenorm": (lambda: image(nn.InstanceNorm2d(2, affine=True)), (2, 5, 5)),
    "layernorm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), (6,)),
    "batchnorm1d": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), (6,)),
    "batchnorm1d_long": (lambda: image(nn.BatchNorm1d(2)), (2, 5)),
    "batchnorm2d": (lambda: image(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), (2, 5, 5)),
    "batchnorm2d_plain": (lambda: image(nn.BatchNorm2d(2, affine=False)), (2, 5, 5)),
    "batchnorm3d": (lambda: image(nn.BatchNorm3d(2)), (2, 3, 3, 3)),
    "batchnorm_cumulative": (lambda: image(nn.BatchNorm2d(2, momentum=None)), (2, 4, 4)),
    "embedding": (lambda: image(nn.Embedding(7, 3)), TOKENS),
    "tied": (Tied, TOKENS),
    "lstm": (lambda: Sequence(nn.LSTM(4, 5, batch_first=True), 5), (6, 4)),
    "lstm_deep": (
        lambda: Sequence(nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), 10),
        (6, 4),
    ),
    "lstm_time_first": (lambda: Sequence(nn.LSTM(4, 5, bias=False), 5), (6, 4)),
    "gru": (lambda: Sequence(nn.GRU(4, 5, batch_first=True), 5), (6, 4)),
    "gru_deep": (lambda: Sequence(nn.GRU(4, 5, 2, batch_first=True), 5), (6, 4)),
    "rnn": (lambda: Sequence(nn.RNN(4, 5, 2, batch_first=True), 5), (6, 4)),
    "rnn_relu": (
        lambda: Sequence(nn.RNN(4, 5, nonlinearity="relu", batch_first=True), 5),
        (6, 4),
    ),
    "cells": (OwnLoop, (6, 4)),
    "attention": (lambda: Sequence(SelfAttention(), 8), (5, 8)),
    "transformer": (
        lambda: Sequence(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 8),
        (5, 8),
    ),
    "transformer_stack": (
        lambda: Sequence(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2),
            8,
        ),
        (5, 8),
    ),
}


def build(name):
    """The case's module in float64 (lazy layers settled), and rows."""
    make, shape = CASES[name]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        module = make().double()
        if shape == TOKENS:
            x = (normal(8, 6).abs() * 3).long() % 7
        else:
            x = normal(8, *shape)
        module.eval()(x)
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.reset_running_stats()
            if layer.affine:
                nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return module.train(), x


@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_buffers_equal_those_of_the_plain_module(name):
    module, x = build(name)
    y = torch.arange(len(x)) % 3
    task = task_from_module(module, keep_weights=True, dtype=F64, sample=x)
    params, buffers = task.init(keys.key(0))
    value, new, gradient = value_and_grad(lambda p: task.loss(p, buffers, make_batch(x, y)), params)
    expected = functional.cross_entropy(module(x), y)
    expected.backward()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    named = dict(module.named_parameters())
    assert set(named) == set(task.names)
    for key, entry in gradient.items():
        torch.testing.assert_close(entry, named[key].grad, rtol=1e-11, atol=1e-12)
    for key, entry in new.items():
        found = dict(module.named_buffers())[key].double()
        torch.testing.assert_close(entry, found, rtol=1e-12, atol=1e-12)
    predicted = task.predict(params, new, x, None)
    torch.testing.assert_close(predicted, module.eval()(x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_stacked_clients_equal_single_ones_without_slow_paths(name):
    module, x = build(name)
    task = task_from_module(module, dtype=F64)
    starts = [task.init(keys.key(client)) for client in range(3)]
    batches = [
        make_batch(x[2 * c : 2 * c + 4], torch.tensor([0, 1, 2, 1]), key=c) for c in range(3)
    ]

    def step(params, buffers, batch):
        return grad_and_value(task.loss, has_aux=True)(params, buffers, batch)

    def joined(part):
        return map_tensors(lambda *t: torch.stack(t), *part)

    params, buffers = (joined(part) for part in zip(*starts, strict=True))
    stacked = vmap(step, randomness="error")(params, buffers, stack(batches))
    for client, (start, batch) in enumerate(zip(starts, batches, strict=True)):
        value, new, gradient = value_and_grad(lambda p: task.loss(p, start[1], batch), start[0])  # noqa: B023
        single = (gradient, (value, new))
        for a, b in zip(
            torch.utils._pytree.tree_leaves(stacked),
            torch.utils._pytree.tree_leaves(single),
            strict=True,
        ):
            torch.testing.assert_close(a[client], b, rtol=1e-10, atol=1e-12)


def test_tied_weights_travel_once_and_collect_both_gradients():
    module, x = build("tied")
    task = task_from_module(module, dtype=F64, sample=x)
    assert task.names == ("body.bias", "body.weight", "embedding.weight")
    assert task.head == ("embedding.weight",)


def test_frozen_parameters_stay_in_the_task():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    given = module[0].weight.clone()
    task = task_from_module(module, sample=torch.zeros(3, 4))
    params, buffers = task.init(keys.key(0))
    assert not any(name.startswith("0.") for name in task.names)
    x = torch.ones(2, 4)
    before = task.predict(params, buffers, x, None)
    with torch.no_grad():
        module[0].weight.zero_()
    assert torch.equal(task.predict(params, buffers, x, None), before)
    module[0].weight.data.copy_(given)
    for name, tensor in params.items():
        module.get_parameter(name).data.copy_(tensor)
    torch.testing.assert_close(module.eval()(x), before)


def test_init_is_a_function_of_the_key_and_leaves_the_generator_alone():
    make = CASES["mlp"][0]
    for given in (make, make()):
        task = task_from_module(given)
        state = torch.get_rng_state()
        first, second, other = (task.init(keys.key(k))[0] for k in (5, 5, 6))
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(first[name], second[name]) for name in task.names)
        assert not any(torch.equal(first[name], other[name]) for name in task.names)


def test_factory_and_module_start_alike_and_kept_weights_are_kept():
    make = CASES["mlp"][0]
    module = make()
    key = keys.key(2)
    by_factory, by_module = (task_from_module(m).init(key)[0] for m in (make, module))
    kept = task_from_module(module, keep_weights=True).init(key)[0]
    for name, tensor in module.named_parameters():
        assert torch.equal(kept[name], tensor)
        assert by_factory[name].shape == by_module[name].shape


def test_the_default_dtype_changes_nothing():
    def numbers(dtype):
        task = task_from_module(CASES["mlp"][0], dtype=dtype)
        params, buffers = task.init(keys.key(1))
        batch = make_batch(torch.ones(2, 6, dtype=dtype), torch.tensor([0, 1]))
        return [
            *params.values(),
            *value_and_grad(lambda p: task.loss(p, buffers, batch), params)[2].values(),
        ]

    for dtype in (torch.float32, F64):
        expected = numbers(dtype)
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(F64 if before != F64 else torch.float32)
            found = numbers(dtype)
        finally:
            torch.set_default_dtype(before)
        assert all(
            torch.equal(a, b) and a.dtype == dtype for a, b in zip(expected, found, strict=True)
        )


def test_float64_starts_from_the_numbers_of_float32():
    make = CASES["mlp"][0]
    single, double = (
        task_from_module(make, dtype=d).init(keys.key(0))[0] for d in (None or torch.float32, F64)
    )
    assert all(torch.equal(single[name].double(), double[name]) for name in single)


def test_padding_rows_do_not_matter():
    for name in ("mlp", "batchnorm2d", "lstm", "transformer"):
        module, x = build(name)
        task = task_from_module(module, dtype=F64)
        params, buffers = task.init(keys.key(0))
        y = torch.arange(8) % 3
        filler = torch.full_like(x[:3], 1e3)
        padded = make_batch(
            torch.cat([x[:5], filler]), y, torch.tensor([1.0] * 5 + [0.0] * 3, dtype=F64)
        )
        results = [
            value_and_grad(lambda p, b=batch: task.loss(p, buffers, b), params)  # noqa: B023
            for batch in (make_batch(x[:5], y[:5]), padded)
        ]
        for a, b in zip(*map(torch.utils._pytree.tree_leaves, results), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_batch_without_real_rows_has_loss_zero():
    task = task_from_module(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    params, buffers = task.init(keys.key(0))
    batch = make_batch(torch.ones(2, 3), torch.zeros(2).long(), torch.zeros(2))
    value, new, gradient = value_and_grad(lambda p: task.loss(p, buffers, batch), params)
    assert float(value) == 0.0
    assert all(bool((g == 0).all()) for g in gradient.values())
    assert all(torch.equal(new[name], buffers[name]) for name in buffers)


def test_features_are_the_input_of_the_head_also_stacked():
    task = task_from_module(CASES["mlp"][0], dtype=F64)
    params, buffers = task.init(keys.key(0))
    x = normal(5, 6)
    features = task.features(params, buffers, x, None)
    rebuilt = features @ params["2.weight"].t() + params["2.bias"]
    torch.testing.assert_close(rebuilt, task.predict(params, buffers, x, None))
    stacked = vmap(lambda p: task.features(p, buffers, x, None))(
        {name: torch.stack([tensor] * 2) for name, tensor in params.items()}
    )
    torch.testing.assert_close(stacked[1], features)
    assert task.head == ("2.bias", "2.weight")
    assert task_from_module(CASES["mlp"][0], head="0").head == ("0.bias", "0.weight")


def test_copies_and_pickles_of_a_task_work():
    module, x = build("lstm_deep")
    module = nn.Sequential(module, nn.Dropout(0.5))
    task = task_from_module(module, dtype=F64)
    params, buffers = task.init(keys.key(0))
    batch = make_batch(x, torch.arange(8) % 3)
    expected = task.loss(params, buffers, batch)[0]
    file = io.BytesIO()
    torch.save(task, file)
    file.seek(0)
    for other in (copy.deepcopy(task), torch.load(file, weights_only=False)):
        assert torch.equal(other.loss(params, buffers, batch)[0], expected)
        assert torch.equal(other.init(keys.key(0))[0]["0.head.weight"], params["0.head.weight"])


def test_a_buffer_that_forward_assigns_comes_back_new():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("scale", torch.ones(()), persistent=False)

        def forward(self, x):
            self.seen = self.seen + 1.0
            return self.linear(x) * self.scale

    task = task_from_module(Counting(), sample=torch.zeros(2, 2))
    params, buffers = task.init(keys.key(0))
    _, new = task.loss(params, buffers, make_batch(torch.zeros(2, 2), torch.zeros(2).long()))
    assert (float(buffers["seen"]), float(new["seen"]), set(new)) == (0.0, 1.0, {"seen"})


def test_regression_is_half_the_mean_squared_error_over_outputs():
    task = task_from_module(nn.Linear(2, 3), kind="regression", dtype=F64, sample=normal(2, 2))
    params, buffers = task.init(keys.key(0))
    x, y = normal(4, 2), normal(4, 3, key=1)
    outputs = task.predict(params, buffers, x, None)
    value, _ = task.loss(params, buffers, make_batch(x, y))
    torch.testing.assert_close(value, 0.5 * functional.mse_loss(outputs, y))
    flat = task_from_module(nn.Linear(2, 1), kind="regression", dtype=F64)
    params, buffers = flat.init(keys.key(0))
    assert torch.isfinite(flat.loss(params, buffers, make_batch(x, y[:, 0]))[0])


def test_sequence_labels_average_over_the_positions_that_count():
    task = task_from_module(nn.Linear(2, 3), dtype=F64)
    params, buffers = task.init(keys.key(0))
    x = normal(2, 4, 2)
    y = torch.tensor([[0, 1, 2, -100], [1, -100, -100, -100]])
    outputs = task.predict(params, buffers, x, None)
    rows = [functional.cross_entropy(outputs[i], y[i]) for i in range(2)]
    value, _ = task.loss(params, buffers, make_batch(x, y))
    torch.testing.assert_close(value, sum(rows) / 2)


def test_own_loss_takes_one_number_per_row():
    task = task_from_module(
        nn.Linear(2, 3), loss=lambda o, y: functional.cross_entropy(o, y, reduction="none") * 2
    )
    assert task.row_loss(torch.zeros(4, 3), torch.zeros(4).long()).shape == (4,)
