"""The spectrum that a method tells over the rounds, that of its models at the end, and the cut.

A history tells ``spectrum_1``, ``spectrum_2``, ..., where to cut (``rank``) and, for methods that
cut at a level, that level (``spectrum_cut``); the method's page says what its spectrum is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from handspan.report.plots import style
from handspan.report.plots.material import Array, Coordinates, Material, Run
from handspan.report.plots.style import NotShown

_LEAST = 1e-6  # of the largest value: smaller ones are zero
_FAR = 0.02  # smallest to largest, from which on an axis is logarithmic
_WIDTHS, _HEIGHT, _GAP = (3.4, 1.7), 2.9, 0.55  # inches
_KEPT = {"color": style.BLUE, "linewidth": 1.2}
_CUT = {"color": style.GREY, "linewidth": 0.8, "linestyle": ":"}
_LEVEL = {"color": style.VERMILLION, "linewidth": 1, "linestyle": "--"}


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a history tells.

    Attributes
    ----------
    rounds, ranks, levels
        One entry per evaluation; NaN where one is not told.
    values
        (evaluations, k), the first column the largest.
    """

    rounds: Array
    values: Array
    ranks: Array
    levels: Array


def has_spectrum(run: Run) -> bool:
    """Whether a run's history tells a spectrum."""
    return any("spectrum_1" in row for row in run.history)


def draw(material: Material, method: str, mine: Coordinates | None) -> Any:
    """Draw what the history tells, and the singular values of all clients' models at the end."""
    run = material.runs_of(method)[0]
    told = told_by(run) if has_spectrum(run) else None
    if told is not None and not (told.values > 0).any():
        told = None
    final = None if mine is None else final_values(mine)
    if told is None and final is None:
        raise NotShown(f"{method} tells no finite spectrum")
    widths = [width for width, part in zip(_WIDTHS, (told, final), strict=True) if part is not None]
    whole = sum(widths) + _GAP * (len(widths) - 1)
    figure = style.canvas(whole, _HEIGHT)
    if told is not None:
        over = figure.add_axes((0, 0.24, widths[0] / whole, 0.76))
        _over_rounds(over, told)
        _ranks(figure.add_axes((0, 0, widths[0] / whole, 0.18), sharex=over), told)
    if final is not None and mine is not None:
        share = widths[-1] / whole
        _at_the_end(figure.add_axes((1 - share, 0, share, 1)), final, mine.rank)
    style.headline(figure, f"Spectrum of {method}", material.title_of(run.seed), clear=0.3)
    style.footnote(figure, _footnote(told, final))
    return figure


def told_by(run: Run) -> Told:
    """Read the spectrum of a history."""
    rows = [row for row in run.history if "spectrum_1" in row]
    places = [re.fullmatch(r"spectrum_(\d+)", name) for row in rows for name in row]
    count = max(int(place.group(1)) for place in places if place)

    def column(name: str) -> Array:
        return np.array([np.nan if row.get(name) is None else float(row[name]) for row in rows])

    return Told(
        rounds=column("round"),
        values=np.stack([column(f"spectrum_{k}") for k in range(1, count + 1)], axis=1),
        ranks=column("rank"),
        levels=column("spectrum_cut"),
    )


def final_values(mine: Coordinates) -> Array | None:
    """Singular values of U V / sqrt(n) over all clients that took part, the offset included."""
    products, values = mine.products, mine.values
    if mine.offset is not None:
        products, values = mine.offset, np.column_stack([np.ones(len(values)), values])
    if products is None or not mine.is_finite or not len(values):
        return None
    squares, vectors = np.linalg.eigh(products)
    root = vectors * np.sqrt(squares.clip(min=0))
    found = np.linalg.svd(values @ root, compute_uv=False) / len(values) ** 0.5
    return found if found.max() > 0 else None


def _over_rounds(axes: Any, told: Told) -> None:
    """One line per value: solid where it is kept, pale and dotted where it is cut."""
    values = np.where(told.values > _LEAST * np.nanmax(told.values), told.values, np.nan)
    ranks = np.where(np.isnan(told.ranks), np.inf, told.ranks)
    kept = np.arange(values.shape[1]) < ranks[:, None]
    for k in range(values.shape[1]):
        for those, look in ((kept[:, k], _KEPT), (~kept[:, k], _CUT)):
            line = np.where(those, values[:, k], np.nan)
            if np.isfinite(line).any():
                axes.plot(told.rounds, line, marker="o", markersize=2, **look)
    if np.isfinite(told.levels).any():
        axes.plot(told.rounds, told.levels, **_LEVEL)
    for place in np.flatnonzero(np.diff(told.ranks) < 0):  # between two evaluations
        axes.axvline(told.rounds[place : place + 2].mean(), **_LEVEL)
    _scale(axes, values)
    axes.set_ylabel("spectrum, as the method tells it")
    axes.set_title("over the rounds")
    axes.tick_params(labelbottom=False)


def _ranks(axes: Any, told: Told) -> None:
    """How many directions are kept."""
    axes.step(told.rounds, told.ranks, where="post", marker="o", markersize=2, **_KEPT)
    highest = np.nanmax(np.append(told.ranks, told.values.shape[1]))
    axes.set(
        xlabel="communication rounds", ylabel="rank", xlim=(0, 1.02 * told.rounds.max()),
        ylim=(0, 1.1 * highest),
    )  # fmt: skip
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=3)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _at_the_end(axes: Any, values: Array, rank: float | None) -> None:
    """The singular values in order: filled where they are kept, hollow where they are cut."""
    place = np.arange(1, len(values) + 1)
    shown = values > _LEAST * values.max()
    kept = place <= (np.inf if rank is None else rank)
    for those, face, edge in (
        (kept & shown, style.BLUE, style.BLUE),
        (~kept & shown, "white", style.GREY),
    ):
        axes.plot(place[those], values[those], "o", ms=4, color=face, markeredgecolor=edge)
    _scale(axes, values[shown])
    last = max(int(place[shown].max()), round(rank or 0))
    axes.set(xlabel="number", ylabel="singular value of U V / √n", xlim=(0.4, last + 0.9))
    axes.set_title("of all clients, at the end")
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=min(last + 1, 10))
    if rank is not None:
        is_left = rank + 0.5 < last / 2
        axes.axvline(rank + 0.5, **_LEVEL)
        axes.annotate(
            f"cut: rank {rank:g}", (rank + 0.5, 1), xycoords=("data", "axes fraction"),
            xytext=(3 if is_left else -3, -2), textcoords="offset points", va="top",
            ha="left" if is_left else "right", color=style.VERMILLION,
        )  # fmt: skip


def _scale(axes: Any, values: Array) -> None:
    """Let an axis begin at 0, or make it logarithmic where values lie far apart."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    known = values[values > 0]  # no NaN either
    is_log = bool(known.min() < _FAR * known.max())
    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0.8 * known.min() if is_log else 0, (1.5 if is_log else 1.12) * known.max())


def _footnote(told: Told | None, final: Array | None) -> str:
    lines = ["solid and filled: kept; dotted and hollow: cut"]
    if told is not None and np.isfinite(told.levels).any():
        lines[0] += "; dashed: the level of the cut"
    if told is not None and (np.diff(told.ranks) < 0).any():
        lines[0] += "; upright: when it was made"
    if final is not None:
        lines.append("U V are the models of the n clients that took part, on the shared basis")
    return "\n".join(lines)
