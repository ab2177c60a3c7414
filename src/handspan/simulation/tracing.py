"""Record the tensor operations of a step once and replay them without Python's overhead.

Running a step through ``vmap`` or autograd costs about a millisecond of bookkeeping, often more
than its arithmetic. The operations themselves depend on shapes alone (a step may not branch on
values), so they are recorded by ``make_fx`` and replayed: same operations, same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Flat = Callable[..., list[Tensor]]
# Recording costs as much as some dozens of plain calls, so a shape must prove that it is common.
_CALLS_BEFORE_RECORDING = 12


class Recorder:
    """Calls a function on flat tensors, replaying a recording once a shape has become common."""

    def __init__(self) -> None:
        self._calls: dict[Any, int] = {}
        self._recordings: dict[Any, Flat] = {}

    def __call__(self, name: Any, function: Flat, leaves: list[Tensor]) -> list[Tensor]:
        """Call ``function(*leaves)``; ``name`` tells functions apart."""
        signature = (name, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        recording = self._recordings.get(signature)
        if recording is None:
            calls = self._calls[signature] = self._calls.get(signature, 0) + 1
            if calls <= _CALLS_BEFORE_RECORDING:
                return function(*leaves)
            recording = self._recordings[signature] = _record(function, leaves)
        return recording(*leaves)


def _record(function: Flat, leaves: list[Tensor]) -> Flat:
    with torch.no_grad():
        module = make_fx(function)(*leaves)
    graph = module.graph
    for node in list(graph.nodes):
        # Without autograd these return their argument.
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
    return module.forward
