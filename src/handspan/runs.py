"""The folder of a run: everything needed to read it, repeat it and go on with it.

``config.json``, ``history.jsonl``, ``timing.jsonl``, ``clients.parquet``, ``summary.json`` and
``checkpoint.safetensors``. Every file is replaced as a whole by one rename, so that a crash at any
moment leaves the last complete version. Only ``timing.jsonl`` and the fields named ``seconds`` vary
with the clock.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handspan.core.errors import HandspanError
from handspan.core.federation import Costs, RunState
from handspan.core.records import Params, from_named, to_named
from handspan.disk import as_json, as_json_lines, damaged, pack, plain, read_json, unpack, write
from handspan.simulation.store import ClientStore

FORMAT = 1


_KINDS = {
    "method": str, "settings": dict, "training": dict, "data": dict | None, "engine": dict,
    "fingerprint": str,
}  # fmt: skip


def _is_whole(config: Mapping[str, Any]) -> bool:
    """Whether a configuration has all its parts."""
    if not all(name in config and isinstance(config[name], _KINDS[name]) for name in _KINDS):
        return False
    engine = config["engine"]
    counts = [engine.get("block_size"), engine.get("threads"), engine.get("workers", 1)]
    return engine.get("engine") in ("loop", "stacked", "workers", "ray", "wire") and all(
        isinstance(count, int) and count > 0 for count in counts
    )


class RunFolder:
    """A run on disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def config_path(self) -> Path:
        """Configuration of the run."""
        return self.path / "config.json"

    @property
    def checkpoint_path(self) -> Path:
        """State of the run, private records included."""
        return self.path / "checkpoint.safetensors"

    @property
    def journal_path(self) -> Path:
        """Checkpoint that has not been applied to the files of private records yet."""
        return self.path / "journal.safetensors"

    @property
    def summary_path(self) -> Path:
        """Results of a finished run."""
        return self.path / "summary.json"

    def create(self, config: dict[str, Any]) -> None:
        """Make the folder of a new run; an existing one is refused."""
        self.refuse_existing()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HandspanError(
                f"cannot create {self.path}: {error.strerror}; choose another --out"
            ) from None
        write(self.config_path, as_json({"format": FORMAT, **config}))

    def refuse_existing(self) -> None:
        """Refuse to write over anything but what a crash left half-written."""
        is_free = not self.path.exists() or (
            self.path.is_dir() and all(entry.suffix == ".partial" for entry in self.path.iterdir())
        )
        if not is_free and self.config_path.exists():
            raise HandspanError(
                f"{self.path} exists already: go on with --resume, or choose another --out"
            )
        if not is_free:
            raise HandspanError(
                f"{self.path} exists already and is no run folder: choose another --out"
            )

    def forget(self) -> None:
        """Remove a run that failed before its first checkpoint."""
        if self.has_state:
            return
        shutil.rmtree(self.path / "clients", ignore_errors=True)
        for name in ("config.json", "timing.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # it holds something else
            self.path.rmdir()

    def clean(self) -> None:
        """Remove what a crash left half-written."""
        for partial in self.path.glob("*.partial"):
            partial.unlink(missing_ok=True)

    def config(self) -> dict[str, Any]:
        """Configuration of an existing run; an unknown format is refused."""
        if not self.config_path.exists():
            raise HandspanError(f"{self.path} is no run folder: it has no config.json")
        config = read_json(self.config_path)
        version = config.get("format") if isinstance(config, dict) else None
        if version is not None and version != FORMAT:
            raise HandspanError(
                f"{self.path} has format version {version!r}, and this handspan reads {FORMAT}: "
                "open it with the version that wrote it"
            )
        if version is None or not _is_whole(config):
            raise damaged(self.config_path)
        return config

    @property
    def has_state(self) -> bool:
        """Whether there is a checkpoint, or the journal of one."""
        return self.checkpoint_path.exists() or self.journal_path.exists()

    def refuse_unfinished(self) -> None:
        """Refuse what is no run, or one that has not come to its end."""
        if not self.summary_path.exists():
            self.config()  # tells what is wrong with the folder, if anything
            raise HandspanError(f"{self.path} has not finished: go on with handspan run --resume")

    def check(self, config: dict[str, Any]) -> dict[str, Any]:
        """Refuse to go on with another configuration; returns the stored one."""
        stored = self.config()
        for group in ("method", "settings", "training", "data", "model", "fingerprint"):
            before, now = stored.get(group), json.loads(as_json(config.get(group)))
            if before == now:
                continue
            if isinstance(before, dict) and isinstance(now, dict):
                name = next(k for k in {**before, **now} if before.get(k) != now.get(k))
                before, now = before.get(name), now.get(name)
                group = name
            raise HandspanError(
                f"{self.path} was started with {group} = {before!r}, not {now!r}: "
                "resume with the same configuration, or choose another --out"
            )
        return stored

    def save(self, state: RunState, store: ClientStore) -> None:
        """Write the whole state, and the history that belongs to it."""
        named = {f"server/{name}": value for name, value in to_named(state.server).items()}
        progress = {
            "format": FORMAT,
            "round": state.round,
            "is_set_up": state.is_set_up,
            "costs": asdict(state.costs),
            "history": state.history,
            "empty_rounds": state.empty_rounds,
            "abandoned_rounds": state.abandoned_rounds,
        }
        if store.is_on_disk:
            store.flush(self.journal_path, named, progress)
        else:
            named.update({f"client/{name}": value for name, value in store.to_named().items()})
        write(self.checkpoint_path, pack(named, progress), mode=0o600)
        if store.is_on_disk:
            self.journal_path.unlink(missing_ok=True)
        write(self.path / "history.jsonl", as_json_lines(state.history))

    def load(self, server_like: Any, store: ClientStore) -> RunState | None:
        """State of the last checkpoint, or None when there is none yet."""
        journal = self.journal_path
        if store.is_on_disk and journal.exists():  # committed, perhaps not yet applied
            named, progress = unpack(journal)
            store.apply(named)
            named = {name: value for name, value in named.items() if name.startswith("server/")}
            write(self.checkpoint_path, pack(named, progress), mode=0o600)
            journal.unlink()
        if not self.checkpoint_path.exists():
            return None
        named, progress = unpack(self.checkpoint_path)
        if progress["format"] != FORMAT:
            raise HandspanError(
                f"{self.checkpoint_path} has format version {progress['format']}, "
                f"and this handspan reads {FORMAT}"
            )
        try:
            server = from_named(server_like, _part(named, "server/"))
            if not store.is_on_disk:
                store.load_named(_part(named, "client/"))
        except (KeyError, RuntimeError):
            raise HandspanError(
                f"{self.checkpoint_path} does not belong to this configuration"
            ) from None
        return RunState(
            server=server,
            round=progress["round"],
            is_set_up=progress["is_set_up"],
            costs=Costs(**progress["costs"]),
            history=progress["history"],
            empty_rounds=progress["empty_rounds"],
            abandoned_rounds=progress["abandoned_rounds"],
        )

    def private_names(self) -> list[str]:
        """Names of the fields of the private records, in the wire form."""
        from urllib.parse import unquote

        found = [unquote(path.stem) for path in (self.path / "clients").glob("*.bin")]
        if self.checkpoint_path.exists():
            named, _ = unpack(self.checkpoint_path)
            found += _part(named, "client/")
        return sorted(found)

    def append_timing(self, row: dict[str, Any]) -> None:
        """Note how long something took."""
        try:
            with (self.path / "timing.jsonl").open("a") as file:
                file.write(json.dumps(plain(row)) + "\n")
        except OSError as error:
            raise HandspanError(f"cannot write {self.path}: {error.strerror}") from None

    def timing(self) -> list[dict[str, Any]]:
        """How long things took, as noted so far."""
        try:
            lines = (self.path / "timing.jsonl").read_text(errors="replace").splitlines()
        except OSError:
            return []
        rows: list[dict[str, Any]] = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # the line that a crash cut short
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows

    def seconds(self) -> tuple[float, float]:
        """Seconds spent so far, in rounds and in all, by earlier sittings."""
        for row in reversed(self.timing()):
            if {"seconds", "seconds_total"} <= {*row}:
                return float(row["seconds"]), float(row["seconds_total"])
        return 0.0, 0.0

    def seconds_of_rounds(self) -> dict[int, float]:
        """Seconds in rounds up to each evaluation, by its round."""
        rows = [row for row in self.timing() if "evaluated" in row]
        return {row["evaluated"]: float(row["after"]) for row in rows}

    def write_clients(self, columns: Mapping[str, Any]) -> None:
        """Write the table of clients, one row each."""
        import io

        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table(
            {
                name: column.numpy() if isinstance(column, Tensor) else column
                for name, column in columns.items()
            }
        )
        sink = io.BytesIO()
        pyarrow.parquet.write_table(table, sink)
        write(self.path / "clients.parquet", sink.getvalue())

    def clients(self) -> dict[str, Any]:
        """Read the table of clients, empty while the run has not finished."""
        import pyarrow
        import pyarrow.parquet

        path = self.path / "clients.parquet"
        if not path.exists() and not self.summary_path.exists():
            return {}
        if path.is_dir():  # pyarrow would take it for a table in parts
            raise damaged(path)
        try:
            table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError):
            raise damaged(path) from None
        return {
            name: column.to_pylist()
            if str(column.type) == "string"
            else torch.from_numpy(column.to_numpy().copy())
            for name, column in zip(table.column_names, table.columns, strict=True)
        }

    def summary(self) -> dict[str, Any]:
        """Read the results, empty while the run has not finished."""
        if not self.summary_path.exists():
            return {}
        summary = read_json(self.summary_path)
        if not isinstance(summary, dict) or not {"method", "rounds", "seed"} <= {*summary}:
            raise damaged(self.summary_path)
        return summary

    def history(self) -> list[dict[str, Any]]:
        """Read the evaluations; none before the first checkpoint."""
        path = self.path / "history.jsonl"
        try:
            return [json.loads(line) for line in path.read_text().splitlines()]
        except FileNotFoundError:
            return []
        except (OSError, ValueError):
            raise HandspanError(f"{path} is damaged: restore it or remove the run folder") from None

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the results."""
        write(self.summary_path, as_json(summary))


def _part(named: Params, prefix: str) -> Params:
    return {
        name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)
    }
