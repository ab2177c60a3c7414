"""``handspan.compare``: trials first, then the final runs, then one table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handspan.comparison.cells import Data, Outcome, Runner, label
from handspan.comparison.folders import refuse_other
from handspan.comparison.grids import Axes, Choice, at_the_edge, best_trial
from handspan.comparison.outcome import Comparison, lacking, lacking_trials
from handspan.comparison.plan import Cell, Plan, make_plan
from handspan.core.errors import HandspanError
from handspan.disk import in_turn, make
from handspan.fitting import Progress
from handspan.options import DataOptions


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a comparison is.

    Attributes
    ----------
    done, total
        Cells finished, and all that this sitting runs or takes over.
    label, score, metric
        The last one, its leading score, and what that is.
    seconds_left
        Estimated from the cells run in this sitting; None before the first.
    """

    done: int
    total: int
    label: str
    score: float | None
    metric: str | None
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
        As in ``fit``; ``engine`` is ``steady`` by default, so that a table comes again as it was.

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
        options={"engine": "steady", **options},
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
        refuse_other(folder)
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
    seconds: dict[str, list[float]] = field(default_factory=dict)
    todo: list[Cell] = field(default_factory=list)
    done: int = 0

    def run(self) -> Comparison:
        cells = [*self.plan.trial_cells(), *self.plan.final_cells({})]
        self.todo = [cell for cell in cells if cell.is_mine]
        if self.plan.budget is not None:  # what never spends it is told before anything runs
            for cell in self.plan.final_cells({}):
                if cell.seed == self.plan.seeds[0] and cell.is_mine:
                    self.runner.estimate(cell)
        self.visit(self.plan.trial_cells(), mine=True)
        self.visit(self.plan.trial_cells(), mine=False)
        self.refuse_untried()
        self.visit(self.final_cells(), mine=True)
        if self.folder is None:
            return self.result()
        with in_turn(self.folder):  # other shards may have gone on in the same folder
            self.visit(self.plan.trial_cells(), mine=False)
            self.visit(self.final_cells(), mine=False)
            result = self.result()
            result.save(self.folder)
        return result

    def visit(self, cells: Iterable[Cell], *, mine: bool) -> None:
        """Run one's own cells, or take over what others have finished."""
        for cell in cells:
            if cell.is_mine != mine:
                continue
            begin = time.perf_counter()
            outcome = self.runner.run(cell)
            if outcome is None:
                continue
            if cell.trial is None:
                self.outcomes[cell.text, cell.seed] = outcome
            else:
                self.trials.setdefault(cell.text, {})[cell.trial] = self.told(cell, outcome)
            if mine:
                if not outcome.was_there:
                    self.seconds.setdefault(cell.text, []).append(time.perf_counter() - begin)
                self.finish(cell, outcome)

    def finish(self, cell: Cell, outcome: Outcome) -> None:
        """Note a cell of one's own."""
        self.done += 1
        self.todo = [other for other in self.todo if not _same(other, cell)]
        self.tell(cell, outcome)
        if self.folder is not None and not outcome.was_there:
            with in_turn(self.folder):
                self.result().note(self.folder)

    def final_cells(self) -> Iterator[Cell]:
        """Final runs of the methods of which all trials are there."""
        chosen = self.chosen()
        waiting = {text for text in self.plan.trials if text not in chosen}
        for cell in self.plan.final_cells(chosen):
            if cell.text not in waiting:
                yield cell

    def tell(self, cell: Cell, outcome: Outcome) -> None:
        if self.watch is None:
            return
        metric = outcome.row["metric"]
        self.watch(
            Standing(
                done=self.done,
                total=self.done + len(self.todo),
                label=f"{label(cell)}, seed {cell.seed}",
                score=None if metric is None else outcome.row[f"personal_{metric}_mean"],
                metric=metric,
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
            "command": row["command"],
            "higher_is_better": row["higher_is_better"],
            "metric": row["metric"],
            **{name: row[name] for name in ("rounds", "rows", "bytes_up", "bytes_down")},
        }

    def refuse_untried(self) -> None:
        """Refuse final runs without their trials."""
        if self.plan.stage != "final":
            return
        missing = lacking_trials(self.plan.describe(), self.tuning())
        if missing:
            raise HandspanError(
                f"--stage final needs all trials, and {len(missing)} are missing: "
                f"{'; '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}; run --stage tune "
                "of every shard and join the folders by handspan merge"
            )

    def chosen(self) -> dict[str, Choice]:
        return {
            text: entry["chosen"]
            for text, entry in self.tuning().get("methods", {}).items()
            if entry["chosen"] is not None
        }

    def tuning(self) -> dict[str, Any]:
        return summarise_trials(self.plan.describe(), self.trials)

    def result(self) -> Comparison:
        about, tuning = self.plan.describe(), self.tuning()
        order = [(cell.text, cell.seed) for cell in self.plan.final_cells({})]
        there = [key for key in order if key in self.outcomes]
        rows = [self.outcomes[key].row for key in there]
        return Comparison(
            rows,
            about=about,
            scores={key: self.outcomes[key].scores for key in there},
            tuning=tuning,
            missing=lacking(about, tuning, rows),
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
    for text in about["methods"]:
        points = about["trials"][text]
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
