"""Write down the tensor operations that a function performs, as a graph.

What ``make_fx`` of torch does, without the description of every tensor that compilers want: that
takes a hundred times as long as the step itself, and nothing here reads it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Recording(nn.Module):
    """Operations in their order, and the tensors that are no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()

    def constant(self, value: Tensor) -> fx.Node:
        """Insert a tensor that is the same in all calls."""
        name = f"_constant_{sum(1 for _ in self.buffers(recurse=False))}"
        self.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = value
        return node


def operations(function: Callable[..., list[Tensor]], leaves: Sequence[Tensor]) -> Recording:
    """Return what the function does with such leaves, below ``vmap`` and autograd."""
    writer = _Writer()
    for position, leaf in enumerate(leaves):
        writer.know(leaf, writer.recording.graph.placeholder(f"leaf_{position}"))
    with writer:
        outputs = function(*leaves)
    writer.recording.graph.output([writer.node(output) for output in outputs])
    return writer.recording


class _Writer(TorchDispatchMode):
    """Sees every operation, and notes it with the nodes of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        # With the tensor, held weakly: an address is given away again once its tensor is gone.
        self._known: dict[int, tuple[weakref.ref[Tensor], fx.Node]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch a second of imports: nothing is compiled here."""
        return False

    def know(self, tensor: Tensor, node: fx.Node) -> None:
        """Note which node stands for a tensor."""
        self._known[id(tensor)] = (weakref.ref(tensor), node)
        node.meta["val"], node.meta["device"] = _described(tensor), tensor.device

    def node(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor; one that nobody made here is a constant."""
        known, node = self._known.get(id(tensor), (None, None))
        if known is None or node is None or known() is not tensor:
            node = self.recording.constant(tensor)
            self._known[id(tensor)] = (weakref.ref(tensor), node)
        return node

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Perform an operation and write it down."""
        options = options or {}
        results = function(*arguments, **options)
        written, named = pytree.tree_map_only(Tensor, self.node, (arguments, options))
        node = self.recording.graph.call_function(function, written, named)
        if isinstance(results, Tensor):
            self.know(results, node)
            return results
        for position, result in enumerate(results if isinstance(results, list | tuple) else ()):
            if isinstance(result, Tensor):
                item = self.recording.graph.call_function(operator.getitem, (node, position))
                self.know(result, item)
        return results


def _described(tensor: Tensor) -> Tensor:
    """Shape, type and strides of a tensor, without its numbers."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
