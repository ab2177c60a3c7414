"""Names of methods in pictures: beside what they name, and never on top of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handspan.report.plots.style import ink

_WIDEST = 44  # characters of a name in one line


def wrapped(name: str, widest: int = _WIDEST) -> str:
    """Break a long method text behind a colon or a plus, where it may be broken."""
    lines = [""]
    for part in name.replace(":", ":\0").replace("+", "+\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > widest:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def label_ends(axes: Any, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Name lines at the right edge of the axes, each beside the end of its own.

    ``ends`` holds name, x and y of the last point, and colour. Names that would overlap move apart;
    a thin line leads from the point to the name.
    """
    low, high = axes.get_ylim()
    inches = axes.get_position().height * axes.figure.get_figheight()
    names = [wrapped(name) for name, _, _, _ in ends]
    heights = [0.145 * (name.count("\n") + 1) for name in names]
    wanted = [inches * (y - low) / (high - low) for _, _, y, _ in ends]
    placed = spread_out(wanted, heights, 0, inches)
    for (_, x, y, colour), name, at in zip(ends, names, placed, strict=True):
        edge = axes.get_xlim()[1]
        if x < edge:
            axes.plot([x, edge], [y, y], color=colour, linewidth=0.5, linestyle=(0, (1, 3)))
        axes.annotate(
            name, (edge, y), xytext=(1.035, at / inches), xycoords="data",
            textcoords="axes fraction", va="center", color=ink(colour), annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )  # fmt: skip


def spread_out(
    wanted: Sequence[float], sizes: Sequence[float], low: float, high: float
) -> list[float]:
    """Centres as near as can be to the wanted ones, so that intervals do not overlap.

    Examples
    --------
    >>> spread_out([1.0, 1.0, 5.0], [1.0, 1.0, 1.0], 0.0, 6.0)
    [0.5, 1.5, 5.0]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    clusters: list[tuple[list[int], float, float]] = []  # members, centre, size
    for i in order:
        members, centre, size = [i], wanted[i], sizes[i]
        centre = min(max(centre, low + size / 2), high - size / 2)
        while clusters and centre - size / 2 < clusters[-1][1] + clusters[-1][2] / 2:
            before, _, its_size = clusters.pop()
            members, size = before + members, its_size + size
            centre = sum(wanted[j] for j in members) / len(members)
            centre = min(max(centre, low + size / 2), high - size / 2)
        clusters.append((members, centre, size))
    centres = [0.0] * len(wanted)
    for members, centre, size in clusters:
        at = centre - size / 2
        for j in members:
            centres[j] = at + sizes[j] / 2
            at += sizes[j]
    return centres
