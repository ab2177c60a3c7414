"""Settings as a user writes them: on the command line, in tables and in names of folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHORT = {"learning_rate": "lr"}  # as the command line writes it


def plain(value: Any) -> str:
    """Write a value as the command line reads it.

    Examples
    --------
    >>> plain(True), plain(0.1), plain(1.0), plain(1 / 3)
    ('true', '0.1', '1', '0.3333333333333333')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def tell(choice: Mapping[str, Any]) -> str:
    """Say a setting in one line.

    Examples
    --------
    >>> tell({"learning_rate": 0.3, "batch_size": None})
    'lr=0.3, batch_size=all'
    """
    return ", ".join(
        f"{SHORT.get(key, key)}={'all' if key == 'batch_size' and value is None else plain(value)}"
        for key, value in choice.items()
    )
