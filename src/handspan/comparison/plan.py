"""What a comparison consists of: which cells there are, and whose they are."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handspan.comparison.budget import Budget, read_equal
from handspan.comparison.grids import Axes, Choice, make_trials
from handspan.core.errors import HandspanError, nearest
from handspan.options import EXECUTION, DataOptions, TrainingOptions
from handspan.registry import parse
from handspan.report.settings import plain

FORMAT = 1
STAGES = ("all", "tune", "final")
MOST_SEEDS = 10_000
_LONGEST = 200  # characters of a folder's name, of which there may be 255


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a comparison: a trial (its position in the grid) or a final run.

    Attributes
    ----------
    choice
        Settings given beside those that all methods get.
    """

    text: str
    seed: int
    choice: Choice
    trial: int | None = None
    is_mine: bool = True

    def name(self, rounds: int | None = None) -> str:
        """Folder of the cell, inside that of the comparison."""
        given = self.choice if rounds is None else {**self.choice, "rounds": rounds}
        suffix = "".join(f"@{slug(key)}={slug(plain(value))}" for key, value in given.items())
        place = "" if self.trial is None else "trials/"
        return f"{place}{_short(slug(self.text) + suffix)}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that was asked for.

    Attributes
    ----------
    trials
        Settings to try for each method; empty where nothing is tuned.
    budget
        What every run may spend; None where rounds are equal.
    settings
        Given to every method that has the field.
    shard, stage
        Which of the cells this sitting runs.
    """

    texts: tuple[str, ...]
    seeds: tuple[int, ...]
    trials: Mapping[str, Sequence[Choice]]
    budget: Budget | None
    settings: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any]
    data_options: DataOptions | None
    shard: tuple[int, int] = (1, 1)
    stage: str = "all"

    def trial_cells(self) -> Iterator[Cell]:
        """Trials, method by method, all with the first seed."""
        for i, text in enumerate(self.texts):
            for j, choice in enumerate(self.trials.get(text, ())):
                yield Cell(
                    text=text,
                    seed=self.seeds[0],
                    choice=choice,
                    trial=j,
                    is_mine=self._is_mine(i, j) and self.stage != "final",
                )

    def final_cells(self, chosen: Mapping[str, Choice]) -> Iterator[Cell]:
        """Final runs, seed by seed."""
        for j, seed in enumerate(self.seeds):
            for i, text in enumerate(self.texts):
                yield Cell(
                    text=text,
                    seed=seed,
                    choice=dict(chosen.get(text, {})),
                    is_mine=self._is_mine(i, j) and self.stage != "tune",
                )

    def _is_mine(self, method: int, place: int) -> bool:
        """Deal cells in turn; whole methods where the final runs wait for trials.

        So a shard of both stages waits for no other: whoever runs a method's trials runs the rest.
        Otherwise no shard gets one method alone, since methods differ in what they cost.
        """
        index, count = self.shard
        turn = method
        if not (self.trials and self.stage == "all"):
            turn += place * len(self.texts)
            turn += 0 if len(self.texts) % count else place
        return turn % count + 1 == index

    def describe(self) -> dict[str, Any]:
        """Return what two shards of one comparison agree in, for its folder."""
        options = {**dataclasses.asdict(TrainingOptions()), **self.options}
        for name in (
            "seed",
            *(("rounds",) if self.budget and "rounds" not in self.options else ()),
        ):
            del options[name]  # the plan has its own say
        return {
            "format": FORMAT,
            "methods": list(self.texts),
            "seeds": list(self.seeds),
            "trials": {text: list(points) for text, points in self.trials.items()},
            "equal": "rounds" if self.budget is None else str(self.budget),
            "settings": {text: _texts(values) for text, values in self.settings.items()},
            "options": _texts({k: v for k, v in options.items() if k not in EXECUTION}),
            "data": None if self.data_options is None else dataclasses.asdict(self.data_options),
        }


def _texts(values: Mapping[str, Any]) -> dict[str, Any]:
    simple = bool | int | float | str | None
    return {
        key: value if isinstance(value, simple) else _text(value) for key, value in values.items()
    }


def _text(value: Any) -> str:
    """Name what was given from Python without an address that changes."""
    if isinstance(value, list | tuple):
        return ",".join(_text(entry) for entry in value)
    if isinstance(value, str):
        return value
    return getattr(value, "__name__", type(value).__name__)


def make_plan(
    methods: Sequence[str],
    *,
    seeds: int,
    seed: int,
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    data_options: DataOptions | None,
    tune: int | None,
    grid: Sequence[str] | Axes | None,
    equal: str,
    shard: str | None,
    stage: str,
) -> Plan:
    """Check everything that can be checked before data are read."""
    if seeds < 1:
        raise HandspanError(f"seeds must be at least 1, not {seeds}")
    if seeds > MOST_SEEDS:
        raise HandspanError(f"seeds must be at most {MOST_SEEDS}, not {seeds}")
    texts = [text.strip() for text in methods if text.strip()]
    if not texts:
        raise HandspanError("name at least one method to compare")
    repeated = {text for text in texts if texts.count(text) > 1}
    if repeated:
        raise HandspanError(f"{sorted(repeated)[0]!r} stands twice: vary a setting or drop one")
    shares = _share(texts, settings)
    budget = read_equal(equal)
    trials = make_trials(texts, grid, tune, budget, options, shares, seed)
    if stage not in STAGES:
        raise HandspanError(f"--stage takes {', '.join(STAGES)}, not {stage!r}")
    if data_options is not None and data_options.validate:
        raise HandspanError(
            "compare scores test rows, and validation rows in its trials: --validate is for run"
        )
    if stage == "tune" and not trials:
        raise HandspanError("--stage tune has nothing to do: give --tune or --grid")
    for text in texts if trials else ():
        if parse(text).method.problem == "matrix":
            raise HandspanError(
                f"{text} factorises all rows and leaves none to choose settings on: compare it "
                "without --tune and --grid"
            )
    return Plan(
        texts=tuple(texts),
        seeds=tuple(range(seed, seed + seeds)),
        trials=trials,
        budget=budget,
        settings=shares,
        options=dict(options),
        data_options=data_options,
        shard=read_shard(shard),
        stage=stage,
    )


def read_shard(text: str | None) -> tuple[int, int]:
    """Read ``i/n``, counted from 1."""
    if text is None:
        return 1, 1
    first, _, last = (part.strip() for part in text.partition("/"))
    if not first.isdecimal() or not last.isdecimal() or int(last) < 1:
        raise HandspanError(f"--shard takes i/n, such as 1/4, not {text!r}")
    index, count = int(first), int(last)
    if not 1 <= index <= count:
        raise HandspanError(f"--shard {text}: shards are numbered 1/{count} to {count}/{count}")
    return index, count


def _share(texts: Sequence[str], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Give each method the settings it has a field for; what none has is an error."""
    fields = {text: parse(text).fields for text in texts}
    for key in settings:
        if not any(key in names for names in fields.values()):
            known = sorted(set().union(*fields.values()))
            raise HandspanError(f"none of the methods has a setting {key!r}{nearest(key, known)}")
    return {
        text: {key: value for key, value in settings.items() if key in fields[text]}
        for text in texts
    }


def _short(name: str) -> str:
    """Return a name that file systems take; what is cut off stands in a hash."""
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def slug(text: str) -> str:
    """Text as part of a file name."""
    return re.sub(r"[^A-Za-z0-9=.+_-]", "-", text)
