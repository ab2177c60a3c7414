"""What ``handspan compare`` and ``handspan merge`` do, once their options have been read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.progress import Progress

from handspan import comparison, fitting
from handspan.commands import bars, console, follow, training_values, warn_divergence
from handspan.comparison import Comparison, Standing
from handspan.options import DataOptions, from_values
from handspan.report.comparison import on_screen
from handspan.report.tables import told_score


def compare_methods(
    methods: list[str],
    options: dict[str, Any],
    settings: dict[str, Any],
    *,
    seeds: int,
    tune: int | None,
    grid: Sequence[str],
    equal: str,
    shard: str | None,
    stage: str,
    out: str | None,
) -> None:
    """``handspan compare``."""
    data_options, training = from_values(options)
    values = training_values(training)
    seed = values.pop("seed")
    if "engine" not in options:
        del values["engine"]  # a comparison has its own default
    if equal != "rounds" and "rounds" not in options:
        del values["rounds"]  # the budget alone says how long a run is
    data = _by_seed(data_options)
    with bars() as progress:
        table = comparison.compare(
            methods,
            data,
            seeds=seeds,
            seed=seed,
            out=out,
            settings=settings,
            tune=tune,
            grid=grid,
            equal=equal,
            shard=shard,
            stage=stage,
            data_options=data_options,
            progress=lambda text, current: follow(progress, f"{text} (seed {current})"),
            watch=_whole(progress),
            **values,
        )
    show(table, out)


def merge_folders(folders: list[str], *, out: str) -> None:
    """``handspan merge``."""
    show(comparison.merge(folders, out), out)


def _by_seed(options: DataOptions) -> Callable[[int, str], Any]:
    """Data of a seed; those read last are kept. What was done to them is told once."""
    opened: dict[tuple[int, str], Any] = {}
    told: set[str] = set()

    def data(seed: int, problem: str) -> Any:
        if (seed, problem) not in opened:
            opened.clear()
            opened[seed, problem] = fitting.open_data(options, seed, problem)
            for remark in opened[seed, problem][0].info.get("remarks", []):
                if remark not in told:
                    console.print(f"note: {remark}")
                told.add(remark)
        return opened[seed, problem]

    return data


def _whole(progress: Progress) -> Callable[[Standing], None]:
    """Show how far the whole table is, above the run that is going on."""
    task = progress.add_task("whole table", total=None, status="")

    def watch(standing: Standing) -> None:
        score = ""
        if standing.score is not None and standing.metric is not None:
            score = f" {told_score(standing.score, standing.metric)}"
        status = f"run {standing.done}/{standing.total}, last {standing.label}{score}"
        progress.update(
            task,
            completed=standing.done,
            total=standing.total,
            status=status,
            seconds_left=standing.seconds_left,
        )
        for other in progress.task_ids:
            if other != task:
                progress.remove_task(other)

    return watch


def show(table: Comparison, out: str | None) -> None:
    """Print a comparison: its tables, or what is missing."""
    if table.missing:
        some = "; ".join(table.missing[:4]) + (" ..." if len(table.missing) > 4 else "")
        console.print(f"{len(table.missing)} runs are missing, the table waits for them: {some}")
    else:
        for part in on_screen(table):
            console.print(part, markup=False)
        warn_divergence(table)
    if out is not None:
        made = "comparison.json" if table.missing else "comparison.json, table.md, .csv and .tex"
        console.print(f"results in {out}: {made}; commands.txt repeats each run", soft_wrap=True)
