"""How much a client computes in a round, in one vocabulary for all methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from handspan.core.data import Round
from handspan.core.errors import HandspanError
from handspan.numerics.optim import Sgd


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """How a client works in one round, common to all methods that train networks.

    Attributes
    ----------
    steps, epochs
        Gradient steps of a client and round, or passes over its rows; when neither is given the
        method's own default holds (15 steps where it has none).
    batch_size
        Rows of a batch; None takes all rows.
    learning_rate
        Step size of the first round.
    schedule, decay
        How it changes over the rounds: constant, exponential (times decay a round), cosine.
    sgd
        Momentum and weight decay.
    adapt_steps
        Steps with which a new client fits its private part.
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = 32
    learning_rate: float = 0.1
    schedule: str = "constant"
    decay: float = 0.99
    sgd: Sgd = field(default_factory=Sgd)
    adapt_steps: int = 50

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.steps is not None and self.epochs is not None:
            raise HandspanError("give either steps or epochs, not both")
        for name in ("steps", "epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise HandspanError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.learning_rate < float("inf"):
            raise HandspanError(
                f"learning_rate must be a number of at least 0, not {self.learning_rate}"
            )
        if self.schedule not in ("constant", "exponential", "cosine"):
            raise HandspanError(
                f"unknown schedule {self.schedule!r}: choose constant, exponential or cosine"
            )
        if not 0 < self.decay < float("inf"):
            raise HandspanError(f"decay must be above 0, not {self.decay}")

    def whole(self, gradients: int = 1) -> dict[str, Any]:
        """Return the options of a stage that does all the work.

        N steps are N gradients: of steps that take several there are as many fewer.
        """
        steps = 15 if self.steps is None and self.epochs is None else self.steps
        steps = None if steps is None else max(1, steps // gradients)
        return {"steps": steps, "epochs": self.epochs, "batch_size": self.batch_size}

    def adapting(self) -> dict[str, Any]:
        """Return the options of the stage in which a new client fits its private part."""
        return {"steps": self.adapt_steps, "epochs": None, "batch_size": self.batch_size}

    def told(self, usual: dict[str, Any], steps: int | None) -> dict[str, Any] | None:
        """Return the options of a stage that lasts as usual, unless told otherwise; 0 is none."""
        if steps is None:
            return usual
        return {"steps": steps, "epochs": None, "batch_size": self.batch_size} if steps else None

    def split(
        self,
        personal_steps: int | None = None,
        shared_steps: int | None = None,
        default: tuple[int, int] = (10, 5),
        *,
        personal_epochs: int | None = None,
        shared_epochs: int | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of the personal and the shared stage: N steps go 2:1.

        With epochs each block gets all of them. What a method is told explicitly comes first.
        """
        pair: tuple[int | None, int | None] = default
        if self.epochs is not None:
            pair = (None, None)
        elif self.steps is not None:
            personal = max(1, round(2 * self.steps / 3))
            pair = (personal, max(1, self.steps - personal))
        return (
            self._block("personal", personal_steps, personal_epochs, pair[0]),
            self._block("shared", shared_steps, shared_epochs, pair[1]),
        )

    def _block(
        self, name: str, told_steps: int | None, told_epochs: int | None, steps: int | None
    ) -> dict[str, Any]:
        """Return the options of one stage: as told, or so many steps, or the epochs of the run."""
        if told_steps is not None and told_epochs is not None:
            raise HandspanError(f"give either {name}_steps or {name}_epochs, not both")
        if told_epochs is not None:
            return {"steps": None, "epochs": told_epochs, "batch_size": self.batch_size}
        chosen = steps if told_steps is None else told_steps
        epochs = self.epochs if chosen is None else None
        return {"steps": chosen, "epochs": epochs, "batch_size": self.batch_size}

    def rate(
        self, round: Round, rounds: int, like: Tensor, learning_rate: float | None = None
    ) -> Tensor:
        """Learning rate of a round, in the type and on the device of ``like``.

        The schedule ends with the rounds: clients that come later start with the first step size.
        """
        base = self.learning_rate if learning_rate is None else learning_rate
        index = round.index.to(torch.float64)
        factor = torch.ones((), dtype=torch.float64)
        if self.schedule == "exponential":
            factor = self.decay**index
        elif self.schedule == "cosine":
            factor = 0.5 * (1 + torch.cos(torch.pi * index / max(1, rounds)))
        factor = torch.where(round.index < rounds, factor, 1.0)
        return (base * factor).to(like, non_blocking=True)  # nobody waits for the GPU
