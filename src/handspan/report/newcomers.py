"""The table of new clients: their score against the number of rows that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from handspan.report import tables


def newcomer_lines(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and one line per method, means over the seeds; nothing without new clients.

    Parameters
    ----------
    rows
        Summaries; those with held-out clients have ``newcomers``.
    """
    entries = [(row["method"], entry) for row in rows for entry in row.get("newcomers") or ()]
    if not entries:
        return [], []
    given = list(dict.fromkeys(entry["given"] for _, entry in entries))
    metric = entries[0][1]["metric"]
    _, heading, _ = tables.columns(f"personal_{metric}_mean")[0]
    lines: list[list[str]] = []
    for method in dict.fromkeys(name for name, _ in entries):
        mine = [entry for name, entry in entries if name == method]
        means = [tables.mean_of([e for e in mine if e["given"] == n], "mean") for n in given]
        lines.append([method, *(tables.format_score(mean, metric) for mean in means)])
    return [f"new clients: {heading} with rows", *map(str, given)], lines


def newcomer_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Write the same for the screen: a table, or none."""
    headings, lines = newcomer_lines(rows)
    if not lines:
        return []
    table = Table(
        title="new clients against the rows they give", title_justify="left", box=box.SIMPLE_HEAD,
        pad_edge=False,
    )  # fmt: skip
    table.add_column(headings[0], overflow="fold")
    for name in headings[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return [table]
