"""One look at everybody's rows before a factorisation: their range, norm and sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Cohort, Phase, Stacked, Stage
from handspan.core.data import Batch, ClientData, Csr, Round
from handspan.core.records import Empty, Record
from handspan.numerics.sparse import entries, extremes


class Scan(Record):
    """Four numbers of a client's rows; what compressed rows do not store is 0."""

    low: Tensor  # () least entry
    high: Tensor  # () largest entry
    square_norm: Tensor  # ()
    total: Tensor  # () sum of absolute values


class Scanning(Record):
    """A private record on its way through, and the numbers."""

    client: Any
    scan: Scan


def scan_phase(like: Tensor, combine: Callable[[Any, Stacked, Round], Any]) -> Phase:
    """Return the set-up phase in which every client sends its ``Scan``.

    Parameters
    ----------
    like
        A scalar in the type of the rows.
    combine
        (S, Stacked, Round) -> S; sees one entry per client.
    """
    zero = torch.zeros_like(like)

    def begin(b: Empty, client: Any, data: ClientData) -> Scanning:
        return Scanning(client=client, scan=Scan(low=zero, high=zero, square_norm=zero, total=zero))

    def step(b: Empty, k: Scanning, batch: Batch) -> Scanning:
        low, high = extremes(batch.x, batch.weight)
        x = entries(batch.x, batch.weight)
        scan = Scan(low=low, high=high, square_norm=(x * x).sum(), total=x.abs().sum())
        return Scanning(client=k.client, scan=scan)

    def flat(b: Empty, client: Any, cohort: Cohort) -> tuple[Any, Scan]:
        return client, scan_of_each(cohort)

    return Phase(
        name="scan",
        broadcast=lambda server, round: Empty(),
        begin=begin,
        stages=(Stage(step=step, steps=1, sparse=True, forward_only=True),),
        end=lambda b, k, data: (k.client, k.scan),
        combine=combine,
        reduce="stack",
        computes="all",
        uploads="all",
        cohort_update=flat,
        infers="least and largest entry, sum and norm of the client's rows",
    )


def scan_of_each(cohort: Cohort) -> Scan:
    """Numbers of all clients at once."""
    x, owner, count = cohort.x, cohort.segment, len(cohort.num)
    values = x.values if isinstance(x, Csr) else x.flatten()
    width = int(x.num_columns) if isinstance(x, Csr) else x.shape[1]
    stored = x.indptr.diff() if isinstance(x, Csr) else torch.full_like(owner, width)
    place = torch.repeat_interleave(owner, stored)
    # What is not stored is 0, which may be the least or the largest entry.
    known = torch.bincount(place, minlength=count)
    has_zeros = known < cohort.num.to(known) * width
    low = values.new_full((count,), torch.inf).scatter_reduce(0, place, values, "amin")
    high = values.new_full((count,), -torch.inf).scatter_reduce(0, place, values, "amax")
    zero = values.new_zeros(count)
    return Scan(
        low=torch.where(has_zeros, low.clamp(max=0), low),
        high=torch.where(has_zeros, high.clamp(min=0), high),
        square_norm=zero.index_add(0, place, values * values),
        total=zero.index_add(0, place, values.abs()),
    )
