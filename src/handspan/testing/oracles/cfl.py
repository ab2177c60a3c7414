"""CFL: recursive bipartition of the clients by the cosines of their updates.

F. Sattler, K.-R. Mueller, W. Samek, Clustered Federated Learning, IEEE TNNLS 2021
(arXiv:1910.01991), Algorithm 3 with weight updates, in round form. In a round of a test, cluster c
with model theta_c is split if, with Delta_i = SGD(theta_c, D_i) - theta_c,

    |sum_i |D_i|/|D_c| Delta_i| < eps_1      (30)  the cluster stands still,
    max_i |Delta_i| >= eps_2                 (31)  and yet a client would move,
    sqrt((1 - alpha_cross) / 2) > gamma_max  (36)

where alpha_cross is the least value, over all bipartitions, of the greatest cosine between the two
sides (23): here by trying all of them. Then every cluster moves by the mean of its own Delta_i.
"""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def flat(params: Params) -> Array:
    """Join all parameters to one vector."""
    return np.concatenate([params[name].ravel() for name in sorted(params)])


def bipartition(vectors: Sequence[Array]) -> tuple[list[int], list[int], float]:
    """Try all bipartitions; the first group holds position 0 (Eq. 23)."""
    count = len(vectors)
    cosine = np.zeros((count, count))
    for i in range(count):
        for j in range(count):
            lengths = np.linalg.norm(vectors[i]) * np.linalg.norm(vectors[j])
            cosine[i, j] = round(float(vectors[i] @ vectors[j] / lengths), 9)
    best = (list(range(count)), list[int](), np.inf)
    for size in range(1, count):
        for group in combinations(range(1, count), size):
            rest = [i for i in range(count) if i not in group]
            cross = max(cosine[i, j] for i in group for j in rest)
            if cross < best[2]:
                best = (rest, list(group), cross)
    return best


def cfl(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    initial: Params,
    *,
    tests: Sequence[int],
    mean_bound: float,
    client_bound: float,
    deviation: float,
    relative: bool = True,
    max_clusters: int = 8,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "examples",
) -> tuple[list[Params], list[int], list[tuple[int, Params, list[Array], list[Array]]]]:
    """Run CFL.

    Parameters
    ----------
    clients, cohorts, gradient, weights
        As in the package. In a round of a test all clients take part.
    batches
        Rows of each step; phase ``"test"`` in a round of a test that not all clients were drawn
        for, ``"train"`` in all others, stage 0.
    initial
        The first model.
    tests
        Rounds of a test.
    mean_bound, client_bound, deviation
        eps_1, eps_2, gamma_max.
    relative
        Whether eps_1 and eps_2 are shares of the longest mean update of a cluster so far.
    max_clusters
        No cluster is split when there are so many.
    learning_rate, momentum, nesterov, weight_decay
        Plain SGD; the buffer starts at 0 in each round.

    Returns
    -------
    models : list of dict
        One for each cluster; a split keeps the number for the group of the lowest client.
    cluster : list of int
        The cluster of each client.
    splits : list
        In order: the number that was split, theta*, the updates of those who stayed and who left.
    """
    models = [{name: np.array(value, dtype=float) for name, value in initial.items()}]
    cluster = [0 for _ in clients]
    splits: list[tuple[int, Params, list[Array], list[Array]]] = []
    longest = 0.0

    def train(theta: Params, round_index: int, phase: str, i: int) -> Params:
        x, y = clients[i]
        model = dict(theta)
        buffer = {name: np.zeros_like(value) for name, value in model.items()}
        for rows in batches(round_index, phase, 0, i):
            slope = gradient(model, x[rows], y[rows])
            for name in model:
                step = slope[name] + weight_decay * model[name]
                buffer[name] = momentum * buffer[name] + step
                step = step + momentum * buffer[name] if nesterov else buffer[name]
                model[name] = model[name] - learning_rate * step
        return {name: model[name] - theta[name] for name in model}

    for round_index, cohort in enumerate(cohorts):
        is_test = round_index in tests
        everyone = list(range(len(clients)))
        phase = "test" if is_test and list(cohort) != everyone else "train"
        here = everyone if is_test else list(cohort)
        delta = {i: train(models[cluster[i]], round_index, phase, i) for i in here}

        def mean(members: Sequence[int], delta: dict[int, Params] = delta) -> Params:
            sizes = [1.0 if weights == "uniform" else float(len(clients[i][1])) for i in members]
            return {
                name: sum(s * delta[i][name] for s, i in zip(sizes, members, strict=True))
                / sum(sizes)
                for name in delta[members[0]]
            }

        for c in range(len(models)):
            members = [i for i in here if cluster[i] == c]
            if members:
                longest = max(longest, float(np.linalg.norm(flat(mean(members)))))
        unit = longest if relative else 1.0
        for c in range(len(models) if is_test else 0):
            members = [i for i in everyone if cluster[i] == c]
            if len(members) < 2 or len(models) == max_clusters:
                continue
            moves = [flat(delta[i]) for i in members]
            stay, leave, cross = bipartition(moves)
            if (
                np.linalg.norm(flat(mean(members))) < mean_bound * unit  # (30)
                and max(np.linalg.norm(move) for move in moves) >= client_bound * unit  # (31)
                and np.sqrt((1 - cross) / 2) > deviation  # (36)
            ):
                splits.append((c, models[c], [moves[k] for k in stay], [moves[k] for k in leave]))
                for k in leave:
                    cluster[members[k]] = len(models)
                models.append(dict(models[c]))
        for c in range(len(models)):
            members = [i for i in here if cluster[i] == c]
            if members:
                step = mean(members)
                models[c] = {name: models[c][name] + step[name] for name in step}
    return models, cluster, splits


def descend(
    splits: Sequence[tuple[int, Params, list[Array], list[Array]]],
    update: Callable[[Params], Array],
) -> int:
    """Lead a new client down the tree to a cluster.

    At each split of the cluster it is in, it goes to the branch whose members' updates have the
    greater mean cosine with its own.

    Parameters
    ----------
    splits
        As returned by `cfl`.
    update
        theta* -> the client's own update from there, as one vector.
    """
    cluster = 0
    for number, (parent, anchor, stayed, left) in enumerate(splits, start=1):
        if parent != cluster:
            continue
        own = update(anchor)

        def nearness(branch: list[Array], own: Array = own) -> float:
            cosines = [float(own @ v / np.linalg.norm(own) / np.linalg.norm(v)) for v in branch]
            return sum(cosines) / len(cosines)

        if nearness(left) > nearness(stayed):
            cluster = number
    return cluster
