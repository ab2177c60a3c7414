"""Side information joined to dense, convolutional and recurrent networks, at any layer."""

import numpy as np
import pytest
import torch
from torch import nn

from handspan.core import keys
from handspan.core.errors import HandspanError
from handspan.models.convert import task_from_module
from handspan.models.side_info import join_side, omniglot_side_encoder, reads_side
from handspan.models.zoo import make_model

F64 = torch.float64
SHAPES = {"mlp": (5,), "omniglot": (16, 16), "lstm": (4, 3), "gru": (4, 3), "linear": (5,)}
CASES = [
    ("mlp", "concatenate", "head"),
    ("mlp", "mask", "hidden2"),
    ("linear", "concatenate", "head"),
    ("omniglot", "concatenate", "conv3"),
    ("omniglot", "mask", "pool3"),
    ("lstm", "concatenate", "recurrent"),
    ("gru", "mask", "recurrent"),
    ("lstm", "mask", "hidden"),
]


def task_of(name, gate=False, **options):
    rows = torch.randn(3, *SHAPES[name], generator=torch.Generator().manual_seed(0))
    factory = join_side(make_model(name, SHAPES[name], 3), 4, rows=rows, gate=gate, **options)
    task = task_from_module(factory, needs_side=True, sample=(rows, torch.ones(4)), dtype=F64)
    return task, rows.double()


def moved(params):
    """Parameters away from their start, so that nothing is neutral any more."""
    return {
        name: value + 0.3 * keys.normal(keys.key(7, name), tuple(value.shape))
        for name, value in params.items()
    }


@pytest.mark.parametrize(("name", "form", "join"), CASES)
def test_the_start_is_the_base_network_and_z_counts_from_then_on(name, form, join):
    task, x = task_of(name, form=form, join=join)
    base = task_from_module(make_model(name, SHAPES[name], 3), dtype=F64)
    (params, buffers), (plain, own) = task.init(keys.key(5)), base.init(keys.key(5))
    z = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=F64)
    torch.testing.assert_close(
        task.predict(params, buffers, x, z), base.predict(plain, own, x, None), rtol=0, atol=1e-12
    )
    changed = moved(params)
    first, second = (task.predict(changed, buffers, x, v) for v in (z, -z))
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "form", "join"), CASES)
def test_a_closed_gate_ignores_z_and_an_open_one_changes_nothing(name, form, join):
    gated, x = task_of(name, gate=True, form=form, join=join)
    task, _ = task_of(name, form=form, join=join)
    params, buffers = gated.init(keys.key(5))
    assert list(buffers) == ["side_gate"]
    params, z = moved(params), torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=F64)
    torch.testing.assert_close(
        gated.predict(params, buffers, x, z), task.predict(params, {}, x, z), rtol=0, atol=1e-12
    )
    shut = {"side_gate": torch.zeros((), dtype=F64)}
    assert torch.equal(*(gated.predict(params, shut, x, v) for v in (z, -z)))


def test_model_1_is_the_layer_on_both_inputs():
    task, x = task_of("mlp", join="hidden2", side_width=2)
    params = moved(task.init(keys.key(0))[0])
    z = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=F64)
    p = {name: value.numpy() for name, value in params.items()}
    hidden = np.maximum(x.numpy() @ p["base.hidden1.weight"].T + p["base.hidden1.bias"], 0)
    code = np.broadcast_to(p["encoder.weight"] @ z.numpy(), (3, 2))
    joined = np.concatenate([hidden, code], 1)
    second = joined @ p["base.hidden2.joined.weight"].T + p["base.hidden2.joined.bias"]
    wanted = np.maximum(second, 0) @ p["base.head.weight"].T + p["base.head.bias"]
    np.testing.assert_allclose(task.predict(params, {}, x, z).numpy(), wanted, atol=1e-12)


def test_model_2_masks_groups_of_channels_behind_the_third_convolution():
    """The CIFAR-10 experiment: a one-hot z leaves a quarter of the third layer's channels."""
    task, x = task_of("omniglot", form="mask", join="pool3", side_encoder="none")
    params, seen = task.init(keys.key(0))[0], []
    assert not [name for name in params if name.startswith("encoder")]
    module = join_side(
        make_model("omniglot", (16, 16), 3), 4, form="mask", join="pool3", side_encoder="none",
        rows=x.float(),
    )()  # fmt: skip
    module.base.pool3.joined.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module(x.float(), torch.eye(4)[[2]].expand(3, 4))
    live = (seen[0].abs().amax((0, 2, 3)) > 0).nonzero().flatten()
    assert live.min() >= 32 and live.max() < 48 and len(live) > 8


def test_omniglots_side_encoder_widens_the_head_by_64():
    factory = join_side(make_model("omniglot", (32, 32), 5), 256, side_encoder="two_layers")
    task = task_from_module(factory, needs_side=True)
    params, _ = task.init(keys.key(0))
    assert params["base.head.joined.weight"].shape == (5, 320)
    assert params["encoder.0.weight"].shape == (576, 256)
    assert omniglot_side_encoder(7)(torch.ones(2, 7)).shape == (2, 64)


def test_a_users_encoder_may_come_from_a_function_or_a_file(tmp_path):
    own = join_side(
        make_model("mlp", (5,), 3), 4, side_encoder=lambda: nn.Linear(4, 7), side_width=7
    )()
    assert own.base.head.joined.in_features == 64 + 7
    path = tmp_path / "encoder.py"
    path.write_text(
        "from torch import nn\ndef make(num_side, side_width):\n"
        "    return nn.Sequential(nn.Linear(num_side, side_width), nn.Tanh())\n"
    )
    read = join_side(make_model("mlp", (5,), 3), 4, side_encoder=f"{path}:make", side_width=3)()
    assert isinstance(read.encoder[1], nn.Tanh) and read.encoder[0].out_features == 3


def test_a_module_that_reads_side_information_is_known():
    plain = make_model("mlp", (5,), 3)
    assert not reads_side(plain) and reads_side(join_side(plain, 4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"join": "haed"}, "no layer of the model; did you mean 'head'"),
        ({"join": "relu1"}, "joins at a linear, convolutional or recurrent layer"),
        ({"form": "mask"}, "pass rows"),
        ({"form": "mask", "side_encoder": "two_layers", "rows": 1}, "belongs to form=concatenate"),
        ({"form": "mask", "side_encoder": "none", "join": "hidden1", "rows": 1}, "3 channels"),
        ({"side_width": 0}, "at least one entry"),
    ],
)
def test_what_cannot_be_joined_is_told(options, words):
    rows = torch.ones(2, 3)
    options = {**options, **({"rows": rows} if "rows" in options else {})}
    with pytest.raises(HandspanError, match=words):
        join_side(make_model("mlp", (3,), 3), 4, **options)
