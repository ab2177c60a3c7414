"""How the clients of each method spread: one dot per client and seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from handspan.report.plots import names, style
from handspan.report.plots.material import Array, Material
from handspan.report.plots.style import NotShown

MOST = 1000  # dots of a method; more are shown by evenly spaced ranks
_BOXES = 60  # of one strip, from the least to the largest score of all


def draw(material: Material) -> Any:
    """Draw one strip per method; of a single run one for the personal and one for global models."""
    strips = strips_of(material)
    if not any(len(values) for seeds in strips.values() for values in seeds):
        raise NotShown("no client has a finite score")
    looks = style.looks(list(strips))
    figure, ((axes,),) = style.panels(4.4, 0.5 * len(strips) + 0.15)
    dots = {name: thinned(np.concatenate(seeds)) for name, seeds in strips.items()}
    every = np.concatenate(list(dots.values()))
    width = (float(np.ptp(every)) or 1.0) / _BOXES
    # All strips have one scale: a crowd of twice the clients is twice as high.
    crowd = max(
        np.unique(boxes(v, width), return_counts=True)[1].max(initial=1) for v in dots.values()
    )
    for place, (name, seeds) in enumerate(strips.items()):
        colour = looks[name]["color"]
        at = place + 0.84 * offsets(dots[name], width) / crowd
        axes.scatter(dots[name], at, s=7, color=colour, alpha=0.5, linewidths=0)
        _mark(axes, place, seeds, material)
    axes.set_yticks(range(len(strips)), [names.wrapped(name) for name in strips])
    axes.tick_params(axis="y", length=0)
    axes.set(ylim=(len(strips) - 0.5, -0.5), xlabel=f"{material.unit} of a client")
    if material.scale == 100:
        axes.set_xlim(-2, 102)
    axes.grid(axis="x", color=style.PALE, linewidth=0.5)
    axes.set_axisbelow(True)
    style.headline(figure, material.heading("of single clients"), material.title)
    style.footnote(figure, _legend(strips, material))
    return figure


def strips_of(material: Material) -> dict[str, list[Array]]:
    """Finite scores of the clients, an array for each seed, by the name of the strip."""
    if material.is_comparison:
        every = {method: material.scores_of(method) for method in material.methods}
    else:
        method = material.runs[0].method
        every = {f"{method}, personal": material.scores_of(method)}
        name = f"global_{material.metric}"
        if name in material.runs[0].scores:
            every[f"{method}, global"] = material.scores_of(method, name)
    return {
        name: [values[np.isfinite(values)] for values in seeds] for name, seeds in every.items()
    }


def thinned(values: Array) -> Array:
    """Sorted values; of many, those at evenly spaced ranks."""
    values = np.sort(values)
    if len(values) <= MOST:
        return values
    return values[np.linspace(0, len(values) - 1, MOST).round().astype(int)]


def offsets(values: Array, width: float) -> Array:
    """Places of sorted values in their boxes, counted from the middle of each box."""
    _, first, counts = np.unique(boxes(values, width), return_index=True, return_counts=True)
    place = np.arange(len(values)) - np.repeat(first, counts)
    return place - np.repeat((counts - 1) / 2, counts)


def boxes(values: Array, width: float) -> Array:
    """Number of the box, of a given width, in which each value lies."""
    return np.floor(values / width + 0.5).astype(int)


def fullest(values: Array, width: float) -> int:
    """Most values in one box."""
    return int(np.unique(boxes(values, width), return_counts=True)[1].max(initial=1))


def _mark(axes: Any, place: int, seeds: list[Array], material: Material) -> None:
    """Mark the mean, and the mean of the worst tenth of the clients; means over seeds, as tables.

    The worst tenth is that of each seed.
    """
    known = [values for values in seeds if len(values)]
    if not known:
        return
    better = material.higher_is_better
    worst = np.mean([worst_tenth(values, higher_is_better=better) for values in known])
    mean = np.mean([values.mean() for values in known])
    for value, marker in ((worst, "^"), (mean, "D")):
        axes.plot(
            [value], [place], marker, markersize=5.5, color="white", markeredgecolor=style.BLACK,
            markeredgewidth=1.1, clip_on=False,
        )  # fmt: skip


def worst_tenth(values: Array, *, higher_is_better: bool) -> float:
    """Mean of the worst tenth of the clients, at least of one."""
    ordered = np.sort(values if higher_is_better else -values)
    worst = float(ordered[: max(1, len(values) // 10)].mean())
    return worst if higher_is_better else -worst


def _legend(strips: dict[str, list[Array]], material: Material) -> str:
    """Say what dots and marks are, and what is not shown."""
    counts = [sum(map(len, seeds)) for seeds in strips.values()]
    told = "each dot a client" + (" and seed" if material.is_comparison else "")
    if max(counts) > MOST:
        told += f" ({MOST:,} of {max(counts):,}, at even ranks)"
    told += ";  ◇ mean;  △ mean of the worst tenth"
    every = max(sum(map(len, material.scores_of(method))) for method in material.methods)
    if min(counts) < every:
        told += (
            f"\nnot shown, for want of a finite score: up to {every - min(counts):,} of {every:,}"
        )
    return told
