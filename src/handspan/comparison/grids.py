"""Which settings are tried for each method: as many for one as for the other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from handspan.comparison.budget import Budget
from handspan.core import keys
from handspan.core.errors import HandspanError, nearest
from handspan.options import SHORT, from_values
from handspan.registry import parse
from handspan.report.settings import tell

RATES = (0.03, 0.1, 0.3, 1.0)
# Options of the run that a grid may vary; the others are the terms of the comparison.
TUNABLE = (
    "learning_rate", "schedule", "decay", "momentum", "nesterov", "weight_decay", "batch_size",
    "steps", "epochs",
)  # fmt: skip
ALL = "all"

Choice = dict[str, Any]
Axes = Mapping[str, Mapping[str, Sequence[Any]]]


def read_grids(texts: Sequence[str], given: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Read ``METHOD:field=a,b,c``; METHOD is a text that is compared, or ``all``."""
    found: dict[str, dict[str, list[str]]] = {}
    for text in given:
        owners = [name for name in (*texts, ALL) if text.strip().startswith(name + ":")]
        if not owners:
            raise HandspanError(
                f"--grid {text!r} begins with no method that is compared: write "
                f"{texts[0]}:lr=0.03,0.1,0.3,1, or all:lr=..."
            )
        owner = max(owners, key=len)
        for axis in text.strip()[len(owner) + 1 :].split(":"):
            name, separator, values = axis.partition("=")
            entries = [value.strip() for value in values.split(",")]
            if not separator or not name.strip() or not all(entries):
                raise HandspanError(f"--grid {text!r}: write METHOD:field=a,b,c")
            _add(found, owner, name.strip(), entries)
    return found


def _add(found: dict[str, dict[str, list[str]]], owner: str, name: str, entries: list[str]) -> None:
    axes = found.setdefault(owner, {})
    if name in axes:
        raise HandspanError(f"--grid gives {name} of {owner} twice")
    axes[name] = entries


def make_trials(
    texts: Sequence[str],
    grid: Sequence[str] | Axes | None,
    tune: int | None,
    budget: Budget | None,
    options: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
    seed: int,
) -> dict[str, list[Choice]]:
    """Settings to try for each method; empty where nothing is tuned.

    A method without a grid of its own tries the default step sizes. ``tune`` takes so many points
    of every grid: all where it has so many, else a draw, the same for grids of one size.
    """
    given: Axes = grid if isinstance(grid, Mapping) else read_grids(texts, grid or [])
    if tune is not None and tune < 0:
        raise HandspanError(f"--tune must be at least 0, not {tune}")
    if not given and not tune:
        return {}
    if tune == 0:
        raise HandspanError("--tune 0 tunes nothing, and --grid says what to tune: drop one")
    for owner in given:
        if owner not in (*texts, ALL):
            raise HandspanError(f"a grid is given for {owner!r}, which is not compared")
    trials: dict[str, list[Choice]] = {}
    for text in texts:
        axes = given.get(text) or given.get(ALL) or {"learning_rate": RATES}
        trials[text] = _points(text, axes, budget, options, settings[text])
    sizes = {text: len(points) for text, points in trials.items()}
    if tune is None and len(set(sizes.values())) > 1:
        told = ", ".join(f"{text} {size}" for text, size in sizes.items())
        raise HandspanError(
            f"every method must get as many trials, and the grids differ in size: {told}; give "
            "grids of one size, or --tune T to draw T points of each"
        )
    return {text: _draw(text, points, tune, seed) for text, points in trials.items()}


def _draw(text: str, points: list[Choice], tune: int | None, seed: int) -> list[Choice]:
    if tune is None or tune == len(points):
        return points
    if tune > len(points):
        raise HandspanError(
            f"--tune {tune} asks for more trials than the grid of {text} has points "
            f"({len(points)}): give it a larger one by --grid"
        )
    rng = keys.generator(keys.key(seed, "tune", len(points)))
    kept = sorted(rng.choice(len(points), tune, replace=False).tolist())
    return [points[index] for index in kept]


def _points(
    text: str,
    axes: Mapping[str, Sequence[Any]],
    budget: Budget | None,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> list[Choice]:
    """All combinations, each checked as the run will check it."""
    fields = parse(text).fields
    named = {_name(text, name, fields, budget, options): list(axes[name]) for name in axes}
    points: list[Choice] = []
    for values in itertools.product(*named.values()):
        point = _read(text, dict(zip(named, values, strict=True)), fields, options, settings)
        if point in points:
            raise HandspanError(f"the grid of {text} holds {tell(point)} twice")
        points.append(point)
    return points


def _name(
    text: str, name: str, fields: set[str], budget: Budget | None, options: Mapping[str, Any]
) -> str:
    if name in fields:
        if any(part.partition("=")[0].strip() == name for part in text.split(":")[1:]):
            raise HandspanError(f"{text} fixes {name} already, so that a grid cannot vary it")
        return name
    option = SHORT.get(name, name).replace("-", "_")
    if option not in TUNABLE:
        known = sorted({*fields, *TUNABLE})
        raise HandspanError(
            f"a grid of {text} cannot vary {name!r}{nearest(option, known)}; it may vary "
            f"{', '.join(TUNABLE)} and settings of the method"
        )
    by_epochs = options.get("epochs") is not None
    if budget is None and (
        option in ("steps", "epochs") or (option == "batch_size" and not by_epochs)
    ):
        raise HandspanError(
            f"with --equal rounds the local work is the same for all, and {name} changes it: "
            "tune it with --equal rows:N or bytes:N"
        )
    return option


def _read(
    text: str,
    point: Choice,
    fields: set[str],
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Choice:
    mine = {key: value for key, value in point.items() if key in fields}
    rest = {key: value for key, value in point.items() if key not in fields}
    spec = parse(text, {**settings, **mine})
    configs = [spec.config, *(config for _, config in spec.extras)]
    base = {key: value for key, value in options.items() if key in TUNABLE}
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in rest:
            base.pop(other, None)
    _, training = from_values({**base, **rest})
    read = {key: getattr(training, key) for key in rest}
    for key in mine:
        read[key] = next(getattr(config, key) for config in configs if hasattr(config, key))
    return {key: read[key] for key in sorted(point)}  # as files have them


def at_the_edge(points: Sequence[Choice], chosen: Choice) -> list[str]:
    """Name the fields whose chosen value is the smallest or largest that was tried."""
    found: list[str] = []
    for key, value in chosen.items():
        tried = {point[key] for point in points}
        numbers = [entry for entry in tried if isinstance(entry, int | float)]
        if len(tried) < 3 or len(numbers) < len(tried) or isinstance(value, bool):
            continue
        if value in (min(numbers), max(numbers)):
            found.append(key)
    return found


def best_trial(scores: Sequence[float | None], higher_is_better: bool) -> int:
    """Position of the best score; what diverged (no number) loses, and of equals the first wins."""
    worst = -np.inf
    signed = [
        worst
        if score is None or not np.isfinite(score)
        else (score if higher_is_better else -score)
        for score in scores
    ]
    return int(np.argmax(signed))
