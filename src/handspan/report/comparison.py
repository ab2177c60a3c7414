"""The table of a comparison, as text, Markdown, CSV and LaTeX.

All forms show the same numbers. A comparison is given as ``handspan.comparison.Comparison``; runs
of matrix methods, which have no scores of clients, stand in a table of their own.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handspan.report import tables
from handspan.report.settings import tell

BEST, TIE = "best", "tie"
_MARKS = {BEST: "*", TIE: "≈", "": ""}
_COSTS = ("rounds", "rows", "bytes_up", "bytes_down", "seconds")

Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table: runs that are ranked by one score.

    Attributes
    ----------
    runs
        By method, in the order of the comparison.
    score
        Name in the summaries of what ranks them.
    tests
        By method; none for the best, and none in tables without scores of clients.
    """

    runs: dict[str, list[dict[str, Any]]]
    score: str
    best: str | None
    tests: dict[str, dict[str, Any]]

    @property
    def columns(self) -> list[tuple[str, str, bool]]:
        """Score, heading, and whether its spread over seeds is shown."""
        known = {
            name
            for runs in self.runs.values()
            for run in runs
            for name, value in run.items()
            if value is not None
        }
        return [column for column in tables.columns(self.score) if column[0] in known]

    def mark(self, method: str) -> str:
        """``best``, ``tie`` or nothing."""
        if method == self.best and len(self.runs) > 1:
            return BEST
        return TIE if self.tests.get(method, {}).get("is_tie") else ""


def means(rows: Runs, name: str) -> dict[str, float | None]:
    """Mean over the seeds of each method, None where no seed has a value."""
    values: dict[str, list[float]] = {}
    for row in rows:
        kept = values.setdefault(row["method"], [])
        if row.get(name) is not None:
            kept.append(row[name])
    return {text: statistics.fmean(kept) if kept else None for text, kept in values.items()}


def sections(comparison: Any) -> list[Section]:
    """Split runs with scores of clients from matrix problems."""
    found: list[Section] = []
    for is_matrix in (False, True):
        rows = [row for row in comparison if (row["metric"] is None) == is_matrix]
        if not rows:
            continue
        runs: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            runs.setdefault(row["method"], []).append(row)
        score = tables.lead(rows[0]) if is_matrix else f"personal_{rows[0]['metric']}_mean"
        tests = {} if is_matrix else comparison.tests
        best = tests.get("best") if tests else tables.best(means(rows, score), score)
        told = {test["method"]: test for test in tests.get("methods", [])}
        found.append(Section(runs=runs, score=score, best=best, tests=told))
    return found


def caption(comparison: Any) -> str:
    """Which data, how much of it, what is equal."""
    about, first = comparison.about, comparison[0]
    seeds = len({row["seed"] for row in comparison})
    hashes = list(dict.fromkeys(row["fingerprint"] for row in comparison))
    data = about["data"]
    source = "given data" if data is None else f"{data['data']}, {data['partition']}"
    told = " ".join(hashes[:3]) + (f" ... {hashes[-1]} ({len(hashes)})" if len(hashes) > 3 else "")
    return (
        f"{source}, {first['num_clients']} clients, {equal(comparison)}, "
        f"{seeds} seed{'s' if seeds > 1 else ''}, data {told}"
    )


def equal(comparison: Any) -> str:
    """Say what is the same for all methods."""
    unit, _, amount = comparison.about["equal"].partition(":")
    if amount:
        return f"equal {unit} ({int(amount):,} a run)"
    rounds = sorted({row["rounds"] for row in comparison})
    return f"equal rounds ({' to '.join(f'{r:,}' for r in {rounds[0]: 0, rounds[-1]: 0})})"


def notes(comparison: Any) -> list[str]:
    """What has to be known to read the table."""
    found: list[str] = []
    tests = comparison.tests
    if tests.get("methods"):
        pairs = max(test["pairs"] for test in tests["methods"])
        found.append(
            f"* best mean; ≈ not distinguishable from it: {tests['test']}, over {pairs} pairs "
            f"({tests['pairs']}), {tests['correction']} over {len(tests['methods'])} tests, level "
            f"{tests['level']:g}. Difference: method minus best, 95 % bootstrap interval of the "
            "mean."
        )
    for test in tests.get("methods", []):
        if test["p"] is None:
            found.append(f"{test['method']} is not tested: some scores are not finite.")
    if len({row["seed"] for row in comparison}) > 1:
        found.append("± is the standard deviation over seeds of the mean over clients.")
    missed = _missed(comparison)
    if missed:
        found.append(f"Not within a round of the budget: {', '.join(missed)}.")
    return found + _about_tuning(comparison)


def _missed(comparison: Any) -> list[str]:
    """Runs that --rounds or the method itself ended earlier, or that overshot."""
    unit, _, amount = comparison.about["equal"].partition(":")
    if not amount:
        return []
    names = ("rows",) if unit == "rows" else ("bytes_up", "bytes_down")
    found: dict[str, None] = {}
    for row in comparison:
        spent = sum(row[name] for name in names)
        if abs(spent - int(amount)) > 2 * spent / max(1, row["rounds"]):
            found[f"{row['method']} ({spent:,.0f} {unit})"] = None
    return list(found)


def _about_tuning(comparison: Any) -> list[str]:
    tuning = comparison.tuning
    if not tuning:
        return ["No setting was tuned (--tune 4 chooses step sizes on validation rows)."]
    numbers = {len(entry["trials"]) for entry in tuning["methods"].values()}
    told = [
        f"{text}: {tell(entry['chosen'])}"
        for text, entry in tuning["methods"].items()
        if entry["chosen"] is not None
    ]
    found = [
        f"Chosen by {tuning['metric']} on validation rows with seed {tuning['seed']}, "
        f"{'/'.join(map(str, sorted(numbers)))} trials each: {'; '.join(told)}."
    ]
    edges = [text for text, entry in tuning["methods"].items() if entry["at_the_edge"]]
    if edges:
        found.append(f"Chosen at the edge of the grid: {', '.join(edges)}.")
    lost = [
        text
        for text, entry in tuning["methods"].items()
        if entry["chosen"] is not None and all(t["score"] is None for t in entry["trials"])
    ]
    if lost:
        found.append(f"Every trial diverged, so the first stands: {', '.join(lost)}.")
    return found


def trial_lines(comparison: Any) -> list[list[str]]:
    """Every trial: method, setting, score on validation rows, and a mark at the chosen one."""
    tuning, found = comparison.tuning, []
    for text, entry in tuning.get("methods", {}).items():
        for trial in entry["trials"]:
            score = tables.format_score(trial["score"], tuning["metric"])
            is_chosen = trial["setting"] == entry["chosen"]
            found.append([text, tell(trial["setting"]), score, "chosen" if is_chosen else ""])
    return found


def text(comparison: Any) -> str:
    """Write what stands on the screen."""
    from rich.console import Console

    sink = io.StringIO()
    console = Console(file=sink, width=150)
    for part in on_screen(comparison):
        console.print(part)
    return sink.getvalue()


def on_screen(comparison: Any) -> list[Any]:
    """Tables and lines for a rich console."""
    found: list[Any] = []
    for section in sections(comparison):
        rows = [run for runs in section.runs.values() for run in runs]
        marks = {name: section.mark(name) for name in section.runs}
        title = caption(comparison)
        found.append(
            tables.comparison_table(
                rows, title, score=section.score, marks={k: _MARKS[v] for k, v in marks.items()}
            )
        )
        if section.tests:
            found.append(tables.tests_table(section.tests, section.best or "", section.score))
    if comparison.tuning:
        found.append(tables.trials_table(trial_lines(comparison), comparison.tuning["metric"]))
    return found + notes(comparison)


def _body(section: Section) -> tuple[list[str], list[list[str]]]:
    """Headings and lines, as Markdown and LaTeX have them."""
    headings = ["method", *(heading for _, heading, _ in section.columns)]
    if section.tests:
        headings += ["difference", "p (Holm)"]
    headings += ["rounds", "rows", "MB up", "MB down", "seconds"]
    lines: list[list[str]] = []
    for method, runs in section.runs.items():
        cells = [tables.score_of(runs, name, spread) for name, _, spread in section.columns]
        if section.tests:
            cells += tables.test_cells(section.tests.get(method), section.score)
        lines.append([method, *cells, *tables.cost_cells(runs, with_rounds=True)])
    return headings, lines


def markdown(comparison: Any) -> str:
    """Write a table that a README takes."""
    out: list[str] = [f"**{caption(comparison)}**", ""]
    for section in sections(comparison):
        headings, lines = _body(section)
        out += [_row(headings), _row(["---"] + ["---:"] * (len(headings) - 1))]
        for line in lines:
            mark = section.mark(line[0])
            name = line[0].replace("|", "\\|")
            name = f"**{name}** \\*" if mark == BEST else f"{name} {_MARKS[mark]}".strip()
            out.append(_row([name, *line[1:]]))
        out.append("")
    out += [f"\\{note}" if note.startswith("*") else note for note in _spaced(notes(comparison))]
    if comparison.tuning:
        out += ["", _row(["method", "setting", "validation", ""]), _row(["---"] * 4)]
        out += [
            _row([cell.replace("|", "\\|") for cell in line]) for line in trial_lines(comparison)
        ]
    return "\n".join(out).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spaced(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in (line, "")][:-1]


def csv_table(comparison: Any) -> str:
    """Write one line per method with plain numbers, for other programs."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    tested = ("difference", "low", "high", "p", "p_holm", "pairs", "zeros")
    names = ("score", "mean", "std", "pooled", "global", "worst_decile", "new_clients", "ari")
    writer.writerow(["method", "mark", "seeds", *names, *tested, *_COSTS, "equal", "chosen"])
    for section in sections(comparison):
        for method, runs in section.runs.items():
            test = section.tests.get(method, {})
            values = [run[section.score] for run in runs if run.get(section.score) is not None]
            spread = statistics.stdev(values) if len(values) > 1 else None
            metric = section.score.removeprefix("personal_").removesuffix("_mean")
            rest = (
                f"personal_{metric}_pooled", f"global_{metric}_pooled", "worst_decile",
                f"heldout_{metric}_mean", "ari",
            )  # fmt: skip
            numbers = [tables.mean_of(runs, section.score), spread]
            numbers += [tables.mean_of(runs, name) for name in rest]
            numbers += [test.get(name) for name in tested]
            numbers += [tables.mean_of(runs, name) for name in _COSTS]
            told = ["" if number is None else f"{number:.10g}" for number in numbers]
            writer.writerow(
                [
                    method,
                    section.mark(method),
                    len(runs),
                    section.score,
                    *told,
                    comparison.about["equal"],
                    tell(runs[0]["chosen"]),
                ]
            )
    return sink.getvalue()


def latex(comparison: Any) -> str:
    """Write a table with booktabs rules."""
    from handspan.report import latex as tex

    tabulars = []
    for section in sections(comparison):
        headings, lines = _body(section)
        marked = [(section.mark(line[0]), line) for line in lines]
        tabulars.append(tex.tabular(headings, marked))
    told = [note.replace("* best mean", "Bold: best mean") for note in notes(comparison)]
    return tex.table(tabulars, caption(comparison), told)
