"""Metrics of each client from flat predictions of all clients.

Rows lie client after client; ``offsets`` (n + 1,) say where each begins. A client without rows, or
for which a metric is not defined, gets NaN. Everything is computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from handspan.core.errors import HandspanError, nearest

PerClient = Callable[[Tensor, Tensor, Tensor], Tensor]
RowLoss = Callable[[Tensor, Tensor], Tensor]
IGNORED = -100  # label of positions of a sequence that do not count
_TABLE_CELLS = 1 << 22  # clients x classes counted at a time by macro F1


@dataclass(frozen=True)
class Metric:
    """A number per client, and one over all rows.

    Attributes
    ----------
    name
        As in summaries.
    higher_is_better
        Which end is the worst.
    per_client
        (outputs, y, offsets) -> (n,) float64.
    task
        The kind of task that it scores; None scores any.
    """

    name: str
    higher_is_better: bool
    per_client: PerClient
    task: str | None = None

    def pooled(self, outputs: Tensor, y: Tensor) -> float:
        """Score all rows as if they were one client's."""
        return float(self.per_client(outputs, y, torch.tensor([0, len(y)], device="cpu")))


def _segments(offsets: Tensor, device: torch.device) -> Tensor:
    """Client of each row."""
    sizes = offsets.diff().to(device)
    return torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)


def segment_mean(values: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean of each client's rows, NaN where the weights sum to zero."""
    segment = _segments(offsets, values.device)
    values = values.to(torch.float64)
    weights = torch.ones_like(values) if weights is None else weights.to(torch.float64)
    zero = torch.zeros(len(offsets) - 1, dtype=torch.float64, device=values.device)
    total = zero.index_add(0, segment, values * weights)
    return total / zero.index_add(0, segment, weights)


def _accuracy(outputs: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    correct = outputs.argmax(-1) == y
    if y.dim() == 1:
        return segment_mean(correct, offsets)
    counted = (y != IGNORED).flatten(1)  # sequences: every position counts alike
    number = counted.sum(1)
    rate = (correct.flatten(1) & counted).sum(1) / number.clamp_min(1)
    return segment_mean(rate, offsets, number)


def _loss(row_loss: RowLoss, outputs: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return segment_mean(row_loss(outputs, y), offsets)


def _errors(outputs: Tensor, y: Tensor) -> Tensor:
    error = outputs.to(torch.float64).reshape(len(y), -1) - y.to(torch.float64).reshape(len(y), -1)
    return error


def _rmse(outputs: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return segment_mean(_errors(outputs, y).square().mean(1), offsets).sqrt()


def _mae(outputs: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return segment_mean(_errors(outputs, y).abs().mean(1), offsets)


def _macro_f1(outputs: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """F1 averaged over the classes that a client has or is predicted to have."""
    num_classes = max(outputs.shape[-1], int(y.max()) + 1 if len(y) else 1)
    predicted = outputs.argmax(-1)
    block = max(1, _TABLE_CELLS // num_classes)
    parts: list[Tensor] = []
    for first in range(0, len(offsets) - 1, block):
        bounds = offsets[first : first + block + 1]
        rows = slice(int(bounds[0]), int(bounds[-1]))
        parts.append(_f1_block(predicted[rows], y[rows], bounds, num_classes))
    return torch.cat(parts)


def _f1_block(predicted: Tensor, y: Tensor, bounds: Tensor, num_classes: int) -> Tensor:
    segment = _segments(bounds, y.device) * num_classes
    num_clients = len(bounds) - 1

    def count(labels: Tensor) -> Tensor:
        table = torch.bincount(labels, minlength=num_clients * num_classes)
        return table.reshape(num_clients, num_classes).to(torch.float64)

    flat = segment + y
    hits = count(flat[predicted == y])
    either = count(flat) + count(segment + predicted)
    # 2 tp / (2 tp + fp + fn); the mean over no class is 0/0, as it should be
    score = torch.where(either > 0, 2.0 * hits / either.clamp_min(1.0), 0.0)
    return score.sum(1) / (either > 0).sum(1)


def _auroc(outputs: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Area under the ROC curve; for several classes the mean over one against the rest.

    Only classes that a client has, beside others, count; with a single class it is NaN.
    """
    scores = outputs.to(torch.float64).reshape(len(y), -1)
    if scores.shape[1] == 1:
        return _binary_auroc(scores[:, 0], y == 1, offsets)
    if scores.shape[1] == 2:
        return _binary_auroc(scores[:, 1] - scores[:, 0], y == 1, offsets)
    scores = torch.log_softmax(scores, 1)
    areas = torch.stack(
        [_binary_auroc(scores[:, c], y == c, offsets) for c in range(scores.shape[1])]
    )
    return areas.nanmean(0)


def _binary_auroc(score: Tensor, positive: Tensor, offsets: Tensor) -> Tensor:
    """Rank statistic within each client, ties at their mean rank."""
    segment = _segments(offsets, score.device)
    order = torch.argsort(score, stable=True)
    order = order[torch.argsort(segment[order], stable=True)]
    score, positive, segment = score[order], positive[order].to(torch.float64), segment[order]
    fresh = torch.ones(len(score), dtype=torch.bool, device=score.device)
    fresh[1:] = (score[1:] != score[:-1]) | (segment[1:] != segment[:-1])
    group = fresh.cumsum(0) - 1
    place = torch.arange(len(score), dtype=torch.float64, device=score.device)
    num_groups = int(group[-1]) + 1 if len(group) else 0
    rank = segment_mean(place, _bounds(group, num_groups))[group]
    rank = rank - offsets.to(score.device, torch.float64)[segment] + 1.0
    zero = torch.zeros(len(offsets) - 1, dtype=torch.float64, device=score.device)
    num_positive = zero.index_add(0, segment, positive)
    num_negative = offsets.diff().to(score.device) - num_positive
    rank_sum = zero.index_add(0, segment, rank * positive)
    wins = rank_sum - num_positive * (num_positive + 1.0) / 2.0
    return wins / (num_positive * num_negative).masked_fill(
        (num_positive == 0) | (num_negative == 0), float("nan")
    )


def _bounds(group: Tensor, num_groups: int) -> Tensor:
    sizes = torch.bincount(group, minlength=num_groups)
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


_BUILT_IN: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", True, _accuracy, "classification"),
        Metric("macro_f1", True, _macro_f1, "classification"),
        Metric("auroc", True, _auroc, "classification"),
        Metric("rmse", False, _rmse, "regression"),
        Metric("mae", False, _mae, "regression"),
    )
}
METRICS = (*_BUILT_IN, "loss")


def loss_metric(row_loss: RowLoss) -> Metric:
    """Mean loss of a client's rows, given the task's ``row_loss``."""
    return Metric("loss", False, partial(_loss, row_loss))


def metric_from_function(
    function: Callable[[Tensor, Tensor], float],
    name: str | None = None,
    *,
    higher_is_better: bool = True,
) -> Metric:
    """Make a metric of any function (outputs, y) -> number, called for one client at a time."""

    def per_client(outputs: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
        bounds = offsets.tolist()
        values = [
            float(function(outputs[first:last], y[first:last])) if last > first else float("nan")
            for first, last in pairwise(bounds)
        ]
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    own_name: str = getattr(function, "__name__", "metric")
    return Metric(name or own_name, higher_is_better, per_client)


def metric_by_name(name: str, row_loss: RowLoss | None = None) -> Metric:
    """Find a built-in metric; ``loss`` needs the task's ``row_loss``.

    Examples
    --------
    >>> metric_by_name("mae").pooled(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    1.0
    """
    if name == "loss":
        if row_loss is None:
            raise HandspanError("the metric 'loss' needs a task")
        return loss_metric(row_loss)
    if name not in _BUILT_IN:
        raise HandspanError(f"there is no metric {name!r}{nearest(name, list(METRICS))}")
    return _BUILT_IN[name]


def worst_decile(values: Tensor, higher_is_better: bool = True) -> float:
    """Mean of the worst tenth of clients (at least one), clients without a value left out."""
    values = values[~values.isnan()].to(torch.float64)
    if not len(values):
        return float("nan")
    count = max(1, len(values) // 10)
    return float(values.sort(descending=not higher_is_better).values[:count].mean())


def summarise(values: Tensor, higher_is_better: bool = True) -> dict[str, float]:
    """Mean, spread and ends of a metric over clients, clients without a value left out."""
    kept = values[~values.isnan()].to(torch.float64)
    if not len(kept):
        nan = float("nan")
        names = ("mean", "std", "min", "median", "max", "worst_decile")
        return dict.fromkeys(names, nan) | {"num_clients": 0.0}
    return {
        "mean": float(kept.mean()),
        "std": float(kept.std(correction=0)),
        "min": float(kept.min()),
        "median": float(kept.quantile(0.5)) if len(kept) < 2**24 else float(kept.median()),
        "max": float(kept.max()),
        "worst_decile": worst_decile(kept, higher_is_better),
        "num_clients": float(len(kept)),
    }
