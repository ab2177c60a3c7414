"""What cannot be supported is refused with a sentence when the task is built."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from handspan.core import keys
from handspan.core.data import Batch
from handspan.core.errors import HandspanError
from handspan.models.convert import task_from_module


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.function = function

    def forward(self, x):
        return self.function(self, self.linear(x))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen.add_(1.0)
        return self.linear(x)


class Halving(nn.BatchNorm1d):
    pass


LAYERS = {
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), "do not share batches"),
    "stats": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), "running statistics"),
    "no stats": (lambda: nn.BatchNorm1d(4, track_running_stats=False), "GroupNorm"),
    "subclass": (lambda: Halving(4), "subclasses"),
    "lazy": (lambda: nn.LazyLinear(3), "run the model once"),
    "alpha": (lambda: nn.AlphaDropout(), "random"),
    "rrelu": (lambda: nn.RReLU(), "random"),
    "sparse": (lambda: nn.Embedding(3, 4, sparse=True), "sparse=False"),
    "max_norm": (lambda: nn.Embedding(3, 4, max_norm=1.0), "max_norm"),
    "bag": (lambda: nn.EmbeddingBag(3, 4), "use Embedding"),
    "projection": (lambda: nn.LSTM(4, 3, proj_size=2), "proj_size"),
    "kdim": (lambda: nn.MultiheadAttention(4, 2, kdim=3), "kdim"),
    "spectral": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "spectral_norm"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_unsupported_layers_are_named(name):
    make, words = LAYERS[name]
    with pytest.raises(HandspanError, match=words) as caught:
        task_from_module(nn.Sequential(make(), nn.Linear(4, 2)))
    assert "'0'" in str(caught.value)


FORWARDS = {
    "global randomness": (lambda _, x: functional.dropout(x, 0.5, training=True), "nn.Dropout"),
    "branch": (lambda _, x: x if x.sum() > 0 else -x, "torch.where"),
    "item": (lambda _, x: x * x.sum().item(), "torch.where"),
    "shape": (lambda _, x: x @ x, "failed on a sample"),
    "no rows": (lambda _, x: x.sum(), "first axis"),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_forward_does_is_tried_on_the_sample(name):
    function, words = FORWARDS[name]
    with pytest.raises(HandspanError, match=words):
        task_from_module(Calls(function), sample=torch.ones(3, 4))


def test_an_operation_without_batching_rule_is_refused():
    def slow(_, x):
        return x + torch.histc(x.detach(), 2, 0, 1)

    with pytest.raises(HandspanError, match="cannot be stacked"):
        task_from_module(Calls(slow), sample=torch.ones(3, 4))


def test_the_failing_layer_is_named():
    module = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(5, 2)))
    with pytest.raises(HandspanError, match=re.escape("'1.0' (Linear)")):
        task_from_module(module, sample=torch.ones(3, 4))


def test_buffers_changed_in_place_are_refused():
    with pytest.raises(HandspanError, match="'seen' in place"):
        task_from_module(InPlace(), sample=torch.ones(3, 4))


def test_contradictions_are_refused():
    linear = nn.Linear(4, 2)
    with pytest.raises(HandspanError, match="2 outputs where 3"):
        task_from_module(linear, num_outputs=3, sample=torch.ones(3, 4))
    with pytest.raises(HandspanError, match="did you mean 'linear'"):
        task_from_module(Calls(lambda _, x: x), head="liner")
    with pytest.raises(HandspanError, match="no trainable"):
        task_from_module(nn.Linear(4, 2).requires_grad_(False))
    with pytest.raises(HandspanError, match="kind"):
        task_from_module(linear, kind="ranking")
    with pytest.raises(HandspanError, match="not int"):
        task_from_module(3)
    with pytest.raises(HandspanError, match="returned int"):
        task_from_module(lambda: 3)


def test_a_loss_that_returns_one_number_is_refused():
    with pytest.raises(HandspanError, match="one loss per row"):
        task_from_module(nn.Linear(4, 2), loss=functional.cross_entropy, sample=torch.ones(3, 4))


def test_missing_labels_and_side_information_are_told():
    task = task_from_module(nn.Linear(4, 2))
    params, buffers = task.init(keys.key(0))
    x = torch.ones(2, 4)
    batch = Batch(x=x, y=None, weight=x[:, 0], key=keys.key(0), rows=torch.arange(2))
    with pytest.raises(HandspanError, match="labels"):
        task.loss(params, buffers, batch)
    task = task_from_module(nn.Linear(4, 2), needs_side=True)
    with pytest.raises(HandspanError, match="side information"):
        task.predict(params, buffers, x, None)
    with pytest.raises(HandspanError, match="do not fit"):
        task.row_loss(torch.zeros(2, 3), torch.zeros(2, 3).long())


def test_the_user_s_module_is_never_changed():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    task = task_from_module(lambda: module, sample=torch.ones(3, 4))
    task.init(keys.key(0))
    assert [type(layer) for layer in module] == [nn.Linear, nn.BatchNorm1d, nn.Dropout, nn.Linear]
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
