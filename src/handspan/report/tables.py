"""Tables for the screen: accuracy with its spread, and what it cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from handspan.registry import methods

_LOWER_IS_BETTER = ("loss", "rmse", "mae", "objective")
_COUNTS = ("rank", "num_groups")


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


def comparison_table(
    rows: Sequence[dict[str, Any]],
    title: str,
    *,
    score: str | None = None,
    marks: Mapping[str, str] | None = None,
    with_rounds: bool = False,
) -> Table:
    """One line per method: means over the seeds, the best one marked.

    ``marks`` (``*`` for the best, ``≈`` for a tie) come from the tests, where there are any.
    """
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    score = score or lead(rows[0])
    if marks is None:
        first = best({name: mean_of(runs, score) for name, runs in by_method.items()}, score)
        marks = {first: "*"} if first is not None and len(by_method) > 1 else {}
    known = {name for run in rows for name, value in run.items() if value is not None}
    shown = [column for column in columns(score) if column[0] in known]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold")
    for _, heading, _ in shown:
        table.add_column(heading, justify="right")
    for name in cost_headings(with_rounds=with_rounds):
        table.add_column(name, justify="right", no_wrap=True)
    for name, runs in by_method.items():
        cells = [score_of(runs, column, with_spread) for column, _, with_spread in shown]
        mark = marks.get(name, "")
        style = "bold" if mark == "*" else None
        costs = cost_cells(runs, with_rounds=with_rounds)
        table.add_row(f"{escape(name)} {mark}".strip(), *cells, *costs, style=style)
    return table


def tests_table(
    tests: Mapping[str, dict[str, Any]], against: str, score: str, *, higher_is_better: bool
) -> Table:
    """One line per method: how far from the best, and whether that can be told from chance."""
    table = Table(
        title=f"against {against}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("method", overflow="fold")
    for name in (difference_heading(score), "p", "p (Holm)", "verdict", "effect", "pairs"):
        table.add_column(name, justify="right")
    for name, test in tests.items():
        difference, p_holm = test_cells(test, score)
        effect = "-" if test["rank_biserial"] is None else f"{test['rank_biserial']:+.2f}"
        told = verdict(test, higher_is_better)
        table.add_row(
            escape(name), difference, _p(test["p"]), p_holm, told, effect, str(test["pairs"])
        )
    return table


def difference_heading(score: str) -> str:
    """Heading of the differences from the best."""
    return f"difference{_unit(score)} [95 % interval]"


def verdict(test: Mapping[str, Any], higher_is_better: bool) -> str:
    """What a test says: tie, worse, or mixed (a worse mean, though better on most clients)."""
    if test["p"] is None:
        return "-"
    if test["is_tie"]:
        return "tie"
    return "mixed" if (test["rank_biserial"] > 0) == higher_is_better else "worse"


def test_cells(test: Mapping[str, Any] | None, score: str) -> list[str]:
    """Difference with its interval, and the corrected p-value."""
    if test is None or test["difference"] is None:
        return ["-", "-"]
    scale, digits = (100, 1) if is_share(score) else (1, 4)
    told = [f"{scale * test[name]:+.{digits}f}" for name in ("difference", "low", "high")]
    return [f"{told[0]} [{told[1]}, {told[2]}]", _p(test["p_holm"])]


def cost_headings(*, with_rounds: bool) -> list[str]:
    """Headings of ``cost_cells``."""
    return [*(["rounds"] if with_rounds else []), "rows", "MB up", "MB down", "seconds"]


def cost_cells(runs: Sequence[dict[str, Any]], *, with_rounds: bool = False) -> list[str]:
    """Rows, megabytes up and down, and seconds; means over the seeds."""
    costs = [
        _count(mean_of(runs, "rows")),
        _megabytes(mean_of(runs, "bytes_up")),
        _megabytes(mean_of(runs, "bytes_down")),
        f"{mean_of(runs, 'seconds') or 0:.1f}",
    ]
    return [_count(mean_of(runs, "rounds")), *costs] if with_rounds else costs


def columns(score: str) -> list[tuple[str, str, bool]]:
    """Score, heading, and whether its spread over seeds is shown."""
    unit = _unit(score)
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
        ("rank", "rank", False),
        ("num_groups", "groups", False),
        ("ari", "ARI", False),
    ]


def best(means: Mapping[str, float | None], score: str) -> str | None:
    """Name of the best mean, None where there is no number."""
    sign = 1 if higher_is_better(score) else -1
    known = {name: sign * value for name, value in means.items() if value is not None}
    return max(known, key=lambda name: known[name]) if known else None


def higher_is_better(score: str) -> bool:
    """Whether more of a score is better, by its name."""
    return not any(word in score for word in _LOWER_IS_BETTER)


def mean_of(runs: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Mean over the runs that have a value."""
    values = [run[name] for run in runs if run.get(name) is not None]
    return statistics.fmean(values) if values else None


def score_of(runs: Sequence[dict[str, Any]], name: str, with_spread: bool) -> str:
    """Mean over the runs, with its standard deviation where it is wanted."""
    values = [run[name] for run in runs if run.get(name) is not None]
    if not values:
        return "-"
    in_per_cent = is_share(name) or (name == "worst_decile" and is_share(_ranking(runs[0])))
    if name in _COUNTS:
        return f"{statistics.fmean(values):.3g}"
    scale, digits = (100, 1) if in_per_cent else (1, 4)
    text = f"{scale * statistics.fmean(values):.{digits}f}"
    if with_spread and len(values) > 1:
        text += f" ± {scale * statistics.stdev(values):.{digits}f}"
    return text


def format_score(value: float | None, name: str) -> str:
    """Write one score as tables do."""
    if value is None:
        return "-"
    return f"{100 * value:.1f}" if is_share(name) else f"{value:.4f}"


def told_score(value: float | None, name: str) -> str:
    """Write one score as sentences do, with its unit."""
    return format_score(value, name) + ("" if value is None else _unit(name))


def _ranking(run: Mapping[str, Any]) -> str:
    """Name of the score to which the worst tenth belongs."""
    return f"personal_{run['metric']}_mean" if run.get("metric") else lead(dict(run))


def is_share(name: str) -> bool:
    """Whether a score is shown in per cent."""
    return any(word in name for word in ("accuracy", "f1", "auroc"))


def _unit(name: str) -> str:
    return " %" if is_share(name) else ""


def _p(value: float | None) -> str:
    if value is None:
        return "-"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.2f}"


def profile_table(rows: Sequence[tuple[str, float, float]]) -> Table:
    """Where a round's time went: part, milliseconds, share."""
    table = Table(title="Where the time of a round goes", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("part")
    for heading in ("ms", "share"):
        table.add_column(heading, justify="right")
    for name, milliseconds, share in rows:
        table.add_row(name, f"{milliseconds:.2f}", f"{share:.0%}")
    return table


def method_table() -> Table:
    """All methods, and what leaves a client."""
    lines = [(m.name, m.paper, m.uploads, m.inferable, m.private) for m in methods().values()]
    head = ("method", "paper", "leaves the client", "can be inferred", "stays")
    return text_table("Methods", head, lines)


def text_table(title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """Words in columns."""
    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table
