"""Environments of the other simulators: their requirements contradict each other and ours."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = {
    "pfl": ("torch==2.13.0", "pfl==0.6.0", "dp-accounting<0.6"),
    "flower": ("torch==2.13.0", "flwr[simulation]==1.41.0"),
}


def python_of(peer: str, cache: Path) -> str:
    """Python of a peer's environment, which is made where it lacks."""
    if peer == "handspan":
        return sys.executable
    folder = cache / peer
    told, wanted = folder / "requirements.txt", "\n".join(REQUIREMENTS[peer]) + "\n"
    if not told.exists() or told.read_text() != wanted:
        print(f"installing {', '.join(REQUIREMENTS[peer])} in {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=folder.exists())
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *REQUIREMENTS[peer]], check=True)
        told.write_text(wanted)
    return str(folder / "bin" / "python")
