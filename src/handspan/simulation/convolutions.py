"""Convolutions of many models at once as matrix products: a pass over recorded steps.

Under ``vmap`` the convolutions of a block are one grouped convolution, a group for each client.
cuDNN runs its groups one by one, in hundreds of small kernels; a batched product of patches and
weights keeps the whole GPU busy. It changes the last bits, so it belongs to the passes that may.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

_ATEN = torch.ops.aten
# Patches are copies of the images, one for each place of the kernel; cuDNN does without.
_MOST_BYTES = 3 << 29


class Grouped:
    """A convolution of several groups, by patches.

    Parameters
    ----------
    weight
        Shape (groups * outputs, inputs, height, width) of the kernels.
    stride, padding, groups
        As in ``torch.nn.functional.conv2d``.
    """

    def __init__(
        self, weight: torch.Size, stride: list[int], padding: list[int], groups: int
    ) -> None:
        self._outputs, self._inputs = weight[0] // groups, weight[1]
        self._kernel, self._groups = (weight[2], weight[3]), groups
        self._stride, self._padding = stride, padding

    def patches(self, x: Tensor) -> Tensor:
        """(batch, groups * inputs, ...) -> (groups, inputs * kernel, batch * places)."""
        top, left = self._padding
        x = functional.pad(x, (left, left, top, top)) if top or left else x
        for axis in (0, 1):
            x = x.unfold(2 + axis, self._kernel[axis], self._stride[axis])
        batch, _, height, width = x.shape[:4]
        x = x.view(batch, self._groups, self._inputs, height, width, *self._kernel)
        x = x.permute(1, 2, 5, 6, 0, 3, 4)
        return x.reshape(self._groups, self._inputs * self._size, batch * height * width)

    @property
    def _size(self) -> int:
        return self._kernel[0] * self._kernel[1]

    def _matrices(self, weight: Tensor) -> Tensor:
        return weight.reshape(self._groups, self._outputs, self._inputs * self._size)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the outputs, (batch, groups * outputs, height, width)."""
        sizes = [
            (x.shape[2 + a] + 2 * self._padding[a] - self._kernel[a]) // self._stride[a] + 1
            for a in (0, 1)
        ]
        out = torch.bmm(self._matrices(weight), self.patches(x))
        out = out.view(self._groups, self._outputs, len(x), *sizes).permute(2, 0, 1, 3, 4)
        out = out.reshape(len(x), -1, *sizes)
        return out if bias is None else out + bias.view(1, -1, 1, 1)

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, mask: list[bool]
    ) -> list[Tensor | None]:
        """Gradients of rows, weights and bias, where ``mask`` asks for them."""
        batch, _, height, width = grad.shape
        turned = grad.reshape(batch, self._groups, self._outputs, height * width)
        turned = turned.permute(1, 2, 0, 3).reshape(self._groups, self._outputs, -1)
        found: list[Tensor | None] = [None, None, None]
        if mask[0]:
            found[0] = self._rows(torch.bmm(self._matrices(weight).mT, turned), x, height * width)
        if mask[1]:
            found[1] = torch.bmm(turned, self.patches(x).mT).view(weight.shape)
        if mask[2]:
            found[2] = grad.sum((0, 2, 3))
        return found

    def _rows(self, patches: Tensor, x: Tensor, places: int) -> Tensor:
        """Add gradients of patches up to those of the rows."""
        batch, kernel = len(x), self._inputs * self._size
        patches = patches.view(self._groups, kernel, batch, places).permute(2, 0, 1, 3)
        patches = patches.reshape(batch * self._groups, kernel, places)
        rows = functional.fold(
            patches,
            (x.shape[2], x.shape[3]),
            self._kernel,
            padding=tuple(self._padding),
            stride=tuple(self._stride),
        )
        return rows.view(x.shape)

    def num_bytes(self, x: Tensor) -> int:
        """Bytes of the patches."""
        places = x.shape[2] * x.shape[3] // (self._stride[0] * self._stride[1])
        rows = len(x) * self._groups * self._inputs
        return rows * self._size * places * x.element_size()


def use_products(graph: fx.Graph, value_of: Callable[[fx.Node], Tensor | None]) -> None:
    """Replace grouped convolutions, and what autograd makes of them, by matrix products."""
    for node in list(graph.nodes):
        if node.target is _ATEN.convolution.default:
            x, weight, bias, *options = node.args
            made = _grouped(value_of(x), value_of(weight), options)  # type: ignore[arg-type]
            if made is not None:
                sources = [x, weight] if bias is None else [x, weight, bias]
                outputs = _inline(graph, node, made.forward, sources, value_of)
                node.replace_all_uses_with(outputs[0])
                graph.erase_node(node)
        elif node.target is _ATEN.convolution_backward.default:
            grad, x, weight, _, *options, mask = node.args
            made = _grouped(value_of(x), value_of(weight), options)  # type: ignore[arg-type]
            if made is not None:
                _replace_backward(graph, node, made, [grad, x, weight], mask, value_of)


def _grouped(x: Any, weight: Any, options: list[Any]) -> Grouped | None:
    stride, padding, dilation, is_transposed, _, groups = options
    if groups == 1 or is_transposed or set(dilation) != {1} or x.dim() != 4:
        return None
    made = Grouped(weight.shape, stride, padding, groups)
    return made if made.num_bytes(x) <= _MOST_BYTES else None


def _replace_backward(
    graph: fx.Graph, node: fx.Node, made: Grouped, sources: list[Any], mask: Any, value_of: Any
) -> None:
    def function(grad: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        return [g for g in made.backward(grad, x, weight, mask) if g is not None]

    outputs = iter(_inline(graph, node, function, sources, value_of))
    places = [next(outputs) if wanted else None for wanted in mask]
    for user in list(node.users):
        assert user.target is operator.getitem
        place = places[user.args[1]]  # type: ignore[index]
        if place is not None:
            user.replace_all_uses_with(place)
        graph.erase_node(user)
    graph.erase_node(node)


def _inline(
    graph: fx.Graph, node: fx.Node, function: Callable[..., Any], sources: list[Any], value_of: Any
) -> list[fx.Node]:
    """Write a function's operations before a node; returns the nodes of its outputs."""
    from torch.fx.experimental.proxy_tensor import make_fx

    like = [value_of(source) for source in sources]
    samples = [
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in like
    ]
    inner = make_fx(lambda *given: function(*given), tracing_mode="fake")(*samples).graph
    places = [place for place in inner.nodes if place.op == "placeholder"]
    known = dict(zip(places, sources, strict=True))
    with graph.inserting_before(node):
        for other in inner.nodes:
            if other.op == "call_function":
                known[other] = graph.node_copy(other, known.__getitem__)
    result: Any = next(iter(reversed(inner.nodes))).args[0]
    return [known[r] for r in (result if isinstance(result, list | tuple) else [result])]
