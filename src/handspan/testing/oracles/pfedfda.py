"""pFedFDA: heads from Gaussian classes in feature space, each client blending its own estimate.

C. J. McLaughlin, L. Su, Personalized Federated Learning via Feature Distribution Adaptation,
NeurIPS 2024 (arXiv:2411.00329).

Model: z | y = c ~ N(mu_c, Sigma), priors pi. Everything is computed directly: one linear system
for each head, one head for each candidate beta.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def gaussian_head(means: Array, covariance: Array, prior: Array, shrinkage: float):
    """Compute weight_c = Sigma^-1 mu_c and bias_c = log pi_c - mu_c^T Sigma^-1 mu_c / 2.

    Sigma is first moved towards the multiple of the identity that has its trace.
    """
    size = len(covariance)
    sigma = (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / size * np.eye(size)
    weight, bias = np.zeros_like(means), np.zeros(len(means))
    for c in range(len(means)):
        weight[c] = np.linalg.lstsq(sigma, means[c], rcond=None)[0]
        bias[c] = np.log(prior[c]) - means[c] @ weight[c] / 2
    return weight, bias


def local_estimate(z: Array, y: NDArray, means: Array, ridge: float) -> tuple[Array, Array]:
    """Estimate class means (``means`` for absent classes) and Sigma + ridge I from features z."""
    own = means.copy()
    for c in set(y.tolist()):
        own[c] = z[y == c].mean(axis=0)
    sigma = np.zeros((z.shape[1], z.shape[1]))
    for row, label in zip(z, y, strict=True):
        sigma += np.outer(row - own[label], row - own[label])
    return own, sigma / max(len(y) - 1, 1) + ridge * np.eye(z.shape[1])


def label_prior(y: NDArray, num_classes: int, floor: float) -> Array:
    """Give pi: frequencies of the labels plus a floor, normalised."""
    pi = np.array([(y == c).mean() + floor for c in range(num_classes)])
    return pi / pi.sum()


def choose_beta(z, y, known, prior, candidates, folds, ridge, shrinkage) -> tuple[float, float]:
    """Choose (beta for mu, beta for Sigma) of least cross-validated cross-entropy; ties: first."""
    if len(candidates) == 1:  # given, not chosen
        return candidates[0]
    kept = [j for j in range(len(y)) if (y == y[j]).sum() >= folds]
    if not kept:
        return 0.0, 0.0
    z, y = z[kept], y[kept]
    fold = np.array([(y[:j] == y[j]).sum() % folds for j in range(len(y))])
    best, best_loss = candidates[0], np.inf
    for beta in candidates:
        total = 0.0
        for f in range(folds):
            own = local_estimate(z[fold != f], y[fold != f], known[0], ridge)
            weight, bias = gaussian_head(*interpolate(own, known, beta), prior, shrinkage)
            for row, label in zip(z[fold == f], y[fold == f], strict=True):
                logits = weight @ row + bias
                total += np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[label]
        if round(total / len(y), 9) < best_loss:
            best, best_loss = beta, round(total / len(y), 9)
    return best


def interpolate(own, known, beta) -> tuple[Array, Array]:
    """Blend: beta own + (1 - beta) known, for means and for the covariance."""
    return (
        beta[0] * own[0] + (1 - beta[0]) * known[0],
        beta[1] * own[1] + (1 - beta[1]) * known[1],
    )


def adapted(z, y, known, prior, candidates, folds=2, ridge=1.0, shrinkage=1e-4):
    """Give (mu_i, Sigma_i) of a client with features z and labels y."""
    beta = choose_beta(z, y, known, prior, candidates, folds, ridge, shrinkage)
    return interpolate(local_estimate(z, y, known[0], ridge), known, beta)


def pfedfda(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    features: Callable[[Params, Array], Array],
    initial: Params,
    head_names: tuple[str, str],
    means: Array,
    candidates: Sequence[tuple[float, float]],
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
    folds: int = 2,
    ridge: float = 1.0,
    shrinkage: float = 1e-4,
    floor: float = 1e-4,
) -> tuple[Params, tuple[Array, Array], list[Params]]:
    """Run pFedFDA.

    Parameters
    ----------
    clients, cohorts, batches, gradient, learning_rate, momentum, nesterov, weight_decay, weights
        As in the other modules; phase ``"train"``, stage 0 = steps on the representation.
    features
        Input of the head for rows.
    initial
        A whole model; only its representation is used.
    head_names
        Names of the head's weight and bias.
    means
        The first global class means (C, D); the first covariance is the identity.
    candidates
        Pairs among which beta is chosen; a fixed beta is a single candidate.
    folds, ridge, shrinkage, floor
        Constants k, eps, e and the floor of the label frequencies.

    Returns
    -------
    theta : dict
        The server's representation.
    known : (means, covariance)
        The server's distribution.
    heads : list of dict
        The head that each client is served after the last round.
    """
    theta = {n: np.array(v, dtype=float) for n, v in initial.items() if n not in head_names}
    known = (np.array(means, dtype=float), np.eye(means.shape[1]))
    options = {"folds": folds, "ridge": ridge, "shrinkage": shrinkage}

    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        total = {name: np.zeros_like(value) for name, value in theta.items()}
        total_means, total_covariance, total_weight = 0.0, 0.0, 0.0
        for i in cohort:
            x, y = clients[i]
            prior = label_prior(y, len(means), floor)
            head = dict(zip(head_names, gaussian_head(*known, prior, shrinkage), strict=True))
            own = dict(theta)
            buffer = {name: np.zeros_like(value) for name, value in own.items()}
            for rows in batches(round_index, "train", 0, i):
                slope = gradient({**own, **head}, x[rows], y[rows])
                for name in own:
                    step = slope[name] + weight_decay * own[name]
                    buffer[name] = momentum * buffer[name] + step
                    step = step + momentum * buffer[name] if nesterov else buffer[name]
                    own[name] = own[name] - learning_rate * step
            mu, sigma = adapted(features(own, x), y, known, prior, candidates, **options)
            weight = 1.0 if weights == "uniform" else float(len(y))
            total_weight += weight
            total = {name: total[name] + weight * own[name] for name in total}
            total_means = total_means + weight * mu
            total_covariance = total_covariance + weight * sigma
        theta = {name: value / total_weight for name, value in total.items()}
        known = (total_means / total_weight, total_covariance / total_weight)

    heads = []
    for x, y in clients:
        prior = label_prior(y, len(means), floor)
        own = adapted(features(theta, x), y, known, prior, candidates, **options)
        heads.append(dict(zip(head_names, gaussian_head(*own, prior, shrinkage), strict=True)))
    return theta, known, heads
