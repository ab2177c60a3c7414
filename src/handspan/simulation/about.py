"""What the functions of clients know of them: a pure function of the data and the seed."""

from __future__ import annotations

from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm
from handspan.core.data import ClientData, FederatedData


def client_data(algorithm: Algorithm, data: FederatedData, seed: int, ids: Tensor) -> ClientData:
    """Return what ``begin`` and ``end`` of the given clients learn of them."""
    side, counts = data.side, None
    if algorithm.needs_label_counts:
        counts = data.label_counts
    return ClientData(
        num=data.num_train[ids],
        key=keys.fold(keys.key(seed, "client"), ids),
        side=None if side is None else side[ids.to(side.device)],
        group=None if data.groups is None else data.groups[ids],
        label_counts=None if counts is None else counts[ids.to(counts.device)],
    )
