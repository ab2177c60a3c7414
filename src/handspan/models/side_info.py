"""Side information concatenated before the last layer: PerFedSI's Model 1 for any network.

Model
-----
    f(x, z) = H([G(x), W(z)]): G is the base network up to its head, W a linear encoding of the
    client's side information z, H the head, widened by the columns for W(z).

Deviations
----------
    The head's new columns start at zero, so that at the start the model equals the base network
    (Remark 2.2 of [1] notes that W may learn to ignore z; it names no start); W itself starts as a
    usual linear layer, because two zero factors would never move.

References
----------
.. [1] PerFedSI: A Framework for Personalized Federated Learning with Side Information,
   anonymous submission, section 2, Model 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from handspan.core.errors import HandspanError
from handspan.models.structure import find_head

Factory = Callable[[], nn.Module]


class JoinCode(nn.Module):
    """Joins the encoded side information to each row's features."""

    code: Tensor | None = None  # set by the outer module for the duration of one forward pass

    def forward(self, features: Tensor) -> Tensor:
        """Return [features, code]; in sequences one code for all positions."""
        if self.code is None:
            raise HandspanError("the head of a model with side information was called by itself")
        code = self.code
        if features.dim() == 3:
            code = code.unsqueeze(1).expand(-1, features.shape[1], -1)
        return torch.cat([features, code], -1)


class NeutralLinear(nn.Linear):
    """Linear layer of [features, code] whose columns for the code start at zero."""

    code_width: int = 0

    def __init__(self, head: nn.Linear, code_width: int) -> None:
        super().__init__(
            head.in_features + code_width,
            head.out_features,
            head.bias is not None,
            dtype=head.weight.dtype,
        )
        self.code_width = code_width
        self._start_as(head)

    def reset_parameters(self) -> None:
        """Draw the columns of the features as the base head would, the others at zero."""
        own = nn.Linear(
            self.in_features - self.code_width, self.out_features, self.bias is not None
        )
        if self.code_width:  # still 0 inside __init__, which sets the weights itself
            self._start_as(own)

    def _start_as(self, head: nn.Linear) -> None:
        with torch.no_grad():
            self.weight.zero_()
            self.weight[:, : head.in_features] = head.weight
            if self.bias is not None:
                self.bias.copy_(head.bias)


class ConcatenateSide(nn.Module):
    """Base network and side encoder, called as ``module(x, side)``."""

    def __init__(self, base: nn.Module, encoder: nn.Module, width: int, head: str | None) -> None:
        super().__init__()
        # Before the base, so that the head stays the last linear layer.
        self.encoder = encoder
        self.base = base
        (name,) = find_head(base, head)
        layer = base.get_submodule(name)
        if not isinstance(layer, nn.Linear) or not name:
            raise HandspanError(
                f"side information is joined before a linear head inside the model, and "
                f"{name or 'the model'!r} is {type(layer).__name__}"
            )
        self.head_name = name
        # Two layers, so that the input of the head is [features, code], as methods expect.
        parts = OrderedDict(join=JoinCode(), linear=NeutralLinear(layer, width))
        base.set_submodule(name, nn.Sequential(parts))

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        """Outputs for rows and their side information (rows, s)."""
        join = self.base.get_submodule(f"{self.head_name}.join")
        assert isinstance(join, JoinCode)
        join.code = self.encoder(side)
        try:
            return self.base(x)
        finally:
            join.code = None


def concatenate_side(
    base_factory: Factory,
    num_side: int,
    width: int = 16,
    *,
    encoder_factory: Factory | None = None,
    head: str | None = None,
) -> Factory:
    """Make a factory of the base network with side information joined before its head.

    Parameters
    ----------
    base_factory
        Builds the base network, called as ``module(x)``.
    num_side
        Entries of the side information z.
    width
        Width of the code W(z).
    encoder_factory
        Builds another encoder (rows, num_side) -> (rows, width); by default one linear layer.
    head
        Name of the linear head, where it is not the last linear layer.

    Examples
    --------
    >>> module = concatenate_side(lambda: nn.Sequential(nn.Linear(4, 3)), num_side=2)()
    >>> module(torch.ones(5, 4), torch.ones(5, 2)).shape
    torch.Size([5, 3])
    """
    if num_side < 1 or width < 1:
        raise HandspanError("side information needs at least one entry and a code of width 1")
    return partial(_build, base_factory, num_side, width, encoder_factory, head)


def _build(
    base_factory: Factory,
    num_side: int,
    width: int,
    encoder_factory: Factory | None,
    head: str | None,
) -> nn.Module:
    base = base_factory()  # first, so that its start is that of the base network alone
    encoder = nn.Linear(num_side, width) if encoder_factory is None else encoder_factory()
    return ConcatenateSide(base, encoder, width, head)


def omniglot_side_encoder(num_side: int) -> nn.Module:
    """The side encoder of the Omniglot experiment: linear to 64x3x3, one conv block, 64 outputs."""
    return nn.Sequential(
        nn.Linear(num_side, 576),
        nn.Unflatten(1, (64, 3, 3)),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
