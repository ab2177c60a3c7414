"""Rows of many clients in one flat store, and what a client's functions see of them.

A client's rows lie together, in the order train, validation, test; offsets say where each client
begins. There is no Python object per client, so a million clients are as cheap as their rows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from handspan.core.errors import HandspanError
from handspan.core.records import Record

Rows = Literal["train", "validation", "all", "test"]


class Csr(Record):
    """Sparse rows in compressed form; ``num_columns`` is a scalar tensor."""

    indptr: Tensor  # (rows + 1,) int64
    indices: Tensor  # (entries,) int64
    values: Tensor  # (entries,)
    num_columns: Tensor  # () int64

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def select(self, rows: Tensor) -> Csr:
        """Gather rows in the given order, still sparse."""
        start = self.indptr[rows]
        length = self.indptr[rows + 1] - start
        indptr = torch.cat([length.new_zeros(1), length.cumsum(0)])
        within = torch.arange(int(indptr[-1]), device=rows.device)
        entries = within + torch.repeat_interleave(start - indptr[:-1], length)
        return Csr(
            indptr=indptr,
            indices=self.indices[entries],
            values=self.values[entries],
            num_columns=self.num_columns,
        )

    def to_dense(self) -> Tensor:
        """Write all entries into a dense matrix (rows, columns)."""
        count = len(self)
        dense = self.values.new_zeros(count, int(self.num_columns))
        row = torch.repeat_interleave(
            torch.arange(count, device=self.indptr.device), self.indptr.diff()
        )
        dense.index_put_((row, self.indices), self.values, accumulate=True)
        return dense


class ClientData(Record):
    """What ``begin`` and ``end`` know of their client; rows are reached only through stages."""

    num: Tensor  # () int64: training rows
    key: Tensor  # () int64: the client's own key, for random starts
    side: Tensor | None = None  # (s,): side information
    group: Tensor | None = None  # () int64: the planted group, for oracles only
    label_counts: Tensor | None = None  # (classes,): training rows of each class, where asked for


class Batch(Record):
    """Rows of one step of one client; weight 0 marks padding."""

    x: Any  # (rows, ...) tensor, or Csr in stages that ask for it
    y: Tensor | None  # (rows, ...)
    weight: Tensor  # (rows,) 1 for a real row, 0 for padding
    key: Tensor  # () int64: for dropout and other draws of the step
    rows: Tensor  # (rows,) int64: positions inside the client's rows
    side: Tensor | None = None  # (s,)


class Round(Record):
    """What the server knows of a round."""

    index: Tensor  # () int64
    ids: Tensor  # (m,) int64: the cohort, unique and sorted
    num_examples: Tensor  # (m,)
    multiplicity: Tensor  # (m,): how often a client was drawn, where sampling is with replacement
    draws: Tensor  # (8,) uniform numbers for the server's own coins


class Population(Record):
    """What the server knows of all clients before the first round."""

    num_clients: Tensor  # () int64
    num_examples: Tensor  # (n,) training rows of each client
    groups: Tensor | None = None  # (n,) planted groups, for oracles only


@dataclass(frozen=True, kw_only=True, eq=False)
class FederatedData:
    """Rows of all clients, split into train, validation and test, with side information.

    Parameters
    ----------
    x, y
        Flat stores, one entry per row, client after client. ``y`` is None for matrix problems
        without labels; int64 labels mean classification, floating point means regression.
    offsets
        (n + 1,) where each client's rows begin.
    num_train, num_validation, num_test
        (n,) rows of each kind; they lie in this order inside a client.
    side
        (n, s) side information, or None.
    groups
        (n,) planted groups of the partition, or None.
    num_classes
        Number of classes, or None for regression and matrix problems.
    names
        Names of the clients in the source (writers, roles), or empty.
    info
        Where the rows come from, for the record: source, partition, seed, remarks.

    Examples
    --------
    >>> data = FederatedData.from_clients([([[0.0], [1.0]], [0, 1]), ([[2.0], [3.0]], [1, 1])])
    >>> data.num_clients, data.num_test.tolist()
    (2, [1, 1])
    """

    x: Tensor | Csr
    y: Tensor | None
    offsets: Tensor
    num_train: Tensor
    num_validation: Tensor
    num_test: Tensor
    side: Tensor | None = None
    groups: Tensor | None = None
    num_classes: int | None = None
    names: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Check that the counts cover the rows."""
        per_client = self.num_train + self.num_validation + self.num_test
        if not torch.equal(per_client, self.offsets.diff()):
            raise HandspanError("the split counts do not add up to the clients' rows")
        if int(self.offsets[-1]) != len(self.x):
            raise HandspanError("the offsets do not cover the rows")

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return len(self.offsets) - 1

    @property
    def num_rows(self) -> int:
        """How many rows there are in all."""
        return len(self.x)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.x.values.device if isinstance(self.x, Csr) else self.x.device

    @property
    def is_sparse(self) -> bool:
        """Whether the rows are stored in compressed form."""
        return isinstance(self.x, Csr)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row's features."""
        if isinstance(self.x, Csr):
            return (int(self.x.num_columns),)
        return tuple(self.x.shape[1:])

    @functools.cached_property
    def label_counts(self) -> Tensor:
        """Training rows of each client and class, (n, classes); computed when first asked for.

        In sequences every position counts, but for those whose label is negative (ignored).
        """
        if self.y is None or self.num_classes is None:
            raise HandspanError("only rows with class labels have counts of labels")
        num, place = self.num_train, torch.arange(int(self.num_train.sum()))
        owner = torch.repeat_interleave(torch.arange(self.num_clients), num)
        place += torch.repeat_interleave(self.offsets[:-1] - (num.cumsum(0) - num), num)
        y = self.y[place.to(self.y.device)].reshape(len(place), math.prod(self.y.shape[1:]))
        cell = owner.to(y.device).unsqueeze(1) * self.num_classes + y
        count = torch.bincount(cell[y >= 0], minlength=self.num_clients * self.num_classes)
        return count.view(self.num_clients, self.num_classes).to(torch.int32)

    def num_bytes_of_rows(self, count: int) -> int:
        """Bytes of so many dense rows."""
        x = self.x.values if isinstance(self.x, Csr) else self.x
        return count * x.element_size() * math.prod(self.row_shape)

    @property
    def task(self) -> str:
        """``classification``, ``regression`` or ``matrix`` (no labels)."""
        if self.y is None:
            return "matrix"
        return "regression" if self.num_classes is None else "classification"

    def span(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """First row (relative to the client) and number of rows of a split, for all clients."""
        zero = torch.zeros_like(self.num_train)
        if rows == "train":
            return zero, self.num_train
        if rows == "validation":
            return self.num_train, self.num_validation
        if rows == "all":
            return zero, self.num_train + self.num_validation
        return self.num_train + self.num_validation, self.num_test

    def pooled(self) -> FederatedData:
        """Let validation rows count as training rows: for runs in which nothing is chosen."""
        return dataclasses.replace(
            self,
            num_train=self.num_train + self.num_validation,
            num_validation=torch.zeros_like(self.num_validation),
        )

    def without_test(self) -> FederatedData:
        """Let all rows count as training rows: for matrix problems, which score their own fit."""
        none = torch.zeros_like(self.num_test)
        total = self.offsets.diff()
        return dataclasses.replace(self, num_train=total, num_validation=none, num_test=none)

    def subset(self, ids: Tensor) -> FederatedData:
        """Return the given clients as a federation of their own."""
        start, length = self.offsets[ids], self.offsets.diff()[ids]
        offsets = torch.cat([length.new_zeros(1), length.cumsum(0)])
        rows = torch.arange(int(offsets[-1])) + torch.repeat_interleave(
            start - offsets[:-1], length
        )
        return dataclasses.replace(
            self,
            x=self.x.select(rows) if isinstance(self.x, Csr) else self.x[rows],
            y=None if self.y is None else self.y[rows],
            offsets=offsets,
            num_train=self.num_train[ids],
            num_validation=self.num_validation[ids],
            num_test=self.num_test[ids],
            side=None if self.side is None else self.side[ids],
            groups=None if self.groups is None else self.groups[ids],
            names=tuple(self.names[i] for i in ids.tolist()) if self.names else (),
        )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> FederatedData:
        """Move the rows to a device and floating point features to a type; counts stay here."""

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

        x = self.x
        if isinstance(x, Csr):
            x = Csr(
                indptr=x.indptr.to(device),
                indices=x.indices.to(device),
                values=convert(x.values),
                num_columns=x.num_columns,
            )
        else:
            x = convert(x)
        return dataclasses.replace(
            self,
            x=x,
            y=None if self.y is None else convert(self.y),
            side=None if self.side is None else convert(self.side),
        )

    def fingerprint(self) -> str:
        """Hash of rows, labels, split and side information: two runs with one hash saw one data."""
        digest = hashlib.sha256()
        x = self.x
        parts: list[Tensor | None] = [x.indptr, x.indices, x.values] if isinstance(x, Csr) else [x]
        parts += [self.y, self.offsets, self.num_train, self.num_validation, self.side]
        for part in parts:
            if part is not None:
                array = np.ascontiguousarray(part.detach().cpu().numpy())
                digest.update(f"{array.dtype}{array.shape}".encode())
                digest.update(array.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()[:16]

    @staticmethod
    def from_clients(
        clients: Sequence[Any], *, side: Any = None, seed: int = 0, **options: Any
    ) -> FederatedData:
        """Build from one entry per client: ``(x, y)`` arrays or a ``torch`` Dataset."""
        from handspan.data.build import from_clients

        return from_clients(clients, side=side, seed=seed, **options)

    @staticmethod
    def from_arrays(
        x: Any, y: Any = None, *, groups: Iterable[Any], seed: int = 0, **options: Any
    ) -> FederatedData:
        """Build from all rows at once and a client id for each row."""
        from handspan.data.build import from_arrays

        return from_arrays(x, y, groups=groups, seed=seed, **options)
