"""Joining the folders of shards: the table is that of the comparison run as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from handspan.comparison.folders import refuse_other
from handspan.comparison.outcome import Comparison, lacking, read
from handspan.comparison.running import summarise_trials
from handspan.core.errors import HandspanError
from handspan.disk import in_turn, make, write
from handspan.report.settings import tell


def merge(folders: Sequence[str | Path], out: str | Path) -> Comparison:
    """Join the folders of one comparison's shards in a new one.

    Parameters
    ----------
    folders
        What ``compare(..., shard="i/n", out=...)`` left; all of the same comparison.
    out
        Folder of the whole; what it holds already is kept. The shards' folders are not changed.

    Returns
    -------
    Comparison
        All runs that are there; ``missing`` names the others.
    """
    places = [Path(folder) for folder in folders]
    target = Path(out)
    if not places:
        raise HandspanError("name the folders to merge")
    refuse_other(target)
    if (target / "plan.json").exists():  # else a merge that was cut short, at most
        places.insert(0, target)
    parts = {place: read(place) for place in places}
    about = _common_plan(parts)
    make(target)
    with in_turn(target):
        for place in parts:
            _copy_runs(place, target)
        tuning = summarise_trials(about, _trials(parts, about))
        rows = _rows(parts, tuning)
        order = [(text, seed) for seed in about["seeds"] for text in about["methods"]]
        scores = {key: scores for part in parts.values() for key, scores in part.scores.items()}
        there = [key for key in order if key in rows]
        result = Comparison(
            [rows[key] for key in there],
            about=about,
            scores={key: scores[key] for key in there},
            tuning=tuning,
            missing=lacking(about, tuning, rows.values()),
        )
        result.save(target)
    return result


def _common_plan(parts: Mapping[Path, Comparison]) -> dict[str, Any]:
    """Return the plan of all; folders of different comparisons are refused."""
    first, *others = parts
    about = parts[first].about
    for other in others:
        for key, value in about.items():
            if parts[other].about.get(key) != value:
                raise HandspanError(
                    f"{first} and {other} are not parts of one comparison: they differ in {key}, "
                    f"{value!r} and {parts[other].about.get(key)!r}"
                )
    return about


def _trials(
    parts: Mapping[Path, Comparison], about: Mapping[str, Any]
) -> dict[str, dict[int, dict[str, Any]]]:
    """Trials of all parts by method and position in the grid."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for part in parts.values():
        shared = {name: part.tuning.get(name) for name in ("metric", "higher_is_better")}
        for text, entry in part.tuning.get("methods", {}).items():
            for trial in entry["trials"]:
                place = about["trials"][text].index(trial["setting"])
                found.setdefault(text, {}).setdefault(place, {**trial, **shared})
    return found


def _rows(
    parts: Mapping[Path, Comparison], tuning: Mapping[str, Any]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Final runs of all parts; each must have been run with the setting that all trials choose."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for place, part in parts.items():
        for row in part:
            wanted = tuning.get("methods", {}).get(row["method"], {}).get("chosen") or {}
            if row["chosen"] != wanted:
                raise HandspanError(
                    f"{place} ran {row['method']} with {tell(row['chosen'])}, and the trials of "
                    f"all folders choose {tell(wanted) or 'nothing yet'}: merge the folders of "
                    "its trials as well"
                )
            found.setdefault((row["method"], row["seed"]), row)
    return found


def _copy_runs(source: Path, target: Path) -> None:
    """Take over the finished runs of a shard; a copy that was cut short is made again."""
    for kind in ("", "trials"):
        for summary in sorted((source / kind).glob("*/summary.json")):
            run = summary.parent
            place = target / kind / run.name
            if (place / "summary.json").exists():
                continue
            try:
                shutil.copytree(
                    run,
                    place,
                    ignore=shutil.ignore_patterns("summary.json"),
                    copy_function=_copy_file,
                    dirs_exist_ok=True,
                )
            except (OSError, shutil.Error) as error:
                raise HandspanError(f"cannot copy {run} to {place}: {error}") from None
            write(place / "summary.json", summary.read_bytes())


def _copy_file(source: str, target: str) -> str:
    """Copy a file that is private from its first byte on, where the other one is."""
    mode = Path(source).stat().st_mode & 0o777
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as copy, Path(source).open("rb") as original:
        shutil.copyfileobj(original, copy)
    return target
