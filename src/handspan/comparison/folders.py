"""What a comparison's folder may hold."""

from __future__ import annotations

from pathlib import Path

from handspan.core.errors import HandspanError

_BEGUN = {"comparison.json", "tuning.json", "commands.txt"}  # written before plan.json


def refuse_other(folder: Path) -> None:
    """Refuse a folder with files that are no comparison's; a new one has folders of runs alone."""
    if not folder.is_dir() or (folder / "plan.json").exists():
        return
    for entry in folder.iterdir():
        if entry.is_file() and entry.name not in _BEGUN and entry.suffix != ".partial":
            raise HandspanError(
                f"{folder} exists already and is no comparison (it holds {entry.name}): choose "
                "another --out"
            )
