"""Graphs of the CPU that behave as those of a GPU: for tests of what is captured.

A captured function is a list of operations on the very memory that they used when they were
captured. Python is not run again: whatever it would have decided, or fetched from elsewhere, stays
as it was. Capturing does nothing, and temporary memory holds nonsense between two replays.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from handspan.simulation.graphs import Work

_ATEN = torch.ops.aten
# What waits for the device, or brings numbers from elsewhere.
_REFUSED = {
    _ATEN._local_scalar_dense.default,
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN.lift_fresh.default,
    _ATEN.equal.default,
}


class TapeGraphs:
    """Captures and replays on the CPU.

    Attributes
    ----------
    captures, replays
        How many there have been.
    """

    def __init__(self) -> None:
        self.captures, self.replays = 0, 0

    def warm_up(self, work: Work) -> None:
        """Do the work once."""
        with torch.no_grad():
            work()

    def capture(self, work: Work) -> Work:
        """Write down the operations; what they change is put back."""
        self.captures += 1
        tape = _Tape()
        with torch.no_grad():
            with tape:
                work()
            tape.undo()

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                tape.replay()

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._own: dict[int, Tensor] = {}  # temporary memory
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # what was there of other memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REFUSED:
            raise RuntimeError(f"{func} is not permitted while a graph is captured")
        for tensor in _written(func, args, kwargs):
            self._keep(tensor)
        result = func(*args, **kwargs)
        given = {_address(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        fresh = [t for t in made if _address(t) not in given]
        for tensor in fresh:
            self._own[_address(tensor)] = tensor
        if fresh or _written(func, args, kwargs):
            self._calls.append((func, args, kwargs, fresh))
        return result

    def _keep(self, tensor: Tensor) -> None:
        place = _address(tensor)
        if place not in self._own and place not in self._before:
            whole = _whole(tensor)
            self._before[place] = whole, whole.clone()

    def undo(self) -> None:
        """Restore what was written to, and forget temporary numbers."""
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()
        self._forget()

    def replay(self) -> None:
        """Do the operations again, on the same memory."""
        for func, args, kwargs, fresh in self._calls:
            result = pytree.tree_leaves(func(*args, **kwargs))
            made = [t for t in result if isinstance(t, Tensor)]
            for place, value in zip(fresh, made[-len(fresh) :] if fresh else [], strict=True):
                place.copy_(value)
        self._forget()

    def _forget(self) -> None:
        for tensor in self._own.values():
            whole = _whole(tensor)
            whole.fill_(float("nan") if whole.is_floating_point() else 0)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Arguments that an operation writes to."""
    known = func._schema.arguments
    named = {argument.name: value for argument, value in zip(known, args, strict=False)} | kwargs
    return [
        named[argument.name]
        for argument in known
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and isinstance(named.get(argument.name), Tensor)
    ]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's memory."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor, (size,), (1,), 0)
