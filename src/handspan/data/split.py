"""Which of a client's rows are for training, validation and test, for all clients at once.

A row's place is drawn from the seed, its client's id and its position inside the client, so that
a client is split in the same way whoever else takes part.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from handspan.core import keys
from handspan.core.errors import HandspanError
from handspan.data.inputs import ClientIds

BLOCK_ROWS = 1 << 20
LEAST_FOR_VALIDATION = 5  # a client with fewer training rows cannot spare one


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Rows in their new order, client after client, train | validation | test in each."""

    order: np.ndarray  # (rows,) source row of every stored row
    offsets: np.ndarray  # (n + 1,)
    num_train: np.ndarray  # (n,)
    num_validation: np.ndarray  # (n,)
    num_test: np.ndarray  # (n,)
    remarks: tuple[str, ...] = ()

    def is_train(self, clients: np.ndarray | None = None) -> np.ndarray:
        """Mark stored training rows, of the given clients (a mask) only."""
        pieces = np.stack([self.num_train, self.num_validation + self.num_test], axis=1)
        counted = np.ones(len(self.num_train), bool) if clients is None else clients
        marks = np.stack([counted, np.zeros_like(counted)], axis=1)
        return np.repeat(marks.reshape(-1), pieces.reshape(-1))


def _check_fractions(test_fraction: float, validation_fraction: float) -> None:
    if not 0.0 < test_fraction < 1.0:
        raise HandspanError(f"test_fraction is {test_fraction}; it must lie between 0 and 1")
    if not 0.0 <= validation_fraction < 1.0:
        raise HandspanError(
            f"validation_fraction is {validation_fraction}; it must be at least 0 and below 1"
        )


def _check_sizes(sizes: np.ndarray, ids: ClientIds) -> None:
    lonely = np.flatnonzero(sizes < 2)
    if len(lonely):
        more = f" (and {len(lonely) - 1} more clients like it)" if len(lonely) > 1 else ""
        raise HandspanError(
            f"client {ids.name(int(lonely[0]))} has only one row{more}, but every client needs one "
            "for training and one for test: give it more rows, leave it out or join it to another"
        )


def _share(counts: np.ndarray, fraction: float) -> np.ndarray:
    return np.floor(counts * fraction + 0.5).astype(np.int64)


def split_rows(
    ids: ClientIds,
    *,
    seed: int,
    test_fraction: float = 0.25,
    validation_fraction: float = 0.2,
    is_test: np.ndarray | None = None,
) -> Split:
    """Draw every client's split; ``is_test`` keeps the source's own test rows."""
    _check_fractions(test_fraction, validation_fraction)
    sizes = np.bincount(ids.codes, minlength=ids.num_clients).astype(np.int64)
    _check_sizes(sizes, ids)
    remarks: list[str] = []
    wanted = _share(sizes, test_fraction)
    if is_test is not None:
        wanted = np.bincount(ids.codes[is_test], minlength=ids.num_clients).astype(np.int64)
    num_test = np.clip(wanted, 1, sizes - 1)
    moved = int(np.abs(num_test - wanted).sum()) if is_test is not None else 0
    if moved:
        remarks.append(
            f"{moved} rows changed between training and test so that every client has one of each"
        )
    fitted = sizes - num_test
    num_validation = np.minimum(np.maximum(_share(fitted, validation_fraction), 1), fitted - 1)
    spared = (fitted >= LEAST_FOR_VALIDATION) & (validation_fraction > 0)
    num_validation = np.where(spared, num_validation, 0)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Split(
        order=_draw_order(ids, offsets, seed, is_test),
        offsets=offsets,
        num_train=fitted - num_validation,
        num_validation=num_validation,
        num_test=num_test,
        remarks=tuple(remarks),
    )


def _draw_order(
    ids: ClientIds, offsets: np.ndarray, seed: int, is_test: np.ndarray | None
) -> np.ndarray:
    """Shuffle every client's rows; test rows of the source, where they are kept, go last."""
    num_rows = len(ids.codes)
    small = np.int32 if num_rows < 2**31 else np.int64
    grouped = bool(np.all(ids.codes[1:] >= ids.codes[:-1]))
    source = None if grouped else np.argsort(ids.codes, kind="stable").astype(small)
    order = np.empty(num_rows, small)
    client_keys = keys.fold(keys.key(seed, "split"), torch.from_numpy(ids.keys))
    # Blocks of whole clients: the temporaries of a draw are several times the size of its rows.
    edges = np.searchsorted(offsets, np.arange(0, num_rows, BLOCK_ROWS), side="right") - 1
    edges = np.append(np.unique(edges), ids.num_clients)
    for first, last in itertools.pairwise(edges):
        start, stop = int(offsets[first]), int(offsets[last])
        client = np.repeat(np.arange(first, last), np.diff(offsets[first : last + 1]))
        position = torch.from_numpy(np.arange(start, stop) - offsets[client])
        draw = keys.fold(client_keys[torch.from_numpy(client)], position).numpy()
        rows = np.arange(start, stop, dtype=small) if source is None else source[start:stop]
        by = (draw, client) if is_test is None else (draw, is_test[rows], client)
        order[start:stop] = rows[np.lexsort(by)]
    return order
