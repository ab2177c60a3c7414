"""What products of float32 numbers are made in: float32, unless less is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from handspan.core.algorithm import Algorithm, Phase, Stage
from handspan.core.errors import HandspanError

_PRODUCTS = {
    functional.linear,
    functional.conv1d,
    functional.conv2d,
    functional.conv3d,
    functional.bilinear,
    torch.matmul,
    torch.mm,
    torch.bmm,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.mm,
    Tensor.bmm,
}


@contextmanager
def multiplying(name: str = "float32") -> Iterator[None]:
    """Let a GPU multiply in float32, or in TF32, and restore the process's choice afterwards.

    Torch's own default computes convolutions in TF32, with 10 bits instead of 23.
    """
    cuda: Any = torch.backends.cuda.matmul
    places = [cuda, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32" if name == "tf32" else "ieee"
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


class _Bfloat16Products(TorchFunctionMode):
    """Products are made in bfloat16, a layer's bias included; all else stays as it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **kwargs)

        def rounded(value: Any) -> Any:
            is_number = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(torch.bfloat16) if is_number else value

        result = func(*map(rounded, args), **{k: rounded(v) for k, v in kwargs.items()})
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return result.to(first.dtype)


@dataclasses.dataclass(frozen=True)
class _InBfloat16:
    """A step whose products, backward as well, are made in bfloat16."""

    step: Callable[[Any, Any, Any], Any]

    def __call__(self, broadcast: Any, working: Any, batch: Any) -> Any:
        with _Bfloat16Products():
            return self.step(broadcast, working, batch)


def with_products(algorithm: Algorithm, name: str) -> Algorithm:
    """Let the local steps of an algorithm multiply in ``bf16``; otherwise it stays as it is."""
    if name != "bf16":
        return algorithm
    if any(phase.cohort_update is not None for phase in algorithm.rounds):
        raise HandspanError("bf16 is for networks: a matrix method takes precision float32 or tf32")

    def change(stage: Stage) -> Stage:
        return dataclasses.replace(stage, step=_InBfloat16(stage.step))

    def changed(phase: Phase) -> Phase:
        return dataclasses.replace(phase, stages=tuple(map(change, phase.stages)))

    return dataclasses.replace(
        algorithm,
        setup=tuple(map(changed, algorithm.setup)),
        rounds=tuple(map(changed, algorithm.rounds)),
        personal=tuple(map(changed, algorithm.personal)),
        adapt=None if algorithm.adapt is None else changed(algorithm.adapt),
    )
