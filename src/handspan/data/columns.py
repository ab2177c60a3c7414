"""Columns of a table, checked one by one and turned into features, labels and client ids.

Every complaint names the column, and the row as it is counted below the header, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from handspan.core.errors import HandspanError
from handspan.data.inputs import check_finite
from handspan.data.side import SideColumn

MOST_CATEGORIES = 50  # of a column of texts among the features
MOST_CLASSES = 1000  # of a column of texts that is the label


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """A column of texts: the number of each row's text among the sorted ones."""

    codes: np.ndarray
    values: list[str]


class Columns:
    """The columns of a table by name.

    Parameters
    ----------
    name
        What to call the table in messages.
    table
        Its rows.
    """

    def __init__(self, name: str, table: pa.Table) -> None:
        self.name = name
        self.table = table
        self._read: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        """Names of all columns in their order."""
        return list(self.table.column_names)

    def what(self, column: str) -> str:
        """Name a column for a message."""
        return f"column {column!r} of {self.name}"

    def read(self, column: str) -> np.ndarray | Texts:
        """Return numbers as an array, texts as ``Texts``; refuse gaps and anything else."""
        if column not in self._read:
            self._read[column] = self._convert(column)
        return self._read[column]

    def _convert(self, column: str) -> np.ndarray | Texts:
        values = self.table.column(column)
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        kind = values.type
        if values.null_count:
            missing = pc.index(pc.is_null(values), True).as_py()
            raise HandspanError(
                f"{self.what(column)} has no value in row {missing} (counted from 0): fill or "
                "remove such rows first"
            )
        if pa.types.is_boolean(kind):
            return np.asarray(values.to_numpy(), dtype=np.uint8)
        if pa.types.is_integer(kind):
            return np.asarray(values.to_numpy())
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return self._finite(column, np.asarray(values.cast(_real(kind)).to_numpy()))
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return _texts(values)
        raise HandspanError(
            f"{self.what(column)} holds {kind}, which is neither numbers nor texts: turn it into "
            "numbers, or leave it out"
        )

    def _finite(self, column: str, values: np.ndarray) -> np.ndarray:
        check_finite(values, self.what(column))
        return values

    def features(self, names: list[str]) -> np.ndarray:
        """Numbers as they are, texts one-hot, side by side in the given order."""
        pieces: list[Any] = []
        width = 0
        for name in names:
            values = self.read(name)
            if isinstance(values, Texts):
                self._check_categories(name, values)
            pieces.append((width, values))
            width += len(values.values) if isinstance(values, Texts) else 1
        reals = [values.dtype for _, values in pieces if isinstance(values, np.ndarray)]
        rows = np.zeros((self.table.num_rows, width), np.result_type(np.float32, *reals))
        for start, values in pieces:
            if isinstance(values, Texts):
                rows[np.arange(len(rows)), start + values.codes] = 1.0
            else:
                rows[:, start] = values
        return rows

    def side(self, name: str) -> SideColumn:
        """Return a column that describes clients; it may have gaps."""
        column = self.table.column(name)
        known = np.asarray(column.is_valid().to_numpy())
        if not known.any():
            raise HandspanError(f"{self.what(name)} is empty, so that it describes no client")
        there = self if known.all() else Columns(self.name, self.table.filter(column.is_valid()))
        found, values = there.read(name), np.full(len(known), np.nan)
        if not isinstance(found, Texts):
            values[known] = found
            return SideColumn(name=name, values=values)
        there._check_categories(name, found)
        values[known] = found.codes
        return SideColumn(name=name, values=values, categories=tuple(found.values))

    def _check_categories(self, column: str, texts: Texts) -> None:
        self._check_mixture(column, texts)
        if len(texts.values) > MOST_CATEGORIES:
            raise HandspanError(
                f"{self.what(column)} holds {len(texts.values)} different texts, too many to be "
                f"categories (at most {MOST_CATEGORIES}): leave it out or group them"
            )

    def _check_mixture(self, column: str, texts: Texts) -> None:
        numbers = np.array([_is_number(value) for value in texts.values])
        if not numbers.any() or numbers.all():
            return
        told = numbers[texts.codes]
        number, text = int(np.argmax(told)), int(np.argmin(told))
        raise HandspanError(
            f"{self.what(column)} mixes numbers and texts: row {number} (counted from 0) holds "
            f"{texts.values[texts.codes[number]]!r}, row {text} {texts.values[texts.codes[text]]!r}"
        )

    def labels(self, column: str, task: str) -> tuple[np.ndarray, tuple[str, ...]]:
        """Numbers as they are; texts as class numbers, with the names of the classes."""
        values = self.read(column)
        if isinstance(values, np.ndarray):
            return values, ()
        self._check_mixture(column, values)
        if task == "regression":
            raise HandspanError(f"{self.what(column)} holds texts, but regression needs numbers")
        if len(values.values) > MOST_CLASSES:
            raise HandspanError(
                f"{self.what(column)} holds {len(values.values)} different texts, too many to be "
                f"classes (at most {MOST_CLASSES}): choose another label column"
            )
        return values.codes.astype(np.int64), tuple(values.values)

    def ids(self, column: str) -> np.ndarray:
        """Return one id per row: whole numbers, or texts."""
        kind = self.table.column(column).type
        if pa.types.is_nested(kind) or pa.types.is_binary(kind):
            raise HandspanError(f"{self.what(column)} holds {kind}, which cannot be client ids")
        if not pa.types.is_integer(kind) and not _is_text(kind):
            position = self.table.column_names.index(column)
            told = self.table.column(column).cast(pa.string())
            return Columns(self.name, self.table.set_column(position, column, told)).ids(column)
        values = self.read(column)
        if isinstance(values, np.ndarray):
            return values
        whole = [value for value in values.values if _is_whole(value)]
        if len(whole) == len(values.values):  # kept as texts only so that 007 is not 7
            return np.array(whole, dtype=np.int64)[values.codes]
        return np.array(values.values)[values.codes]

    def flags(self, column: str) -> np.ndarray:
        """Return one True or False per row."""
        values = self.read(column)
        if isinstance(values, Texts) or not np.isin(values, (0, 1)).all():
            raise HandspanError(f"{self.what(column)} must hold one true or false per row")
        return values.astype(bool)


def _real(kind: Any) -> Any:
    return pa.float32() if pa.types.is_float32(kind) or pa.types.is_float16(kind) else pa.float64()


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _texts(values: Any) -> Texts:
    encoded = values.combine_chunks().dictionary_encode()
    found = encoded.dictionary.to_pylist()
    order = np.argsort(np.array(found, dtype=object), kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    codes = rank[encoded.indices.to_numpy(zero_copy_only=False)]
    return Texts(codes=codes, values=[found[position] for position in order])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_whole(text: str) -> bool:
    return len(text) < 19 and text.removeprefix("-").isdecimal() and str(int(text)) == text
