"""What pictures are made from: plain arrays and texts, read from folders elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from handspan.report import tables
from handspan.report.plots.style import NotShown, is_local

Array = NDArray[Any]
_SHORT = {"rmse": "RMSE", "mae": "MAE", "auroc": "AUROC", "f1": "F1", "macro_f1": "macro F1"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes
    ----------
    method, seed
        Which run it is.
    history
        One entry per evaluation; ``seconds`` where they are known.
    scores
        Scores of all clients, by name (``personal_accuracy``, ``global_accuracy``, ...).
    newcomers
        Scores of held-out clients by the number of rows they give; nothing where none were.
    """

    method: str
    seed: int
    history: list[dict[str, Any]]
    scores: dict[str, Array]
    newcomers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Who has how many rows of which label.

    Attributes
    ----------
    counts
        (clients, classes) rows as the clients see their labels.
    original
        The same as the source calls them, where a partition has renamed labels.
    groups
        (clients,) planted groups.
    relabel
        (groups, classes) how each group calls each class.
    turn
        (groups, 2) degrees by which each group's images are turned and sheared.
    names
        Names of the classes.
    seed
        Whose partition it is.
    """

    counts: Array
    seed: int
    original: Array | None = None
    groups: Array | None = None
    relabel: Array | None = None
    turn: Array | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Private coordinates v_i of the clients that took part in a run.

    Attributes
    ----------
    method, seed
        Which run it is.
    values
        (clients, r) coordinates.
    products
        (r, r) U^T U, which turns distances of coordinates into those of models; None if unknown.
    offset
        (1 + r, 1 + r) the same with the shared offset in front, where there is one.
    rank
        How many directions the method counts; None where it does not say.
    planted, found
        (clients,) planted groups, and those that the method has found, where there are any.
    num_absent
        Clients that never took part and still hold what they started with.
    """

    method: str
    seed: int
    values: Array
    products: Array | None = None
    offset: Array | None = None
    rank: float | None = None
    planted: Array | None = None
    found: Array | None = None
    num_absent: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether neither coordinates nor basis have diverged."""
        parts = [part for part in (self.values, self.products, self.offset) if part is not None]
        return all(bool(np.isfinite(part).all()) for part in parts)


@dataclass(frozen=True, kw_only=True)
class Material:
    """All that is known of a run or a comparison.

    Attributes
    ----------
    title
        Data, partition, clients, rounds, seeds.
    score
        Name of the leading score in the summaries.
    higher_is_better
        Whether more of it is better.
    is_comparison
        Whether there are several runs side by side.
    runs
        All of them, in the order of the comparison.
    labels, coordinates
        As above; or half a sentence that says why they are not known.
    omitted
        Methods that no picture shows, and why.
    """

    title: str
    score: str
    higher_is_better: bool
    is_comparison: bool
    runs: list[Run]
    labels: Labels | str
    coordinates: list[Coordinates] | str = field(default_factory=list[Coordinates])
    omitted: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def methods(self) -> list[str]:
        """Methods in the order of the comparison."""
        return list(dict.fromkeys(run.method for run in self.runs))

    @property
    def baseline(self) -> str | None:
        """The method of training alone, if it is there."""
        return next((method for method in self.methods if is_local(method)), None)

    @property
    def metric(self) -> str:
        """What the leading score measures, without its prefix."""
        return self.score.removeprefix("personal_").removesuffix("_mean")

    @property
    def column(self) -> str:
        """Name of the leading score of single clients."""
        return f"personal_{self.metric}"

    @property
    def scale(self) -> float:
        """Shares are shown in per cent."""
        return 100.0 if tables.is_share(self.score) else 1.0

    @property
    def noun(self) -> str:
        """The metric in words."""
        return _SHORT.get(self.metric, self.metric.replace("_", " "))

    def heading(self, rest: str) -> str:
        """Title of a picture that begins with the metric."""
        return f"{self.noun[0].upper()}{self.noun[1:]} {rest}"

    @property
    def unit(self) -> str:
        """The metric in words with its unit, for an axis."""
        return f"{self.noun} (%)" if tables.is_share(self.score) else self.noun

    def title_of(self, seed: int) -> str:
        """Title of a picture that shows one of the seeds."""
        several = len({run.seed for run in self.runs}) > 1
        return f"{self.title} (here seed {seed})" if several else self.title

    def runs_of(self, method: str) -> list[Run]:
        """Runs of a method, seed by seed."""
        return [run for run in self.runs if run.method == method]

    def scores_of(self, method: str, column: str | None = None) -> list[Array]:
        """Scores of the clients, an array for each seed, on the scale of the screen.

        NaN where a client has none; matrix problems have no scores of clients at all.
        """
        name = column or self.column
        found = [run.scores[name] for run in self.runs_of(method) if name in run.scores]
        if not found:
            raise NotShown("there are no scores of single clients")
        return [self.scale * values for values in found]
