"""Coordinates v_i of the clients in two dimensions, with the groups planted and found."""

from __future__ import annotations

from typing import Any

import numpy as np

from handspan.report.plots import style
from handspan.report.plots.material import Array, Coordinates, Material
from handspan.report.plots.style import NotShown

_ENOUGH = 0.9  # share of the variance from which on one pair of components is enough
_LITTLE = 0.01  # share of the variance from which on a component is worth an axis


def draw(material: Material, mine: Coordinates) -> Any:
    """Draw the principal components of the personal models, a dot for each client."""
    if len(mine.values) < 2:
        raise NotShown("fewer than two clients have taken part")
    if not mine.is_finite:
        raise NotShown(f"{mine.method} diverged")
    points, shares = components(mine)
    found, how = groups_found(mine, points)
    pairs = [(0, 1)]
    more = int((shares[2:] > _LITTLE).sum())
    if shares[:2].sum() < _ENOUGH and more:
        pairs.append((2, 3) if more > 1 else (0, 2))
    figure, matrix = style.panels(2.9, 2.9, 1, len(pairs), gap=(0.75, 0))
    for axes, pair in zip(matrix[0], pairs, strict=True):
        _panel(axes, points[:, list(pair)], mine.planted, found)
        for name, component in zip(("xlabel", "ylabel"), pair, strict=True):
            share = f"{shares[component]:.0%} of the variance"
            axes.set(**{name: f"component {component + 1} ({share})"})
    style.headline(figure, f"Coordinates of {mine.method}", material.title_of(mine.seed))
    style.footnote(figure, _footnote(mine, found, how))
    return figure


def components(mine: Coordinates) -> tuple[Array, Array]:
    """Principal components of U v_i, or of v_i where U is not known, and their variances' shares.

    At least two columns; signs such that the largest entry of each is positive.
    """
    values = mine.values - mine.values.mean(0)
    if mine.products is not None:  # |U v| = |R v| where R^T R = U^T U
        squares, vectors = np.linalg.eigh(mine.products)
        values = values @ (vectors * np.sqrt(squares.clip(min=0)))
    left, singular, _ = np.linalg.svd(values, full_matrices=False)
    points = left * singular
    sign = np.sign(points[np.abs(points).argmax(0), np.arange(points.shape[1])])
    points = points * np.where(sign == 0, 1, sign)
    shares = singular**2 / max(float((singular**2).sum()), np.finfo(float).tiny)
    missing = max(0, 2 - points.shape[1])
    return np.pad(points, ((0, 0), (0, missing))), np.pad(shares, (0, missing))


def groups_found(mine: Coordinates, points: Array) -> tuple[Array | None, str]:
    """Groups that the method tells, or k-means of the components; and how they were found."""
    if mine.found is not None:
        return mine.found, "groups found by the method"
    if mine.planted is None:
        return None, "no groups are planted, and the method tells none"
    from sklearn.cluster import KMeans

    count = min(len(np.unique(mine.planted)), len(np.unique(points, axis=0)))
    kmeans = KMeans(count, n_init=10, random_state=0).fit(points)
    return kmeans.labels_, f"groups found by k-means of all components, k = {count}"


def agreement(planted: Array, found: Array) -> float:
    """Adjusted Rand index of the planted and the found groups."""
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(planted, found))


def _panel(axes: Any, points: Array, planted: Array | None, found: Array | None) -> None:
    """Colour by planted group, marker by found group; planted groups named at their middle."""
    none = np.zeros(len(points), dtype=int)
    colours, markers = (none if kind is None else kind for kind in (planted, found))
    for group in np.unique(colours):
        for place, cluster in enumerate(np.unique(markers)):
            those = (colours == group) & (markers == cluster)
            if those.any():
                axes.scatter(
                    *points[those].T, s=18, linewidths=0.3, edgecolors="white", alpha=0.8,
                    color=style.COLOURS[int(group) % len(style.COLOURS)],
                    marker=style.MARKERS[place % len(style.MARKERS)],
                )  # fmt: skip
    axes.axhline(0, color=style.PALE, linewidth=0.5, zorder=0)
    axes.axvline(0, color=style.PALE, linewidth=0.5, zorder=0)
    axes.set_aspect("equal", adjustable="datalim")
    if planted is None:
        return
    groups = np.unique(planted)
    for group in groups:
        axes.annotate(
            str(group), np.median(points[planted == group], axis=0), weight="bold", ha="center",
            va="center", size=8 if len(groups) <= 10 else 6,
            bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white", "linewidth": 0.6},
        )  # fmt: skip


def _footnote(mine: Coordinates, found: Array | None, how: str) -> str:
    lines: list[str] = []
    if mine.planted is not None:
        lines.append("colour and number: planted group")
    if found is not None:
        lines.append(f"marker: {how}")
        if mine.planted is not None:
            ari = agreement(mine.planted, found)
            lines[-1] += f"; adjusted Rand index with the planted ones {ari:.2f}"
    else:
        lines.append(how)
    what = "U v_i, models on the shared basis" if mine.products is not None else "v_i"
    lines.append(f"principal components of {what}, centred")
    if mine.num_absent:
        lines.append(f"not shown: {mine.num_absent:,} clients that never took part")
    return "\n".join(lines)
