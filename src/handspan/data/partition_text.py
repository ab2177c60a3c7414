"""The texts between the colons of a partition, read into arguments and refused by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from handspan.core.errors import HandspanError

_MOST_SIGMA = 100  # long before it one client has all rows but two of each other


def _whole(text: str, what: str, usage: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 2**31:
        raise HandspanError(f"{what} in {usage} must be a whole number of at least 1, not {text!r}")
    return int(text)


def _real(text: str, what: str, usage: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise HandspanError(f"{what} in {usage} must be a positive number, not {text!r}")
    return value


def parse_dirichlet(arguments: list[str]) -> tuple[float, int]:
    """Read ALPHA[:MIN]."""
    usage = "dirichlet:ALPHA[:MIN]"
    if len(arguments) not in (1, 2):
        raise HandspanError(f"write the partition as {usage}, for example dirichlet:0.5")
    alpha = _real(arguments[0], "ALPHA", usage)
    least = _whole(arguments[1], "MIN", usage) if len(arguments) == 2 else 2
    if least < 2:
        raise HandspanError(
            f"MIN in {usage} must be at least 2: every client needs a training and a test row"
        )
    return alpha, least


def parse_shards(arguments: list[str]) -> tuple[int, bool]:
    """Read S[:exact]."""
    usage = "shards:S[:exact]"
    if len(arguments) not in (1, 2) or arguments[1:] not in ([], ["exact"]):
        raise HandspanError(
            f"write the partition as {usage}, for example shards:2 or shards:2:exact"
        )
    return _whole(arguments[0], "S", usage), len(arguments) == 2


def parse_groups(name: str, example: int, most: int | None = None) -> Callable[..., tuple[int]]:
    """Make the reader of a number of groups G."""
    return functools.partial(_parse_groups, name, example, most)


def _parse_groups(name: str, example: int, most: int | None, arguments: list[str]) -> tuple[int]:
    usage = f"{name}:G"
    if len(arguments) != 1:
        raise HandspanError(f"write the partition as {usage}, for example {name}:{example}")
    count = _whole(arguments[0], "G", usage)
    if most is not None and count > most:
        raise HandspanError(f"G in {usage} must be at most {most}, not {count}")
    return (count,)


def parse_quantity(arguments: list[str]) -> tuple[float]:
    """Read SIGMA."""
    if len(arguments) != 1:
        raise HandspanError("write the partition as quantity:SIGMA, for example quantity:1.5")
    sigma = _real(arguments[0], "SIGMA", "quantity:SIGMA")
    if sigma > _MOST_SIGMA:
        raise HandspanError(f"SIGMA in quantity:SIGMA must be at most {_MOST_SIGMA}, not {sigma:g}")
    return (sigma,)


def parse_iid(arguments: list[str]) -> tuple[()]:
    """Refuse arguments."""
    if arguments:
        raise HandspanError("the partition iid has no arguments; write iid")
    return ()


def parse_natural(arguments: list[str]) -> tuple[str | None]:
    """Read [FIELD]."""
    if len(arguments) > 1 or arguments == [""]:
        raise HandspanError("write the partition as natural or natural:FIELD")
    return (arguments[0] if arguments else None,)


def parse_file(arguments: list[str]) -> tuple[str]:
    """Read the path of a stored partition, which may hold colons."""
    path = ":".join(arguments)
    if not path:
        raise HandspanError("write the partition as file:PATH, for example file:p.npz")
    return (path,)
