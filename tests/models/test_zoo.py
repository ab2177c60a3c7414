"""The papers' networks by name, a user's file, and side information before the head."""

import pytest
import torch
from torch import nn

from handspan.core import keys
from handspan.core.errors import HandspanError
from handspan.models.convert import task_from_module
from handspan.models.side_info import join_side
from handspan.models.zoo import MODELS, make_model

F64 = torch.float64
ROWS = {
    "linear": [(5,), (28, 28)],
    "mlp": [(5,), (8, 8), (28, 28)],
    "mlp_batchnorm": [(8, 8)],
    "cnn": [(8, 8), (28, 28), (3, 32, 32), (32, 32, 3)],
    "cnn_bench": [(28, 28)],
    "cnn_fedrep": [(3, 32, 32)],
    "omniglot": [(28, 28), (32, 32)],
    "omniglot_batchnorm": [(32, 32)],
    "lstm": [(6, 4)],
    "gru": [(6, 4)],
}


def test_every_model_is_listed_here():
    assert set(ROWS) == set(MODELS)


@pytest.mark.parametrize(("name", "shape"), [(n, s) for n, shapes in ROWS.items() for s in shapes])
def test_models_fit_the_rows_with_and_without_side_information(name, shape):
    x = keys.normal(keys.key(0), (3, *shape)).float()
    task = task_from_module(make_model(name, shape, 7), sample=x)
    assert task.num_outputs == 7
    assert task.head == ("head.bias", "head.weight")
    params, buffers = task.init(keys.key(0))
    assert task.predict(params, buffers, x, None).shape == (3, 7)

    side = torch.tensor([1.0, -2.0])
    joined = task_from_module(
        make_model(name, shape, 7, num_side=2), needs_side=True, sample=(x, side)
    )
    with_side, side_buffers = joined.init(keys.key(0))
    assert joined.head == ("base.head.joined.bias", "base.head.joined.weight")
    # Remark 2.2: at the start the side information is ignored.
    torch.testing.assert_close(
        joined.predict(with_side, side_buffers, x, side), task.predict(params, buffers, x, None)
    )


def test_widths_are_those_of_the_papers():
    def widths(name, shape):
        layers = make_model(name, shape, 10)().modules()
        return [
            layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
            for layer in layers
            if isinstance(layer, nn.Linear | nn.Conv2d)
        ]

    assert widths("mlp", (28, 28)) == [200, 200, 10]
    assert widths("mlp", (8, 8)) == [64, 64, 10]
    assert widths("mlp_batchnorm", (8, 8)) == [64, 64, 10]
    assert widths("cnn", (28, 28)) == [32, 64, 512, 10]
    assert widths("cnn_bench", (28, 28)) == [32, 64, 128, 10]
    assert widths("cnn_fedrep", (3, 32, 32)) == [64, 64, 120, 64, 10]
    assert widths("omniglot", (32, 32)) == [64, 64, 64, 64, 10]
    assert make_model("omniglot", (32, 32), 10)().head.in_features == 256


def test_text_models_take_tokens():
    x = torch.arange(12).reshape(2, 6) % 9
    task = task_from_module(make_model("lstm", (6,), 4, num_tokens=9), sample=x)
    assert "embedding.weight" in task.names
    with pytest.raises(HandspanError, match="number of tokens is not given"):
        make_model("gru", (6,), 4)


def test_impossible_models_are_refused():
    with pytest.raises(HandspanError, match="did you mean 'mlp'"):
        make_model("mpl", (4,), 2)
    with pytest.raises(HandspanError, match="needs images"):
        make_model("cnn", (64,), 2)
    with pytest.raises(HandspanError, match="at least 16 x 16"):
        make_model("omniglot", (8, 8), 2)
    with pytest.raises(HandspanError, match="there is no model"):
        make_model("resnet50", (3, 32, 32), 2)


FILE = """
from dataclasses import dataclass
from torch import nn
import sibling

@dataclass
class Shape:
    rows: "tuple[int, ...]"

def make_model(row_shape, num_outputs):
    return nn.Linear(row_shape[0], num_outputs)

def everything(**options):
    assert set(options) == {"row_shape", "num_outputs", "num_side"}
    return nn.Linear(2, 3)

def greedy(row_shape, vocabulary):
    return nn.Linear(2, 3)

def failing():
    return 1 / 0

def number():
    return 3
"""


def test_models_from_files(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FILE)
    (tmp_path / "sibling.py").write_text("")
    assert make_model(f"{path}:make_model", (4,), 3)().weight.shape == (3, 4)
    assert make_model(str(path), (4,), 3)().weight.shape == (3, 4)
    assert isinstance(make_model(f"{path}:everything", (4,), 3)(), nn.Linear)
    for function, words in {
        "greedy": "asks for 'vocabulary'",
        "failing": "line 21: ZeroDivisionError",
        "number": "returned int",
        "make_mode": "did you mean 'make_model'",
    }.items():
        with pytest.raises(HandspanError, match=words):
            make_model(f"{path}:{function}", (4,), 3)
    with pytest.raises(HandspanError, match="there is no model file"):
        make_model("nowhere.py:make_model", (4,), 3)
    path.write_text("def broken(:\n")
    with pytest.raises(HandspanError, match="line 1: SyntaxError"):
        make_model(str(path), (4,), 3)


def test_side_information_changes_the_model_once_the_head_has_learned():
    task = task_from_module(
        join_side(lambda: nn.Sequential(nn.Linear(4, 3)), 2, side_width=5),
        needs_side=True,
        dtype=F64,
    )
    params, buffers = task.init(keys.key(0))
    assert bool((params["base.0.joined.weight"][:, 4:] == 0).all())
    params["base.0.joined.weight"] = params["base.0.joined.weight"] + 0.1
    x = torch.ones(2, 4, dtype=F64)
    first, second = (
        task.predict(params, buffers, x, torch.tensor([a, 1.0], dtype=F64)) for a in (0.0, 1.0)
    )
    assert not torch.allclose(first, second)
    features = task.features(params, buffers, x, x[0, :2])
    rebuilt = features @ params["base.0.joined.weight"].t() + params["base.0.joined.bias"]
    torch.testing.assert_close(rebuilt, task.predict(params, buffers, x, x[0, :2]))
