"""Side information joined to any network, at any of its layers: PerFedSI's Models 1 and 2.

Models
------
    Model 1 (Eq. 3)   f(x, z) = H([G(x), W(z)]): the layer at the join reads the code W(z) as well
    Model 2 (Eq. 4)   f(x, z) = H(G(x) * W(z)): the channels of that layer's input are masked

G is the network up to the join, H the layer at the join and all behind it, W the encoder of the
client's side information z. With a gate, W(z) is drawn to what tells nothing: 0, or a mask of ones.

Deviations
----------
    Starts are neutral: at the start the model equals the base network (Remark 2.2 of [1] notes that
    W may learn to ignore z; it names no start). In Model 1 the new weights of the layer at the join
    are zero and W starts as usual, because two zero factors would never move; in Model 2
    W(z) = 1 + A z with A = 0. A mask of z itself (``none``), or by an encoder of one's own, is no
    neutral start. What reads z first in our encoders has no bias: it would tell z itself
    (docs/methods).

References
----------
.. [1] PerFedSI: A Framework for Personalized Federated Learning with Side Information,
   anonymous submission, section 2.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv, pooling

from handspan.core import keys
from handspan.core.errors import HandspanError, nearest
from handspan.models.files import load_model_file
from handspan.models.source import reproducible
from handspan.models.structure import find_head

Factory = Callable[[], nn.Module]
FORMS = ("concatenate", "mask")
ENCODERS = ("linear", "two_layers", "none")
SIDE = ("form", "join", "side_encoder", "side_width", "gate")
"""Settings of a method that ``join_side`` understands."""
_POOLS = (pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._AdaptiveMaxPoolNd)
_CHANNELS_SECOND = (
    conv._ConvNd,
    batchnorm._NormBase,
    nn.GroupNorm,
    *_POOLS,
    pooling._AdaptiveAvgPoolNd,
)


class _Join(nn.Module):
    """A layer of the base network whose input takes up the code W(z)."""

    def __init__(self, joined: nn.Module) -> None:
        super().__init__()
        self.joined = joined
        self.code: Tensor | None = None  # set by the outer module for one forward pass

    def spread(self, x: Tensor) -> tuple[Tensor, int]:
        """Return the code with the axes of an input, and the position of its channels."""
        if self.code is None:
            raise HandspanError("a layer that joins side information was called by itself")
        channels = channel_axis(self.joined, x)
        is_late = isinstance(self.joined, nn.RNNBase) and not self.joined.batch_first
        shape = [1] * x.dim()
        shape[1 if is_late else 0], shape[channels] = self.code.shape
        return self.code.reshape(shape), channels


class Concatenated(_Join):
    """Model 1: the layer reads [G(x), W(z)]."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        """Widen the input by the code; in sequences and maps one code for all positions."""
        code, channels = self.spread(x)
        shape = list(x.shape)
        shape[channels] = code.shape[channels]
        return self.joined(torch.cat([x, code.expand(shape)], channels), *rest)


class Masked(_Join):
    """Model 2: the layer reads G(x) * W(z)."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        """Multiply the channels of the input by the mask."""
        return self.joined(x * self.spread(x)[0], *rest)


class OnePlusLinear(nn.Module):
    """The mask W(z) = 1 + A z, where A starts at zero."""

    def __init__(self, num_side: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_side, width, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, side: Tensor) -> Tensor:
        """Masks of rows."""
        return 1 + self.linear(side)


class ChannelGroups(nn.Module):
    """No trained W: each entry of z is the mask of an equal group of channels."""

    group: Tensor

    def __init__(self, num_side: int, width: int) -> None:
        super().__init__()
        if num_side > width:
            raise HandspanError(
                f"side_encoder=none masks groups of channels: {width} channels cannot be divided "
                f"among {num_side} entries of side information; take side_encoder=linear"
            )
        self.register_buffer("group", torch.arange(width) * num_side // width, persistent=False)

    def forward(self, side: Tensor) -> Tensor:
        """Masks of rows."""
        return side.index_select(1, self.group)


class WithSide(nn.Module):
    """Base network and side encoder, called as ``module(x, side)``.

    Parameters
    ----------
    base
        The network; the layer at the join is replaced.
    encoder
        W, of the right width.
    join
        Name of the layer at the join.
    width
        Width of the code in Model 1; None makes it Model 2.
    has_gate
        Whether there is a buffer ``side_gate`` by which W(z) is drawn to what tells nothing.
    """

    side_gate: Tensor

    def __init__(
        self, base: nn.Module, encoder: nn.Module, join: str, width: int | None, has_gate: bool
    ) -> None:
        super().__init__()
        # Before the base, so that the head stays the last linear layer.
        self.encoder = encoder
        self.base = base
        self.join = join
        self.neutral = 1.0 if width is None else 0.0
        self.has_gate = has_gate
        if has_gate:
            self.register_buffer("side_gate", torch.ones(()))
        layer = base.get_submodule(join)
        joined = Masked(layer) if width is None else Concatenated(widened(layer, width))
        base.set_submodule(join, joined)

    def forward(self, x: Tensor, side: Tensor) -> Any:
        """Outputs for rows and their side information (rows, s)."""
        layer = self.base.get_submodule(self.join)
        assert isinstance(layer, _Join)
        code = self.encoder(side)
        if self.has_gate:
            code = self.neutral + self.side_gate * (code - self.neutral)
        layer.code = code
        try:
            return self.base(x)
        finally:
            layer.code = None


def channel_axis(layer: nn.Module, x: Tensor) -> int:
    """Position of the channels in the input of a layer: the last axis, or that of feature maps."""
    if isinstance(layer, nn.Linear | nn.RNNBase):
        return x.dim() - 1
    return 1 if x.dim() > 3 or isinstance(layer, _CHANNELS_SECOND) else x.dim() - 1


def widened(layer: nn.Module, width: int) -> nn.Module:
    """Return a copy of the layer that reads ``width`` inputs more, by weights that are zero."""
    layer = copy.deepcopy(layer)
    if isinstance(layer, nn.Linear):
        layer.in_features += width
        names = ["weight"]
    elif isinstance(layer, conv._ConvNd) and layer.groups == 1 and not layer.transposed:
        layer.in_channels += width
        names = ["weight"]
    elif isinstance(layer, nn.RNNBase):
        layer.input_size += width
        names = [name for name, _ in layer.named_parameters() if name.startswith("weight_ih_l0")]
    else:
        raise HandspanError(
            f"form=concatenate joins at a linear, convolutional or recurrent layer, and this one "
            f"is {type(layer).__name__}: name another by join, or take form=mask"
        )
    for name in names:
        old = getattr(layer, name)
        new = torch.cat([old.detach(), old.new_zeros(len(old), width, *old.shape[2:])], 1)
        setattr(layer, name, nn.Parameter(new, requires_grad=old.requires_grad))
    return layer


def reads_side(given: nn.Module | Factory) -> bool:
    """Whether a network is called as ``module(x, side)`` already."""
    if not isinstance(given, nn.Module):
        with reproducible(keys.key(0, "side")):  # leaves torch's generator as it was
            given = given()
    return "side" in inspect.signature(given.forward).parameters


def join_side(
    base_factory: Factory,
    num_side: int,
    *,
    form: str = "concatenate",
    join: str = "head",
    side_encoder: str | Callable[[], nn.Module] = "linear",
    side_width: int = 16,
    gate: bool = False,
    rows: Tensor | None = None,
) -> Factory:
    """Make a factory of a base network that reads side information at one of its layers.

    Parameters
    ----------
    base_factory
        Builds the base network, called as ``module(x)``.
    num_side
        Entries of the side information z.
    form
        ``concatenate`` (Model 1), or ``mask`` (Model 2).
    join
        The layer whose input is joined: ``head`` (the last linear layer), or its name.
    side_encoder
        W: ``linear``; ``two_layers``, that of the Omniglot experiment; ``none``, z as it is, in a
        mask one group of channels for each entry; ``FILE.py:function``, or a function, that builds
        another one, from (rows, num_side) to (rows, width of the code or channels of the mask).
    side_width
        Width of the code in Model 1, where the encoder leaves it open.
    gate
        Whether the model has a buffer ``side_gate``, 1 at the start; at 0 it ignores z.
    rows
        A few rows, from which Model 2 learns how many channels there are.

    Examples
    --------
    >>> module = join_side(lambda: nn.Sequential(nn.Linear(4, 3)), num_side=2)()
    >>> module(torch.ones(5, 4), torch.ones(5, 2)).shape
    torch.Size([5, 3])
    """
    if num_side < 1 or side_width < 1:
        raise HandspanError("side information needs at least one entry and a code of width 1")
    with reproducible(keys.key(0, "side")):  # leaves torch's generator as it was
        tried = _nested(base_factory())
        name = _layer_name(tried, join)
        width = _channels(tried, name, rows) if form == "mask" else side_width
        if side_encoder in ("none", "two_layers") and form == "concatenate":
            width = num_side if side_encoder == "none" else 64
        if form == "concatenate":
            widened(tried.get_submodule(name), width)  # refused now rather than at the start
        encoder = _encoder(side_encoder, num_side, width, form)
        encoder()
    return partial(_build, base_factory, encoder, name, None if form == "mask" else width, gate)


def _build(
    base_factory: Factory, encoder: Factory, name: str, width: int | None, gate: bool
) -> nn.Module:
    base = _nested(base_factory())  # first, so that its start is that of the base network alone
    return WithSide(base, encoder(), name, width, gate)


def _nested(base: nn.Module) -> nn.Module:
    """Put a network that is a single layer inside another module, where it can be replaced."""
    return base if list(base.children()) else nn.Sequential(OrderedDict(head=base))


def _layer_name(base: nn.Module, join: str) -> str:
    names = [name for name, _ in base.named_modules() if name]
    if join in names:
        return join
    if join == "head":
        return find_head(base, None)[0]
    raise HandspanError(
        f"join={join!r} is no layer of the model{nearest(join, names)}; there are "
        f"{', '.join(names)}"
    )


def _encoder(kind: str | Factory, num_side: int, width: int, form: str) -> Factory:
    if not isinstance(kind, str):
        return kind
    if ".py" in kind:
        return load_model_file(kind, num_side=num_side, side_width=width)
    if kind == "two_layers":
        if form == "mask":
            raise HandspanError("side_encoder=two_layers belongs to form=concatenate")
        return partial(omniglot_side_encoder, num_side)
    if kind == "none":
        return nn.Identity if form == "concatenate" else partial(ChannelGroups, num_side, width)
    if form == "mask":
        return partial(OnePlusLinear, num_side, width)
    return partial(nn.Linear, num_side, width, bias=False)


def _channels(base: nn.Module, name: str, rows: Tensor | None) -> int:
    """Channels of the input of a layer, seen by calling the network once."""
    if rows is None:
        raise HandspanError("form=mask must be shown a few rows: pass rows")
    seen: list[int] = []
    layer = base.get_submodule(name)
    hook = layer.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[channel_axis(module, args[0])])
    )
    with torch.no_grad():
        base.eval()(rows.cpu().float() if rows.is_floating_point() else rows.cpu())
    hook.remove()
    if not seen:
        raise HandspanError(f"the model never calls its layer {name!r}: name another by join")
    return seen[0]


def omniglot_side_encoder(num_side: int) -> nn.Module:
    """The side encoder of the Omniglot experiment: linear to 64x3x3, one conv block, 64 outputs."""
    return nn.Sequential(
        nn.Linear(num_side, 576, bias=False),
        nn.Unflatten(1, (64, 3, 3)),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
