"""What a comparison leaves in your hands: summaries, tests, chosen settings, tables, files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from handspan.comparison.plan import FORMAT
from handspan.core.errors import HandspanError
from handspan.disk import as_json, make, read_json, write
from handspan.evaluation import statistics
from handspan.report import comparison as report
from handspan.report.settings import tell
from handspan.runs import RunFolder

Scores = Mapping[tuple[str, int], np.ndarray | None]
TABLES = {"table.md": "markdown", "table.csv": "csv", "table.tex": "latex"}


class Comparison(list[dict[str, Any]]):
    """The summaries, one for each method and seed, and what follows from them.

    Attributes
    ----------
    about
        What was asked for: methods, seeds, trials, budget, options.
    scores
        The leading score of every client, by method and seed.
    tuning
        Every trial with its score on validation rows, and the setting that was chosen.
    missing
        Cells that other shards, or a later sitting, still have to run; the table waits for them.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        about: Mapping[str, Any],
        scores: Scores,
        tuning: Mapping[str, Any],
        missing: Sequence[str] = (),
    ) -> None:
        super().__init__(dict(row) for row in rows)
        self.about = dict(about)
        self.scores = dict(scores)
        self.tuning = dict(tuning)
        self.missing = list(missing)

    @property
    def chosen(self) -> dict[str, dict[str, Any]]:
        """Settings chosen on validation rows, by method; empty where nothing was tuned."""
        told = self.tuning.get("methods", {})
        return {text: entry["chosen"] for text, entry in told.items()}

    @property
    def commands(self) -> list[str]:
        """What repeats each trial and each final run; a remark where rows or model were given."""
        tried = [t for entry in self.tuning.get("methods", {}).values() for t in entry["trials"]]
        return [
            run["command"] or f"# {run['cell']}: given in Python, and so it has no command"
            for run in [*tried, *self]
        ]

    @functools.cached_property
    def tests(self) -> dict[str, Any]:
        """Tests of every method against the best, over the clients; empty for matrix problems."""
        rows = [row for row in self if row["metric"] is not None]
        if not rows or self.missing:
            return {}
        seeds = sorted({row["seed"] for row in rows})
        same = len({row["clients_hash"] for row in rows}) == 1
        joined = {
            text: statistics.pair_up(
                [np.asarray(self.scores[text, seed]) for seed in seeds], same_clients=same
            )
            for text in dict.fromkeys(row["method"] for row in rows)
        }
        best = self._best(rows, joined)
        tests = [] if best is None else statistics.against_best(joined, best)
        return {
            "metric": rows[0]["metric"],
            "best": best,
            "test": "Wilcoxon signed-rank, two-sided, zeros as Pratt",
            "correction": "Holm",
            "level": statistics.LEVEL,
            "pairs": "clients, averaged over seeds" if same else "clients of every seed, pooled",
            "same_clients": same,
            "seeds": seeds,
            "resamples": statistics.RESAMPLES,
            "fingerprints": list(dict.fromkeys(row["fingerprint"] for row in rows)),
            "methods": [dataclasses.asdict(test) for test in tests],
        }

    def _best(self, rows: list[dict[str, Any]], joined: Mapping[str, np.ndarray]) -> str | None:
        """Best mean over the seeds, among those with the fewest clients without a finite score."""
        means = report.means(rows, f"personal_{rows[0]['metric']}_mean")
        gaps = {text: int((~np.isfinite(values)).sum()) for text, values in joined.items()}
        known = {
            text: mean
            for text, mean in means.items()
            if mean is not None and gaps[text] == min(gaps.values())
        }
        sign = 1 if rows[0]["higher_is_better"] else -1
        return max(known, key=lambda text: sign * known[text]) if known else None

    def table(self, style: str = "text") -> str:
        """Write the table as ``text``, ``markdown``, ``csv`` or ``latex``.

        Examples
        --------
        >>> import handspan
        >>> from handspan.data import load_data
        >>> data = load_data("digits", partition="permuted:2", num_clients=10, seed=0)
        >>> table = handspan.compare(["local", "fedavg"], data, seeds=1, rounds=1, engine="loop")
        >>> table.table("csv").splitlines()[0][:11]
        'method,mark'
        """
        makers = {
            "text": report.text,
            "markdown": report.markdown,
            "csv": report.csv_table,
            "latex": report.latex,
        }
        if style not in makers:
            raise HandspanError(f"a table is written as {', '.join(makers)}, not {style!r}")
        return makers[style](self)

    def save(self, folder: str | Path) -> Path:
        """Write the comparison's files; the tables only when no cell is missing."""
        target = Path(folder)
        make(target)
        self.note(target)
        write(target / "clients.parquet", self._parquet())
        if self.missing:
            return target
        write(target / "tests.json", as_json(self.tests))
        for name, style in TABLES.items():
            write(target / name, self.table(style).encode())
        return target

    def note(self, folder: Path) -> None:
        """Write what is known so far; tables of an earlier plan would tell something else."""
        if self.missing:
            for name in ("tests.json", *TABLES):
                (folder / name).unlink(missing_ok=True)
        write(folder / "comparison.json", as_json(list(self)))
        write(folder / "tuning.json", as_json(self.tuning))
        write(folder / "commands.txt", "".join(f"{line}\n" for line in self.commands).encode())
        write(folder / "plan.json", as_json(self.about))  # last: what has it can be read

    def _parquet(self) -> bytes:
        import io

        import pyarrow
        import pyarrow.parquet

        columns: dict[str, list[Any]] = {"method": [], "seed": [], "client": [], "score": []}
        for (text, seed), values in self.scores.items():
            for client, score in enumerate([] if values is None else values.tolist()):
                for name, entry in zip(columns, (text, seed, client, score), strict=True):
                    columns[name].append(entry)
        sink = io.BytesIO()
        kinds = {"method": "string", "seed": "int64", "client": "int64", "score": "float64"}
        arrays = {name: pyarrow.array(values, type=kinds[name]) for name, values in columns.items()}
        pyarrow.parquet.write_table(pyarrow.table(arrays), sink)
        return sink.getvalue()


def read(folder: str | Path) -> Comparison:
    """Open the folder of a comparison, finished or not."""
    place = Path(folder)
    if not (place / "plan.json").exists():
        raise HandspanError(f"{place} is no comparison: it has no plan.json")
    about = read_json(place / "plan.json")
    version = about.get("format") if isinstance(about, dict) else None
    if version is not None and version != FORMAT:
        raise HandspanError(
            f"{place} has format version {version!r}, and this handspan reads {FORMAT}: open it "
            "with the version that wrote it"
        )
    rows, tuning = read_json(place / "comparison.json"), read_json(place / "tuning.json")
    try:
        scores = {(row["method"], row["seed"]): _scores(place, row) for row in rows}
        if tuning:  # files have their keys sorted
            told = tuning["methods"]
            tuning["methods"] = {text: told[text] for text in about["methods"]}
        missing = lacking(about, tuning, rows)
    except (KeyError, TypeError, AttributeError):
        raise HandspanError(
            f"a file of {place} is damaged: run the comparison again, it takes finished runs over"
        ) from None
    return Comparison(rows, about=about, scores=scores, tuning=tuning, missing=missing)


def lacking(
    about: Mapping[str, Any], tuning: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Name the trials and the final runs that are not there."""
    there = {(row["method"], row["seed"]) for row in rows}
    return lacking_trials(about, tuning) + [
        f"{text}, seed {seed}"
        for seed in about["seeds"]
        for text in about["methods"]
        if (text, seed) not in there
    ]


def lacking_trials(about: Mapping[str, Any], tuning: Mapping[str, Any]) -> list[str]:
    """Name the trials that are not there."""
    tried = {
        text: [trial["setting"] for trial in entry["trials"]]
        for text, entry in tuning.get("methods", {}).items()
    }
    return [
        f"{text} {tell(point)}, seed {about['seeds'][0]}"
        for text in about["methods"]
        for point in about["trials"].get(text, ())
        if point not in tried.get(text, [])
    ]


def _scores(place: Path, row: Mapping[str, Any]) -> np.ndarray | None:
    """Scores from the run's own folder, or from the comparison's where that is all there is."""
    import pyarrow.compute
    import pyarrow.parquet

    if row["metric"] is None:
        return None
    clients = RunFolder(place / row["cell"]).clients()
    if clients:
        return clients[f"personal_{row['metric']}"].double().numpy()
    path = place / "clients.parquet"
    if not path.exists():
        raise HandspanError(f"{place} has no scores of {row['cell']}: run the comparison again")
    table = pyarrow.parquet.read_table(path)
    mine = pyarrow.compute.and_(
        pyarrow.compute.equal(table["method"], row["method"]),
        pyarrow.compute.equal(table["seed"], row["seed"]),
    )
    return table.filter(mine)["score"].to_numpy()
