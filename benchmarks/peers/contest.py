"""Contestants as this process sees them, and their turns."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import python_of
from benchmarks.peers.stage import Play

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3  # rounds before it counts


class Contestant:
    """A process that trains when it is asked to."""

    def __init__(self, peer: str, play: Play, cache: Path) -> None:
        self.peer, self.play = peer, play
        self.seconds: list[float] = []  # of a round, in each turn
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "OMP_NUM_THREADS": str(play.threads),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        if peer == "handspan":
            del environment["OMP_NUM_THREADS"]  # the engine decides
        self._errors = Path(play.material).with_suffix(f".{peer}-{os.getpid()}.txt")
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [python_of(peer, cache), "-m", f"benchmarks.peers.side_{peer}", play.told()],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        told = self._answer()
        self.name, self.steps = told["ready"], told.get("steps", 0)
        self.ask(str(WARM_UP))

    def ask(self, words: str) -> dict[str, Any]:
        """Ask and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.peer} stopped:\n{self._errors.read_text()[-3000:]}")
        return json.loads(line)

    def train(self, rounds: int) -> None:
        """Take a turn."""
        self.seconds.append(self.ask(str(rounds))["seconds"] / rounds)

    def accuracy(self) -> float:
        """Accuracy of the model so far."""
        return self.ask("score")["accuracy"]

    def leave(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def take_turns(contestants: list[Contestant], rounds: int, repeats: int) -> None:
    """Let everybody train so many rounds, again and again."""
    for _ in range(repeats):
        for one in contestants:
            one.train(rounds)
