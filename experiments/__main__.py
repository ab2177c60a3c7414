"""Run a table: ``python -m experiments NAME [--data-folder data] [--out FOLDER] ...``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from experiments.claims import claims
from experiments.tables import TABLES, Table

_COMMAND = [sys.executable, "-m", "handspan.cli", "compare"]


def command(table: Table, folder: str, out: Path, extra: list[str]) -> list[str]:
    """Return the command line of a table."""
    options = [option.replace("{data}", folder) for option in table.options]
    methods = ",".join(table.methods)
    return [*_COMMAND, methods, *options, "--out", str(out), *extra]


def run(line: list[str], processes: int) -> int:
    """Run a table, as shards that share its folder; trials first."""
    if processes == 1:
        return subprocess.run(line).returncode
    stages = ["tune", "final"] if "--tune" in line else ["final"]
    for stage in stages:
        parts = [
            subprocess.Popen(
                [*line, "--stage", stage, "--shard", f"{i + 1}/{processes}"],
                stdout=subprocess.DEVNULL,
            )
            for i in range(processes)
        ]
        if failed := [code for part in parts if (code := part.wait())]:
            return failed[0]
    return subprocess.run(line).returncode  # takes everything over, prints the table


def main() -> int:
    """Run the tables that are named."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("names", nargs="+", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--data-folder", default="data", help="where mnist.npz and others are")
    parser.add_argument("--out", default="runs/experiments", help="folder for the results")
    parser.add_argument("--processes", type=int, default=1, help="shards run side by side")
    parser.add_argument("--show", action="store_true", help="print the commands alone")
    options, extra = parser.parse_known_args()
    for name in options.names:
        if name not in TABLES:
            parser.error(f"unknown table {name!r}: choose from {', '.join(TABLES)}")
    code = 0
    for name in options.names:
        table, out = TABLES[name], Path(options.out) / name
        line = command(table, options.data_folder, out, extra)
        print("$ handspan", " ".join(line[3:]), flush=True)
        if options.show:
            continue
        code = run(line, options.processes) or code
        for sentence in claims(table, out):
            print(sentence, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
