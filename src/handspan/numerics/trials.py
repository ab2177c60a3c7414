"""Choosing between candidates by the losses of held-out rows, from sums over a cohort.

A row counts for no more than the loss of knowing nothing (an output of zeros), so that a
candidate which is mostly right and sometimes very sure of an error is not thrown away for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Reduced, Stage
from handspan.core.data import Batch
from handspan.core.records import Record
from handspan.core.task import Task

_BATCH = 512
_SURE = 3.0  # standard errors


class Trial(Record):
    """A client's candidates, and their losses on the validation rows seen so far."""

    inner: Any
    losses: Tensor  # (q,) float64, sums
    weight: Tensor  # () float64, rows


class TrialUpload(Record):
    """A client's mean losses, and their products: variances of differences come from them."""

    losses: Tensor  # (q,)
    products: Tensor  # (q, q)
    present: Tensor  # () 1, or 0 for a client without validation rows


class Verdict(Record):
    """Mean losses over the clients, and what is uncertain about their differences."""

    losses: Tensor  # (q,)
    covariance: Tensor  # (q, q) of the mean losses

    def gain(self, better: int, worse: int) -> tuple[float, float]:
        """How much smaller the first loss is, and the standard error of that."""
        c = self.covariance
        variance = c[better, better] + c[worse, worse] - 2 * c[better, worse]
        return float(self.losses[worse] - self.losses[better]), float(variance.clamp(min=0).sqrt())

    def leads(self, better: int, worse: int, share: float) -> bool:
        """Whether the first loss is below a share of the other, beyond doubt."""
        gain, error = self.gain(better, worse)
        is_much = float(self.losses[better]) < share * float(self.losses[worse])
        return is_much and gain > _SURE * error


def trial(inner: Any, count: int, device: torch.device) -> Trial:
    """Begin a trial of so many candidates."""
    losses = torch.zeros(count, dtype=torch.float64, device=device)
    return Trial(inner=inner, losses=losses, weight=losses.sum())


def bounded_loss(task: Task, outputs: Tensor, y: Tensor) -> Tensor:
    """Loss of each row, at most that of an output of zeros; also where it is no number."""
    return torch.fmin(task.row_loss(outputs, y), task.row_loss(torch.zeros_like(outputs), y))


def measuring(task: Task, outputs: Callable[[Any, Any, Batch], list[Tensor]], models: int) -> Stage:
    """Stage in which the candidates' ``outputs(B, inner, batch)`` are scored."""

    def step(b: Any, k: Trial, batch: Batch) -> Trial:
        assert batch.y is not None
        losses = [
            (bounded_loss(task, candidate, batch.y) * batch.weight).double().sum()
            for candidate in outputs(b, k.inner, batch)
        ]
        return dataclasses.replace(
            k,
            losses=k.losses + torch.stack(losses),
            weight=k.weight + batch.weight.double().sum(),
        )

    return Stage(
        step=step,
        rows="validation",
        batch_size=_BATCH,
        epochs=1,
        forward_only=True,
        models=models,
    )


def uploaded(k: Trial, like: Tensor) -> TrialUpload:
    """Return what a client says of its trial."""
    present = (k.weight > 0).to(like)
    mean = (k.losses / k.weight.clamp(min=1)).to(like) * present
    return TrialUpload(losses=mean, products=torch.outer(mean, mean), present=present)


def verdict(reduction: Reduced) -> Verdict | None:
    """Return the outcome; None when nobody had a row to try the candidates on."""
    total: TrialUpload = reduction.total
    count = total.present
    if float(count) <= 0:
        return None
    mean = total.losses / count
    covariance = (total.products / count - torch.outer(mean, mean)) / count
    return Verdict(losses=mean, covariance=covariance)
