"""The rows on which settings are chosen. Test rows are not among them: they are cut out before.

A trial trains on training rows and is scored on validation rows. It gets a federation that holds
nothing else, so that no choice can depend on a test row. The final runs then train on both.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from handspan.core.data import Csr, FederatedData
from handspan.core.errors import HandspanError


def selection_data(data: FederatedData) -> FederatedData:
    """Training and validation rows alone, the validation rows in the place of the scored ones.

    A method that itself chooses by validation rows gets its own from the training rows, as large
    a share of them; for all others they stay training rows.

    Examples
    --------
    >>> from handspan.data import load_data
    >>> data = load_data("digits", partition="iid", num_clients=10, seed=0)
    >>> trial = selection_data(data)
    >>> torch.equal(trial.num_test, data.num_validation), trial.num_rows < data.num_rows
    (True, True)
    """
    if data.y is None or not int(data.num_validation.sum()):
        raise HandspanError(
            "settings are chosen on validation rows, and the data have none: split some off "
            "(validation_fraction=), or leave settings as they are"
        )
    kept = data.num_train + data.num_validation
    offsets = torch.cat([kept.new_zeros(1), kept.cumsum(0)])
    shift = torch.repeat_interleave(data.offsets[:-1] - offsets[:-1], kept)
    rows = shift + torch.arange(int(offsets[-1]))
    inner = data.num_train * data.num_validation // kept.clamp(min=1)
    return dataclasses.replace(
        data,
        x=_select(data.x, rows),
        y=data.y[rows.to(data.y.device)],
        offsets=offsets,
        num_train=data.num_train - inner,
        num_validation=inner,
        num_test=data.num_validation,
        info={**data.info, "scored": "validation rows"},
    )


def _select(x: Tensor | Csr, rows: Tensor) -> Tensor | Csr:
    return x.select(rows) if isinstance(x, Csr) else x[rows.to(x.device)]
