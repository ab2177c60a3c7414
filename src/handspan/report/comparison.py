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
from handspan.report.newcomers import newcomer_lines, newcomer_tables
from handspan.report.settings import tell
from handspan.report.tuning import about_tuning, trial_lines, trials_table, trials_title

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
    data = about["data"]
    source = "given data" if data is None else f"{data['data']}, {data['partition']}"
    return (
        f"{source}, {first['num_clients']} clients, {equal(comparison)}, "
        f"{seeds} seed{'s' if seeds > 1 else ''}"
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
    return [*found, *about_tuning(comparison.tuning), _terms(comparison), _hashes(comparison)]


def _terms(comparison: Any) -> str:
    """What was given to all methods alike."""
    given = comparison.about["options"]
    work = "epochs" if given["epochs"] is not None else "steps"
    shown = {
        "model": given["model"] or "mlp",
        "cohort": given["cohort"],
        work: "each method's own" if given[work] is None else given[work],
        **{name: given[name] for name in ("batch_size", "learning_rate")},
    }
    chosen = {name for row in comparison for name in row["chosen"]}
    return f"For all: {tell({k: v for k, v in shown.items() if k not in chosen})}."


def _hashes(comparison: Any) -> str:
    """Which partition and which rows each seed has."""
    hashes = {row["seed"]: row for row in comparison}
    told = [
        f"{seed}: {row['partition_hash'] or '-'} {row['fingerprint']}"
        for seed, row in sorted(hashes.items())
    ]
    return f"Hashes of partition and data by seed: {', '.join(told)}."


def _missed(comparison: Any) -> list[str]:
    """Runs that --rounds or the method itself ended earlier, or that overshot."""
    unit = comparison.about["equal"].partition(":")[0]
    names = ("rows",) if unit == "rows" else ("bytes_up", "bytes_down")
    return [
        f"{row['method']}, seed {row['seed']} ({sum(row[name] for name in names):,.0f} {unit})"
        for row in comparison
        if row["budget_met"] is False
    ]


def text(comparison: Any) -> str:
    """Write what stands on the screen."""
    from rich.console import Console

    sink = io.StringIO()
    console = Console(file=sink, width=150)
    for part in on_screen(comparison):
        console.print(part, markup=False)
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
                rows,
                title,
                score=section.score,
                marks={k: _MARKS[v] for k, v in marks.items()},
                with_rounds=comparison.about["equal"] != "rounds",
            )
        )
        if section.tests:
            found.append(
                tables.tests_table(
                    section.tests,
                    section.best or "",
                    section.score,
                    higher_is_better=rows[0]["higher_is_better"],
                )
            )
    found += newcomer_tables(comparison)
    if comparison.tuning:
        found += [trials_title(comparison.tuning), trials_table(comparison.tuning)]
    return found + notes(comparison)


def _body(section: Section) -> tuple[list[str], list[list[str]]]:
    """Headings and lines, as Markdown and LaTeX have them."""
    headings = ["method", *(heading for _, heading, _ in section.columns)]
    if section.tests:
        headings += [tables.difference_heading(section.score), "p (Holm)"]
    headings += tables.cost_headings(with_rounds=True)
    lines: list[list[str]] = []
    for method, runs in section.runs.items():
        cells = [tables.score_of(runs, name, spread) for name, _, spread in section.columns]
        if section.tests:
            cells += tables.test_cells(section.tests.get(method), section.score)
        lines.append([method, *cells, *tables.cost_cells(runs, with_rounds=True)])
    return headings, lines


def markdown(comparison: Any) -> str:
    """Write a table that a README takes."""
    parts = [[f"**{_plain(caption(comparison))}**"]]
    for section in sections(comparison):
        headings, lines = _body(section)
        parts.append(_table(headings, [(section.mark(line[0]), line) for line in lines]))
    headings, lines = newcomer_lines(comparison)
    if lines:
        parts.append(_table(headings, [("", line) for line in lines]))
    parts += [[_plain(note)] for note in notes(comparison)]
    if comparison.tuning:
        headings, lines = trial_lines(comparison.tuning)
        parts.append([_plain(trials_title(comparison.tuning))])
        parts.append(_table(headings, [("", line) for line in lines]))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _table(headings: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Write a table whose lines have a mark (best, tie or nothing) and cells."""
    out = [_row(headings), _row(["---"] + ["---:"] * (len(headings) - 1))]
    for mark, (name, *cells) in lines:
        told = (
            f"**{_plain(name)}** {_plain(_MARKS[mark])}"
            if mark == BEST
            else (f"{_plain(name)} {_MARKS[mark]}".strip())
        )
        out.append(_row([told, *map(_plain, cells)]))
    return out


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Keep Markdown from reading signs as its own."""
    return "".join(f"\\{sign}" if sign in "\\|*_" else sign for sign in text)


def csv_table(comparison: Any) -> str:
    """Write one line per method with plain numbers, for other programs."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    tested = ("difference", "low", "high", "p", "p_holm", "rank_biserial", "pairs", "zeros")
    names = (
        "score", "mean", "std", "pooled", "global", "worst_decile", "new_clients", "rank",
        "num_groups", "ari",
    )  # fmt: skip
    told_once = ("equal", "chosen", "partition_hashes", "data_hashes")
    writer.writerow(["method", "mark", "seeds", *names, *tested, *_COSTS, *told_once])
    for section in sections(comparison):
        for method, runs in section.runs.items():
            test = section.tests.get(method, {})
            values = [run[section.score] for run in runs if run.get(section.score) is not None]
            spread = statistics.stdev(values) if len(values) > 1 else None
            metric = section.score.removeprefix("personal_").removesuffix("_mean")
            rest = (
                f"personal_{metric}_pooled", f"global_{metric}_pooled", "worst_decile",
                f"heldout_{metric}_mean", "rank", "num_groups", "ari",
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
                    " ".join(run["partition_hash"] or "-" for run in runs),
                    " ".join(run["fingerprint"] for run in runs),
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
    headings, lines = newcomer_lines(comparison)
    if lines:
        tabulars.append(tex.tabular(headings, [("", line) for line in lines]))
    told = [note.replace("* best mean", "Bold: best mean") for note in notes(comparison)]
    return tex.table(tabulars, caption(comparison), told)
