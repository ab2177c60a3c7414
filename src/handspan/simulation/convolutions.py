"""Convolutions of many models at once as matrix products: a pass over recorded steps.

Under ``vmap`` the convolutions of a block are one grouped convolution, a group for each client.
cuDNN runs its groups one by one, in hundreds of small kernels; a batched product of patches and
weights keeps the whole GPU busy. It changes the last bits, so it belongs to the passes that may.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx

_ATEN = torch.ops.aten
# Patches are copies of the images, one for each place of the kernel; cuDNN does without.
_MOST_BYTES = 3 << 29


@dataclass(frozen=True)
class Grouped:
    """A convolution of several groups; its functions are single operations of a recording.

    Attributes
    ----------
    batch, groups, inputs, outputs
        Rows, models, and channels of each model.
    size, kernel, stride, padding
        Of the images and of the convolution, (height, width).
    """

    batch: int
    groups: int
    inputs: int
    outputs: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def places(self) -> tuple[int, int]:
        """Height and width of the outputs."""
        sizes = zip(self.size, self.padding, self.kernel, self.stride, strict=True)
        height, width = ((n + 2 * p - k) // s + 1 for n, p, k, s in sizes)
        return height, width

    @property
    def patches_shape(self) -> tuple[int, int, int]:
        """Shape of the patches: groups, entries of a kernel, places of all rows."""
        height, width = self.places
        entries = self.inputs * self.kernel[0] * self.kernel[1]
        return self.groups, entries, self.batch * height * width

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of all models' weights, one after the other."""
        return self.groups * self.outputs, self.inputs, *self.kernel

    def _framed(self) -> tuple[int, int]:
        height, width = (n + 2 * p for n, p in zip(self.size, self.padding, strict=True))
        return height, width

    def _shifts(self, images: Tensor, patches: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of views, one for each entry of the kernel: its pixels, and its patches."""
        (height, width), (down, right) = self.places, self.stride
        patches = patches.view(self.groups, self.inputs, *self.kernel, self.batch, height, width)
        return [
            (
                images[..., i : i + down * height : down, j : j + right * width : right][
                    ..., :height, :width
                ],
                patches[:, :, i, j],
            )
            for i, j in product(*map(range, self.kernel))
        ]

    def _by_group(self, rows: Tensor) -> Tensor:
        """(batch, groups * inputs, ...) -> (groups, inputs, batch, ...)."""
        shape = (self.batch, self.groups, self.inputs, *rows.shape[2:])
        return rows.view(shape).permute(1, 2, 0, 3, 4)

    def patches(self, x: Tensor) -> Tensor:
        """Patches of images (batch, groups * inputs, height, width)."""
        top, left = self.padding
        x = torch.nn.functional.pad(x, (left, left, top, top)) if top or left else x
        patches = x.new_empty(self.patches_shape)
        for pixels, place in self._shifts(self._by_group(x), patches):
            place.copy_(pixels)
        return patches

    def forward(self, patches: Tensor, weight: Tensor) -> Tensor:
        """Outputs (batch, groups * outputs, height, width)."""
        matrices = weight.reshape(self.groups, self.outputs, -1)
        made = torch.bmm(matrices, patches).view(self.groups, self.outputs, self.batch, -1)
        made = made.permute(2, 0, 1, 3).contiguous()
        return made.view(self.batch, -1, *self.places)

    def _turned(self, grad: Tensor) -> Tensor:
        """Gradient of the outputs as matrices (groups, outputs, places of all rows)."""
        grad = grad.reshape(self.batch, self.groups, self.outputs, -1)
        return grad.permute(1, 2, 0, 3).reshape(self.groups, self.outputs, -1)

    def rows_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Gradient of the images."""
        matrices = weight.reshape(self.groups, self.outputs, -1)
        patches = torch.bmm(matrices.mT, self._turned(grad))
        rows = grad.new_zeros(self.batch, self.groups * self.inputs, *self._framed())
        for pixels, place in self._shifts(self._by_group(rows), patches):
            pixels.add_(place)
        (top, left), (height, width) = self.padding, self.size
        return rows[:, :, top : top + height, left : left + width].contiguous()

    def weight_grad(self, grad: Tensor, patches: Tensor) -> Tensor:
        """Gradient of the weights."""
        return torch.bmm(self._turned(grad), patches.mT).view(self.weight_shape)


def use_products(graph: fx.Graph, value_of: Callable[[fx.Node], Tensor | None]) -> None:
    """Replace grouped convolutions, and what autograd makes of them, by matrix products."""
    for node in list(graph.nodes):
        if node.target is _ATEN.convolution.default:
            x, weight, bias, *options = node.args
            made = _grouped(value_of(x), value_of(weight), options, value_of(node))  # type: ignore
            if made is not None and bias is None:
                patches = _call(graph, node, made.patches, (x,), made.patches_shape)
                shape = tuple(value_of(node).shape)  # type: ignore[union-attr]
                node.replace_all_uses_with(
                    _call(graph, node, made.forward, (patches, weight), shape)
                )
                graph.erase_node(node)
        elif node.target is _ATEN.convolution_backward.default:
            _replace_backward(graph, node, value_of)


def _grouped(x: Any, weight: Any, options: Any, output: Any) -> Grouped | None:
    """Describe a convolution; None where it is left alone."""
    stride, padding, dilation, is_transposed, _, groups = options
    if groups == 1 or is_transposed or set(dilation) != {1} or x.dim() != 4:
        return None
    made = Grouped(
        batch=x.shape[0],
        groups=groups,
        inputs=weight.shape[1],
        outputs=weight.shape[0] // groups,
        size=tuple(x.shape[2:]),
        kernel=tuple(weight.shape[2:]),
        stride=tuple(stride),
        padding=tuple(padding),
    )
    numbers = made.patches_shape[0] * made.patches_shape[1] * made.patches_shape[2]
    is_plain = output is None or output.is_contiguous()  # what follows relies on the layout
    return _known(made) if is_plain and numbers * x.element_size() <= _MOST_BYTES else None


@functools.cache
def _known(made: Grouped) -> Grouped:
    """One object for equal ones: operations on the same patches are then found to be the same."""
    return made


def _replace_backward(graph: fx.Graph, node: fx.Node, value_of: Any) -> None:
    grad, x, weight, _, *options, mask = node.args
    made = _grouped(value_of(x), value_of(weight), options, None)
    users = {user.args[1]: user for user in node.users}
    layouts = [value for user in users.values() if (value := value_of(user)) is not None]
    if made is None or mask[2] or not all(value.is_contiguous() for value in layouts):
        return
    if 0 in users:
        shape = tuple(value_of(x).shape)
        rows = _call(graph, node, made.rows_grad, (grad, weight), shape)
        users[0].replace_all_uses_with(rows)
    if 1 in users:
        patches = _call(graph, node, made.patches, (x,), made.patches_shape)
        matrices = _call(graph, node, made.weight_grad, (grad, patches), made.weight_shape)
        users[1].replace_all_uses_with(matrices)
    for user in users.values():
        assert user.target is operator.getitem
        graph.erase_node(user)
    graph.erase_node(node)


def _call(
    graph: fx.Graph,
    node: fx.Node,
    function: Callable[..., Tensor],
    sources: tuple[Any, ...],
    shape: tuple[int, ...],
) -> fx.Node:
    """Write an operation of ours before a node."""
    with graph.inserting_before(node):
        made = graph.call_function(function, sources)
    like = next(source.meta["val"] for source in sources if "val" in source.meta)
    made.meta["val"] = torch.empty(shape, dtype=like.dtype, device="meta")
    return made
