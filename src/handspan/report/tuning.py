"""What was tried on validation rows, and what was chosen: a table and some lines for the notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from handspan.report import tables
from handspan.report.settings import tell

_WIDEST = 72  # characters of settings that fit side by side


def trial_lines(tuning: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines with every trial, its score, and a star at the chosen one.

    Methods with one grid have a line each, with a column for each setting; others have a line for
    each trial.
    """
    metric, entries = tuning["metric"], tuning["methods"]
    heading = tables.columns(f"personal_{metric}_mean")[0][1]
    cells = {text: [_cell(trial, entry, metric) for trial in entry["trials"]]
             for text, entry in entries.items()}  # fmt: skip
    grids = [[tell(trial["setting"]) for trial in entry["trials"]] for entry in entries.values()]
    if all(grid == grids[0] for grid in grids) and sum(map(len, grids[0])) <= _WIDEST:
        return ["method", *grids[0]], [[text, *line] for text, line in cells.items()]
    lines = [
        [text, setting, cell]
        for (text, line), grid in zip(cells.items(), grids, strict=True)
        for setting, cell in zip(grid, line, strict=True)
    ]
    return ["method", "setting", f"validation {heading}"], lines


def _cell(trial: Mapping[str, Any], entry: Mapping[str, Any], metric: str) -> str:
    score = tables.format_score(trial["score"], metric)
    return f"{score} *" if trial["setting"] == entry["chosen"] else score


def trials_title(tuning: Mapping[str, Any]) -> str:
    """Say what the numbers of the trials are."""
    heading = tables.columns(f"personal_{tuning['metric']}_mean")[0][1]
    return f"trials: {heading} on validation rows, * chosen"


def trials_table(tuning: Mapping[str, Any]) -> Table:
    """Write the trials for the screen."""
    headings, lines = trial_lines(tuning)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in headings:
        is_text = name in ("method", "setting")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    for line in lines:
        table.add_row(*map(escape, line))
    return table


def about_tuning(tuning: Mapping[str, Any]) -> list[str]:
    """Tell how settings were chosen, and where a grid was too narrow."""
    if not tuning:
        return ["No setting was tuned (--tune 4 chooses step sizes on validation rows)."]
    entries = tuning["methods"]
    numbers = sorted({len(entry["trials"]) for entry in entries.values()})
    told = [f"{text}: {tell(entry['chosen'])}" for text, entry in entries.items()]
    found = [
        f"Chosen by {tuning['metric']} on validation rows with seed {tuning['seed']}, "
        f"{'/'.join(map(str, numbers))} trials each: {'; '.join(told)}."
    ]
    edges = [text for text, entry in entries.items() if entry["at_the_edge"]]
    if edges:
        found.append(f"Chosen at the edge of the grid: {', '.join(edges)}.")
    lost = [t for t, entry in entries.items() if all(e["score"] is None for e in entry["trials"])]
    if lost:
        found.append(f"Every trial diverged, so the first stands: {', '.join(lost)}.")
    return found
