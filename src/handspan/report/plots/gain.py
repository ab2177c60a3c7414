"""What each client gains over training alone: one panel per method, clients sorted by gain."""

from __future__ import annotations

from typing import Any

import numpy as np

from handspan.report.plots import names, style
from handspan.report.plots.material import Array, Material
from handspan.report.plots.style import NotShown

_ACROSS = 3  # panels in a row
_TEXT = 0.32  # of the height of a panel, for two lines of text


def draw(material: Material) -> Any:
    """Draw the gains over Local, paired by client and seed."""
    gains = gains_of(material)
    looks = style.looks(material.methods)
    num_columns = min(_ACROSS, len(gains))
    num_rows = -(-len(gains) // num_columns)
    figure, matrix = style.panels(
        2.05, 1.35, num_rows, num_columns, gap=(0.35, 0.62), sharex=True, sharey=True
    )
    matrix[0, 0].set_ylim(*_limits([values for values in gains.values() if len(values)]))
    for axes, (method, values) in zip(matrix.flat, gains.items(), strict=False):
        _panel(axes, values, looks[method]["color"], material)
        axes.set_title(names.wrapped(method, 32), color=style.ink(looks[method]["color"]))
    for axes in matrix.flat[len(gains) :]:
        axes.set_visible(False)
    for axes in matrix.flat[max(0, len(gains) - num_columns) : len(gains)]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("clients, sorted by gain (%)")
    for axes in matrix[:, 0]:
        axes.set_ylabel(_words(material))
    lines = max(names.wrapped(method, 32).count("\n") for method in list(gains)[:num_columns])
    title = f"Gain of each client over {material.baseline}"
    style.headline(figure, title, material.title, clear=0.3 + 0.13 * lines)
    return figure


def gains_of(material: Material) -> dict[str, Array]:
    """Gains of all clients and seeds by method, those with two finite scores, the largest first.

    A gain is positive where the method is better than Local.
    """
    baseline = material.baseline
    if not material.is_comparison:
        raise NotShown("a single run has no local beside it: plot a comparison that has")
    if baseline is None:
        raise NotShown("local is not in the comparison")
    alone = {run.seed: run.scores.get(material.column) for run in material.runs_of(baseline)}
    found: dict[str, Array] = {}
    for method in material.methods:
        if method == baseline:
            continue
        pairs = [
            (run.scores.get(material.column), alone.get(run.seed))
            for run in material.runs_of(method)
        ]
        found[method] = _sorted_gains(pairs, material)
    if not found:
        raise NotShown("there is no method beside local")
    if not any(len(values) for values in found.values()):
        raise NotShown("no client has a score beside that of local")
    return found


def _sorted_gains(pairs: list[tuple[Array | None, Array | None]], material: Material) -> Array:
    sign = material.scale if material.higher_is_better else -material.scale
    gains = [
        sign * (mine - local) for mine, local in pairs if mine is not None and local is not None
    ]
    joined = np.concatenate(gains) if gains else np.zeros(0)
    return np.sort(joined[np.isfinite(joined)])[::-1]


def _panel(axes: Any, values: Array, colour: str, material: Material) -> None:
    """Draw gains as a falling curve; losses are hatched."""
    if not len(values):
        axes.text(0.5, 0.5, "no pairs of finite scores", transform=axes.transAxes, ha="center")
        return
    # Client k of n covers the share from k/n to (k+1)/n.
    x = 100 * np.arange(len(values) + 1) / len(values)
    y = np.append(values, values[-1])
    axes.step(x, y, where="post", color=colour, linewidth=1)
    fill = {"step": "post", "linewidth": 0, "facecolor": colour}
    axes.fill_between(x, np.maximum(y, 0), **fill, alpha=0.3)
    axes.fill_between(x, np.minimum(y, 0), **fill, alpha=0.6, hatch="//////")
    axes.axhline(0, color=style.BLACK, linewidth=0.6)
    axes.set_xlim(0, 100)
    axes.set_xticks((0, 50, 100))
    # Equal scores on few test rows may differ in the last digit of a division.
    gain, loss = (values > 1e-9).mean(), (values < -1e-9).mean()
    unit = " points" if material.scale == 100 else ""
    digits = 1 if material.scale == 100 else 4
    axes.text(
        0.98, 0.97, f"mean {signed(values.mean(), digits)}{unit}\n{gain:.0%} gain, {loss:.0%} lose",
        transform=axes.transAxes, ha="right", va="top", size=7.5,
    )  # fmt: skip


def _limits(gains: list[Array]) -> tuple[float, float]:
    """Room for all gains, and for two lines of text above those on the right."""
    low = min(0.0, *(float(values[-1]) for values in gains)) * 1.05
    high = max(0.0, *(float(values[0]) for values in gains)) * 1.05
    right = max(0.0, *(float(values[int(0.4 * len(values))]) for values in gains))
    room = (right - _TEXT * low) / (1 - _TEXT)
    return low, max(high, room) or 1.0


def signed(value: float, digits: int) -> str:
    """Write a number with its sign, a minus being one."""
    return f"{value:+.{digits}f}".replace("-", "−")


def _words(material: Material) -> str:
    if material.scale == 100:
        return f"gain in {material.noun}\n(points)"
    return f"gain in {material.noun}" if material.higher_is_better else f"less {material.noun}"
