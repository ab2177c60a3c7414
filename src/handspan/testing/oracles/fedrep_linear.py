"""FedRep for linear regression: a shared orthonormal basis B, heads w_i; and its baselines.

Algorithm 2 of L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, Exploiting Shared
Representations for Personalized Federated Learning, ICML 2021 (arXiv:2102.07078), Section A.1.

Every client sends its whole B_i; kept heads of all clients are turned after every QR.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Clients = Sequence[tuple[Array, Array]]
Batches = Callable[[int, str, int, int], Sequence[NDArray[np.integer]]]


def positive_qr(matrix: Array) -> tuple[Array, Array]:
    """Factorise with a positive diagonal of R."""
    q, r = np.linalg.qr(matrix)
    for j in range(len(r)):
        if r[j, j] < 0:
            q[:, j], r[j] = -q[:, j], -r[j]
    return q, r


def distance(first: Array, second: Array) -> float:
    """Compute dist(B1, B2) = |B1_perp^T B2|_2 (10), with a whole basis of the complement."""
    size = first.shape[1]
    full = np.linalg.qr(np.hstack([first, np.eye(len(first))]))[0]
    second = np.linalg.qr(second)[0]
    return float(np.linalg.norm(full[:, size:].T @ second, 2))


def top_vectors(symmetric: Array, count: int) -> Array:
    """Give the eigenvectors of the largest eigenvalues; the largest entry of each is positive."""
    values, vectors = np.linalg.eigh(symmetric)
    vectors = vectors[:, np.argsort(-values)[:count]]
    for j in range(count):
        if vectors[np.abs(vectors[:, j]).argmax(), j] < 0:
            vectors[:, j] = -vectors[:, j]
    return vectors


def moments_start(clients: Clients, rank: int, batches, shares: Sequence[float]) -> Array:
    """Give the top eigenvectors of the mean of Z_i = 1/m sum_j y_ij^2 x_ij x_ij^T."""
    size = clients[0][0].shape[1]
    total = np.zeros((size, size))
    for i, (x, y) in enumerate(clients):
        rows = batches(i)
        z = np.zeros((size, size))
        for j in rows:
            z += y[j] ** 2 * np.outer(x[j], x[j]) / len(rows)
        total += shares[i] * z
    return top_vectors(total, rank)


def projected_start(clients: Clients, rank: int, rounds: int) -> Array:
    """Run projected gradient descent on the unfactorised models, from 0 (Tu et al. 2016, Alg. 1).

    The projection is the truncated singular value decomposition of all models side by side.
    """
    models = np.zeros((len(clients), clients[0][0].shape[1]))
    right = None
    for _ in range(rounds):
        for i, (x, y) in enumerate(clients):
            covariance = x.T @ x / len(y)
            step = 1 / np.linalg.eigvalsh(covariance)[-1]
            models[i] = models[i] - step * (x.T @ (x @ models[i] - y) / len(y))
        left, values, right = np.linalg.svd(models, full_matrices=False)
        models = left[:, :rank] * values[:rank] @ right[:rank]
    return right[:rank].T


def fedrep_linear(
    clients: Clients,
    cohorts: Sequence[Sequence[int]],
    batches: Batches,
    basis: Array,
    *,
    learning_rate: float | None,
    head: str = "exact",
    head_steps: int = 1,
    head_learning_rate: float | None = None,
    orthonormal: bool = True,
    weights: str = "uniform",
) -> tuple[Array, list[Array]]:
    """Run Algorithm 2, or GD-GD (``head="gradient"``), or FedSGD (``head="shared"``).

    Parameters
    ----------
    clients
        Rows x (m, d) and numbers y (m,) of each client.
    cohorts
        Sorted client ids of each round.
    batches
        Rows of the local steps: phase ``"train"``, stage 0.
    basis
        B^0.
    learning_rate
        eta; None takes 1 / (4 sbar^2) with the largest sbar of the heads found so far (Theorem 1).
    head, head_steps, head_learning_rate, orthonormal, weights
        As in the docstring of the method.

    Returns
    -------
    basis : array
        B^T.
    heads : list of array
        The head of each client as its last round left it, turned with every QR since; of FedSGD
        the one shared head.
    """
    size = basis.shape[1]
    heads = [np.zeros(size) for _ in clients]
    shared, largest = np.zeros(size), 0.0
    head_rate = learning_rate if head_learning_rate is None else head_learning_rate
    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        found: list[tuple[float, Array, Array]] = []  # weight, gradient or B_i - B, head
        for i in cohort:
            x, y = clients[i]
            local, w = basis.copy(), (shared if head == "shared" else heads[i]).copy()
            for rows in batches(round_index, "train", 0, i):
                a, b = x[rows], y[rows]
                old = w
                if head == "exact":
                    w = np.linalg.lstsq(a @ local, b, rcond=None)[0]  # least norm where m < k
                for _ in range({"exact": 0, "shared": 1}.get(head, head_steps)):
                    w = w - head_rate * (a @ local).T @ (a @ local @ w - b) / len(b)
                used = old if head == "shared" else w
                slope = -np.outer(a.T @ (b - a @ local @ used), used) / len(b)  # grad_B
                local = local - (1.0 if learning_rate is None else learning_rate) * slope
            if head != "shared":
                heads[i] = w
            found.append((1.0 if weights == "uniform" else float(len(y)), local - basis, w))
        total = sum(weight for weight, _, _ in found)
        change = sum(weight * delta for weight, delta, _ in found) / total
        if learning_rate is None:
            side = np.stack([np.sqrt(weight / total) * w for weight, _, w in found])
            largest = max(largest, np.linalg.norm(side, 2))  # sigma_max of W / sqrt(rn)
            change = change / (4 * largest**2)
        basis = basis + change
        if head == "shared":
            shared = sum(weight * w for weight, _, w in found) / total
        if orthonormal:
            basis, r = positive_qr(basis)
            heads, shared = [r @ w for w in heads], r @ shared
    return basis, [shared] if head == "shared" else heads
