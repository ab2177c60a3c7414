"""Records of span: what stays where, and what is sent."""

from __future__ import annotations

from torch import Tensor

from handspan.core.algorithm import Model
from handspan.core.records import Params, Record
from handspan.numerics.mixture import Centres, CentreSums


class SpanServer(Record):
    """One model for all, the personal branch, and what has been decided.

    A cut is a map of coordinates, v -> matrix v + shift, kept here; every client applies those
    that it has not seen when it takes part again.
    """

    common: Model
    average: Model  # of the last rounds of ``common``
    averaged: Tensor  # () rounds in it
    body: Params
    buffers: Params
    basis: Params  # (1 + r, ...): the offset, then directions; those behind ``rank`` are dormant
    moments: Tensor  # (1 + r, 1 + r) float64, mean of [1, v] [1, v]^T over recent rounds
    centres: Centres
    matrices: Tensor  # (cuts, r, r) float64
    shifts: Tensor  # (cuts, r)
    num_cuts: Tensor  # () int64
    mode: Tensor  # () int64
    rank: Tensor  # () int64, directions in use
    temperature: Tensor  # () float64, of the label prior
    own: Tensor  # () float64, weight of a client's own v against its centre
    weighed: Tensor  # () int64, 1 once that has been chosen


class SpanClient(Record):
    """Coordinates, in the form that they had after so many cuts."""

    coordinates: Tensor  # (r,)
    seen: Tensor  # () int64, cuts
    centre: Tensor  # () int64


class SpanServed(Record):
    """Coordinates that are served, and the label prior's term of the logits; never stored."""

    coordinates: Tensor  # (r,)
    shift: Tensor | None  # (classes,)
    centre: Tensor


class SpanBroadcast(Record):
    """The personal branch: directions in use, centres, and numbers."""

    body: Params
    buffers: Params
    basis: Params  # (1 + k, ...)
    gram: Tensor  # (k, k)
    inverse: Tensor  # (k, k) preconditioner of v
    means: Tensor  # (groups, k)
    is_there: Tensor  # (groups,) 1 where there is a centre
    own: Tensor
    temperature: Tensor
    matrices: Tensor  # (cuts so far, r, r)
    shifts: Tensor
    learning_rate: Tensor


class CutBroadcast(Record):
    """The personal branch in canonical coordinates, and the candidates."""

    inner: SpanBroadcast  # with all directions
    masks: Tensor  # (q, r) 1 for directions of a candidate
    inverses: Tensor  # (q, r, r)


class WeighBroadcast(Record):
    """The personal branch, and its centres merged to several degrees."""

    inner: SpanBroadcast
    means: Tensor  # (levels, groups, k)
    is_there: Tensor  # (levels, groups)


class JudgeBroadcast(Record):
    """Both branches."""

    common: Model
    inner: SpanBroadcast


class ServeBroadcast(Record):
    """What a client needs to be served."""

    inner: SpanBroadcast
    share: Tensor  # (groups,) logarithms of the centres' shares of the clients


class SpanWorking(Record):
    """Local work: v in its stage; then the head from ``start``, and the body."""

    coordinates: Tensor  # (k,)
    velocity: Tensor
    fixed: Tensor  # (1 + k,) the v of the shared steps, the offset's 1 in front
    choice: Tensor  # (groups,) one-hot
    start: Params
    delta: Params
    body: Params
    buffers: Params
    shared_velocity: Params
    shift: Tensor | None  # (classes,)


class SpanUpload(Record):
    """What the engine keeps of an upload; the wire carries sums of products."""

    delta: Params
    fixed: Tensor  # (1 + k,)
    coordinates: Tensor  # (k,)
    choice: Tensor  # (groups,) float64, 1 / weight of the client at its centre
    body: Params
    buffers: Params


class SpanSums(Record):
    """Sums over clients; also what one client sends: its own summands."""

    products: Params  # [1, v] D^T
    moments: Tensor  # [1, v] [1, v]^T of the v of the shared steps
    spread: Tensor  # [1, v] [1, v]^T of the clients' own v
    centres: CentreSums
    body: Params
    buffers: Params
    weight: Tensor


class Candidates(Record):
    """Coordinates refitted for each candidate."""

    coordinates: Tensor  # (q, r)
    shift: Tensor | None  # (classes,)
