"""Linear models of numbers: what methods for linear regression ask of a task, and give it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from handspan.core.algorithm import Model
from handspan.core.data import Batch
from handspan.core.errors import HandspanError
from handspan.core.method import Setting
from handspan.numerics.linear_head import LinearHead, linear_head


class Rows(NamedTuple):
    """Rows of a batch as matrices; padding is zero."""

    x: Tensor  # (rows, d)
    y: Tensor  # (rows, c)
    num: Tensor  # () real rows


class LinearModel:
    """A task that is linear, y = W x (+ bias), whose weight W a method computes.

    Attributes
    ----------
    num_features, num_outputs
        d and c.
    """

    def __init__(self, setting: Setting, method: str) -> None:
        task = setting.model
        if task.kind != "regression":
            raise HandspanError(f"{method} is a regression: its labels are numbers, not classes")
        self.num_features = math.prod(setting.row_shape)
        self.num_outputs = task.num_outputs
        layer = linear_head(task, method)
        if not layer.is_whole_model or layer.width != self.num_features:
            raise HandspanError(f"{method} fits a linear model: leave --model out, or say linear")
        self._layer: LinearHead = layer
        self._like = setting.scalar

    def rows(self, batch: Batch) -> Rows:
        """Return the batch as matrices."""
        assert batch.y is not None
        real = batch.weight.unsqueeze(1)
        # Not a product: what padding holds may be too large for one.
        x = torch.where(real > 0, batch.x.flatten(1), 0.0).to(self._like)
        y = torch.where(real > 0, batch.y.reshape(len(x), -1), 0.0).to(self._like)
        return Rows(x=x, y=y, num=batch.weight.sum().to(self._like))

    def served(self, columns: Tensor) -> Model:
        """Return the model with weight ``columns``^T, (d, c) -> (c, d); a bias is 0."""
        params = {self._layer.weight: columns.T.to(self._like)}
        if self._layer.bias is not None:
            params[self._layer.bias] = self._like.new_zeros(self.num_outputs)
        return Model(params=params, buffers={})


def least_squares(matrix: Tensor, targets: Tensor) -> Tensor:
    """Return the w of least norm that minimises |matrix w - targets|; rows of zeros do nothing."""
    return torch.linalg.pinv(matrix) @ targets
