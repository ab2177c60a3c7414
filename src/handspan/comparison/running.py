"""``handspan.compare``: trials first, then the final runs, then one table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handspan.comparison.cells import Data, Outcome, Runner, make
from handspan.comparison.grids import Axes, Choice, at_the_edge, best_trial, tell
from handspan.comparison.outcome import Comparison
from handspan.comparison.plan import Cell, Plan, make_plan
from handspan.core.errors import HandspanError
from handspan.fitting import Progress
from handspan.options import DataOptions


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a comparison is.

    Attributes
    ----------
    done, total
        Cells finished, and all that this sitting runs or takes over.
    label, score
        The last one, and its leading score.
    seconds_left
        Estimated from the cells run in this sitting; None before the first.
    """

    done: int
    total: int
    label: str
    score: float | None
    seconds_left: float | None


def compare(
    methods: Sequence[str],
    data: Data,
    *,
    seeds: int = 3,
    seed: int = 0,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    tune: int | None = None,
    grid: Sequence[str] | Axes | None = None,
    equal: str = "rounds",
    shard: str | None = None,
    stage: str = "all",
    progress: Callable[[str, int], Progress | None] | None = None,
    watch: Callable[[Standing], None] | None = None,
    data_options: DataOptions | None = None,
    **options: Any,
) -> Comparison:
    """Run every method with every seed on the same terms, and test who is best.

    Parameters
    ----------
    methods
        Texts ``name[+ft][:key=value...]``; one method can stand twice with other settings.
    data
        A federation for all seeds, or a function (seed, problem) -> (federation, held out).
    seeds, seed
        How many seeds, and the first one.
    out
        Folder of the comparison; finished runs found there are taken over, others resumed.
    settings
        Given to every method that has the field; an error where none has it.
    tune
        Trials of each method, with the first seed, scored on validation rows; off by default.
    grid
        What to try: texts ``METHOD:field=a,b,c``, or a mapping {method: {field: values}}; step
        sizes 0.03, 0.1, 0.3 and 1 by default. The method ``all`` stands for those without one.
    equal
        ``rounds``, ``rows:N`` or ``bytes:N``; with the last two, ``rounds`` is only a bound.
    shard, stage
        Run only the i-th of n parts (``"1/4"``), and only the trials (``tune``) or only the final
        runs (``final``).
    progress
        (label, seed) -> what ``fit`` takes as ``progress``; called for every run.
    watch
        Called with a ``Standing`` after every cell.
    **options
        As in ``fit``.

    Returns
    -------
    Comparison
        A list of the summaries, one for each method and seed, as in ``comparison.json``; with
        ``table()``, ``tests``, ``chosen`` and ``save(folder)``.

    Examples
    --------
    >>> from handspan.data import load_data
    >>> data = load_data("digits", partition="permuted:2", num_clients=10, seed=0)
    >>> table = compare(["local", "fedavg"], data, seeds=1, rounds=2, engine="loop")
    >>> [row["method"] for row in table]
    ['local', 'fedavg']
    """
    plan = make_plan(
        methods,
        seeds=seeds,
        seed=seed,
        settings=settings or {},
        options=options,
        data_options=data_options,
        tune=tune,
        grid=grid,
        equal=equal,
        shard=shard,
        stage=stage,
    )
    if out is None and (plan.shard != (1, 1) or stage != "all"):
        raise HandspanError("a part of a comparison needs a folder to leave its results in: --out")
    folder = None if out is None else Path(out)
    if folder is not None:
        make(folder)
    runner = Runner(plan=plan, data=data, folder=folder, progress=progress)
    return _Sitting(plan=plan, runner=runner, folder=folder, watch=watch).run()


@dataclass(kw_only=True)
class _Sitting:
    """One sitting of a comparison: what was run, what is missing, how long it takes."""

    plan: Plan
    runner: Runner
    folder: Path | None
    watch: Callable[[Standing], None] | None
    outcomes: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    trials: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    done: int = 0

    def run(self) -> Comparison:
        self.trial_cells = list(self.plan.trial_cells())
        self.todo = [cell for cell in (*self.trial_cells, *self.plan.final_cells({}))]
        self.todo = [cell for cell in self.todo if cell.is_mine]
        if self.plan.budget is not None:  # what never spends it is told before anything runs
            for cell in self.plan.final_cells({}):
                if cell.seed == self.plan.seeds[0] and cell.is_mine:
                    self.runner.estimate(cell)
        for cell in self.trial_cells:
            outcome = self.play(cell)
            if outcome is not None:
                self.trials.setdefault(cell.text, {})[cell.trial or 0] = self.told(cell, outcome)
            self.note(outcome)
        complete = self.ready()
        for cell in self.plan.final_cells(self.chosen()):
            if cell.text not in complete:
                self.missing.append(f"{cell.text}, seed {cell.seed}")
                continue
            outcome = self.play(cell)
            if outcome is not None:
                self.outcomes[cell.text, cell.seed] = outcome
            self.note(outcome)
        result = self.result()
        if self.folder is not None:
            result.save(self.folder)
        return result

    def play(self, cell: Cell) -> Outcome | None:
        begin = time.perf_counter()
        outcome = self.runner.run(cell)
        if outcome is None:
            choice = f" {tell(cell.choice)}" if cell.trial is not None else ""
            self.missing.append(f"{cell.text}{choice}, seed {cell.seed}")
            return None
        if not outcome.was_there:
            self.seconds.setdefault(cell.text, []).append(time.perf_counter() - begin)
        if cell.is_mine:
            self.done += 1
            self.todo = [other for other in self.todo if not _same(other, cell)]
            self.tell(cell, outcome)
        return outcome

    def tell(self, cell: Cell, outcome: Outcome) -> None:
        if self.watch is None:
            return
        label = cell.text if cell.trial is None else f"{cell.text} {tell(cell.choice)}"
        metric = outcome.row["metric"]
        self.watch(
            Standing(
                done=self.done,
                total=self.done + len(self.todo),
                label=f"{label}, seed {cell.seed}",
                score=None if metric is None else outcome.row[f"personal_{metric}_mean"],
                seconds_left=self.seconds_left(),
            )
        )

    def seconds_left(self) -> float | None:
        """A cell takes as long as its method took so far, or as long as the others."""
        known = [value for values in self.seconds.values() for value in values]
        if not known:
            return 0.0 if not self.todo else None
        overall = sum(known) / len(known)
        each = {text: sum(values) / len(values) for text, values in self.seconds.items()}
        return sum(each.get(cell.text, overall) for cell in self.todo)

    def told(self, cell: Cell, outcome: Outcome) -> dict[str, Any]:
        """Return what ``tuning.json`` says of a trial: nothing that varies with the clock."""
        row = outcome.row
        return {
            "setting": cell.choice,
            "score": row[f"personal_{row['metric']}_mean"],
            "cell": row["cell"],
            "higher_is_better": row["higher_is_better"],
            "metric": row["metric"],
            **{name: row[name] for name in ("rounds", "rows", "bytes_up", "bytes_down")},
        }

    def note(self, outcome: Outcome | None) -> None:
        if self.folder is not None and outcome is not None and not outcome.was_there:
            self.result().note(self.folder)

    def ready(self) -> set[str]:
        """Return the methods of which all trials are there; they alone may go on."""
        lacking = {
            text
            for text in self.plan.texts
            if len(self.trials.get(text, {})) < len(self.plan.trials.get(text, ()))
        }
        if self.plan.stage == "final" and lacking:
            raise HandspanError(
                f"--stage final needs all trials, and {len(self.missing)} are missing: "
                f"{'; '.join(self.missing[:4])}{' ...' if len(self.missing) > 4 else ''}. Run "
                "--stage tune of every shard and join the folders by handspan merge"
            )
        return set(self.plan.texts) - lacking

    def chosen(self) -> dict[str, Choice]:
        return {
            text: entry["chosen"]
            for text, entry in self.tuning().get("methods", {}).items()
            if entry["chosen"] is not None
        }

    def tuning(self) -> dict[str, Any]:
        return summarise_trials(self.plan.describe(), self.trials)

    def result(self) -> Comparison:
        order = [(cell.text, cell.seed) for cell in self.plan.final_cells({})]
        there = [key for key in order if key in self.outcomes]
        return Comparison(
            [self.outcomes[key].row for key in there],
            about=self.plan.describe(),
            scores={key: self.outcomes[key].scores for key in there},
            tuning=self.tuning(),
            missing=self.missing,
        )


def _same(one: Cell, other: Cell) -> bool:
    return (one.text, one.seed, one.trial) == (other.text, other.seed, other.trial)


def summarise_trials(
    about: Mapping[str, Any], trials: Mapping[str, Mapping[int, Mapping[str, Any]]]
) -> dict[str, Any]:
    """Choose for every method whose trials are all there; returns ``tuning.json``."""
    if not about["trials"]:
        return {}
    methods: dict[str, Any] = {}
    metric, sign = None, True
    for text, points in about["trials"].items():
        found = trials.get(text, {})
        told = [dict(found[place]) for place in sorted(found)]
        for trial in told:
            metric, sign = trial.pop("metric", metric), trial.pop("higher_is_better", sign)
        is_complete = len(told) == len(points)
        best = best_trial([trial["score"] for trial in told], sign) if is_complete else None
        chosen = None if best is None else points[best]
        methods[text] = {
            "trials": told,
            "chosen": chosen,
            "at_the_edge": [] if chosen is None else at_the_edge(points, chosen),
        }
    return {
        "seed": about["seeds"][0],
        "rows": "validation",
        "metric": metric,
        "higher_is_better": sign,
        "methods": methods,
    }
