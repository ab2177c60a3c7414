"""Rewrite the recorded operations of a step: fewer of them, with the same result.

All passes but ``fuse_updates`` keep every bit. That one lets a matrix product be added to the
parameters directly instead of through a gradient in memory, which halves the cost of an SGD step on
a dense layer and changes the last bits; whether it runs depends on shapes alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from handspan.simulation.convolutions import use_products
from handspan.simulation.kernels import use_cpu_kernels
from handspan.simulation.recording import Recording

_ATEN = torch.ops.aten
_SAME_DATA = {_ATEN.detach.default, _ATEN.alias.default}
_SAME_NUMBERS = {_ATEN.squeeze_.dim, _ATEN.unsqueeze_.default, _ATEN.t_.default}
_SAME_SHAPE = {_ATEN.expand.default, _ATEN.view.default, _ATEN._unsafe_view.default}
_TURNS = {_ATEN.t.default, _ATEN.transpose.int}
_FILLED = {_ATEN.ones_like.default: 1, _ATEN.zeros_like.default: 0}
_SUMS = {_ATEN.addcmul.default, _ATEN.add.Tensor}
_PRODUCTS = {_ATEN.mm.default: _ATEN.addmm.default, _ATEN.bmm.default: _ATEN.baddbmm.default}


def rewrite(module: Recording, constants: dict[int, Tensor], fuse: bool) -> None:
    """Simplify a recording; ``constants`` are arguments that never change, by position."""
    graph = module.graph
    if any(map(writes, graph.nodes)):  # what is written to is neither constant nor shared
        return
    _insert_constants(module, constants)
    on_gpu = _is_on_gpu(graph)
    if fuse and on_gpu:
        use_products(graph, value_of)
    _drop_what_changes_nothing(graph)
    graph.eliminate_dead_code()
    _fold_constants(module)
    _join_repetitions(graph)
    if fuse:
        _fuse_updates(graph)
    if fuse and not on_gpu:
        use_cpu_kernels(graph, value_of)
    graph.eliminate_dead_code()


def _is_on_gpu(graph: fx.Graph) -> bool:
    places = (node.meta.get("device") for node in graph.nodes if node.op == "placeholder")
    return any(place is not None and place.type == "cuda" for place in places)


def writes(node: fx.Node) -> bool:
    """Whether the operation changes the numbers of an argument in place."""
    return node.target not in _SAME_NUMBERS and is_mutable(node)


def is_mutable(node: fx.Node) -> bool:
    """Whether the operation changes an argument, be it only its shape."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def value_of(node: fx.Node) -> Tensor | None:
    """Shape, type and strides of what a node returns; None where it is no tensor."""
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    return value if hasattr(value, "shape") else None


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Shape of what a node returns."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return None if value is None else tuple(value.shape)


def _insert_constants(module: Recording, constants: dict[int, Tensor]) -> None:
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    for position, value in constants.items():
        if places[position].users:
            with module.graph.inserting_after(places[-1]):
                places[position].replace_all_uses_with(module.constant(value))


def _drop_what_changes_nothing(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        if _is_idle(node, source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif _drops_an_axis(node, source):
            source.args = source.args[:2]  # which keeps no axis
            source.meta["val"] = value_of(node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target in _TURNS and source.target in _TURNS and _axes(node) == _axes(source):
            node.replace_all_uses_with(source.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)


def _axes(node: fx.Node) -> set[int]:
    if node.target is _ATEN.t.default:
        return {0, 1}
    rank = len(shape_of(node) or ())
    return {axis % rank for axis in node.args[1:3]}  # type: ignore[operator]


def _is_idle(node: fx.Node, source: fx.Node) -> bool:
    """Whether the operation returns its argument (autograd being off)."""
    if node.target in _SAME_DATA:
        return True
    if node.target in _SAME_SHAPE:
        return shape_of(node) is not None and shape_of(node) == shape_of(source)
    return node.target is _ATEN.mul.Scalar and node.args[1] == 1


def _drops_an_axis(node: fx.Node, source: fx.Node) -> bool:
    """Whether a view takes away the axis that the sum before it has kept."""
    is_sum = source.target is _ATEN.sum.dim_IntList and len(source.users) == 1
    if not is_sum or node.target is not _ATEN.view.default or not source.kwargs == {}:
        return False
    whole = shape_of(source.args[0])
    return source.args[1:] == ([0], True) and whole is not None and shape_of(node) == whole[1:]


def _fold_constants(module: Recording) -> None:
    """Compute once what depends on no argument (shares of the rows, zeros of a ``where``)."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if node.target in _FILLED:
            value = value_of(node)
            if value is None:
                continue
            result = torch.full(
                tuple(value.shape),
                _FILLED[node.target],
                dtype=value.dtype,
                device=node.meta["device"],
            )
        elif all(source.op == "get_attr" for source in node.all_input_nodes):
            known = {n: getattr(module, str(n.target)) for n in node.all_input_nodes}
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            result = node.target(*args, **kwargs)
        else:
            continue
        if isinstance(result, Tensor):
            with module.graph.inserting_before(node):
                constant = module.constant(result)
            node.replace_all_uses_with(constant)
            module.graph.erase_node(node)


def _join_repetitions(graph: fx.Graph) -> None:
    """Do the same operation on the same arguments once."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _fuse_updates(graph: fx.Graph) -> None:
    """Add matrix products to what they are added to: ``p - rate * (a @ b)`` and ``y + a @ b``."""
    for node in list(graph.nodes):
        if (
            node.target in _TURNS
            and _is_lone_product(node.args[0])
            and {user.target for user in node.users} <= _SUMS
        ):
            _turn_product(graph, node)
    _drop_what_changes_nothing(graph)
    for node in list(graph.nodes):
        if node.target is _ATEN.addcmul.default:
            _fuse_scaled(graph, node)
        elif node.target is _ATEN.add.Tensor:
            _fuse_sum(graph, node)


def _turn_product(graph: fx.Graph, node: fx.Node) -> None:
    """``(a @ b).T`` becomes ``b.T @ a.T``."""
    product: Any = node.args[0]
    rank = len(shape_of(product) or ())
    if _axes(node) != {rank - 2, rank - 1}:
        return
    with graph.inserting_before(product):
        turned = []
        for factor in reversed(product.args):
            turn = graph.call_function(_ATEN.transpose.int, (factor, rank - 2, rank - 1))
            turn.meta["val"] = value_of(factor).transpose(rank - 2, rank - 1)  # type: ignore
            turned.append(turn)
        new = graph.call_function(product.target, tuple(turned))
        new.meta["val"] = torch.empty(shape_of(node), dtype=value_of(node).dtype, device="meta")
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    graph.erase_node(product)


def _fuse_scaled(graph: fx.Graph, node: fx.Node) -> None:
    """``p + value * (a @ b) * rate`` becomes a product with the smaller factor scaled."""
    target, product, rate = node.args
    if not _is_lone_product(product, target) or not _is_one_per_client(rate, target):
        return
    left, right = product.args  # type: ignore[union-attr]
    scale_left = _numel(left) <= _numel(right)
    with graph.inserting_before(node):
        smaller: Any = left if scale_left else right
        scaled = graph.call_function(_ATEN.mul.Tensor, (smaller, rate))
        scaled.meta = dict(smaller.meta)
        factors = (scaled, right) if scale_left else (left, scaled)
        _replace_by_sum(graph, node, target, product, factors, 1, node.kwargs.get("value", 1))


def _fuse_sum(graph: fx.Graph, node: fx.Node) -> None:
    """``y * m + a @ b`` and ``a @ b + alpha * y``: momentum and weight decay."""
    first, second = node.args
    alpha = node.kwargs.get("alpha", 1)
    if _is_lone_product(first, second):
        with graph.inserting_before(node):
            _replace_by_sum(graph, node, second, first, first.args, alpha, 1)  # type: ignore
    elif _is_lone_product(second, first):
        beta: Any = 1
        is_scaled = first.target is _ATEN.mul.Tensor  # type: ignore[union-attr]
        if is_scaled and isinstance(first.args[1], int | float):  # type: ignore[union-attr]
            first, beta = first.args  # type: ignore[union-attr]
        with graph.inserting_before(node):
            _replace_by_sum(graph, node, first, second, second.args, beta, alpha)  # type: ignore


def _replace_by_sum(
    graph: fx.Graph, node: fx.Node, target: Any, product: Any, factors: Any, beta: Any, alpha: Any
) -> None:
    fused = graph.call_function(
        _PRODUCTS[product.target], (target, *factors), {"beta": beta, "alpha": alpha}
    )
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    graph.erase_node(node)


def _is_lone_product(node: Any, like: Any = None) -> bool:
    """Whether the node is a product that only one operation uses, of the shape of ``like``."""
    if not (isinstance(node, fx.Node) and node.target in _PRODUCTS and len(node.users) == 1):
        return False
    return like is None or shape_of(node) == shape_of(like)


def _is_one_per_client(rate: Any, target: Any) -> bool:
    """Whether there is one number for each matrix."""
    shape, rank = shape_of(rate), len(shape_of(target) or ())
    return shape is not None and (shape == () if rank == 2 else shape[1:] == (1, 1))


def _numel(node: Any) -> int:
    value = value_of(node)
    return 0 if value is None else value.numel()
