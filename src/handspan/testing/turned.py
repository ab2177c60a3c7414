"""Clients that differ in what labels mean, in how frequent they are, in both, or in nothing."""

from __future__ import annotations

import torch

from handspan.core import keys
from handspan.core.data import FederatedData
from handspan.testing.toys import NUM_CLASSES, NUM_FEATURES


def turned(
    seed: int = 0,
    *,
    num_clients: int = 20,
    rows: int = 8,
    num_groups: int = 3,
    skew: float = 0.0,
    noise: float = 0.7,
    is_held_out: bool = True,
    dtype: torch.dtype = torch.float64,
) -> FederatedData:
    """Gaussian classes whose labels each planted group turns on by one.

    Parameters
    ----------
    seed, num_clients, rows, num_groups, dtype
        Clients have so many training rows, or one or two more.
    skew
        How far label frequencies differ between clients.
    noise
        Standard deviation inside a class; the classes' means have 2.
    is_held_out
        Whether there are validation rows: none to three.
    """
    k, place = keys.key(seed, "toys", "turned"), torch.arange(num_clients)
    train, validation = rows + place % 3, place % 4 if is_held_out else 0 * place
    test = 1 + place % 2
    length = train + validation + test
    offsets = torch.cat([length.new_zeros(1), length.cumsum(0)])
    owner, count = torch.repeat_interleave(place, length), int(offsets[-1])
    favour = skew * keys.normal(keys.fold(k, "favour"), (num_clients, NUM_CLASSES))
    luck = -(-keys.uniform(keys.fold(k, "luck"), (count, NUM_CLASSES)).log()).log()  # Gumbel
    kind = (favour[owner] + luck).argmax(1)
    means = 2 * keys.normal(keys.fold(k, "means"), (NUM_CLASSES, NUM_FEATURES))
    x = means[kind] + noise * keys.normal(keys.fold(k, "x"), (count, NUM_FEATURES))
    groups = place % num_groups
    return FederatedData(
        x=x.to(dtype),
        y=(kind + groups[owner]) % NUM_CLASSES,
        offsets=offsets,
        num_train=train,
        num_validation=validation,
        num_test=test,
        num_classes=NUM_CLASSES,
        groups=groups,
    )
