"""span, the clients' part: what the server and a client keep, and the local steps.

A personal head is the offset plus a combination of directions, U_0 + sum_k v[k] U_k. Whole copies
of U and whole outer products are formed, and the nearest centre is found from distances of heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from handspan.testing.oracles.centres import Centres

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


@dataclass
class Server:
    """What the server keeps."""

    common: Params
    body: Params
    basis: Params  # (1 + r, ...): the offset, then directions
    centres: Centres
    moments: Array  # mean of [1, v] [1, v]^T
    mode: str  # race, personal or common
    rank: int
    average: Params = field(default_factory=dict)
    averaged: int = 0
    cuts: list[tuple[Array, Array]] = field(default_factory=list)
    temperature: float = 0.0
    own: float = 1.0


@dataclass
class Client:
    """What a client keeps."""

    v: Array
    seen: int = 0
    centre: int = 0


@dataclass(frozen=True, kw_only=True)
class Clients:
    """All clients, and how they work.

    Attributes
    ----------
    rows, num_train
        Rows (x, y) of each client, those for training first; how many these are.
    batches
        Rows of each step, by round, phase, stage and client.
    gradient, predict
        Of the mean cross-entropy, and the logits, of rows.
    bias
        The parameter that takes the label prior, or None.
    rate
        Step size of a round.
    scaled, offset
        Whether steps are preconditioned, and whether heads have a common part.
    """

    rows: Sequence[tuple[Array, NDArray]]
    num_train: Sequence[int]
    batches: Callable[[int, str, int, int], Rows]
    gradient: Callable[[Params, Array, NDArray], Params]
    predict: Callable[[Params, Array], Array]
    num_classes: int
    bias: str | None
    rate: Callable[[int], float]
    momentum: float = 0.0
    nesterov: bool = False
    scaled: bool = True
    offset: bool = True

    def sgd(self, values: Params, slope: Params, buffer: Params, rate: float) -> Params:
        """Take one SGD step; ``buffer`` is updated in place."""
        moved = {}
        for name in values:
            buffer[name] = self.momentum * buffer.get(name, 0.0) + slope[name]
            step = slope[name] + self.momentum * buffer[name] if self.nesterov else buffer[name]
            moved[name] = values[name] - rate * step
        return moved

    # -- models ------------------------------------------------------------------------------

    def today(self, s: Server, client: Client) -> Array:
        """Apply the cuts that the client has not seen; coordinates in use only."""
        v = client.v
        for matrix, shift in s.cuts[client.seen :]:
            v = np.append(v, np.zeros(len(shift) - len(v)))
            v = matrix @ v + shift
        return np.append(v, np.zeros(max(0, s.rank - len(v))))[: s.rank]

    def head(self, basis: Params, v: Array) -> Params:
        """Form U_0 + sum_k v[k] U_k."""
        made = {name: u[0].copy() for name, u in basis.items()}
        for name, u in basis.items():
            for k in range(len(v)):
                made[name] = made[name] + v[k] * u[1 + k]
        return made

    def labels(self, i: int) -> NDArray:
        """Give the labels of client i's training rows."""
        return self.rows[i][1][: self.num_train[i]]

    def told(self, params: Params, temperature: float, y: NDArray) -> Params:
        """Add temperature (log p(y) - log 1/C) to the logits, one row of each class granted."""
        if self.bias is None:
            return params
        counts = np.array([np.sum(y == c) for c in range(self.num_classes)])
        prior = np.log((counts + 1) / (len(y) + self.num_classes)) - np.log(1 / self.num_classes)
        return {**params, self.bias: params[self.bias] + temperature * prior}

    def model(self, s: Server, v: Array, i: int) -> Params:
        """Give client i's model at coordinates v, as it is trained."""
        return self.told({**s.body, **self.head(s.basis, v)}, s.temperature, self.labels(i))

    def nearest(self, s: Server, centres: Centres, v: Array) -> int:
        """Give the centre whose head is nearest; ties go to the first."""
        best, least = 0, np.inf
        for j in range(len(centres.count)):
            ours, theirs = self.head(s.basis, v), self.head(s.basis, centres.mean[j][: len(v)])
            distance = round(sum(float(np.sum((ours[n] - theirs[n]) ** 2)) for n in ours), 9)
            if centres.count[j] > 0 and distance < least:
                best, least = j, distance
        return best

    def losses(self, params: Params, x: Array, y: NDArray) -> Array:
        """Cross-entropy of each row."""
        found = []
        for row, label in zip(self.predict(params, x), y, strict=True):
            found.append(np.log(np.exp(row - row.max()).sum()) + row.max() - row[label])
        return np.array(found)

    # -- local steps -------------------------------------------------------------------------

    def gram(self, s: Server, size: int) -> Array:
        """Give the inner products of the first ``size`` directions."""
        flat = np.concatenate([u[1 : 1 + size].reshape(size, -1) for u in s.basis.values()], axis=1)
        return flat @ flat.T

    def coordinate_steps(self, s: Server, v: Array, i: int, steps: Rows, rate: float) -> Array:
        """V <- v - eta (U^T U)^-1 U^T grad f_i."""
        (x, y), buffer = self.rows[i], {}
        gram = self.gram(s, len(v))
        gram = gram + 1e-8 * np.trace(gram) / len(v) * np.eye(len(v))
        for rows in steps:
            slope = self.gradient(self.model(s, v, i), x[rows], y[rows])
            along = np.zeros(len(v))
            for k in range(len(v)):
                along[k] = sum(np.sum(u[1 + k] * slope[name]) for name, u in s.basis.items())
            along = np.linalg.solve(gram, along) if self.scaled else along
            v = self.sgd({"v": v}, {"v": along}, buffer, rate)["v"]
        return v

    def shared_steps(
        self, s: Server, v: Array, i: int, steps: Rows, rate: float
    ) -> tuple[Params, Params]:
        """Move the body, and the head itself (scaled) or an own copy of U, with v fixed.

        Gives the new body, and what is sent of the head: D [1, v]^T, or the change of U.
        """
        (x, y), buffer = self.rows[i], {}
        one = np.append(1.0, v)
        columns = {name: u[: 1 + len(v)] for name, u in s.basis.items()}
        start = self.head(s.basis, v) if self.scaled else columns
        local = {**s.body, **start}
        for rows in steps:
            head = {name: local[name] for name in start}
            head = head if self.scaled else self.head(head, v)
            params = self.told({**local, **head}, s.temperature, self.labels(i))
            slope = dict(self.gradient(params, x[rows], y[rows]))
            if not self.scaled:
                slope.update({name: outer(one, slope[name]) for name in start})
                if not self.offset:
                    slope.update({n: np.append(0 * slope[n][:1], slope[n][1:], 0) for n in start})
            local = self.sgd(local, slope, buffer, rate)
        moved = {name: local[name] - start[name] for name in start}
        if self.scaled:
            moved = {name: outer(one, moved[name]) for name in start}
        return {name: local[name] for name in s.body}, moved


def outer(vector: Array, value: Array) -> Array:
    """Stack vector[k] times the value."""
    return np.array([entry * value for entry in vector])
