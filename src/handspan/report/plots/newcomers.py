"""What new clients are served, against the number of rows they give: one line for each method."""

from __future__ import annotations

from typing import Any

import numpy as np

from handspan.report.plots import curves, names, style
from handspan.report.plots.curves import Line
from handspan.report.plots.material import Material, Run
from handspan.report.plots.style import NotShown


def draw(material: Material) -> Any:
    """Draw the scores of new clients; equal steps from one number of rows to the next."""
    lines = lines_of(material)
    given = [str(entry["given"]) for entry in _of(material.runs)[0].newcomers]
    looks = style.looks([line.name for line in lines])
    figure, ((axes,),) = style.panels(4.0, 2.7)
    axes.set(xlim=(-0.2, len(given) - 0.8), ylim=curves.limits(lines, material))
    for line in lines:
        curves.with_band(axes, line, looks[line.name])
    ends = [(li.name, li.x[-1], li.mean[-1], looks[li.name]["color"]) for li in lines]
    names.label_ends(axes, ends)
    axes.set_xticks(range(len(given)), given)
    axes.set(xlabel="rows that a new client gives", ylabel=curves.words(material))
    style.headline(figure, material.heading("of new clients"), material.title)
    return figure


def lines_of(material: Material) -> list[Line]:
    """One line per method; of a single run the mean and the worst tenth."""
    if material.is_comparison:
        found = [
            _line(method, _of(material.runs_of(method)), "mean", material.scale)
            for method in material.methods
            if _of(material.runs_of(method))
        ]
    else:
        kinds = {"mean over new clients": "mean", "worst tenth of them": "worst_decile"}
        runs = _of(material.runs)
        found = [_line(name, runs, key, material.scale) for name, key in kinds.items() if runs]
    if not found:
        raise NotShown("no client was held out: train with --holdout-clients")
    known = [line for line in found if np.isfinite(line.mean).all()]
    if not known:
        raise NotShown("no new client has a finite score")
    return known


def _of(runs: list[Run]) -> list[Run]:
    return [run for run in runs if run.newcomers]


def _line(name: str, runs: list[Run], key: str, scale: float) -> Line:
    values = [[entry[key] for entry in run.newcomers] for run in runs]
    y = scale * np.array(values, dtype=float)
    deviation = y.std(0, ddof=1) if len(y) > 1 else np.zeros_like(y[0])
    return Line(name=name, x=np.arange(y.shape[1]), mean=y.mean(0), deviation=deviation)
