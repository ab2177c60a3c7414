"""What a method module offers to the registry: a name, a config, a builder and its statement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from handspan.core.algorithm import Algorithm
from handspan.core.data import Rows
from handspan.core.errors import HandspanError
from handspan.core.task import Task


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Base of all configurations: frozen, keyword-only, every field documented."""

    def one_of(self, name: str, allowed: Iterable[str]) -> None:
        """Refuse a word that is none of those allowed."""
        if getattr(self, name) not in (known := list(allowed)):
            *most, last = known
            listed = f"{', '.join(most)} or {last}"
            raise HandspanError(f"{name} must be {listed}, not {getattr(self, name)!r}")

    def at_least(self, name: str, least: float) -> None:
        """Refuse a number below the least that makes sense; None stands for a default."""
        value = getattr(self, name)
        if value is not None and not least <= value < math.inf:
            raise HandspanError(f"{name} must be at least {least}, not {value}")

    def only_with(self, holds: bool, where: str, *names: str) -> None:
        """Refuse settings that would be ignored: ``where`` says to what they belong."""
        defaults = type(self).__dataclass_fields__
        for name in names:
            if not holds and getattr(self, name) != defaults[name].default:
                raise HandspanError(f"{name} belongs to {where}: drop {name}, or add {where}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a builder knows of the run: the problem, never the rows.

    Attributes
    ----------
    task
        The prediction problem; matrix methods have none.
    work
        Local work (``numerics.local_work.LocalWork``).
    num_clients, cohort
        Registered clients, and the expected number in a round.
    rounds
        Rounds planned.
    num_groups
        Planted groups of the partition, 0 where there are none; for oracles only.
    row_shape
        Shape of one row.
    dtype, device
        Where and in which precision to compute.
    keeps_validation
        Whether validation rows are kept from training to the end, for what chooses by them.
    """

    task: Task | None
    work: Any
    num_clients: int
    cohort: int
    rounds: int
    num_groups: int = 0
    row_shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    keeps_validation: bool = False

    @property
    def final_rows(self) -> Rows:
        """Rows to train on once nothing more is chosen by validation rows."""
        return "train" if self.keeps_validation else "all"

    @property
    def scalar(self) -> torch.Tensor:
        """A zero of the right type on the right device, for numbers of the broadcast."""
        return torch.zeros((), dtype=self.dtype, device=self.device)

    @property
    def model(self) -> Task:
        """The prediction problem, for methods that cannot do without."""
        if self.task is None:
            raise HandspanError("this method trains a model on labels, and there are none")
        return self.task


@dataclass(frozen=True, kw_only=True)
class Method:
    """A registered method: how to build it, and its statement of what leaves a client.

    Attributes
    ----------
    name, title, paper
        Registry name, name for tables, reference.
    config
        Configuration class.
    build
        (Setting, config) -> Algorithm.
    uploads, private, inferable
        In words: what leaves the client, what stays, what one upload reveals when seen alone.
    numbers
        Name of a phase -> how many numbers a client sends in it, in symbols: ``d`` parameters of
        the model, ``h`` of its head, ``b`` of the rest, ``v`` of its batch normalisation, ``c``
        outputs, ``f`` inputs of the head, ``p`` entries of a row, ``groups``, and settings by name.
    problem
        ``labels`` (a network on labelled rows), ``regression`` (a linear model of labels that are
        numbers) or ``matrix``.
    needs_side, needs_groups, needs_norm
        Whether it reads side information, or the partition's planted groups; whether the model must
        have layers of batch normalisation.
    chooses
        config -> whether it chooses by validation rows, which then are no training rows.
    """

    name: str
    title: str
    paper: str
    config: type[MethodConfig]
    build: Callable[[Setting, Any], Algorithm]
    uploads: str
    private: str
    inferable: str
    numbers: Mapping[str, str] = field(default_factory=dict[str, str])
    problem: str = "labels"
    needs_side: bool = False
    needs_groups: bool = False
    needs_norm: bool = False
    chooses: Callable[[Any], bool] = lambda config: False
