"""Multi-head attention in plain tensor operations, with keyed dropout.

Torch's own layer has a fused path in evaluation that ``vmap`` cannot batch, and draws its dropout
from the global generator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from handspan.core.errors import HandspanError
from handspan.models.layers import drop
from handspan.models.skeleton import ForwardContext


class PlainAttention(nn.MultiheadAttention):
    """Attention of queries, keys and values of one width."""

    context: ForwardContext

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, weights), as the layer that this one replaces."""
        if query.dim() != 3:
            raise HandspanError("MultiheadAttention takes tensors with three axes here")
        if not self.batch_first:
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        q, k, v = self._project(query, key, value)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        # As in torch, is_causal is a remark about attn_mask; the mask itself must be given.
        if is_causal and attn_mask is None:
            raise HandspanError("is_causal needs the causal attn_mask as well")
        for mask in (attn_mask, key_padding_mask):
            if mask is not None:
                scores = _masked(scores, mask, self.num_heads, mask is key_padding_mask)
        weights = torch.softmax(scores, -1)
        if self.training and self.dropout > 0.0:
            weights = drop(weights, self.context, self.dropout, tuple(weights.shape))
        output = self.out_proj((weights @ v).transpose(1, 2).flatten(2))
        if not self.batch_first:
            output = output.transpose(0, 1)
        if not need_weights:
            return output, None
        return output, weights.mean(1) if average_attn_weights else weights

    def _project(self, *inputs: Tensor) -> list[Tensor]:
        weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [
            functional.linear(x, weight, bias)
            .unflatten(-1, (self.num_heads, self.head_dim))
            .transpose(1, 2)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        ]


def _masked(scores: Tensor, mask: Tensor, num_heads: int, is_padding: bool) -> Tensor:
    if is_padding:
        mask = mask[:, None, None, :]
    elif mask.dim() == 3:
        mask = mask.unflatten(0, (-1, num_heads))
    if mask.dtype == torch.bool:
        return scores.masked_fill(mask, float("-inf"))
    return scores + mask
