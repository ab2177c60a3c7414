"""Counter-based randomness: a key gives the same numbers alone, in any cohort, on any engine.

Keys are int64 tensors; ``fold`` mixes coordinates (seed, stream, round, phase, stage, client) into
them by splitmix64. Nothing here has a state, so that a draw never depends on what was drawn before
or on who else was drawn with it. Not for privacy noise, which needs a secure generator.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MULTIPLY_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MULTIPLY_2 = -7723592293110705685  # 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without dragging the sign along (torch's int64 shift is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Finaliser of splitmix64, elementwise on int64."""
    x = x + _GAMMA
    x = (x ^ _shift(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift(x, 27)) * _MULTIPLY_2
    return x ^ _shift(x, 31)


def _mix_number(x: int) -> int:
    """``mix`` of one number, without the cost of tensors."""
    x = (x + _GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * _MULTIPLY_1) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLY_2) & _MASK
    return _signed(x ^ (x >> 31))


def _signed(x: int) -> int:
    return (x & _MASK) - ((x & (1 << 63)) << 1)


def _number(coordinate: str | int) -> int:
    return zlib.crc32(coordinate.encode()) if isinstance(coordinate, str) else int(coordinate)


def key(seed: int, *names: str | int) -> Tensor:
    """Make a scalar key from a seed and names of streams."""
    k = _mix_number(seed & 0x7FFFFFFFFFFFFFFF)
    for name in names:
        k = _mix_number(k ^ _mix_number(_number(name)))
    return torch.tensor(k, dtype=torch.int64)


def fold(k: Tensor, *coordinates: str | int | Tensor) -> Tensor:
    """Derive new keys; a tensor coordinate (client ids, say) gives one key per entry.

    Keys are made where the tensors are; a key on the CPU is one number for all of them.
    """
    for coordinate in coordinates:
        if not isinstance(coordinate, Tensor):
            k = mix(k ^ _mix_number(_number(coordinate)))
            continue
        mixed = mix(coordinate.to(torch.int64))
        k = mix(k ^ (mixed.to(k.device) if mixed.dim() and k.dim() else mixed))
    return k


def bits(k: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Random int64 of shape ``(*k.shape, *shape)``, entry j hashed from ``(k, j)``."""
    count = math.prod(shape)
    counter = torch.arange(count, dtype=torch.int64, device=k.device) * _GAMMA
    return mix(k.unsqueeze(-1) + counter).reshape(*k.shape, *shape)


def uniform(k: Tensor, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Tensor:
    """Uniform numbers in [0, 1) of shape ``(*k.shape, *shape)``."""
    return (_shift(bits(k, shape), 11).to(torch.float64) * 2.0**-53).to(dtype)


def normal(k: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers of shape ``(*k.shape, *shape)`` (Box-Muller, in float64)."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(fold(k, 1), shape)))
    return (radius * torch.cos(2.0 * math.pi * uniform(fold(k, 2), shape))).to(dtype)


def generator(k: Tensor) -> np.random.Generator:
    """NumPy generator for one server-side draw, a pure function of the key."""
    return np.random.Generator(np.random.Philox(key=int(k.item()) & 0x7FFFFFFFFFFFFFFF))


def seed_of(k: Tensor) -> int:
    """Return a non-negative seed for a foreign generator (a module's own initialisation)."""
    return int(k.item()) & 0x7FFFFFFF
