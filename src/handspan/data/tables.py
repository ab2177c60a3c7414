"""Tables with a client column: ``.csv`` and ``.parquet`` files.

One column holds the client of each row, one the label, some (constant within a client) its side
information; all others are features: numbers as they are, texts one-hot.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from handspan.core.errors import HandspanError, nearest
from handspan.data.columns import Columns, Texts
from handspan.data.inputs import as_labels
from handspan.data.source import Source
from handspan.data.table_text import split_columns

_LABELS = ("label", "y")
_IS_TEST = "is_test"


def read_table(text: str, task: str = "auto") -> Source:
    """Read a table; ``text`` is its path, with the columns behind it if they have other names."""
    file, given = split_columns(text)
    path = Path(file)
    if not path.exists():
        raise HandspanError(f"there is no file {path}: check its name")
    if path.is_dir():
        raise HandspanError(f"{path} is a folder: give the file itself")
    client_name = given.get("client", "client")
    is_parquet = path.suffix.lower() == ".parquet"
    table = _read_parquet(path) if is_parquet else _read_csv(path, client_name)
    columns = Columns(str(path), table)
    _check_names(columns, given)
    client = client_name if client_name in columns.names else None
    label = _label(columns, given, task)
    if label is not None and label == client:
        raise HandspanError(
            f"{columns.what(label)} cannot be both client and label: name another by "
            "--client-column or --label-column"
        )
    side = _side_names(columns, given, client, label)
    taken = {client, label, _IS_TEST, *side}
    features = [name for name in columns.names if name not in taken]
    if not features:
        raise HandspanError(f"{path} has no columns left for features besides {_list(taken)}")
    return _make(columns, text, task, client, label, side, features)


def _make(
    columns: Columns,
    text: str,
    task: str,
    client: str | None,
    label: str | None,
    side: list[str],
    features: list[str],
) -> Source:
    ids = None if client is None else _client_ids(columns, client)
    y, classes = (None, ()) if label is None else columns.labels(label, task)

    def where(row: int) -> str:
        return f"row {row} (counted from 0) of {columns.name}"

    x = columns.features(features)
    if y is not None:
        checked, _ = as_labels(y, len(x), task, len(classes) or None, where)
        y = y if checked is None else checked
    fields = {name: _field(columns, name) for name in features if _is_discrete(columns, name)}
    if client is not None and ids is not None:
        fields[client] = ids
    return Source(
        x=x,
        y=y,
        name=text,
        kind="table",
        client=ids,
        side_columns=tuple(columns.side(name) for name in side),
        is_test=columns.flags(_IS_TEST) if _IS_TEST in columns.names else None,
        fields=fields,
        num_classes=len(classes) or None,
        classes=classes,
    )


def _field(columns: Columns, name: str) -> np.ndarray:
    values = columns.read(name)
    return np.array(values.values)[values.codes] if isinstance(values, Texts) else values


def _is_discrete(columns: Columns, name: str) -> bool:
    values = columns.read(name)
    return isinstance(values, Texts) or values.dtype.kind in "iu"


def _list(names: Any) -> str:
    return ", ".join(repr(name) for name in names if name is not None)


def _check_names(columns: Columns, given: dict[str, str]) -> None:
    names = columns.names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise HandspanError(f"{columns.name} has two columns {twice!r}: rename one")
    for role in ("client", "label"):
        if role in given and given[role] not in names:
            raise HandspanError(_unknown(columns, given[role]))


def _unknown(columns: Columns, column: str) -> str:
    return f"{columns.name} has no column {column!r}{nearest(column, columns.names)}"


def _label(columns: Columns, given: dict[str, str], task: str) -> str | None:
    for name in (given["label"],) if "label" in given else _LABELS:
        if name in columns.names:
            return name
    if task == "matrix":
        return None
    raise HandspanError(
        f"{columns.name} has no column 'label' or 'y': name it with --label-column, or choose "
        f"--task matrix if there are no labels (columns: {', '.join(columns.names[:20])})"
    )


def _side_names(
    columns: Columns, given: dict[str, str], client: str | None, label: str | None
) -> list[str]:
    names = [name.strip() for name in given["side"].split(",")] if "side" in given else []
    for name in names:
        if name not in columns.names:
            raise HandspanError(_unknown(columns, name))
    if names and client is None:
        raise HandspanError(
            f"side columns describe clients, but {columns.name} has no client column: name it "
            "with --client-column"
        )
    for name in names:
        if name in (client, label) or names.count(name) > 1:
            raise HandspanError(
                f"{columns.what(name)} is named twice: a side column is nothing else"
            )
    return names


def _client_ids(columns: Columns, client: str) -> np.ndarray:
    ids = columns.ids(client)
    if (ids == ids[0]).all():
        raise HandspanError(
            f"{columns.what(client)} names a single client ({ids[0]}) in all rows: a federation "
            "needs several; name another --client-column, or remove this one"
        )
    return ids


def _read_parquet(path: Path) -> pa.Table:
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, PermissionError):
            raise HandspanError(f"{path} cannot be read: you lack the permission") from None
        raise HandspanError(f"{path} is damaged, cut off or no parquet file") from None
    if not table.num_rows:
        raise HandspanError(f"{path} has no rows")
    return table


def _read_csv(path: Path, client: str) -> pa.Table:
    from pyarrow import csv

    # One block, so that a column has one type wherever a stray text stands in it.
    size = max(1 << 16, min(path.stat().st_size + 1, (1 << 31) - 1))
    try:
        table = csv.read_csv(
            path,
            read_options=csv.ReadOptions(use_threads=False, block_size=size),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(
                column_types={client: pa.string()},
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
    except PermissionError:
        raise HandspanError(f"{path} cannot be read: you lack the permission") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise HandspanError(_csv_complaint(path, str(error))) from None
    _check_csv(path, table)
    return table


def _csv_complaint(path: Path, message: str) -> str:
    counts = re.search(r"Expected (\d+) columns, got (\d+)", message)
    if counts:
        row = re.search(r"Row #(\d+)", message)
        place = f"line {row[1]}" if row else "a line"
        return f"{path} has {counts[2]} entries in {place}, but its header names {counts[1]}"
    if "invalid UTF8" in message:
        return f"{path} is not UTF-8 text: save it as UTF-8"
    if "Empty CSV" in message:
        return f"{path} is empty: its first line must name the columns"
    return f"{path} cannot be read as a table: {message.splitlines()[0]}"


def _check_csv(path: Path, table: pa.Table) -> None:
    names = table.column_names
    if len(names) == 1 and re.search("[;\t|]", names[0]):
        raise HandspanError(f"{path} must separate its columns by commas, as in 'client,label,x'")
    for column in (field.name for field in table.schema if pa.types.is_binary(field.type)):
        raise HandspanError(f"column {column!r} of {path} is not UTF-8 text: save it as UTF-8")
    if not table.num_rows:
        raise HandspanError(f"{path} has no rows below its header")
    if all(re.fullmatch(r"[-+.\deE]+", name) for name in names):
        raise HandspanError(f"{path} must name its columns in its first line")
