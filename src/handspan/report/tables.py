"""Tables for the screen: accuracy with its spread, and what it cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from handspan.registry import methods

_HIGHER_IS_WORSE = ("loss", "rmse", "mae", "objective")


def lead(summary: dict[str, Any]) -> str:
    """Return the score that ranks runs: the first personal one, or the clustering's."""
    for name in summary:
        if name.startswith("personal_") and name.endswith("_mean") and summary[name] is not None:
            if not name.startswith("personal_loss"):
                return name
    for name in ("clustering_accuracy", "objective"):
        if summary.get(name) is not None:
            return name
    return "personal_accuracy_mean"


def comparison_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """One line per method: means over the seeds, the best one marked."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    score = lead(rows[0])
    sign = -1 if any(bad in score for bad in _HIGHER_IS_WORSE) else 1
    means = {name: _mean(runs, score) for name, runs in by_method.items()}
    known = [sign * value for value in means.values() if value is not None]
    best = sign * max(known) if known else None
    other = score.replace("_mean", "_pooled")
    columns = [(score, True), (other, False), (other.replace("personal", "global"), False),
               ("worst_decile", False), (score.replace("personal", "heldout"), False)]
    columns = [
        (name, spread) for name, spread in dict(columns).items()
        if any(run.get(name) is not None for run in rows)
    ]
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for name, _ in columns:
        table.add_column(_heading(name), justify="right")
    for name in ("rows", "MB up", "MB down", "seconds"):
        table.add_column(name, justify="right")
    for name, runs in by_method.items():
        mark = best is not None and means[name] == best
        cells = [_score(runs, column, spread) for column, spread in columns]
        costs = [_count(_mean(runs, "rows")), _megabytes(_mean(runs, "bytes_up")),
                 _megabytes(_mean(runs, "bytes_down")), f"{_mean(runs, 'seconds') or 0:.1f}"]
        table.add_row(name, *cells, *costs, style="bold green" if mark else None)
    return table


def _mean(runs: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [run[name] for run in runs if run.get(name) is not None]
    return statistics.fmean(values) if values else None


def _score(runs: Sequence[dict[str, Any]], name: str, with_spread: bool) -> str:
    values = [run[name] for run in runs if run.get(name) is not None]
    if not values:
        return "-"
    scale = 100 if _is_share(name) else 1
    digits = 1 if _is_share(name) else 4
    text = f"{scale * statistics.fmean(values):.{digits}f}"
    if with_spread and len(values) > 1:
        text += f" ± {scale * statistics.stdev(values):.{digits}f}"
    return text


def _is_share(name: str) -> bool:
    return any(word in name for word in ("accuracy", "decile", "f1", "auroc"))


def _heading(name: str) -> str:
    return name.replace("_", " ") + (" %" if _is_share(name) else "")


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.2f}"


def method_table() -> Table:
    """All methods, and what leaves a client."""
    table = Table(title="Methods", title_justify="left")
    for name in ("method", "paper", "leaves the client", "can be inferred", "stays"):
        table.add_column(name, overflow="fold")
    for method in methods().values():
        table.add_row(
            method.name, method.paper, method.uploads, method.inferable, method.private
        )
    return table
