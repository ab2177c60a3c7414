"""The folder of a run: everything needed to read it, repeat it and go on with it.

``config.json``, ``history.jsonl``, ``timing.jsonl``, ``clients.parquet``, ``summary.json`` and
``checkpoint.safetensors``. Every file is replaced as a whole by one rename, so that a crash at any
moment leaves the last complete version. Only ``timing.jsonl`` and the fields named ``seconds`` vary
with the clock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handspan.core.errors import HandspanError
from handspan.core.federation import Costs, RunState
from handspan.core.records import Params, from_named, to_named
from handspan.simulation.store import ClientStore

FORMAT = 1


def write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file by one rename, after its content has reached the disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        partial.unlink(missing_ok=True) if partial.parent.is_dir() else None
        raise HandspanError(
            f"cannot write {path}: {error.strerror}; what was there before is unchanged"
        ) from None


def as_json(value: Any) -> bytes:
    """Readable JSON, the same bytes for the same value; not-a-number becomes null."""
    return (json.dumps(_plain(value), indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def as_json_lines(rows: list[dict[str, Any]]) -> bytes:
    """One JSON object a line."""
    return "".join(json.dumps(_plain(row), allow_nan=False) + "\n" for row in rows).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file of a run folder."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise HandspanError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise HandspanError(
            f"{path} is damaged: it is no JSON; restore it or remove the run folder"
        ) from None


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
    def summary_path(self) -> Path:
        """Results of a finished run."""
        return self.path / "summary.json"

    def create(self, config: dict[str, Any]) -> None:
        """Make the folder of a new run; an existing one is refused."""
        self.refuse_existing()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HandspanError(f"cannot create {self.path}: {error.strerror}") from None
        write(self.config_path, as_json({"format": FORMAT, **config}))

    def refuse_existing(self) -> None:
        """Refuse to write over anything but what a crash left half-written."""
        is_free = not self.path.exists() or (
            self.path.is_dir() and all(entry.suffix == ".partial" for entry in self.path.iterdir())
        )
        if not is_free:
            raise HandspanError(
                f"{self.path} exists already: go on with --resume, or choose another --out"
            )

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
        if version != FORMAT:
            raise HandspanError(
                f"{self.path} has format version {version}, and this handspan reads {FORMAT}: "
                "open it with the version that wrote it"
            )
        return config

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
            store.flush(self.path / "journal.safetensors", named, progress)
        else:
            named.update({f"client/{name}": value for name, value in store.to_named().items()})
        write(self.checkpoint_path, pack(named, progress), mode=0o600)
        if store.is_on_disk:
            (self.path / "journal.safetensors").unlink(missing_ok=True)
        write(self.path / "history.jsonl", as_json_lines(state.history))

    def load(self, server_like: Any, store: ClientStore) -> RunState | None:
        """State of the last checkpoint, or None when there is none yet."""
        journal = self.path / "journal.safetensors"
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

    def append_timing(self, row: dict[str, Any]) -> None:
        """Note how long something took."""
        try:
            with (self.path / "timing.jsonl").open("a") as file:
                file.write(json.dumps(_plain(row)) + "\n")
        except OSError as error:
            raise HandspanError(f"cannot write {self.path}: {error.strerror}") from None

    def timing(self) -> list[dict[str, Any]]:
        """How long things took, as noted so far."""
        try:
            lines = (self.path / "timing.jsonl").read_text().splitlines()
        except OSError:
            return []
        rows: list[dict[str, Any]] = []
        for line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError:  # the line that a crash cut short
                continue
        return rows

    def seconds(self) -> tuple[float, float]:
        """Seconds spent so far, in rounds and in all, by earlier sittings."""
        for row in reversed(self.timing()):
            if "seconds" in row:
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
        import pyarrow.parquet

        path = self.path / "clients.parquet"
        if not path.exists():
            return {}
        table = pyarrow.parquet.read_table(path)
        return {
            name: column.to_pylist()
            if str(column.type) == "string"
            else torch.from_numpy(column.to_numpy().copy())
            for name, column in zip(table.column_names, table.columns, strict=True)
        }

    def summary(self) -> dict[str, Any]:
        """Read the results, empty while the run has not finished."""
        return read_json(self.summary_path) if self.summary_path.exists() else {}

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the results."""
        write(self.summary_path, as_json(summary))


def pack(named: Params, progress: dict[str, Any]) -> bytes:
    """Tensors and progress as safetensors bytes."""
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in named.items()}
    return save(tensors, metadata={"handspan": json.dumps(_plain(progress))})


def unpack(path: Path) -> tuple[Params, dict[str, Any]]:
    """Read what ``pack`` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            named = {name: file.get_tensor(name) for name in file.keys()}
            return named, json.loads(file.metadata()["handspan"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        raise HandspanError(
            f"{path} is damaged or no checkpoint of handspan: remove it to start again"
        ) from None


def _part(named: Params, prefix: str) -> Params:
    return {
        name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)
    }
