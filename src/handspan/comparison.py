"""``handspan.compare``: several methods, several seeds, one table with costs beside accuracy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.fitting import Progress, execute, set_up
from handspan.options import DataOptions
from handspan.registry import parse
from handspan.runs import RunFolder, as_json, write

Data = FederatedData | Callable[[int, str], tuple[FederatedData, FederatedData | None]]


def compare(
    methods: Sequence[str],
    data: Data,
    *,
    seeds: int = 3,
    seed: int = 0,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[str, int], Progress | None] | None = None,
    data_options: DataOptions | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Run every method with every seed on the same terms.

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
    **options
        As in ``fit``.

    Returns
    -------
    list
        The summaries, one for each method and seed, as in ``comparison.json``.

    Examples
    --------
    >>> from handspan.data import load_data
    >>> data = load_data("digits", partition="permuted:2", num_clients=10, seed=0)
    >>> table = compare(["local", "fedavg"], data, seeds=1, rounds=2, engine="loop")
    >>> [row["method"] for row in table]
    ['local', 'fedavg']
    """
    if seeds < 1:
        raise HandspanError(f"seeds must be at least 1, not {seeds}")
    texts = [text.strip() for text in methods if text.strip()]
    if not texts:
        raise HandspanError("name at least one method to compare")
    repeated = {text for text in texts if texts.count(text) > 1}
    if repeated:
        raise HandspanError(f"{sorted(repeated)[0]!r} stands twice: vary a setting or drop one")
    shares = _share(texts, settings or {})
    folder = None if out is None else Path(out)
    if folder is not None:
        _make(folder)
    rows: list[dict[str, Any]] = []
    for current in range(seed, seed + seeds):
        for text in texts:
            place = None if folder is None else folder / f"{_slug(text)}-seed{current}"
            given, held_out = (
                (data, None)
                if isinstance(data, FederatedData)
                else data(current, parse(text).method.problem)
            )
            result = _run(
                text,
                given,
                held_out,
                place,
                current,
                shares[text],
                None if progress is None else progress(text, current),
                data_options,
                options,
            )
            rows.append(result)
            if folder is not None:
                write(folder / "comparison.json", as_json(rows))
    return rows


def _run(
    text: str,
    data: FederatedData,
    held_out: FederatedData | None,
    place: Path | None,
    seed: int,
    settings: Mapping[str, Any],
    progress: Progress | None,
    data_options: DataOptions | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    problem, config = set_up(
        text,
        data,
        held_out=held_out,
        seed=seed,
        settings=settings,
        data_options=data_options,
        **options,
    )
    if place is not None and RunFolder(place).summary_path.exists():  # finished earlier
        RunFolder(place).check(config)
        return RunFolder(place).summary()
    return execute(problem, config, out=place, resume=True, progress=progress).summary


def _share(texts: Sequence[str], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Give each method the settings it has a field for; what none has is an error."""
    fields = {text: parse(text).fields for text in texts}
    for key in settings:
        if not any(key in names for names in fields.values()):
            raise HandspanError(f"none of the methods has a setting {key!r}")
    return {
        text: {key: value for key, value in settings.items() if key in fields[text]}
        for text in texts
    }


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HandspanError(f"cannot create {folder}: {error.strerror}") from None


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9=.+_-]", "-", text)
