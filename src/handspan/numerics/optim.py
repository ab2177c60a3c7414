"""Stochastic gradient descent as pure functions: equal to ``torch.optim.SGD``, state included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from handspan.core.records import Params


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Local optimiser.

    Attributes
    ----------
    momentum, nesterov, weight_decay
        As in ``torch.optim.SGD``; the momentum starts at zero in every stage.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def start(self, params: Params) -> Params:
        """Momentum at the beginning of a stage: nothing is kept when there is none."""
        return {k: torch.zeros_like(p) for k, p in params.items()} if self.momentum else {}

    def direction(
        self, params: Params, gradient: Params, velocity: Params
    ) -> tuple[Params, Params]:
        """Return the step before the learning rate, and the new momentum."""
        if self.weight_decay:
            gradient = {k: g.add(params[k], alpha=self.weight_decay) for k, g in gradient.items()}
        if not self.momentum:
            return gradient, velocity
        velocity = {k: velocity[k] * self.momentum + g for k, g in gradient.items()}
        if self.nesterov:
            return {
                k: g.add(velocity[k], alpha=self.momentum) for k, g in gradient.items()
            }, velocity
        return velocity, velocity

    def step(
        self, params: Params, gradient: Params, velocity: Params, learning_rate: Tensor
    ) -> tuple[Params, Params]:
        """Return parameters and momentum after one step."""
        direction, velocity = self.direction(params, gradient, velocity)
        return {
            k: torch.addcmul(p, direction[k], learning_rate, value=-1.0) for k, p in params.items()
        }, velocity


def pulled(gradient: Params, params: Params, centre: Params, weight: float) -> Params:
    """Gradient of f + weight/2 |params - centre|^2, given that of f."""
    return {k: g.add(params[k] - centre[k], alpha=weight) for k, g in gradient.items()}
