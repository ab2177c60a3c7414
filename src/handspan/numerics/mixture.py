"""Centres of the clients' coordinates, found by sums alone.

Every client finds the centre that is nearest to its own coordinates; counts, sums and sums of
squares come up, and the server moves the centres (Lloyd's algorithm, with a memory of earlier
rounds, because a round sees a cohort only). Centres are made by splitting those of the largest
spread, never from one client's coordinates; in the end those that are not apart are merged.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from handspan.core.records import Record
from handspan.numerics.carrying import rounded

_MEMORY = 0.8  # weight of what was known a round ago
_FORGOTTEN = 0.3  # clients, remembered ones included, below which a centre is given up
_HALF = (2 / torch.pi) ** 0.5  # mean of half a normal distribution, in standard deviations


class Centres(Record):
    """Up to k centres, in float64; those whose count is 0 are free."""

    count: Tensor  # (k,) clients, remembered ones included
    mean: Tensor  # (k, r)
    variance: Tensor  # (k, r) inside, by coordinate


class CentreSums(Record):
    """What clients say of their nearest centre, summed."""

    count: Tensor  # (k,)
    total: Tensor  # (k, r)
    square: Tensor  # (k, r)


def one_centre(most: int, width: int, device: torch.device) -> Centres:
    """Start with one centre, at the origin."""
    zeros = torch.zeros(most, width, dtype=torch.float64, device=device)
    count = torch.eye(1, most, dtype=torch.float64, device=device)[0]
    return Centres(count=count, mean=zeros, variance=zeros.clone())


def nearest(coordinates: Tensor, mean: Tensor, is_there: Tensor, gram: Tensor) -> Tensor:
    """One-hot choice (k,) of the centre whose model is nearest; ties go to the first."""
    apart = mean - coordinates
    distance = rounded(((apart @ gram) * apart).sum(1))
    best = torch.where(is_there, distance, torch.inf).argmin()
    return (torch.arange(len(mean), device=best.device) == best).to(coordinates)


def sum_by_centre(choice: Tensor, coordinates: Tensor, weights: Tensor) -> CentreSums:
    """Sum over a block: ``choice`` (c, k) is one-hot, ``coordinates`` (c, r)."""
    share = (choice.to(torch.float64) * weights.to(choice.device).unsqueeze(1)).T
    v = coordinates.to(torch.float64)
    return CentreSums(count=share.sum(1), total=share @ v, square=share @ (v * v))


def updated(centres: Centres, new: CentreSums) -> Centres:
    """Lloyd's step with memory; centres that nobody is near to any more are given up."""
    width = new.total.shape[1]
    old, mean, variance = _MEMORY * centres.count, centres.mean.clone(), centres.variance.clone()
    count = old + new.count
    safe = count.clamp(min=1e-12).unsqueeze(1)
    before, spread = mean[:, :width], variance[:, :width]
    square = old.unsqueeze(1) * (spread + before**2) + new.square
    mean[:, :width] = (old.unsqueeze(1) * before + new.total) / safe
    variance[:, :width] = (square / safe - mean[:, :width] ** 2).clamp(min=0)
    kept = (count >= _FORGOTTEN) | (count == count.max())
    return Centres(count=torch.where(kept, count, 0.0), mean=mean, variance=variance)


def split(centres: Centres, gram: Tensor, least: float) -> Centres:
    """Split centres along the axis of their largest spread, the widest first, while there is room.

    Parameters
    ----------
    gram
        (r, r) inner products of the directions: spreads are measured between models.
    least
        Clients that a centre must have to be split.
    """
    count, mean, variance = (t.clone() for t in (centres.count, centres.mean, centres.variance))
    spread = variance[:, : len(gram)] * gram.diagonal()
    free = (count == 0).nonzero().flatten().tolist()
    for j in (count * spread.sum(1)).argsort(descending=True, stable=True).tolist():
        if not free:
            break
        axis = int(spread[j].argmax())
        if count[j] < least or spread[j, axis] <= 0:
            continue
        shift = _HALF * variance[j, axis].sqrt()
        other = free.pop(0)
        count[j] /= 2
        variance[j, axis] -= shift**2
        count[other], mean[other], variance[other] = count[j], mean[j], variance[j]
        mean[j, axis] -= shift
        mean[other, axis] += shift
    return Centres(count=count, mean=mean, variance=variance)


def merged(centres: Centres, gram: Tensor, separation: float) -> Centres:
    """Merge the pair of centres that is least apart, until all are apart.

    Apart is measured in standard deviations inside the two, along the line between them. The
    halves of one normal distribution are 2.6 apart, so ``separation`` has to be larger than that.
    """
    gram, width = gram.to(centres.mean), len(gram)
    while int((centres.count > 0).sum()) > 1:
        distance = _separations(centres, gram, width)
        least = int(distance.argmin())
        if distance.flatten()[least] > separation:
            break
        a, b = sorted((least // len(distance), least % len(distance)))
        pair, counts = [a, b], centres.count[[a, b]]
        share = (counts / counts.sum()).unsqueeze(1)
        mean = (share * centres.mean[pair]).sum(0)
        second = (share * (centres.variance[pair] + centres.mean[pair] ** 2)).sum(0)
        count, means, variances = (
            t.clone() for t in (centres.count, centres.mean, centres.variance)
        )
        count[a], count[b] = counts.sum(), 0.0
        means[a], variances[a] = mean, (second - mean**2).clamp(min=0)
        centres = Centres(count=count, mean=means, variance=variances)
    return centres


def _separations(centres: Centres, gram: Tensor, width: int) -> Tensor:
    """(k, k) distances in inner standard deviations; infinite where there is no pair."""
    count, mean = centres.count, centres.mean[:, :width]
    variance = centres.variance[:, :width]
    apart = mean.unsqueeze(1) - mean.unsqueeze(0)
    pull = apart @ gram
    square = (pull * apart).sum(2)
    share = count / (count.unsqueeze(0) + count.unsqueeze(1)).clamp(min=1e-12)  # of the column
    pooled = share.T.unsqueeze(2) * variance.unsqueeze(1) + share.unsqueeze(2) * variance
    inside = (pull**2 * pooled).sum(2) / square.clamp(min=1e-300)
    typical = (count.unsqueeze(1) * variance * gram.diagonal()).sum() / count.sum()
    distance = (square / (inside + 1e-3 * typical).clamp(min=1e-300)).sqrt()
    is_there = count > 0
    is_pair = is_there.unsqueeze(0) & is_there.unsqueeze(1)
    is_pair &= ~torch.eye(len(count), dtype=torch.bool, device=count.device)
    return torch.where(is_pair, distance, torch.inf)


def moved(centres: Centres, matrix: Tensor, shift: Tensor) -> Centres:
    """Centres in new coordinates, v -> matrix v + shift."""
    return replace(
        centres,
        mean=centres.mean @ matrix.T + shift,
        variance=centres.variance @ (matrix**2).T,
    )
