"""What every reader returns: rows as they were found, before they belong to clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from handspan.data.side import SideColumn


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Rows as they were found, before they belong to clients.

    Parameters
    ----------
    x, y
        Features (dense array or ``csr_array``) and labels, or None.
    name
        What the user called it.
    kind
        ``image``, ``table``, ``counts`` or ``tokens``.
    divide
        Largest value of an image, if that is not what its type says.
    client, side, is_test
        The source's own client ids, side information and test rows, or None.
    side_columns
        Columns that describe the source's own clients, in place of ``side``; or empty.
    fields
        All arrays with one entry per row, by name: what ``natural:FIELD`` can use.
    names
        Names of the source's own clients, in sorted order of their ids, or empty.
    num_classes
        Number of classes, if the source tells.
    classes
        Names of the classes in the order of their numbers, or empty.
    """

    x: Any
    y: np.ndarray | None
    name: str
    kind: str
    divide: float | None = None
    client: np.ndarray | None = None
    side: np.ndarray | None = None
    side_columns: tuple[SideColumn, ...] = ()
    is_test: np.ndarray | None = None
    fields: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    names: tuple[str, ...] = ()
    num_classes: int | None = None
    classes: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return int(self.x.shape[0])
