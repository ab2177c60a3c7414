"""Turn recorded operations into a plain Python function that reuses memory.

An operation works in place where nobody needs its argument afterwards: temporary results, and in
all steps but the first the working state, which then belongs to the engine. The bits are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from handspan.simulation.kernels import TURNED
from handspan.simulation.recording import Recording
from handspan.simulation.rewriting import is_mutable, value_of

_ATEN = torch.ops.aten


def _direct(operation: Any) -> Callable[..., Any]:
    """The operation without the Python function around it."""
    return getattr(operation, "_op", operation)


_threshold_backward = _direct(_ATEN.threshold_backward.grad_input)
# Torch's own bindings of common operations cost half as much per call as ``torch.ops``.
_BINDINGS: dict[Any, Callable[..., Any]] = {
    _ATEN.addcmul.default: torch.addcmul,
    _ATEN.addmm.default: torch.addmm,
    _ATEN.add.Tensor: torch.add,
    _ATEN.baddbmm.default: torch.baddbmm,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.clamp_min.default: torch.clamp_min,
    _ATEN.div.Tensor: torch.div,
    _ATEN.expand.default: Tensor.expand,
    _ATEN.gather.default: torch.gather,
    _ATEN._log_softmax.default: torch._log_softmax,
    _ATEN.mm.default: torch.mm,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.ne.Scalar: torch.ne,
    _ATEN.neg.default: torch.neg,
    _ATEN.permute.default: torch.permute,
    _ATEN.relu.default: torch.relu,
    _ATEN.sub.Tensor: torch.sub,
    _ATEN.sum.default: torch.sum,
    _ATEN.sum.dim_IntList: torch.sum,
    _ATEN.t.default: torch.t,
    _ATEN.tanh.default: torch.tanh,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.unsqueeze.default: torch.unsqueeze,
    _ATEN.view.default: Tensor.view,
    _ATEN.where.self: torch.where,
}
# Operation: (its form in place, positions of the arguments that it may overwrite).
_IN_PLACE: dict[Any, tuple[Callable[..., Any], tuple[int, ...]]] = {
    _ATEN.addcmul.default: (Tensor.addcmul_, (0,)),
    _ATEN.addmm.default: (Tensor.addmm_, (0,)),
    _ATEN.add.Tensor: (Tensor.add_, (0, 1)),
    _ATEN.baddbmm.default: (Tensor.baddbmm_, (0,)),
    _ATEN.clamp_min.default: (Tensor.clamp_min_, (0,)),
    _ATEN.div.Tensor: (Tensor.div_, (0,)),
    _ATEN.mul.Tensor: (Tensor.mul_, (0, 1)),
    _ATEN.neg.default: (Tensor.neg_, (0,)),
    _ATEN.relu.default: (torch.relu_, (0,)),
    _ATEN.sub.Tensor: (Tensor.sub_, (0,)),
    _ATEN.tanh.default: (torch.tanh_, (0,)),
    _ATEN.threshold_backward.default: (
        lambda grad, out, limit: _threshold_backward(grad, out, limit, grad_input=grad),
        (0,),
    ),
}
_FOREVER = 1 << 60


class Replay:
    """A recording, ready to be called.

    Attributes
    ----------
    fresh
        Leaves all its arguments as they are.
    moving
        Overwrites the arguments in ``owned``.
    owned
        State arguments whose new values no other tensor shares, by position in the state.
    turned
        Those of them, matrices, that had better lie column by column.
    used
        Positions of the arguments that matter.
    num_operations
        How long it is.
    """

    def __init__(self, module: Recording, state: range) -> None:
        self._module = module
        self._nodes: list[fx.Node] = list(module.graph.nodes)
        self._index = {node: position for position, node in enumerate(self._nodes)}
        self._places = [node for node in self._nodes if node.op == "placeholder"]
        self.used = frozenset(j for j, place in enumerate(self._places) if place.users)
        self.num_operations = sum(node.op == "call_function" for node in self._nodes)
        self._pure = not any(map(is_mutable, self._nodes))
        self.owned = self._find_owned() if state else frozenset()
        self.turned = frozenset(
            j for j in self.owned if self._places[state[j]].meta.get(TURNED, False)
        )
        self._turned: dict[int, tuple[Tensor, Tensor]] = {}
        mutable = {self._places[state[position]] for position in self.owned}
        self.fresh = self._compile(set())
        self.moving = self._compile(mutable) if mutable else self.fresh

    def __call__(self, *leaves: Tensor) -> list[Tensor]:
        """Perform the operations; the arguments stay as they are."""
        return self.fresh(*leaves)

    def laid_out(self, state: list[Tensor]) -> list[Tensor]:
        """Return a state that ``moving`` may overwrite, and that lies as it should."""
        return [
            self._turn(position, value).clone() if position in self.owned else value
            for position, value in enumerate(state)
        ]

    def _turn(self, position: int, value: Tensor) -> Tensor:
        """Turn a matrix that had better be turned; that of a broadcast, once for all clients."""
        if position not in self.turned:
            return value
        before = self._turned.get(position)
        if before is None or before[0] is not value:
            turned = value.t().clone(memory_format=torch.contiguous_format).t()
            self._turned[position] = before = (value, turned)
        return before[1]

    def _find_owned(self) -> frozenset[int]:
        outputs: Any = self._nodes[-1].args[0]
        if not self._pure:
            return frozenset()
        roots = [_root(node) for node in outputs]
        return frozenset(
            position
            for position, (node, root) in enumerate(zip(outputs, roots, strict=True))
            if root is node and node.op == "call_function" and roots.count(root) == 1
        )

    def _compile(self, mutable: set[fx.Node]) -> Callable[..., list[Tensor]]:
        """Write the function's source; ``mutable`` arguments may be overwritten."""
        names = {node: f"v{position}" for position, node in enumerate(self._nodes)}
        scope: dict[str, Any] = {}
        storage = _Storage(self._nodes, self._index, mutable if self._pure else None)
        body: list[str] = []
        for position, node in enumerate(self._nodes):
            if node.op == "get_attr":
                scope[names[node]] = getattr(self._module, str(node.target))
            elif node.op == "call_function":
                body.append(f"{names[node]} = {self._call(node, names, scope, storage)}")
                body += self._released(node, position, names)
        header = f"def replay({', '.join(names[place] for place in self._places)}):"
        result = f"return {_written(self._nodes[-1].args[0], names, scope)}"
        exec("\n    ".join([header, *body, result]), scope)
        return scope["replay"]

    def _call(
        self, node: fx.Node, names: dict[fx.Node, str], scope: dict[str, Any], storage: _Storage
    ) -> str:
        if node.target is operator.getitem:
            return f"{names[node.args[0]]}[{node.args[1]!r}]"  # type: ignore[index]
        target: Any = node.target
        function, arguments = _BINDINGS.get(target, _direct(target)), list(node.args)
        overwritten = storage.overwritten(node)
        if overwritten is not None:
            function = _IN_PLACE[target][0]
            arguments[0], arguments[overwritten] = arguments[overwritten], arguments[0]
        name = f"f{self._index[node]}"
        scope[name] = function
        values = [_written(value, names, scope) for value in arguments]
        values += [f"{key}={_written(value, names, scope)}" for key, value in node.kwargs.items()]
        return f"{name}({', '.join(values)})"

    def _released(self, node: fx.Node, position: int, names: dict[fx.Node, str]) -> list[str]:
        """Let go of what is used here for the last time."""
        return [
            f"{names[source]} = None"
            for source in node.all_input_nodes
            if source.op != "get_attr"
            and max(self._index[user] for user in source.users) == position
        ]


class _Storage:
    """Which memory may be overwritten: what is nobody else's and not used again."""

    def __init__(
        self, nodes: list[fx.Node], index: dict[fx.Node, int], mutable: set[fx.Node] | None
    ) -> None:
        self._index = index
        self._mutable = mutable
        self._root = {node: _root(node) for node in nodes}
        self._moved: dict[fx.Node, fx.Node] = {}
        self._last: dict[fx.Node, int] = {}
        for node in nodes:
            root = self._root[node]
            uses = [index[user] if user.op != "output" else _FOREVER for user in node.users]
            self._last[root] = max([self._last.get(root, -1), *uses])

    def overwritten(self, node: fx.Node) -> int | None:
        """Return the position of an argument that the operation may overwrite."""
        if self._mutable is None or node.target not in _IN_PLACE:
            return None
        for position in _IN_PLACE[node.target][1]:
            if self._may_overwrite(node, position):
                root = self._find(node.args[position])
                self._last[root] = self._last[node]
                self._moved[node] = root  # the result lives there from now on
                return position
        return None

    def _find(self, node: Any) -> fx.Node:
        """Return the node whose memory holds this one's numbers."""
        root = self._root[node]
        while root in self._moved:
            root = self._moved[root]
        return root

    def _may_overwrite(self, node: fx.Node, position: int) -> bool:
        assert self._mutable is not None
        source = node.args[position] if position < len(node.args) else None
        if not isinstance(source, fx.Node) or (position == 1 and node.kwargs.get("alpha", 1) != 1):
            return False
        root = self._find(source)
        others = [other for other in node.all_input_nodes if other is not source]
        is_free = root in self._mutable or root.op == "call_function"
        return (
            is_free
            and self._last[root] == self._index[node]
            and all(self._find(other) is not root for other in others)
            and list(node.args).count(source) == 1
            and _same_layout(value_of(source), value_of(node), value_of(root))
        )


def _root(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view looks at."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        if node.target is operator.getitem:
            if _root(source) is source:
                return node
        elif not _is_view(node.target):
            return node
        node = source
    return node


def _is_view(target: Any) -> bool:
    if target is _ATEN._unsafe_view.default:
        return True
    schema = getattr(target, "_schema", None)  # operations of our own have none, and make no views
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _same_layout(source: Any, result: Any, root: Any) -> bool:
    if source is None or result is None or root is None:
        return False
    return (
        source.shape == result.shape
        and source.dtype == result.dtype
        and source.stride() == result.stride()
        and source.numel() == root.numel()  # no row that stands for many
    )


def _written(value: Any, names: dict[fx.Node, str], scope: dict[str, Any]) -> str:
    """Source of an argument; what has no literal is put into the scope."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_written(entry, names, scope) for entry in value)}]"
    if value is None or isinstance(value, bool | int):
        return repr(value)
    name = f"k{len(scope)}"
    scope[name] = value
    return name
