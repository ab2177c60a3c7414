"""Images turned and sheared about their centres, by bilinear interpolation.

A turn is linear in the pixels: one sparse matrix per turn serves all images at once. Multiples of
90 degrees move the pixels of square images without changing them. What comes from outside is 0.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse

_CHANNELS = (1, 3, 4)
_BLOCK = 1 << 22  # pixels at a time
_EXACT = {0.0: (1.0, 0.0), 90.0: (0.0, 1.0), 180.0: (-1.0, 0.0), 270.0: (0.0, -1.0)}


def warp_images(x: np.ndarray, rows: np.ndarray, out: np.ndarray, turn: np.ndarray) -> None:
    """Write some images, turned, into ``out``.

    Parameters
    ----------
    x
        Images (rows, height, width), (rows, channels, height, width) or (rows, height, width,
        channels).
    rows
        Which of them.
    out
        An array like x.
    turn
        Degrees of the clockwise turn and of the clockwise shear that follows it.
    """
    is_last = x.ndim == 4 and x.shape[1] not in _CHANNELS and x.shape[3] in _CHANNELS
    height, width = x.shape[1:3] if is_last else x.shape[-2:]
    real = np.float64 if x.dtype == np.float64 else np.float32
    matrix = warp_matrix(height, width, float(turn[0]), float(turn[1])).astype(real)
    step = max(1, _BLOCK // max(1, math.prod(x.shape[1:])))
    for start in range(0, len(rows), step):
        chosen = rows[start : start + step]
        block = np.moveaxis(x[chosen], -1, 1) if is_last else x[chosen]
        flat = block.reshape(-1, height * width).astype(real)
        turned = (matrix @ flat.T).T.reshape(block.shape)
        if x.dtype.kind in "bui":
            turned = np.rint(turned)
        out[chosen] = (np.moveaxis(turned, 1, -1) if is_last else turned).astype(x.dtype)


def warp_matrix(height: int, width: int, degrees: float, shear: float) -> sparse.csr_array:
    """Return the matrix that makes the pixels of the new image out of those of the old one."""
    cos, sin = _direction(degrees)
    down, right = np.meshgrid(
        np.arange(height) - (height - 1) / 2, np.arange(width) - (width - 1) / 2, indexing="ij"
    )
    # Where a pixel comes from: back through the shear, then back through the turn (y points down).
    right = right + math.tan(math.radians(shear)) * down
    from_right = (cos * right + sin * down).ravel() + (width - 1) / 2
    from_down = (cos * down - sin * right).ravel() + (height - 1) / 2
    left, top = np.floor(from_right), np.floor(from_down)
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for step_down in (0, 1):
        for step_right in (0, 1):
            i, j = top + step_down, left + step_right
            weight = (1 - np.abs(from_down - i)) * (1 - np.abs(from_right - j))
            inside = (i >= 0) & (i < height) & (j >= 0) & (j < width) & (weight > 0)
            target = np.flatnonzero(inside)
            entries.append((weight[inside], target, (i * width + j)[inside].astype(np.int64)))
    weights, targets, origins = (np.concatenate(part) for part in zip(*entries, strict=True))
    size = height * width
    return sparse.csr_array((weights, (targets, origins)), shape=(size, size))


def _direction(degrees: float) -> tuple[float, float]:
    degrees %= 360.0
    if degrees in _EXACT:
        return _EXACT[degrees]
    return math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
