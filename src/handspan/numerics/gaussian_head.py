"""Classes as Gaussians in feature space, with one covariance: their head is a closed form.

For features z | y = c ~ N(mu_c, Sigma) and class frequencies pi the posterior is a softmax of
linear outputs, with weight_c = Sigma^-1 mu_c and bias_c = log pi_c - mu_c^T Sigma^-1 mu_c / 2.

All functions take the rows of one client; rows of weight 0 are padding. Sums are in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from handspan.core.records import Record
from handspan.numerics.carrying import rounded


class Gaussians(Record):
    """Means of the classes and their common covariance."""

    means: Tensor  # (C, D)
    covariance: Tensor  # (D, D)


class Rows(Record):
    """Features of one client's rows."""

    features: Tensor  # (rows, D) float64
    classes: Tensor  # (rows, C) float64, one-hot, zero for padding

    @property
    def weight(self) -> Tensor:
        """Return 1 for a real row and 0 for padding."""
        return self.classes.sum(1)

    def only(self, chosen: Tensor) -> Rows:
        """Keep the chosen rows (1) and make padding of the others (0)."""
        return Rows(features=self.features, classes=self.classes * chosen.unsqueeze(1))


def rows_of(features: Tensor, y: Tensor, weight: Tensor, num_classes: int) -> Rows:
    """Bring features (rows, D) and labels (rows,) into the form of this module."""
    classes = y.unsqueeze(1) == torch.arange(num_classes, device=y.device)
    return Rows(
        features=torch.where(weight.unsqueeze(1) > 0, features, 0).double(),
        classes=classes.double() * weight.double().unsqueeze(1),
    )


def estimate(rows: Rows, known: Gaussians, ridge: float) -> Gaussians:
    """Means and covariance of rows; a class without rows has its ``known`` mean."""
    count = rows.classes.sum(0).unsqueeze(1)
    means = torch.where(
        count > 0, rows.classes.T @ rows.features / count.clamp(min=1), known.means.double()
    )
    residual = (rows.features - rows.classes @ means) * rows.weight.unsqueeze(1)
    # The client has one covariance, so its degrees of freedom are counted once; one row has none.
    freedom = (rows.weight.sum() - 1).clamp(min=1)
    eye = torch.eye(len(known.covariance), dtype=torch.float64, device=means.device)
    return Gaussians(means=means, covariance=residual.T @ residual / freedom + ridge * eye)


def blend(local: Gaussians, known: Gaussians, beta: Tensor) -> Gaussians:
    """Interpolate: ``beta`` (2,) is the local share of the means and of the covariance."""
    return Gaussians(
        means=beta[0] * local.means + (1 - beta[0]) * known.means.double(),
        covariance=beta[1] * local.covariance + (1 - beta[1]) * known.covariance.double(),
    )


def shrunk(covariance: Tensor, shrinkage: float) -> Tensor:
    """Return the covariance moved towards a multiple of the identity with the same trace."""
    size = len(covariance)
    eye = torch.eye(size, dtype=torch.float64, device=covariance.device)
    covariance = covariance.double()
    return (1 - shrinkage) * covariance + shrinkage * covariance.trace() / size * eye


def head(known: Gaussians, prior: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Weight (C, D) and bias (C,) of the head, in float64."""
    means = known.means.double()
    weight = torch.linalg.solve(shrunk(known.covariance, shrinkage), means.T).T
    return weight, prior.double().log() - (means * weight).sum(1) / 2


def choose_blend(
    rows: Rows,
    known: Gaussians,
    prior: Tensor,
    candidates: Tensor,
    *,
    folds: int,
    ridge: float,
    shrinkage: float,
) -> Tensor:
    """Return the candidate (g, 2) whose heads have the least cross-validated cross-entropy.

    Folds are stratified, in stored order; classes with fewer rows than folds take no part, and a
    client that has none but those takes 0: the known distribution.
    """
    enough = rows.only(rows.classes @ (rows.classes.sum(0) >= folds).double())
    place = ((enough.classes.cumsum(0) - 1) * enough.classes).sum(1)  # among rows of its class
    loss = torch.zeros_like(candidates[:, 0])
    for fold in range(folds):
        is_out = (place % folds == fold).double()
        local = estimate(enough.only(1 - is_out), known, ridge)
        loss = loss + _losses(enough.only(is_out), local, known, prior, candidates, shrinkage)
    count = enough.weight.sum()
    best = rounded(loss / count.clamp(min=1)).argmin()  # the first of equals
    return torch.where(count > 0, candidates.index_select(0, best.unsqueeze(0)).squeeze(0), 0.0)


def _losses(
    rows: Rows,
    local: Gaussians,
    known: Gaussians,
    prior: Tensor,
    candidates: Tensor,
    shrinkage: float,
) -> Tensor:
    """Sum of the rows' cross-entropies under the head of each candidate (g,).

    Both covariances are made diagonal by one change of coordinates, in which every blend of them
    is diagonal as well: one decomposition serves all candidates.
    """
    root = torch.linalg.cholesky(shrunk(known.covariance, shrinkage))
    inner = torch.linalg.solve_triangular(root, shrunk(local.covariance, shrinkage), upper=False)
    inner = torch.linalg.solve_triangular(root, inner.T, upper=False)
    values, vectors = torch.linalg.eigh((inner + inner.T) / 2)

    def turned(points: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(root, points.T, upper=False).T @ vectors

    share, spread = candidates[:, 0].view(-1, 1, 1), candidates[:, 1:]
    means = share * turned(local.means) + (1 - share) * turned(known.means.double())  # (g, C, D)
    weight = means / (spread * values + 1 - spread).unsqueeze(1)
    bias = prior.double().log() - (means * weight).sum(2) / 2
    logits = torch.einsum("rd,gcd->grc", turned(rows.features), weight) + bias.unsqueeze(1)
    told = (logits * rows.classes).sum(2)
    return (torch.logsumexp(logits, 2) * rows.weight - told).sum(1)
