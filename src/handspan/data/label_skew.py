"""Partitions in which clients have different classes: Dirichlet proportions, and shards."""

from __future__ import annotations

import numpy as np

from handspan.core.errors import HandspanError

REDRAWS = 100
MOST_DRAWS = 100_000_000  # gamma variates in all redraws: keeps a million clients within seconds
MIXING_ROUNDS = 20
LARGEST_ALPHA = 1e12  # beyond, gamma variates overflow and proportions are equal anyway


def _by_class(
    labels: np.ndarray, num_classes: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows sorted by class, in random order inside a class, and the sizes of classes."""
    shuffled = rng.permutation(len(labels))
    rows = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return rows, np.bincount(labels, minlength=num_classes)


def dirichlet(
    labels: np.ndarray,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    alpha: float,
    least: int,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Give every client at least ``least`` rows, by redraws and then by moving rows.

    Returns the client of every row and remarks.
    """
    if least * num_clients > len(labels):
        raise HandspanError(
            f"{num_clients} clients with at least {least} rows each need {least * num_clients} "
            f"rows, but there are {len(labels)}: ask for fewer clients or a smaller minimum"
        )
    rows, sizes = _by_class(labels, num_classes, rng)
    tries = min(REDRAWS, max(1, MOST_DRAWS // (num_clients * num_classes)))
    best = _draw_counts(sizes, num_clients, rng, alpha)
    for _ in range(tries - 1):
        if _lacking(best, least) == 0:
            break
        counts = _draw_counts(sizes, num_clients, rng, alpha)
        if _lacking(counts, least) < _lacking(best, least):
            best = counts
    client = np.empty(len(labels), dtype=np.int32)
    everyone = np.tile(np.arange(num_clients, dtype=np.int32), num_classes)
    client[rows] = np.repeat(everyone, best.reshape(-1))
    moved = _top_up(client, num_clients, rng, least)
    if not moved:
        return client, ()
    return client, (
        f"after {tries} draws some clients still had fewer than {least} rows; "
        f"{moved} rows were moved to them from the largest clients",
    )


def _lacking(counts: np.ndarray, least: int) -> int:
    return int(np.maximum(least - counts.sum(axis=0), 0).sum())


def _draw_counts(
    sizes: np.ndarray, num_clients: int, rng: np.random.Generator, alpha: float
) -> np.ndarray:
    """Rows of every class (first axis) for every client, by cumulated proportions."""
    alphas = np.full(num_clients, min(alpha, LARGEST_ALPHA))
    shares = rng.dirichlet(alphas, size=len(sizes))
    lost = ~np.isfinite(shares).all(axis=1) | (shares.sum(axis=1) < 0.5)
    if lost.any():
        # At a tiny alpha all variates may underflow: in the limit one client has the class.
        shares[lost] = 0.0
        shares[lost, rng.integers(num_clients, size=int(lost.sum()))] = 1.0
    ends = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
    ends = np.minimum(ends, sizes[:, None])
    ends[:, -1] = sizes
    return np.diff(ends, axis=1, prepend=0)


def _top_up(client: np.ndarray, num_clients: int, rng: np.random.Generator, least: int) -> int:
    """Move random rows of the largest clients to those with too few; return how many."""
    totals = np.bincount(client, minlength=num_clients)
    lack = np.maximum(least - totals, 0)
    moved = int(lack.sum())
    if not moved:
        return 0
    low, high = least, int(totals.max())
    while low < high:  # the highest level above which there are enough rows
        middle = (low + high + 1) // 2
        if np.maximum(totals - middle, 0).sum() >= moved:
            low = middle
        else:
            high = middle - 1
    give = np.maximum(totals - low, 0)
    spare = int(give.sum()) - moved
    give[np.flatnonzero(give)[:spare]] -= 1
    shuffled = rng.permutation(len(client))
    rows = shuffled[np.argsort(client[shuffled], kind="stable")]
    starts = np.repeat(np.cumsum(totals) - totals, totals)
    taken = rows[np.arange(len(rows)) - starts < np.repeat(give, totals)]
    client[rng.permutation(taken)] = np.repeat(np.arange(num_clients, dtype=np.int32), lack)
    return moved


def shards(
    labels: np.ndarray,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    count: int,
    exact: bool,
) -> np.ndarray:
    """Return the client of every row: ``count`` shards each, of different classes if exact."""
    rows, sizes = _by_class(labels, num_classes, rng)
    present = np.flatnonzero(sizes)
    per_class = _apportion(sizes[present], num_clients, count, exact)
    if exact:
        owner = _exact_owners(per_class, num_clients, count, rng)
    else:
        owner = rng.permutation(np.repeat(np.arange(num_clients), count))
    # Shard j of a class with m rows and k shards holds the rows with position * k // m = j.
    m, k = sizes[present], per_class
    position = np.arange(len(rows)) - np.repeat(np.cumsum(m) - m, m)
    within = position * np.repeat(k, m) // np.repeat(m, m)
    shard = within + np.repeat(np.cumsum(k) - k, m)
    client = np.empty(len(rows), dtype=np.int32)
    client[rows] = owner[shard]
    return client


def _apportion(sizes: np.ndarray, num_clients: int, count: int, exact: bool) -> np.ndarray:
    """Divide count * num_clients shards among classes, so that shards are about equally large."""
    total = num_clients * count
    spec = f"shards:{count}:exact" if exact else f"shards:{count}"
    if exact and count > len(sizes):
        raise HandspanError(
            f"{spec} is impossible with {len(sizes)} classes; ask for at most that many"
        )
    if total < len(sizes):
        raise HandspanError(
            f"{spec} makes {total} shards for {len(sizes)} classes, which leaves classes without a "
            "shard; ask for more shards or more clients"
        )
    # A client with a single shard needs two rows in it: one for training, one for test.
    most = sizes // 2 if count == 1 else sizes.copy()
    if exact:
        most = np.minimum(most, num_clients)
    if int(most.sum()) < total or (most < 1).any():
        raise HandspanError(
            f"{spec} is impossible for {num_clients} clients: the classes are too small or too "
            "uneven; ask for fewer clients or another number of shards"
        )

    def shares(rows_per_shard: float) -> np.ndarray:
        return np.clip(np.floor(sizes / rows_per_shard), 1, most).astype(np.int64)

    low, high = 0.5, float(sizes.max()) + 1.0  # too many shards at low, too few or enough at high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if shares(middle).sum() <= total else (middle, high)
    chosen = shares(high)
    while (missing := total - int(chosen.sum())) > 0:  # ties: less than one per class
        ratio = np.where(chosen < most, sizes / chosen, -1.0)
        chosen[np.argsort(-ratio, kind="stable")[: min(missing, int((chosen < most).sum()))]] += 1
    return chosen


def _exact_owners(
    per_class: np.ndarray, num_clients: int, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Owners of shards, class after class, such that no client owns two shards of one class."""
    # Dealt round, a class meets a client at most once, as it has at most num_clients shards.
    num_classes = len(per_class)
    dealt = np.repeat(np.arange(num_classes), per_class)
    has = np.zeros((num_clients, num_classes), dtype=bool)
    has[np.arange(len(dealt)) % num_clients, dealt] = True
    # Random trades between pairs of clients make it random and keep both kinds of sums.
    for _ in range(MIXING_ROUNDS):
        pairs = rng.permutation(num_clients)[: num_clients // 2 * 2].reshape(2, -1)
        has[pairs[0]], has[pairs[1]] = _trade(has[pairs[0]], has[pairs[1]], rng)
    has = has[rng.permutation(num_clients)]
    order, _ = np.nonzero(has.T)
    if order.size != len(dealt) or (has.sum(axis=1) != count).any():  # pragma: no cover
        raise HandspanError("the shards do not fit the clients; ask for another number of shards")
    return np.nonzero(has.T)[1]


def _trade(
    one: np.ndarray, other: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Share out anew, at random and evenly, the classes that only one of two clients has."""
    differ = one ^ other
    score = np.where(differ, rng.random(one.shape), 2.0)
    rank = np.argsort(np.argsort(score, axis=1), axis=1)
    first = differ & (rank < (one & differ).sum(axis=1, keepdims=True))
    common = one & other
    return common | first, common | (differ & ~first)
