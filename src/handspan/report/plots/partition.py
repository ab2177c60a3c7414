"""Who has which labels: clients x classes, before and after a partition renames them."""

from __future__ import annotations

from typing import Any

import numpy as np

from handspan.report.plots import style
from handspan.report.plots.material import Array, Labels, Material
from handspan.report.plots.style import NotShown

_WIDTH, _GAP = 4.8, 0.3  # inches
_MOST_NAMED = 20  # classes whose names fit
_SKEWED = 20  # from this ratio of sizes on, colours tell shares and not numbers of rows


def draw(material: Material) -> Any:
    """Draw sizes, labels as clients see them (and as the source does), and the names of groups."""
    labels = material.labels
    if isinstance(labels, str):
        raise NotShown(labels)
    order = order_of(labels)
    shown = {"labels as the clients see them": labels.counts[order]}
    if labels.original is not None:
        shown = {"labels as the source has them": labels.original[order], **shown}
    sizes = labels.counts.sum(1)
    in_shares = bool(sizes.max() > _SKEWED * max(1, sizes.min()))
    top = 1.0 if in_shares else max(table.max() for table in shown.values())
    heights = [0.45, *[_height(labels.counts.shape[1])] * len(shown)]
    figure, (first, *maps) = _column(heights)
    _sizes(first, sizes[order])
    for axes, (title, table) in zip(maps, shown.items(), strict=True):
        image = _heat_map(axes, _shares(table) if in_shares else table, labels, top)
        axes.set_title(title)
    _boundaries([first, *maps], labels, order)
    _colour_bar(figure, image, maps, "share of rows" if in_shares else "rows")
    maps[-1].set_xlabel("client" if labels.groups is None else "clients, by planted group")
    below = 0.5
    if labels.relabel is not None and labels.relabel.shape[1] <= _MOST_NAMED:
        below += _names(figure, labels, below)
    style.headline(figure, "Rows of each client by label", material.title_of(labels.seed))
    style.footnote(figure, _footnote(labels), clear=below)
    return figure


def order_of(labels: Labels) -> Array:
    """Order of the clients: by planted group where there are any, then by number."""
    count = len(labels.counts)
    return np.arange(count) if labels.groups is None else np.argsort(labels.groups, kind="stable")


def _column(heights: list[float]) -> tuple[Any, list[Any]]:
    """Return a figure and axes of given heights in inches, one below the other."""
    total = sum(heights) + _GAP * (len(heights) - 1)
    figure, axes, top = style.canvas(_WIDTH, total), [], total
    for height in heights:
        axes.append(figure.add_axes((0, (top - height) / total, 1, height / total)))
        top -= height + _GAP
    for place in axes[:-1]:
        place.tick_params(bottom=False, labelbottom=False)
    return figure, axes


def _height(num_classes: int) -> float:
    return float(np.clip(0.11 * num_classes, 0.4, 2.2))


def _sizes(axes: Any, sizes: Array) -> None:
    """Rows of each client as bars."""
    axes.bar(np.arange(len(sizes)), sizes, width=1.0, color=style.GREY, linewidth=0)
    axes.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(0, 1.1 * sizes.max()), ylabel="rows")


def _shares(table: Array) -> Array:
    return table / np.maximum(1, table.sum(1, keepdims=True))


def _heat_map(axes: Any, values: Array, labels: Labels, top: float) -> Any:
    """Clients across, classes down; white is none."""
    image = axes.imshow(
        values.T, aspect="auto", cmap="Blues", vmin=0, vmax=top, interpolation="nearest"
    )
    axes.spines[:].set_visible(True)
    count = values.shape[1]
    if count <= _MOST_NAMED:
        axes.set_yticks(range(count), labels.names or range(count), size=6)
    axes.set_ylabel("label")
    axes.tick_params(length=0)
    return image


def _colour_bar(figure: Any, image: Any, beside: list[Any], words: str) -> None:
    bottom, top = beside[-1].get_position().y0, beside[0].get_position().y1
    bar = figure.colorbar(image, cax=figure.add_axes((1.02, bottom, 0.02, top - bottom)))
    bar.set_label(words)
    bar.outline.set_visible(False)
    bar.locator.set_params(integer=words == "rows")
    bar.update_ticks()


def _boundaries(axes: list[Any], labels: Labels, order: Array) -> None:
    """Draw lines between planted groups, and name them."""
    if labels.groups is None:
        return
    groups = labels.groups[order]
    edges = np.flatnonzero(np.diff(groups)) + 0.5
    if len(edges) >= _MOST_NAMED:  # many groups: their lines would hide the clients
        return
    for place in axes:
        for edge in edges:
            place.axvline(edge, color=style.BLACK, linewidth=0.6)
    limits = np.concatenate([[-0.5], edges, [len(groups) - 0.5]])
    names = groups[np.ceil(limits[:-1]).astype(int)]
    axes[-1].set_xticks((limits[:-1] + limits[1:]) / 2, [str(name) for name in names])


def _names(figure: Any, labels: Labels, clear: float) -> float:
    """Write what each group calls the source's labels; returns the inches that it takes."""
    assert labels.relabel is not None
    table = labels.relabel[:_MOST_NAMED]
    num_groups, num_classes = table.shape
    names = labels.names or tuple(map(str, range(num_classes)))
    cell = 0.15
    height, whole = cell * num_groups, figure.get_figheight()
    width = min(1.0, num_classes * max(0.2, 0.075 * max(map(len, names))) / _WIDTH)
    top = clear + 0.36
    axes = figure.add_axes((0, -(top + height) / whole, width, height / whole))
    axes.set(xlim=(-0.5, num_classes - 0.5), ylim=(num_groups - 0.5, -0.5))
    for group, row in enumerate(table):
        for original, called in enumerate(row):
            axes.text(original, group, names[called], ha="center", va="center", size=7)
    axes.xaxis.tick_top()
    axes.set_xticks(range(num_classes), names, weight="bold", size=7)
    axes.set_yticks(range(num_groups), [f"group {group}" for group in range(num_groups)], size=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.spines["top"].set_visible(True)
    num_all = len(labels.relabel)
    cut = f" ({num_groups} of {num_all} groups)" if num_all > num_groups else ""
    axes.set_title(f"what each group calls the source's labels{cut}", pad=4)
    return top - clear + height + 0.12


def _footnote(labels: Labels) -> str:
    """Say which rows these are, and how the images of each group lie."""
    lines = ["all rows: training, validation and test, held-out clients included"]
    if labels.turn is not None:
        told = [
            f"group {group} {turned:g}°" + (f" and sheared by {sheared:g}°" if sheared else "")
            for group, (turned, sheared) in enumerate(labels.turn[:_MOST_NAMED].tolist())
        ]
        told += ["..."] if len(labels.turn) > _MOST_NAMED else []
        lines.append(f"images are turned clockwise: {', '.join(told)}")
    return "\n".join(lines)
