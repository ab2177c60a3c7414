"""Score against rounds, rows, bytes and seconds: one line for each method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from handspan.report.plots import names, style
from handspan.report.plots.material import Array, Material, Run
from handspan.report.plots.style import NotShown

_NOTHING = 0.002  # of the axis: a line that spends less is shown as a level


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What is spent: how it is called, and where it stands in a history."""

    words: str
    names: tuple[str, ...]
    divide_by: float = 1.0


AXES = {
    "rounds": Axis(words="communication rounds", names=("round",)),
    "rows": Axis(words="rows whose gradient was taken (thousands)", names=("rows",), divide_by=1e3),
    "bytes": Axis(
        words="megabytes sent, up and down", names=("bytes_up", "bytes_down"), divide_by=1e6
    ),
    "seconds": Axis(words="seconds in rounds", names=("seconds",)),
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """Mean over seeds, and its standard deviation, at each evaluation."""

    name: str
    x: Array
    mean: Array
    deviation: Array


def draw(material: Material, against: str) -> Any:
    """Draw the leading score against one of ``AXES``."""
    axis = AXES[against]
    lines = lines_of(material, axis)
    if max(len(line.x) for line in lines) < 2:
        raise NotShown("there was a single evaluation, and a line needs two: lower --eval-every")
    looks = style.looks([line.name for line in lines])
    figure, ((axes,),) = style.panels(4.0, 2.7)
    low, high = limits(lines, material)
    axes.set(xlim=(0, 1.02 * max(line.x.max() for line in lines)), ylim=(low, high))
    ends: list[tuple[str, float, float, str]] = []
    for line in lines:
        look = looks[line.name]
        if line.x.max() < _NOTHING * axes.get_xlim()[1]:
            axes.axhline(
                line.mean[-1], label=line.name, color=look["color"], linestyle=":", linewidth=1.2
            )
            name = f"{line.name} (at the end; spends next to nothing)"
            ends.append((name, axes.get_xlim()[1], line.mean[-1], look["color"]))
            continue
        with_band(axes, line, look)
        ends.append((line.name, line.x[-1], line.mean[-1], look["color"]))
    names.label_ends(axes, ends)
    axes.set(xlabel=axis.words, ylabel=words(material))
    axes.xaxis.get_major_locator().set_params(integer=against == "rounds")
    style.headline(figure, material.heading(f"against {against}"), material.title)
    return figure


def with_band(axes: Any, line: Line, look: dict[str, Any]) -> None:
    """Draw a line, and a band around it where there are several seeds."""
    axes.plot(line.x, line.mean, label=line.name, linewidth=1.2, **look)
    if line.deviation.any():
        axes.fill_between(
            line.x, line.mean - line.deviation, line.mean + line.deviation,
            color=look["color"], alpha=0.15, linewidth=0,
        )  # fmt: skip


def words(material: Material) -> str:
    """Say what the lines are."""
    if not material.is_comparison:
        return material.unit
    told = f"mean {material.unit}" if material.score.startswith("personal_") else material.unit
    several = len({run.seed for run in material.runs}) > 1
    return f"{told}\nband: ± standard deviation over seeds" if several else told


def lines_of(material: Material, axis: Axis) -> list[Line]:
    """One line per method; of a single run the mean, the worst tenth and the global model."""
    if material.is_comparison:
        found = [
            _line(method, material.runs_of(method), material.score, axis, material.scale)
            for method in material.methods
        ]
    else:
        method = material.runs[0].method
        scores = {method: material.score}
        if material.score.startswith("personal_"):
            scores = {
                f"{method}, mean over clients": material.score,
                "worst tenth of the clients": "worst_decile",
                "global model, all rows": f"global_{material.metric}_pooled",
            }
        found = [
            _line(name, material.runs, score, axis, material.scale)
            for name, score in scores.items()
        ]
    known = [line for line in found if len(line.x)]
    if not known:
        what = "seconds" if axis.names == ("seconds",) else "history"
        raise NotShown(f"the folders hold no {what} of single evaluations")
    return known


def _line(name: str, runs: Sequence[Run], score: str, axis: Axis, scale: float) -> Line:
    """Join the seeds of a method at the evaluations that all of them have, the last included."""
    kept = [
        [row for row in run.history if row.get(score) is not None and _spent(row, axis) is not None]
        for run in runs
    ]
    if not all(kept):
        return Line(name=name, x=np.zeros(0), mean=np.zeros(0), deviation=np.zeros(0))
    # A budget may end the seeds in different rounds: their last evaluations belong together.
    inner = set.intersection(*({row["round"] for row in rows} for rows in kept))
    inner -= {rows[-1]["round"] for rows in kept}
    columns = [[row for row in rows if row["round"] in inner] + rows[-1:] for rows in kept]
    x = np.array([[_spent(row, axis) for row in column] for column in columns], dtype=float)
    y = scale * np.array([[row[score] for row in column] for column in columns], dtype=float)
    deviation = y.std(0, ddof=1) if len(y) > 1 else np.zeros_like(y[0])
    return Line(name=name, x=x.mean(0) / axis.divide_by, mean=y.mean(0), deviation=deviation)


def _spent(row: dict[str, Any], axis: Axis) -> float | None:
    parts = [row.get(name) for name in axis.names]
    return None if None in parts else float(sum(parts))  # type: ignore[arg-type]


def limits(lines: Sequence[Line], material: Material) -> tuple[float, float]:
    """Room for lines and bands; shares end at 0 and 100 per cent."""
    low = min(float((line.mean - line.deviation).min()) for line in lines)
    high = max(float((line.mean + line.deviation).max()) for line in lines)
    room = 0.04 * (high - low) or 1.0
    low, high = low - room, high + room
    return (max(0.0, low), min(100.0 + room / 2, high)) if material.scale == 100 else (low, high)
