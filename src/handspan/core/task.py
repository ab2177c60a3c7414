"""A prediction problem as methods see it: losses and predictions of parameters, never a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from handspan.core.data import Batch
from handspan.core.records import Params

P = TypeVar("P", Tensor, Params)


class Task(ABC):
    """What a method may ask of a model.

    Attributes
    ----------
    head
        Names of the last layer's parameters, shared out by FedRep and its relatives.
    kind
        ``classification`` or ``regression``.
    names
        Names of all trainable parameters; frozen ones stay inside the task and are never sent.
    num_outputs
        Width of the last layer.
    needs_side
        Whether the model reads side information.
    """

    head: tuple[str, ...]
    kind: str
    names: tuple[str, ...]
    num_outputs: int
    needs_side: bool = False

    @abstractmethod
    def init(self, key: Tensor) -> tuple[Params, Params]:
        """Fresh trainable parameters and buffers, a pure function of the key."""

    @abstractmethod
    def loss(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Mean training loss over the batch's real rows, and the new buffers."""

    @abstractmethod
    def predict(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """Outputs (logits, or values) for rows, in evaluation mode."""

    @abstractmethod
    def features(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """Input of the head for rows, in evaluation mode."""

    @abstractmethod
    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Loss of each row, from the outputs."""


def value_and_grad(function: Callable[[P], tuple[Tensor, Any]], params: P) -> tuple[Tensor, Any, P]:
    """Value, extra result and gradient: the only way in which a method takes a gradient.

    Under ``vmap`` this is ``torch.func``; outside it plain autograd, which takes half the time.
    """
    if _inside_transform():
        gradient, (value, extra) = torch.func.grad_and_value(function, has_aux=True)(params)
        return value, extra, gradient
    leaves = _map(lambda tensor: tensor.detach().requires_grad_(), params)
    with torch.enable_grad():
        value, extra = function(leaves)
        flat = [leaves] if isinstance(leaves, Tensor) else list(leaves.values())
        gradients = torch.autograd.grad(value, flat, allow_unused=True, materialize_grads=True)
    extra = {k: v.detach() for k, v in extra.items()} if isinstance(extra, dict) else extra
    if isinstance(leaves, Tensor):
        return value.detach(), extra, cast("P", gradients[0])
    return value.detach(), extra, cast("P", dict(zip(leaves, gradients, strict=True)))


def _map(function: Callable[[Tensor], Tensor], params: P) -> P:
    if isinstance(params, Tensor):
        return cast("P", function(params))
    return cast("P", {name: function(tensor) for name, tensor in params.items()})


def _inside_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]
