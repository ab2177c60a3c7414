"""Faster kernels for the operations of a recorded step on a CPU, equal but for the last bits.

Images channels last: torch pools others without vector instructions, ten times as slowly, and its
convolutions would turn them round anyhow.

Large matrix products by oneDNN, where MKL does not use the vector instructions that there are (it
keeps AVX-512 to processors of its maker).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

_ATEN = torch.ops.aten
_OF_IMAGES = {  # forward: its backward, which is given the same image as its second argument
    _ATEN.convolution.default: _ATEN.convolution_backward.default,
    _ATEN.max_pool2d_with_indices.default: _ATEN.max_pool2d_with_indices_backward.default,
}
_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # not in every build
_LINEAR = _LINEAR and _LINEAR.default
TURNED = "turned"  # mark of a matrix that had better lie column by column
_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default}
# Multiplications from which on oneDNN, which takes some microseconds to begin, is faster: of a
# product, and of one that MKL would add to a matrix on the way.
_LEAST, _LEAST_ADDED = 1 << 20, 3 << 20

Value = Callable[[fx.Node], Tensor | None]


def use_cpu_kernels(graph: fx.Graph, value_of: Value) -> None:
    """Rewrite what a recording on a CPU does in float32."""
    _put_channels_last(graph, value_of)
    if _has_unused_instructions():
        _use_onednn(graph, value_of)


def _is_float(node: Any, value_of: Value) -> bool:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return value is not None and value.dtype is torch.float32


# -- images -----------------------------------------------------------------------------------


def _put_channels_last(graph: fx.Graph, value_of: Value) -> None:
    found = [node for node in graph.nodes if _is_of_image(node, value_of)]
    for node in found:
        image: Any = node.args[0]
        with graph.inserting_before(node):
            turned = _turned(graph, image, value_of(image))
        for user in list(image.users):
            if user is node or (user.target is _OF_IMAGES[node.target] and user.args[1] is image):
                user.replace_input_with(image, turned)
    for node in graph.nodes if found else ():
        if node.target is _ATEN.view.default:  # of what has other strides now
            node.target = _ATEN.reshape.default


def _is_of_image(node: fx.Node, value_of: Value) -> bool:
    if node.target not in _OF_IMAGES or not _is_float(node.args[0], value_of):
        return False
    image = value_of(node.args[0])  # type: ignore[arg-type]
    is_plain = node.target is not _ATEN.convolution.default or node.args[8] == 1  # one group
    return is_plain and image is not None and len(image.shape) == 4


def _turned(graph: fx.Graph, image: fx.Node, value: Any) -> fx.Node:
    """The image channels last; nothing is copied where it lies so already."""
    if value.shape[1] > 1:
        options = {"memory_format": torch.channels_last}
        turned = graph.call_function(_ATEN.contiguous.default, (image,), options)
    else:  # strides alone tell how a single channel is meant
        number, _, height, width = value.shape
        plain = graph.call_function(_ATEN.contiguous.default, (image,))
        strides = (height * width, 1, width, 1)
        turned = graph.call_function(
            _ATEN.as_strided.default, (plain, (number, 1, height, width), strides)
        )
    turned.meta["val"] = value
    return turned


# -- products ---------------------------------------------------------------------------------


@functools.cache
def _has_unused_instructions() -> bool:
    """Whether oneDNN uses instructions here that MKL does not."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    try:
        with open("/proc/cpuinfo") as lines:
            maker = next(line for line in lines if line.startswith("vendor_id"))
    except (OSError, StopIteration):
        return False
    return "AMD" in maker and torch.backends.mkldnn.is_available() and _LINEAR is not None


def _use_onednn(graph: fx.Graph, value_of: Value) -> None:
    for node in list(graph.nodes):
        if node.target not in _PRODUCTS or not _is_float(node, value_of):
            continue
        left, right = node.args[-2:]
        size = value_of(left).numel() * value_of(right).shape[1]
        is_plain = node.target is _ATEN.mm.default or _is_bias(node, value_of)
        if size < (_LEAST if is_plain else _LEAST_ADDED):
            continue
        with graph.inserting_before(node):
            new = _product(graph, node, is_plain)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    for node in graph.nodes:
        node.meta[TURNED] = _is_better_turned(node)


def _is_better_turned(weight: fx.Node) -> bool:
    """Whether an argument is a weight of oneDNN's, which takes it column by column most easily.

    Nothing may be done with it one by one, which would be slow beside others that are not turned.
    """
    if weight.op != "placeholder":
        return False
    uses = list(weight.users)
    views = [use for use in uses if use.target in (_ATEN.t.default, _ATEN.transpose.int)]
    users = [use for use in uses if use not in views] + [u for view in views for u in view.users]
    is_weight = any(use.target is _LINEAR and use.args[1] is weight for use in uses)
    is_moved = any(use.target is _ATEN.addmm.default and use.args[0] is weight for use in uses)
    return is_weight and is_moved and all(user.target in (*_PRODUCTS, _LINEAR) for user in users)


def _is_bias(node: fx.Node, value_of: Value) -> bool:
    """Whether a vector is added to the product."""
    is_scaled = any(factor != 1 for factor in node.kwargs.values())
    return not is_scaled and len(value_of(node.args[0]).shape) == 1  # type: ignore


def _product(graph: fx.Graph, node: fx.Node, is_plain: bool) -> fx.Node:
    """``b + x @ w``, or ``beta * p + alpha * (x @ w)`` where something else is added."""
    *added, left, right = node.args
    is_turned = isinstance(right, fx.Node) and right.target is _ATEN.t.default
    weight = right.args[0] if is_turned else graph.call_function(_ATEN.t.default, (right,))  # type: ignore
    bias = added[0] if added and is_plain else None
    product = graph.call_function(_LINEAR, (left, weight, bias, "none", [], ""))
    if is_plain:
        return product
    target, beta = added[0], node.kwargs.get("beta", 1)
    if beta != 1:
        target = graph.call_function(_ATEN.mul.Tensor, (target, beta))
        target.meta = dict(node.meta)
    product.meta = dict(node.meta)
    alpha = {"alpha": node.kwargs.get("alpha", 1)}
    return graph.call_function(_ATEN.add.Tensor, (target, product), alpha)
