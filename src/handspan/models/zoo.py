"""The papers' networks by name, and networks from a user's file.

Widths that the papers leave open are ours: the MLP's 200-200, and 64-64 for rows of up to 100
features; the text model's embedding 64, LSTM 128 and hidden layer 64.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from handspan.core.errors import HandspanError, nearest
from handspan.models.files import load_model_file
from handspan.models.side_info import join_side

Factory = Callable[[], nn.Module]
_CHANNELS = (1, 3, 4)


class ChannelsFirst(nn.Module):
    """Bring images into the order (rows, channels, height, width)."""

    def __init__(self, row_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.is_grey = len(row_shape) == 2
        self.is_last = not self.is_grey and (
            row_shape[0] not in _CHANNELS and row_shape[2] in _CHANNELS
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the channel axis, or move it forward."""
        if self.is_grey:
            return x.unsqueeze(1)
        return x.permute(0, 3, 1, 2) if self.is_last else x


def _image_shape(row_shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(row_shape) == 2:
        return 1, *row_shape
    order = ChannelsFirst(row_shape)
    height, width, channels = row_shape if order.is_last else (*row_shape[1:], row_shape[0])
    return channels, height, width


def _linear(row_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), head=nn.Linear(math.prod(row_shape), num_outputs))
    )


def _mlp(row_shape: tuple[int, ...], num_outputs: int, *, has_norm: bool = False) -> nn.Module:
    inputs = math.prod(row_shape)
    width = 200 if inputs > 100 else 64
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for index, size in enumerate((inputs, width), 1):
        layers[f"hidden{index}"] = nn.Linear(size, width)
        if has_norm:
            layers[f"norm{index}"] = nn.BatchNorm1d(width)
        layers[f"relu{index}"] = nn.ReLU()
    layers["head"] = nn.Linear(width, num_outputs)
    return nn.Sequential(OrderedDict(layers))


def _cnn(
    row_shape: tuple[int, ...], num_outputs: int, *, maps: tuple[int, int], hidden: tuple[int, ...]
) -> nn.Module:
    """Two convolutions 5x5, each with pooling, then fully connected layers."""
    channels, height, width = _image_shape(row_shape)
    # Small images would shrink to nothing: 8 px need padding to have 2 px left.
    padding = 2 if min(height, width) < 20 else 0

    def shrink(size: int) -> int:
        return ((size + 2 * padding - 4) // 2 + 2 * padding - 4) // 2

    layers: dict[str, nn.Module] = {"channels": ChannelsFirst(row_shape)}
    for index, count in enumerate(maps, 1):
        layers[f"conv{index}"] = nn.Conv2d(channels, count, 5, padding=padding)
        layers[f"relu{index}"] = nn.ReLU()
        layers[f"pool{index}"] = nn.MaxPool2d(2)
        channels = count
    layers["flatten"] = nn.Flatten()
    inputs = channels * shrink(height) * shrink(width)
    for index, count in enumerate(hidden, 1):
        layers[f"hidden{index}"] = nn.Linear(inputs, count)
        layers[f"relu{len(maps) + index}"] = nn.ReLU()
        inputs = count
    layers["head"] = nn.Linear(inputs, num_outputs)
    return nn.Sequential(OrderedDict(layers))


def _omniglot(row_shape: tuple[int, ...], num_outputs: int, *, norm: str) -> nn.Module:
    """Four blocks of 64 maps 3x3: 32x32 pixels give 64x2x2 = 256 features."""
    channels, height, width = _image_shape(row_shape)
    layers: dict[str, nn.Module] = {"channels": ChannelsFirst(row_shape)}
    for index in range(1, 5):
        layers[f"conv{index}"] = nn.Conv2d(channels, 64, 3, padding=1)
        layers[f"norm{index}"] = nn.BatchNorm2d(64) if norm == "batch" else nn.GroupNorm(8, 64)
        layers[f"relu{index}"] = nn.ReLU()
        layers[f"pool{index}"] = nn.MaxPool2d(2)
        channels = 64
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(64 * (height // 16) * (width // 16), num_outputs)
    return nn.Sequential(OrderedDict(layers))


class Recurrent(nn.Module):
    """Embedding (for tokens), one recurrent layer, two fully connected ones on its last state."""

    def __init__(self, cell: str, num_tokens: int | None, features: int, num_outputs: int) -> None:
        super().__init__()
        self.embedding = None if num_tokens is None else nn.Embedding(num_tokens, features)
        kind = nn.LSTM if cell == "lstm" else nn.GRU
        self.recurrent = kind(features, 128, batch_first=True)
        self.hidden = nn.Linear(128, 64)
        self.relu = nn.ReLU()
        self.head = nn.Linear(64, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs for sequences (rows, time) of tokens or (rows, time, features)."""
        sequence = x if self.embedding is None else self.embedding(x.long())
        output, _ = self.recurrent(sequence)
        return self.head(self.relu(self.hidden(output[:, -1])))


_TABLES = {"linear": _linear, "mlp": _mlp, "mlp_batchnorm": partial(_mlp, has_norm=True)}
_IMAGES: dict[str, tuple[int, Callable[..., nn.Module]]] = {  # least number of pixels, builder
    "cnn": (8, partial(_cnn, maps=(32, 64), hidden=(512,))),
    "cnn_bench": (8, partial(_cnn, maps=(32, 64), hidden=(128,))),
    "cnn_fedrep": (8, partial(_cnn, maps=(64, 64), hidden=(120, 64))),
    "omniglot": (16, partial(_omniglot, norm="group")),
    "omniglot_batchnorm": (16, partial(_omniglot, norm="batch")),
}
_SEQUENCES = ("lstm", "gru")
MODELS = tuple(sorted((*_TABLES, *_IMAGES, *_SEQUENCES)))


def make_model(
    name: str,
    row_shape: tuple[int, ...],
    num_outputs: int,
    num_side: int | None = None,
    *,
    num_tokens: int | None = None,
) -> Factory:
    """Make a factory of a network that fits the rows.

    Parameters
    ----------
    name
        One of ``MODELS``, or ``FILE.py:function``.
    row_shape
        Shape of one row; images of two axes get a channel axis.
    num_outputs
        Classes, or target values.
    num_side
        Entries of side information, joined before the head; such a model is called
        ``module(x, side)``.
    num_tokens
        Vocabulary of text models whose rows are token numbers.

    Examples
    --------
    >>> make_model("mlp", (8, 8), 10)().head
    Linear(in_features=64, out_features=10, bias=True)
    """
    if ":" in name or name.endswith(".py"):
        # A user's function receives num_side and joins the side information itself.
        return load_model_file(
            name, row_shape=tuple(row_shape), num_outputs=num_outputs, num_side=num_side
        )
    factory = _by_name(name, tuple(row_shape), num_outputs, num_tokens)
    if num_side is None:
        return factory
    return join_side(factory, num_side)


def _by_name(
    name: str, row_shape: tuple[int, ...], num_outputs: int, num_tokens: int | None
) -> Factory:
    if name in _TABLES:
        return partial(_TABLES[name], row_shape, num_outputs)
    if name in _SEQUENCES:
        return _sequence_model(name, row_shape, num_outputs, num_tokens)
    if name not in _IMAGES:
        raise HandspanError(f"there is no model {name!r}{nearest(name, list(MODELS))}")
    least, build = _IMAGES[name]
    if len(row_shape) not in (2, 3):
        raise HandspanError(
            f"model {name!r} needs images, and the rows have shape {row_shape}; use 'mlp'"
        )
    if min(_image_shape(row_shape)[1:]) < least:
        raise HandspanError(
            f"model {name!r} needs images of at least {least} x {least} pixels, and the rows have "
            f"shape {row_shape}; use 'mlp'"
        )
    return partial(build, row_shape, num_outputs)


def _sequence_model(
    name: str, row_shape: tuple[int, ...], num_outputs: int, num_tokens: int | None
) -> Factory:
    if len(row_shape) == 1 and num_tokens is not None:
        return partial(Recurrent, name, num_tokens, 64, num_outputs)
    if len(row_shape) == 2 and num_tokens is None:
        return partial(Recurrent, name, None, row_shape[1], num_outputs)
    raise HandspanError(
        f"model {name!r} needs rows of tokens (time,) and the number of tokens, or sequences "
        f"(time, features); the rows have shape {row_shape} and the number of tokens is "
        f"{'not given' if num_tokens is None else num_tokens}"
    )
