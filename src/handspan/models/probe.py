"""Try a task for two stacked clients before any training, and say what does not work."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from handspan.core import keys
from handspan.core.data import Batch
from handspan.core.errors import HandspanError
from handspan.core.records import Params, map_tensors
from handspan.core.task import Task

_SLOW = "batching rule"
_ROWS = 3  # not 2, the number of clients: a mixed-up axis must show


class _Trail:
    """Which layer is running: entered and not yet left."""

    def __init__(self, module: nn.Module) -> None:
        self.open: list[str] = []
        self.handles: list[Any] = []
        for name, layer in module.named_modules():
            self.handles.append(layer.register_forward_pre_hook(self._enter(name, layer)))
            self.handles.append(layer.register_forward_hook(self._leave))

    def _enter(self, name: str, layer: nn.Module) -> Any:
        text = f"layer {name!r} ({type(layer).__name__})" if name else "the model's own forward"
        return lambda *_: self.open.append(text)

    def _leave(self, *_: Any) -> None:
        self.open.pop()

    def where(self) -> str:
        """Name of the innermost open layer."""
        return self.open[-1] if self.open else "the loss or its gradient"

    def close(self) -> None:
        """Take the hooks away again."""
        for handle in self.handles:
            handle.remove()


def probe(
    task: Task, modules: tuple[nn.Module, nn.Module], x: Tensor, side: Tensor | None
) -> Tensor:
    """Run one training step and one prediction of two clients; returns one client's outputs."""
    params, buffers = task.init(keys.key(0, "probe"))
    versions = {name: tensor._version for name, tensor in (params | buffers).items()}
    rows = torch.cat([x[:_ROWS]] * _ROWS)[:_ROWS]
    moving = {name: value.detach().requires_grad_() for name, value in params.items()}
    outputs = _guarded(modules[1], lambda: task.predict(moving, buffers, rows, side))
    if not isinstance(outputs, Tensor) or outputs.dim() < 1 or outputs.shape[0] != _ROWS:
        raise HandspanError("the model must return one tensor whose first axis is the rows")
    if not outputs.requires_grad:
        raise HandspanError("the model's outputs do not depend on its parameters: nothing to train")
    outputs = outputs.detach()
    _guarded(modules[0], lambda: _train(task, params, buffers, rows, side, outputs))
    _guarded(modules[1], lambda: _predict(task, params, buffers, rows, side))
    for name, tensor in (params | buffers).items():
        if tensor._version != versions[name]:
            raise HandspanError(
                f"the model changes {name!r} in place during the forward pass; assign a new tensor "
                "to a buffer instead"
            )
    return outputs


def _train(
    task: Task, params: Params, buffers: Params, x: Tensor, side: Tensor | None, outputs: Tensor
) -> None:
    if task.kind == "classification":
        y = torch.zeros(outputs.shape[:-1], dtype=torch.int64, device=outputs.device)
    else:
        y = torch.zeros_like(outputs)
    batch = Batch(
        x=x,
        y=y,
        weight=torch.ones(_ROWS, dtype=outputs.dtype, device=outputs.device),
        key=keys.key(0, "probe").to(outputs.device),
        rows=torch.arange(_ROWS, device=outputs.device),
        side=side,
    )

    def step(params: Params, buffers: Params, batch: Batch) -> Any:
        return grad_and_value(task.loss, has_aux=True)(params, buffers, batch)

    vmap(step, randomness="error")(_twice(params), _twice(buffers), _twice(batch))


def _predict(task: Task, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> None:
    with torch.no_grad():
        both = _twice((params, buffers, x))
        if side is None:
            vmap(lambda p, b, rows: task.predict(p, b, rows, None), randomness="error")(*both)
        else:
            vmap(task.predict, randomness="error")(*both, torch.stack([side, side]))


def _twice(tree: Any) -> Any:
    return map_tensors(lambda tensor: torch.stack([tensor, tensor]), tree)


def _guarded(module: nn.Module, call: Any) -> Any:
    """Turn failures and slow paths into one sentence that names the layer."""
    trail = _Trail(module)
    slow: list[tuple[str, str]] = []

    def note(message: Any, *_: Any, **__: Any) -> None:
        if _SLOW in str(message):
            slow.append((trail.where(), str(message)))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            result = call()
    except HandspanError:
        raise
    except Exception as error:
        raise HandspanError(_sentence(trail.where(), str(error))) from error
    finally:
        trail.close()
    if slow:
        where, message = slow[0]
        operator = next((word for word in message.split() if word.startswith("aten::")), "")
        raise HandspanError(
            f"{where} uses an operation that cannot be stacked over clients "
            f"({operator or 'no batching rule'}); replace it by another layer"
        )
    return result


def _sentence(where: str, message: str) -> str:
    first = message.strip().splitlines()[0] if message.strip() else "unknown error"
    if "random" in message:
        return (
            f"{where} draws random numbers by itself, which would differ from engine to engine; "
            "use nn.Dropout layers, which are given a key"
        )
    if "data-dependent" in message or ".item()" in message:
        return (
            f"{where} branches on the values of a tensor, which cannot be done for stacked "
            "clients; use torch.where"
        )
    return f"{where} failed on a sample of the rows: {first}"
