"""span: personal heads on a shared span, a whole run, one client after the other.

Ours; docs/methods/span.md has the equations. One round plays, of these, what the mode asks for:

    judge    mode "race", rounds ``races``: the model for all against personal heads, on held-out
             rows; the race ends in the last of them, earlier where its outcome is clear
    cut      mode "personal", rounds ``cuts``: canonical coordinates, then the number of directions
    weigh    mode "personal", round ``shrink``: the centres, and the weight of the own v
    race     mode "race", even rounds: FedAvg on the model for all; mode "common": ``common``
    explore  mode "race", odd rounds, and mode "personal" until nothing is left to decide: personal
             heads; from then on ``train``

Canonical directions come from a singular value decomposition of all heads' directions, standard
errors from the clients' single differences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from handspan.testing.oracles.centres import Centres, merged, split, updated
from handspan.testing.oracles.span_clients import Client, Clients, Params, Server, outer

Array = NDArray[np.float64]
Cohort = Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Span(Clients):
    """A run of span.

    Attributes
    ----------
    rounds, races, cuts, shrink
        Rounds in all, and of the decisions; None where there is none.
    average
        Share of the last rounds over which the model for all is averaged.
    weights
        ``"examples"``, or ``"uniform"`` means.
    damping
        Ridge of the basis step.
    apart, own_weights, most_sizes
        What is tried: degrees of merging, weights of the own v, how many sizes at a cut.
    """

    rounds: int
    races: Sequence[int]
    cuts: Sequence[int]
    shrink: int | None
    average: float = 0.0
    weights: str = "examples"
    damping: float = 1e-3
    apart: Sequence[float] = (6.0, 4.0, 2.8, 0.0)
    own_weights: Sequence[float] = (1.0, 0.75, 0.5, 0.25, 0.0)
    most_sizes: int = 8

    # -- the rounds --------------------------------------------------------------------------

    def run(
        self, s: Server, clients: Sequence[Client], cohorts: Sequence[Cohort]
    ) -> tuple[Server, list[Client]]:
        """Play all rounds; one without clients is skipped."""
        clients = [replace(client) for client in clients]
        settled = max([0, *self.races, *self.cuts, self.shrink or 0])
        for t, cohort in enumerate(cohorts):
            if len(cohort) == 0:
                continue
            if s.mode == "race" and t in self.races:
                s = self.judge(s, clients, cohort, t)
            if s.mode == "personal" and t in self.cuts:
                s = self.cut(s, clients, cohort, t)
            if s.mode == "personal" and t == self.shrink:
                s = self.weigh(s, clients, cohort, t)
            if s.mode == "common" or (s.mode == "race" and t % 2 == 0):
                s = self.train_common(s, cohort, t, "race" if s.mode == "race" else "common")
            else:
                phase = "explore" if s.mode == "race" or t < settled else "train"
                s = self.train_personal(s, clients, cohort, t, phase)
        return s, clients

    def shares(self, cohort: Cohort) -> dict[int, float]:
        """Give the weight of each client in a mean."""
        size = {i: self.num_train[i] if self.weights == "examples" else 1 for i in cohort}
        return {i: size[i] / sum(size.values()) for i in cohort}

    def train_common(self, s: Server, cohort: Cohort, t: int, phase: str) -> Server:
        """Train one model for all as FedAvg does, and average it over the last rounds."""
        share = self.shares(cohort)
        mean = {name: np.zeros_like(value) for name, value in s.common.items()}
        for i in cohort:
            (x, y), model, buffer = self.rows[i], dict(s.common), {}
            for rows in self.batches(t, phase, 0, i):
                slope = self.gradient(model, x[rows], y[rows])
                model = self.sgd(model, slope, buffer, self.rate(t))
            mean = {name: mean[name] + share[i] * model[name] for name in mean}
        if t < (1 - self.average) * self.rounds:
            return replace(s, common=mean)
        old, n = (s.average if s.averaged else mean), s.averaged
        average = {name: (n * old[name] + mean[name]) / (n + 1) for name in mean}
        return replace(s, common=mean, average=average, averaged=n + 1)

    def train_personal(
        self, s: Server, clients: list[Client], cohort: Cohort, t: int, phase: str
    ) -> Server:
        """Move v, then body and head; the server moves U by least squares, and the centres."""
        share, rank = self.shares(cohort), s.rank
        body = {name: np.zeros_like(value) for name, value in s.body.items()}
        change = {name: np.zeros_like(u[: 1 + rank]) for name, u in s.basis.items()}
        products, spread = np.zeros((1 + rank, 1 + rank)), np.zeros((1 + rank, 1 + rank))
        points: dict[int, list[Array]] = {}
        for i in cohort:
            v = self.today(s, clients[i])
            v = self.coordinate_steps(s, v, i, self.batches(t, phase, 0, i), self.rate(t))
            j = self.nearest(s, s.centres, v)
            centre = s.centres.mean[j][:rank]
            fixed = centre + s.own * (v - centre)
            trained, moved = self.shared_steps(
                s, fixed, i, self.batches(t, phase, 1, i), self.rate(t)
            )
            clients[i] = Client(v=v, seen=len(s.cuts), centre=j)
            points.setdefault(j, []).append(v)
            body = {name: body[name] + share[i] * trained[name] for name in body}
            change = {name: change[name] + share[i] * moved[name] for name in change}
            one, own = np.append(1.0, fixed), np.append(1.0, v)
            products, spread = (
                total + share[i] * outer(u, u) for total, u in ((products, one), (spread, own))
            )
        moments = s.moments.copy()
        moments[: 1 + rank, : 1 + rank] = 0.8 * moments[: 1 + rank, : 1 + rank] + 0.2 * spread
        basis = self.moved_basis(s.basis, change, products)
        return self.cluster(replace(s, body=body, basis=basis, moments=moments), points, t)

    def moved_basis(self, basis: Params, change: Params, products: Array) -> Params:
        """U <- U + mean(D [1, v]^T) (mean([1, v] [1, v]^T) + damping I)^-1."""
        first = 0 if self.offset else 1  # the offset moves where there is one
        moved = {name: u.copy() for name, u in basis.items()}
        for name, total in change.items():
            step = total[first:]
            if self.scaled:
                ridge = products[first:, first:] + self.damping * np.eye(len(step))
                step = np.linalg.solve(ridge, step.reshape(len(step), -1)).reshape(step.shape)
            moved[name][first : len(total)] += step
        return moved

    def cluster(self, s: Server, points: dict[int, list[Array]], t: int) -> Server:
        """Move the centres, and split them in some rounds."""
        begin = max([0, *self.races, *self.cuts[:1]])
        if self.shrink is None or s.mode != "personal" or t < begin:
            return s
        centres = updated(s.centres, points)
        if (t - begin) % 2 == 1 and self.shrink - t >= 2:
            centres = split(centres, self.gram(s, s.rank))
        return replace(s, centres=centres)

    # -- decisions ---------------------------------------------------------------------------

    def trial(self, cohort: Cohort, candidates: Callable[[int], list[Params]]) -> Array | None:
        """Give the mean held-out losses of each client's candidates, (clients, candidates)."""
        table = []
        for i in cohort:
            x, y = (part[self.num_train[i] :] for part in self.rows[i])
            if len(y):
                bound = np.log(self.num_classes)  # the loss of knowing nothing
                models = candidates(i)
                table.append([np.minimum(self.losses(m, x, y), bound).mean() for m in models])
        return np.array(table) if table else None

    def judge(self, s: Server, clients: list[Client], cohort: Cohort, t: int) -> Server:
        """End the race, or let it go on."""

        def candidates(i: int) -> list[Params]:
            v = self.today(s, clients[i])
            v = self.coordinate_steps(s, v, i, self.batches(t, "judge", 0, i), self.rate(t))
            told = [] if self.bias is None else [self.told(s.common, 1.0, self.labels(i))]
            return [s.common, *told, self.model(s, v, i)]

        table, is_last = self.trial(cohort, candidates), t == max(self.races)
        if table is None:
            return replace(s, mode="common") if is_last else s
        is_told = self.bias is not None and clearly(table, 1, 0, 1.0)
        one, own = 1 if is_told else 0, table.shape[1] - 1
        common, personal = table.mean(0)[one], table.mean(0)[own]
        half_the_loss = common < 0.5 * personal and clearly(table, one, own, 3.0)
        a_tenth_less = personal < 0.9 * common and clearly(table, own, one, 3.0)
        if not (is_last or half_the_loss or a_tenth_less):
            return s
        mode = "personal" if personal < common else "common"
        return replace(s, mode=mode, temperature=1.0 if is_told else 0.0)

    def canonical(self, s: Server) -> tuple[Params, Array, Array, Array]:
        """Give the basis with orthogonal directions and white coordinates, the map, the lengths."""
        rank, width = s.rank, len(s.moments) - 1
        mean = s.moments[0, 1 : 1 + rank] if self.offset else np.zeros(rank)
        covariance = s.moments[1 : 1 + rank, 1 : 1 + rank] - np.outer(mean, mean)
        covariance = covariance + 1e-2 * np.trace(covariance) / rank * np.eye(rank)
        values, vectors = np.linalg.eigh(covariance)
        root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
        flat = np.concatenate([u[1 : 1 + rank].reshape(rank, -1) for u in s.basis.values()], axis=1)
        _, lengths, right = np.linalg.svd(flat.T @ root, full_matrices=False)
        for k in range(rank):  # the largest entry is positive
            if right[k][np.argmax(np.abs(right[k]))] < 0:
                right[k] = -right[k]
        basis = {name: u.copy() for name, u in s.basis.items()}
        for name, u in s.basis.items():
            for k in range(rank):
                row = right[k] @ root
                basis[name][1 + k] = sum(row[m] * u[1 + m] for m in range(rank))
                basis[name][0] = basis[name][0] + mean[k] * u[1 + k]
        matrix, shift = np.zeros((width, width)), np.zeros(width)
        matrix[:rank, :rank] = right @ np.linalg.inv(root)
        shift[:rank] = -matrix[:rank, :rank] @ mean
        return basis, matrix, shift, lengths

    def sizes(self, lengths: Array, width: int) -> list[int]:
        """Give the numbers of directions to try: all, dormant ones too, and the largest falls."""
        falls = []
        for k in range(len(lengths) - 1):
            is_long = lengths[k] > 0.05 * lengths[0]
            falls.append((lengths[k] - lengths[k + 1]) / lengths[k] if is_long else -1.0)
        chosen = [len(lengths), width, *(1 + np.argsort(-np.array(falls), kind="stable"))]
        return sorted(list(dict.fromkeys(int(size) for size in chosen))[: self.most_sizes])

    def cut(self, s: Server, clients: list[Client], cohort: Cohort, t: int) -> Server:
        """Choose the number of directions; each candidate's coordinates are refitted."""
        width = len(s.moments) - 1
        basis, matrix, shift, lengths = self.canonical(s)
        wide = replace(s, basis=basis, cuts=[*s.cuts, (matrix, shift)], rank=width)
        tried, plain = self.sizes(lengths, width), replace(self, momentum=0.0)

        def candidates(i: int) -> list[Params]:
            v, steps = self.today(wide, clients[i]), self.batches(t, "cut", 0, i)
            fits = [plain.coordinate_steps(wide, v[:k], i, steps, self.rate(t)) for k in tried]
            return [self.model(wide, fit, i) for fit in fits]

        rank, table = s.rank, self.trial(cohort, candidates)
        if table is not None:
            best, now = first_least(table.mean(0)), tried.index(rank)
            if tried[best] < rank or clearly(table, best, now, 2.0):
                rank = tried[best]
        matrix, shift = matrix.copy(), shift.copy()
        matrix[rank:], shift[rank:] = 0.0, 0.0
        mean = np.array([matrix @ m + shift for m in s.centres.mean])
        variance = np.array([(matrix**2) @ v for v in s.centres.variance])
        return replace(
            s,
            basis=basis,
            cuts=[*s.cuts, (matrix, shift)],
            rank=rank,
            moments=np.eye(1 + width),
            centres=Centres(s.centres.count, mean, variance),
        )

    def weigh(self, s: Server, clients: list[Client], cohort: Cohort, t: int) -> Server:
        """Choose the centres, and the weight of the clients' own v."""
        levels, centres, n = [], s.centres, len(self.own_weights)
        for apart in sorted(self.apart):
            centres = merged(centres, self.gram(s, s.rank), apart)
            levels.insert(0, centres)

        def candidates(i: int) -> list[Params]:
            v = self.today(s, clients[i])
            v = self.coordinate_steps(s, v, i, self.batches(t, "weigh", 0, i), self.rate(t))
            models = []
            for level in levels:
                centre = level.mean[self.nearest(s, level, v)][: s.rank]
                models += [self.model(s, centre + w * (v - centre), i) for w in self.own_weights]
            return models

        table = self.trial(cohort, candidates)
        if table is None:
            return s
        best, level, place = first_least(table.mean(0)), 0, 0
        for level in range(len(levels)):  # the fewest centres that are not clearly worse
            place = level * n + best % n
            place += first_least(table.mean(0)[place : (level + 1) * n])
            if not clearly(table, best, place, 1.0):
                break
        s = replace(s, centres=levels[level], own=self.own_weights[place % n])
        if s.own > 0 or np.sum(s.centres.count > 0) > 1:
            return s
        v = s.centres.mean[int(np.argmax(s.centres.count))]
        none = Centres(np.eye(1, len(s.centres.count))[0], *np.zeros((2, *s.centres.mean.shape)))
        common = {**s.body, **self.head(s.basis, v)}
        return replace(s, mode="common", common=common, averaged=0, centres=none)

    # -- serving -----------------------------------------------------------------------------

    def fitting_centre(self, s: Server, i: int) -> int:
        """Give the centre of the largest posterior, on all rows of client i."""
        (x, y), scores = self.rows[i], []
        for j in range(len(s.centres.count)):
            model = self.model(s, s.centres.mean[j][: s.rank], i)
            share = s.centres.count[j] / s.centres.count.sum()
            total = float(self.losses(model, x, y).sum())
            scores.append(total - np.log(share) if share > 0 else np.inf)
        return first_least(np.array(scores))

    def served(self, s: Server, client: Client, i: int) -> Params:
        """Give the model that client i is served."""
        if s.mode != "personal":
            params = s.average if s.averaged else s.common
        else:
            v = self.today(s, client)
            if self.shrink is not None and len(self.rows[i][1]):
                centre = s.centres.mean[self.fitting_centre(s, i)][: s.rank]
                v = centre + s.own * (v - centre)
            params = {**s.body, **self.head(s.basis, v)}
        return self.told(params, s.temperature, self.rows[i][1])

    def adapted(self, s: Server, i: int, steps: Sequence[NDArray[np.integer]]) -> Client:
        """Fit a new client: the centre that fits its rows, then steps on v from there."""
        if not len(self.rows[i][1]):
            share = s.centres.count / s.centres.count.sum()
            return Client(v=(share @ s.centres.mean)[: s.rank], seen=len(s.cuts))
        j = self.fitting_centre(s, i)
        v = s.centres.mean[j][: s.rank]
        v = self.coordinate_steps(s, v, i, steps, self.rate(self.rounds))
        return Client(v=v, seen=len(s.cuts), centre=j)


def first_least(values: Array) -> int:
    """Give the first of the smallest values, equal to 1e-9."""
    best = 0
    for j in range(len(values)):
        if round(values[j], 9) < round(values[best], 9):
            best = j
    return best


def clearly(table: Array, better: int, worse: int, errors: float) -> bool:
    """Tell whether one candidate is better by more than so many standard errors."""
    gains = table[:, worse] - table[:, better]
    return bool(gains.mean() > errors * gains.std() / np.sqrt(len(gains)))
