"""A module without weights of its own: parameters and buffers are put in for one call at a time.

``torch.func.functional_call`` does the same, but walks the module tree at every call; here the
places are found once. Trainable parameters lie on the meta device between calls, so that a module
that kept a reference of its own to them fails loudly instead of computing with stale values.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from handspan.core.records import Params


class ForwardContext:
    """What converted layers must know of the batch at hand; empty between calls.

    Attributes
    ----------
    weight
        (rows,) 1 for real rows and 0 for padding, or None in evaluation.
    key
        () int64 key of the step, or None in evaluation.
    draws
        How many random masks this call has drawn so far: a layer that is used twice draws anew.
    captured
        Input of the head, where it is listened for.
    """

    __slots__ = ("captured", "draws", "key", "listening", "weight")

    weight: Tensor | None
    key: Tensor | None
    draws: int
    listening: bool
    captured: Tensor | None

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the batch, so that no tensor of one call is seen by another."""
        self.weight = self.key = self.captured = None
        self.draws = 0
        self.listening = False


class Capture:
    """Forward pre-hook that keeps the first input of the head, when asked to."""

    def __init__(self, context: ForwardContext) -> None:
        self.context = context

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep the input."""
        context = self.context
        if context.listening and context.captured is None and args:
            context.captured = args[0]


class Skeleton:
    """A converted module and the places of its tensors.

    Calls change the module and put it back, hence the lock: several threads may serve one task.
    """

    def __init__(self, module: nn.Module, names: Params, context: ForwardContext) -> None:
        self.module = module
        self.context = context
        self._names = names
        self._lock = threading.RLock()
        self._slots = _slots(module, names)
        buffers = {id(names[name]): name for name in names}
        self._buffer_slots = sorted(
            (buffers[id(tensor)], child._buffers, key)
            for child in module.modules()
            for key, tensor in child._buffers.items()
            if id(tensor) in buffers
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Find the places anew in a copy."""
        return Skeleton, (self.module, self._names, self.context)

    def __call__(
        self,
        params: Params,
        buffers: Params,
        inputs: tuple[Tensor, ...],
        weight: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Any, Params]:
        """Outputs, and the buffers as the forward pass left them."""
        with self._lock:
            self._fill(params, buffers)
            context = self.context
            context.weight, context.key = weight, key
            try:
                outputs = self.module(*inputs)
                if self._buffer_slots:
                    buffers = {name: store[key] for name, store, key in self._buffer_slots}
            finally:
                context.clear()
                self._empty()
        return outputs, buffers

    def capture(self, params: Params, buffers: Params, inputs: tuple[Tensor, ...]) -> Any:
        """Input of the head, or None where the head never ran."""
        with self._lock:
            self._fill(params, buffers)
            context = self.context
            context.listening = True
            try:
                self.module(*inputs)
                return context.captured
            finally:
                context.clear()
                self._empty()

    def _fill(self, params: Params, buffers: Params) -> None:
        for store, key, name, _ in self._slots:
            store[key] = params[name] if name in params else buffers[name]

    def _empty(self) -> None:
        for store, key, _, original in self._slots:
            store[key] = original


def _slots(module: nn.Module, names: Params) -> list[tuple[dict[str, Any], str, str, Tensor]]:
    """Find every place of every named tensor: tied weights have several."""
    wanted = {id(tensor): name for name, tensor in names.items()}
    return [
        (store, key, wanted[id(tensor)], tensor)
        for child in module.modules()
        for store in (child._parameters, child._buffers)
        for key, tensor in store.items()
        if id(tensor) in wanted
    ]


def meta_like(tensor: Tensor) -> Tensor:
    """Stand-in without memory that fails wherever it is computed with."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)
