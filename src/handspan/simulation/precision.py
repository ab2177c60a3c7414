"""What multiplications of float32 numbers mean on a GPU: nothing but float32, unless asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def precision(name: str = "float32") -> Iterator[None]:
    """Multiply in float32, or in TF32, and restore the process's choice afterwards.

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
