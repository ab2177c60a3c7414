"""Kill a run at random moments, resume it each time, and compare what it leaves behind.

``python -m benchmarks.kill [--kills 20] [--seed 0] [--method fedrep] [--store memory]``. The final
files have to equal those of a run that nobody disturbed, bit for bit; only fields that tell seconds
may differ. A run that finishes before its next kill is compared, and another one begins.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.problems import describe_machine, judge
from handspan.disk import unpack

CLOCKS = ("seconds", "seconds_total")  # fields of summary.json
VARIES = "timing.jsonl"  # the file that tells nothing but seconds


@dataclass
class Victim:
    """A run that is killed and resumed, folder after folder."""

    command: list[str]
    root: Path
    expected: dict[str, bytes]
    lasted: float  # seconds of the shortest run so far that nobody killed
    finished: int = 0
    kills: int = 0
    torn: int = 0  # kills that hit a file half-written, or a journal not yet applied
    differing: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Where the present run lives."""
        return self.root / f"run-{self.finished}"

    def live(self, seconds: float | None) -> None:
        """Start or resume the run; kill it after so many seconds."""
        is_whole, begin = not self.folder.exists(), time.perf_counter()
        process = subprocess.Popen(
            [*self.command, "--out", str(self.folder), "--resume"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            _, complaint = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self.kills += 1
            self.tell(seconds)
            return
        if process.returncode:
            raise SystemExit(f"the run stopped by itself: {complaint.decode()}")
        if is_whole:
            self.lasted = min(self.lasted, time.perf_counter() - begin)
        self.compare()

    def tell(self, seconds: float | None) -> None:
        """Print what the kill left behind."""
        rest = sorted(path.name for path in self.folder.rglob("*") if _is_torn(path))
        self.torn += bool(rest)
        checkpoint = self.folder / "checkpoint.safetensors"
        told = "no checkpoint yet"
        if checkpoint.exists():
            told = f"checkpoint of round {unpack(checkpoint)[1]['round']}"
        more = f", {', '.join(rest)}" if rest else ""
        print(
            f"{self.kills:>3}  {self.folder.name}  after {seconds:5.2f} s: {told}{more}", flush=True
        )

    def compare(self) -> None:
        """Look for files that differ, lack or should not be there."""
        found = contents(self.folder)
        names = sorted(found.keys() | self.expected.keys())
        wrong = [name for name in names if found.get(name) != self.expected.get(name)]
        self.differing += [f"{self.folder.name}/{name}" for name in wrong]
        print(f"     {self.folder.name}  finished: {len(names)} files, {len(wrong)} differ")
        self.finished += 1


def _is_torn(path: Path) -> bool:
    return path.suffix == ".partial" or path.name.startswith("journal")


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run folder by name, without what tells seconds."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != VARIES
    }
    summary = json.loads(found["summary.json"])
    for name in CLOCKS:
        del summary[name]
    found["summary.json"] = json.dumps(summary).encode()
    return found


def main() -> int:
    """Run once undisturbed, then under fire."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kill", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--method", default="fedrep")
    parser.add_argument("--store", default="memory", choices=("memory", "disk"))
    parser.add_argument("--rounds", type=int, default=1000)
    options = parser.parse_args()
    command = [sys.executable, "-m", "handspan.cli", "run", options.method]
    command += ["--engine", "stacked", "--partition", "permuted:5", "--rounds", str(options.rounds)]
    command += ["--threads", "1", "--eval-every", "100", "--checkpoint-seconds", "0"]
    command += ["--momentum", "0.5", "--store", options.store]
    print(describe_machine(), " ".join(command[1:]), sep="\n")
    with tempfile.TemporaryDirectory() as name:
        root, begin = Path(name), time.perf_counter()
        undisturbed = root / "undisturbed"
        subprocess.run([*command, "--out", str(undisturbed)], check=True, stdout=subprocess.DEVNULL)
        lasted = time.perf_counter() - begin
        print(f"     undisturbed: {lasted:.1f} s")
        victim = Victim(command, root, contents(undisturbed), lasted)
        moments = random.Random(options.seed)
        while victim.kills < options.kills:
            victim.live(moments.uniform(0, victim.lasted))
        if victim.folder.exists():
            victim.live(None)
    for path in victim.differing:
        print(f"differs: {path}")
    return judge(
        (f"kills                       {victim.kills:6d}", f"{options.kills}", True),
        (f"of these, while a file was written {victim.torn:3d}", "", True),
        (f"finished runs               {victim.finished:6d}", "at least 1", victim.finished > 0),
        (f"files that differ           {len(victim.differing):6d}", "0", not victim.differing),
    )


if __name__ == "__main__":
    raise SystemExit(main())
