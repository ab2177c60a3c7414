"""Which columns of a table are what, written behind its path: ``beds.csv:client=ward:side=a,b``.

The text names a source completely, so that run folders, tables and printed commands need no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from handspan.core.errors import HandspanError

ROLES = ("client", "label", "side")
_ROLE = re.compile(r":(?=(?:client|label|side)=)")


def split_columns(text: str) -> tuple[str, dict[str, str]]:
    """Return the path, and the columns given behind it by their roles.

    Examples
    --------
    >>> split_columns("beds.csv:client=ward:side=age,beds")
    ('beds.csv', {'client': 'ward', 'side': 'age,beds'})
    """
    path, *given = _ROLE.split(text)
    columns: dict[str, str] = {}
    for entry in given:
        role, _, column = entry.partition("=")
        if not column:
            raise HandspanError(f"{text!r} names no column behind {role}=")
        if role in columns:
            raise HandspanError(f"{text!r} says {role}= twice")
        columns[role] = column
    return path, columns


def with_columns(
    text: str, *, client: str | None = None, label: str | None = None, side: Iterable[str] = ()
) -> str:
    """Write columns behind the path of a table; they overrule those that stand there.

    Examples
    --------
    >>> with_columns("beds.csv:label=died", client="ward", side=["age", "beds"])
    'beds.csv:client=ward:label=died:side=age,beds'
    """
    told = {"client": client, "label": label, "side": ",".join(side)}
    if not any(told.values()):
        return text
    path, columns = split_columns(text)
    if not path.lower().endswith((".csv", ".parquet")):
        raise HandspanError(
            f"client, label and side columns belong to a .csv or .parquet table, not to {path}"
        )
    columns.update({role: column for role, column in told.items() if column})
    return path + "".join(f":{role}={columns[role]}" for role in ROLES if role in columns)
