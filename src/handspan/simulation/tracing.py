"""Record the tensor operations of a step once and replay them without Python's overhead.

Running a step through ``vmap`` or autograd costs about a millisecond of bookkeeping, often more
than its arithmetic. The operations themselves depend on shapes alone (a step may not branch on
values), so they are recorded by ``make_fx``, freed of those that change nothing, and replayed:
the same arithmetic in the same order, hence the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

Flat = Callable[..., list[Tensor]]
# Recording costs as much as some dozens of plain calls, so a shape must prove that it is common.
_CALLS_BEFORE_RECORDING = 12
_ATEN = torch.ops.aten
_SAME_DATA = {_ATEN.detach.default, _ATEN.alias.default}
_SAME_NUMBERS = {_ATEN.squeeze_.dim, _ATEN.unsqueeze_.default, _ATEN.t_.default}
_SAME_SHAPE = {_ATEN.expand.default, _ATEN.view.default, _ATEN._unsafe_view.default}


class Recorder:
    """Calls a function on flat tensors, replaying a recording once a shape has become common."""

    def __init__(self) -> None:
        self._calls: dict[Any, int] = {}
        self._recordings: dict[Any, Flat] = {}
        self._patience = _CALLS_BEFORE_RECORDING

    def record_at_once(self) -> None:
        """Record on the first call of a shape: for timing what a long run will replay."""
        self._patience = 0

    def __call__(self, name: Any, function: Flat, leaves: list[Tensor]) -> list[Tensor]:
        """Call ``function(*leaves)``; ``name`` tells functions apart."""
        signature = (name, tuple([(leaf.shape, leaf.dtype) for leaf in leaves]))
        recording = self._recordings.get(signature)
        if recording is None:
            calls = self._calls[signature] = self._calls.get(signature, 0) + 1
            if calls <= self._patience:
                return function(*leaves)
            recording = self._recordings[signature] = record(function, leaves)
        return recording(*leaves)


def record(function: Flat, leaves: list[Tensor]) -> Flat:
    """Return a replay of the tensor operations that the function performs on such leaves."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    with torch.no_grad():
        # A tensor that is two leaves (v and the v that stays fixed) must be told apart: replays
        # are given two.
        module = make_fx(function)(*[leaf.detach() for leaf in leaves])
    graph = module.graph
    _drop_what_changes_nothing(graph)
    if not any(map(_writes, graph.nodes)):  # what is written to is neither constant nor shared
        _fold_constants(module)
        _join_repetitions(graph)
    graph.eliminate_dead_code()
    module.recompile()
    return module.forward


def _drop_what_changes_nothing(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        if _is_idle(node, source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target is _ATEN.transpose.int and source.target is _ATEN.transpose.int:
            rank = len(_shape(node))
            axes = [{axis % rank for axis in step.args[1:3]} for step in (node, source)]
            if axes[0] == axes[1]:
                node.replace_all_uses_with(source.args[0])  # type: ignore[arg-type]
                graph.erase_node(node)


def _is_idle(node: fx.Node, source: fx.Node) -> bool:
    """Whether the operation returns its argument (autograd being off)."""
    if node.target in _SAME_DATA:
        return True
    if node.target in _SAME_SHAPE:
        return _shape(node) == _shape(source)
    return node.target is _ATEN.mul.Scalar and node.args[1] == 1


def _writes(node: fx.Node) -> bool:
    """Whether the operation changes the numbers of an argument in place."""
    if node.op != "call_function" or node.target in _SAME_NUMBERS:
        return False
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    return None if value is None else tuple(value.shape)


def _fold_constants(module: fx.GraphModule) -> None:
    """Compute once what depends on no argument (zeros of a ``where``, ranges)."""
    for position, node in enumerate(list(module.graph.nodes)):
        if node.op != "call_function" or node.all_input_nodes:
            continue
        name = f"_folded_{position}"
        module.register_buffer(name, node.target(*node.args, **node.kwargs))
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
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
