"""Replacements of the layers that look at a whole batch or draw random numbers.

Each is a subclass of the torch layer that it replaces: conversion changes the class of the layer
in a copy of the module, so that parameters, attributes and ``isinstance`` stay what they were.
Padding rows (weight 0) have no influence on real rows, and nothing is updated in place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from handspan.core.errors import HandspanError
from handspan.models.skeleton import ForwardContext

# Odd multipliers of the finalisers of splitmix64 and MurmurHash3, as signed numbers.
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685, -49064778989728563)


def _coordinate(draw: int) -> int:
    # Python numbers: a tensor made in the step would be a copy to the GPU, which cannot be part
    # of a captured graph. Multiples of the golden ratio keep the counters of draws apart.
    return ((draw + 1) * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63


def keep_mask(context: ForwardContext, shape: tuple[int, ...], p: float) -> Tensor:
    """Boolean mask, true with probability 1 - p, hashed from the step's key and the position.

    Positions count row by row, so that padding rows at the end leave the masks of the real rows
    as they are. The hash is leaner than that of ``keys``: ten tensor operations, not thirty, of
    which small layers would notice every one. Only its highest bits are used.
    """
    key = context.key
    if key is None:
        raise HandspanError("a dropout layer in training mode was called without a batch key")
    start = key + _coordinate(context.draws)
    context.draws += 1
    x = torch.arange(math.prod(shape), dtype=torch.int64, device=key.device) + start
    first, second, third = _MULTIPLIERS
    x = x * first
    x = (x ^ (x >> 32)) * second
    x = (x ^ (x >> 29)) * third
    # Signed integers compare with the p-quantile directly: no conversion to floating point.
    threshold = min(int(p * 2.0**64) - 2**63, 2**63 - 1)
    return (x >= threshold).reshape(shape)


def drop(x: Tensor, context: ForwardContext, p: float, shape: tuple[int, ...]) -> Tensor:
    """Zero entries with probability p and scale the others, so that the mean stays."""
    if p == 0.0:
        return x
    if p == 1.0:
        return torch.zeros_like(x)
    return x * keep_mask(context, shape, p) * (1.0 / (1.0 - p))


def _check_rows(x: Tensor, context: ForwardContext, layer: str) -> None:
    weight = context.weight
    if weight is not None and x.shape[0] % weight.shape[0]:
        raise HandspanError(
            f"{layer} got a tensor of shape {tuple(x.shape)} in a batch of {weight.shape[0]} rows; "
            "rows must come first (batch_first=True)"
        )


class KeyedDropout(nn.Dropout):
    """Dropout whose mask is a pure function of the batch key."""

    context: ForwardContext

    def forward(self, input: Tensor) -> Tensor:
        """Drop single entries in training; identity in evaluation."""
        if not self.training:
            return input
        _check_rows(input, self.context, "Dropout")
        return drop(input, self.context, self.p, tuple(input.shape))


class _KeyedChannelDropout:
    def forward(self, input: Tensor) -> Tensor:
        """Drop whole channels in training; identity in evaluation."""
        if not self.training:  # type: ignore[attr-defined]
            return input
        context: ForwardContext = self.context  # type: ignore[attr-defined]
        _check_rows(input, context, type(self).__name__)
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
        return drop(input, context, self.p, shape)  # type: ignore[attr-defined]


class KeyedDropout1d(_KeyedChannelDropout, nn.Dropout1d):
    """Channel dropout of sequences (rows, channels, length)."""


class KeyedDropout2d(_KeyedChannelDropout, nn.Dropout2d):
    """Channel dropout of images (rows, channels, height, width)."""


class KeyedDropout3d(_KeyedChannelDropout, nn.Dropout3d):
    """Channel dropout of volumes."""


class _WeightedBatchNorm:
    """Batch normalisation over the real rows of a batch.

    The new running statistics are *assigned*, never written in place: the skeleton reads them off.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the batch in training, by the running statistics in evaluation."""
        self._check_input_dim(input)  # type: ignore[attr-defined]
        shape = (1, -1, *(1 for _ in input.shape[2:]))
        if self.training:  # type: ignore[attr-defined]
            centred, variance = self._from_batch(input, shape)
        else:
            centred = input - self.running_mean.reshape(shape)  # type: ignore[attr-defined]
            variance = self.running_var  # type: ignore[attr-defined]
        scale = torch.rsqrt(variance + self.eps)  # type: ignore[attr-defined]
        if self.affine:  # type: ignore[attr-defined]
            scale = scale * self.weight  # type: ignore[attr-defined]
            return centred * scale.reshape(shape) + self.bias.reshape(shape)  # type: ignore[attr-defined]
        return centred * scale.reshape(shape)

    def _from_batch(self, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        weight = self.context.weight  # type: ignore[attr-defined]
        if weight is None or weight.shape[0] != x.shape[0]:
            raise HandspanError(
                f"{type(self).__name__} got {x.shape[0]} rows in a batch of "
                f"{0 if weight is None else weight.shape[0]}; rows must stay the first axis"
            )
        dims = (0, *range(2, x.dim()))
        real = (weight > 0).reshape(-1, *(1 for _ in x.shape[1:]))
        count = (weight > 0).sum().to(x.dtype) * math.prod(x.shape[2:])
        divisor = count.clamp_min(1.0)
        # Selected, not multiplied: whatever stands in a padding row, be it NaN, goes no further.
        zero = x.new_zeros(())
        mean = torch.where(real, x, zero).sum(dims) / divisor
        centred = torch.where(real, x - mean.reshape(shape), zero)
        variance = centred.square().sum(dims) / divisor
        self._update(count, mean.detach(), variance.detach())
        return centred, variance

    def _update(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        buffers = self._buffers  # type: ignore[attr-defined]
        momentum = self.momentum  # type: ignore[attr-defined]
        if momentum is None:
            tracked = buffers["num_batches_tracked"] + (count > 0)
            buffers["num_batches_tracked"] = tracked
            momentum = 1.0 / tracked.clamp_min(1.0)
        # A batch without rows tells nothing; a single value tells nothing of the variance.
        rate = (count > 0).to(mean.dtype) * momentum
        unbiased = variance * (count / (count - 1.0).clamp_min(1.0))
        old_mean, old_var = buffers["running_mean"], buffers["running_var"]
        buffers["running_mean"] = old_mean + rate * (mean - old_mean)
        buffers["running_var"] = old_var + rate * (count > 1) * (unbiased - old_var)


class WeightedBatchNorm1d(_WeightedBatchNorm, nn.BatchNorm1d):
    """Batch normalisation of tables and sequences."""


class WeightedBatchNorm2d(_WeightedBatchNorm, nn.BatchNorm2d):
    """Batch normalisation of images."""


class WeightedBatchNorm3d(_WeightedBatchNorm, nn.BatchNorm3d):
    """Batch normalisation of volumes."""
