"""Tables for the screen: accuracy with its spread, and what it cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from handspan.registry import methods

_LOWER_IS_BETTER = ("loss", "rmse", "mae", "objective")


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
    known = {name for run in rows for name, value in run.items() if value is not None}
    columns = [column for column in _columns(score) if column[0] in known]
    best = _best({name: _mean(runs, score) for name, runs in by_method.items()}, score)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold")
    for _, heading, _ in columns:
        table.add_column(heading, justify="right")
    for name in ("rows", "MB up", "MB down", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, runs in by_method.items():
        cells = [_score(runs, column, with_spread) for column, _, with_spread in columns]
        costs = [
            _count(_mean(runs, "rows")),
            _megabytes(_mean(runs, "bytes_up")),
            _megabytes(_mean(runs, "bytes_down")),
            f"{_mean(runs, 'seconds') or 0:.1f}",
        ]
        mark = name == best and len(by_method) > 1
        table.add_row(f"{name} *" if mark else name, *cells, *costs, style="bold" if mark else None)
    return table


def _columns(score: str) -> list[tuple[str, str, bool]]:
    """Score, heading, and whether its spread over seeds is shown."""
    unit = " %" if _is_share(score) else ""
    if not score.startswith("personal_"):
        return [
            (score, score.replace("_", " ") + unit, True),
            ("nmi", "NMI", False),
            ("ari", "ARI", False),
            ("objective", "objective", False),
        ]
    metric = score.removeprefix("personal_").removesuffix("_mean")
    name = metric.replace("_", " ")
    return [
        (score, f"{name}{unit}", True),
        (f"personal_{metric}_pooled", f"pooled{unit}", False),
        (f"global_{metric}_pooled", f"global{unit}", False),
        ("worst_decile", f"worst tenth{unit}", False),
        (f"heldout_{metric}_mean", f"new clients{unit}", False),
        ("ari", "ARI", False),
    ]


def _best(means: dict[str, float | None], score: str) -> str | None:
    sign = -1 if any(word in score for word in _LOWER_IS_BETTER) else 1
    known = {name: sign * value for name, value in means.items() if value is not None}
    return max(known, key=lambda name: known[name]) if known else None


def _mean(runs: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [run[name] for run in runs if run.get(name) is not None]
    return statistics.fmean(values) if values else None


def _score(runs: Sequence[dict[str, Any]], name: str, with_spread: bool) -> str:
    values = [run[name] for run in runs if run.get(name) is not None]
    if not values:
        return "-"
    is_share = _is_share(name) or (name == "worst_decile" and _is_share(lead(runs[0])))
    scale, digits = (100, 1) if is_share else (1, 4)
    text = f"{scale * statistics.fmean(values):.{digits}f}"
    if with_spread and len(values) > 1:
        text += f" ± {scale * statistics.stdev(values):.{digits}f}"
    return text


def _is_share(name: str) -> bool:
    return any(word in name for word in ("accuracy", "f1", "auroc"))


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
        table.add_row(method.name, method.paper, method.uploads, method.inferable, method.private)
    return table
