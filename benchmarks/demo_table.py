"""Write what ``make demo`` found into the README: ``python -m benchmarks.demo_table [runs/demo]``.

Both tables become one, with the machine, the date and the commit below it.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.problems import describe_machine
from handspan.report.tables import score_of

README = Path(__file__).resolve().parent.parent / "README.md"
PLACE = re.compile(r"(?<=<!-- DEMO TABLE: begin -->\n).*?(?=<!-- DEMO TABLE: end -->)", re.DOTALL)
SIDES = {"permuted": "permuted labels", "dirichlet": "Dir(0.5)"}
Runs = dict[str, list[dict[str, Any]]]


def read(folder: Path) -> Runs:
    """Summaries of a comparison by method, in its order."""
    found: Runs = {}
    for row in json.loads((folder / "comparison.json").read_text()):
        found.setdefault(row["method"], []).append(row)
    return found


def table(folder: Path, about: str) -> str:
    """Accuracy and the worst tenth on both sides, bytes and seconds of the first."""
    sides = {name: read(folder / name) for name in SIDES}
    first = sides["permuted"]
    count = len(next(iter(first.values())))
    headings = ["method"]
    for name, told in SIDES.items():
        rounds = max(run["rounds"] for runs in sides[name].values() for run in runs)
        headings += [f"{told}, {rounds} rounds: accuracy %", "worst tenth %"]
    lines = [[*headings, "MB up", "seconds"], ["---", *["---:"] * 6]]
    for method, runs in first.items():
        cells = [f"`{method}`"]
        for side in sides.values():
            known = side.get(method)
            for score, with_spread in (("personal_accuracy_mean", True), ("worst_decile", False)):
                cells.append("-" if known is None else score_of(known, score, with_spread))
        sent = sum(run["bytes_up"] for run in runs) / len(runs) / 1e6
        seconds = sum(run["seconds"] for run in runs) / len(runs)
        lines.append([*cells, f"{sent:.0f}", f"{seconds:.1f}"])
    made = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{made}\n\nMeans over clients, ± over {count} seeds; bytes and seconds of the permuted "
        f"side. No setting was tuned.\nMade by `make demo`; {about}.\n"
    )


def main() -> None:
    """Renew the README's table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_table", description=__doc__)
    parser.add_argument("folder", nargs="?", default="runs/demo", type=Path)
    options = parser.parse_args()
    about = ", ".join(describe_machine().split("  "))
    text, times = PLACE.subn(lambda _: table(options.folder, about), README.read_text())
    if times != 1:
        raise SystemExit(f"{README} has {times} places for the table")
    README.write_text(text)
    print(f"written: {README}")


if __name__ == "__main__":
    main()
