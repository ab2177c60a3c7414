"""Running one cell of a comparison, or taking it over from its folder."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from handspan.comparison.budget import Estimate, estimate, is_met, nearest_to, revise
from handspan.comparison.commands import run_command
from handspan.comparison.plan import Cell, Plan
from handspan.core.data import FederatedData
from handspan.data.selection import selection_data
from handspan.fitting import Problem, Progress, execute, set_up
from handspan.options import DataOptions
from handspan.registry import parse
from handspan.report.settings import tell
from handspan.runs import RunFolder

Data = FederatedData | Callable[[int, str], tuple[FederatedData, FederatedData | None]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished cell.

    Attributes
    ----------
    row
        Its summary, with what the table needs beside it.
    scores
        The leading score of every client; none for matrix problems.
    was_there
        Whether it was taken over.
    """

    row: dict[str, Any]
    scores: np.ndarray | None
    was_there: bool


class _Done(NamedTuple):
    """What a finished run has left."""

    summary: dict[str, Any]
    clients: dict[str, Any]
    engine: Mapping[str, Any]


@dataclass(kw_only=True)
class Runner:
    """Runs the cells of a plan, each in a folder of its own where there is one."""

    plan: Plan
    data: Data
    folder: Path | None
    progress: Callable[[str, int], Progress | None] | None
    _opened: dict[Any, Any] = field(default_factory=dict)
    _estimates: dict[str, Estimate] = field(default_factory=dict)

    def run(self, cell: Cell) -> Outcome | None:
        """Run or take over a cell; None where it is another shard's and not there yet."""
        if self.plan.budget is None:
            return self._once(cell, None)
        found = self.estimate(cell)
        tried: list[Outcome] = []
        attempts: list[tuple[int, int]] = []
        rounds: int | None = found.rounds
        bound = self.plan.options.get("rounds")
        while rounds is not None:
            outcome = self._once(cell, rounds)
            if outcome is None:
                return None
            tried.append(outcome)
            attempts.append((rounds, self.plan.budget.spent(outcome.row)))
            if outcome.row["rounds"] < rounds:  # the method itself had finished
                break
            rounds = revise(attempts, self.plan.budget, found, bound)
        place = nearest_to(attempts, self.plan.budget)
        kept = tried[place]
        met = is_met(attempts[place], self.plan.budget, found)
        return dataclasses.replace(
            kept,
            row={**kept.row, "budget_met": met},
            was_there=all(one.was_there for one in tried),
        )

    def estimate(self, cell: Cell) -> Estimate:
        """Count the rounds that the budget pays for."""
        assert self.plan.budget is not None
        name = cell.name()
        if name not in self._estimates:
            self._estimates[name] = estimate(
                lambda rounds: self._set_up(cell, rounds)[0],
                self.plan.budget,
                self.plan.options.get("rounds"),
            )
        return self._estimates[name]

    def _once(self, cell: Cell, rounds: int | None) -> Outcome | None:
        name = cell.name(rounds)
        folder = None if self.folder is None else RunFolder(self.folder / name)
        was_there = folder is not None and folder.summary_path.exists()
        if not cell.is_mine and not was_there:
            return None
        problem, config = self._set_up(cell, rounds)
        if folder is not None and was_there:
            done = _taken_over(folder, config)
        else:
            done = self._play(cell, problem, config, folder)
        metric = problem.metrics[0] if problem.metrics else None
        row = {
            **done.summary,
            "cell": name,
            "chosen": dict(cell.choice),
            "metric": None if metric is None else metric.name,
            "higher_is_better": None if metric is None else metric.higher_is_better,
            "clients_hash": client_identity(self._open(cell)[0]),
            "budget_met": None,
            "command": self._command(cell, problem, config, done.engine),
        }
        scores = None if metric is None else done.clients[f"personal_{metric.name}"]
        return Outcome(
            row=row,
            scores=None if scores is None else scores.double().numpy(),
            was_there=was_there,
        )

    def _play(
        self, cell: Cell, problem: Problem, config: dict[str, Any], folder: RunFolder | None
    ) -> _Done:
        """Run a cell, or go on with it."""
        follow = None if self.progress is None else self.progress(label(cell), cell.seed)
        result = execute(
            problem,
            config,
            out=None if folder is None else folder.path,
            resume=True,
            progress=follow,
        )
        engine = result.choice.description(problem.setting.device)
        return _Done(result.summary, result.clients, engine)

    def _command(
        self, cell: Cell, problem: Problem, config: Mapping[str, Any], engine: Mapping[str, Any]
    ) -> str | None:
        return run_command(
            cell.text,
            dataclasses.asdict(problem.options),
            self._data_options(cell),
            config["settings"],
            engine,
        )

    def _data_options(self, cell: Cell) -> DataOptions | None:
        """Say where the rows of a cell come from; None for given ones."""
        options = self.plan.data_options
        if options is None or cell.trial is None:
            return options
        return dataclasses.replace(options, validate=True)

    def _set_up(self, cell: Cell, rounds: int | None) -> tuple[Problem, dict[str, Any]]:
        data, held_out = self._open(cell)
        fields = parse(cell.text).fields
        mine = {key: value for key, value in cell.choice.items() if key in fields}
        rest = {key: value for key, value in cell.choice.items() if key not in fields}
        options = dict(self.plan.options)
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if one in rest:
                options.pop(other, None)
        options.update(rest)
        if rounds is not None:
            options["rounds"] = rounds
        return set_up(
            cell.text,
            data,
            held_out=held_out,
            seed=cell.seed,
            settings={**self.plan.settings[cell.text], **mine},
            data_options=self._data_options(cell),
            **options,
        )

    def _open(self, cell: Cell) -> tuple[FederatedData, FederatedData | None]:
        """Rows of a cell; a trial's have no test rows among them."""
        problem = parse(cell.text).method.problem
        if cell.trial is None:
            return self._given(cell.seed, problem)
        key = ("trial", cell.seed, problem)
        if key not in self._opened:
            self._opened.clear()
            self._opened[key] = selection_data(self._given(cell.seed, problem)[0])
        return self._opened[key], None

    def _given(self, seed: int, problem: str) -> tuple[FederatedData, FederatedData | None]:
        if isinstance(self.data, FederatedData):
            return self.data, None
        return self.data(seed, problem)


def _taken_over(folder: RunFolder, config: dict[str, Any]) -> _Done:
    """Read a finished cell; one of another configuration is refused."""
    engine = folder.check(config)["engine"]
    return _Done(folder.summary(), folder.clients(), engine)


def label(cell: Cell) -> str:
    """Say which run this is; the seed apart."""
    return cell.text if cell.trial is None else f"{cell.text} {tell(cell.choice)}"


def client_identity(data: FederatedData) -> str:
    """Hash that is equal where two seeds have the same clients, however their rows are split.

    By the clients' names, or else by the labels each of them has.
    """
    digest = hashlib.sha256()
    if data.names:
        digest.update("\n".join(data.names).encode())
        return digest.hexdigest()[:16]
    digest.update(data.offsets.numpy().tobytes())
    if data.y is not None:
        y = data.y.cpu().reshape(len(data.y), -1).double().sum(1)
        client = torch.repeat_interleave(torch.arange(data.num_clients), data.offsets.diff())
        order = y.argsort(stable=True)
        order = order[client[order].argsort(stable=True)]
        digest.update(y[order].numpy().tobytes())
    return digest.hexdigest()[:16]
