"""Plant bugs and see whether the tests notice: ``python -m benchmarks.mutate [METHOD...]``.

Each bug is planted in a temporary copy of the project, never in the working tree. The exit code
is 1 if any bug survives, or if its place in the source is not found exactly once. ``--list`` only
lists them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
_COPIED = ("src", "tests", "benchmarks", "pyproject.toml")


def places(mutation: Mutation, root: Path = ROOT) -> int:
    """How often the text to be changed occurs."""
    return (root / "src" / "handspan" / mutation.file).read_text().count(mutation.old)


def suites(mutation: Mutation) -> list[list[str]]:
    """Arguments for pytest, the likeliest tests first."""
    if mutation.method == "shared":
        return [
            ["tests/numerics"],
            ["tests/oracles"],
            ["tests/simulation", "tests/reductions"],
            ["tests/contract"],
        ]
    if mutation.method == "runs":
        return [["tests/runs"]]
    if mutation.method == "side":
        return [["tests/models/test_side_info.py"], ["tests/data/test_side.py"]]
    keyword = "+ft" if mutation.method == "finetune" else mutation.method
    return [
        [f"tests/oracles/test_{mutation.method}.py"],
        ["tests/reductions"],
        ["tests/contract", "-k", f"[{keyword}" if keyword[0].isalpha() else keyword],
    ]


def caught_by(mutation: Mutation, copy: Path) -> str | None:
    """Plant the bug in the copy, run the tests, remove it; the test that fails, if any."""
    path = copy / "src" / "handspan" / mutation.file
    before = path.read_text()
    path.write_text(before.replace(mutation.old, mutation.new))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        for arguments in suites(mutation):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "--durations=0"]
            command += ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments]
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, check=False
            )
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            if failed:
                return failed[1].removeprefix("tests/")
            if done.returncode not in (0, 5):
                return f"pytest stopped with code {done.returncode}"
    finally:
        path.write_text(before)
    return None


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutate", description=__doc__)
    parser.add_argument(
        "method", nargs="*", help="only bugs of these methods, 'shared', 'side' or 'runs'"
    )
    parser.add_argument("--list", action="store_true", help="only print the bugs")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.method or m.method in options.method]
    if not chosen:
        parser.error(f"choose from {', '.join(sorted({m.method for m in MUTATIONS}))}")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        if not options.list:
            for name in _COPIED:
                source = ROOT / name
                ignore = shutil.ignore_patterns("__pycache__")
                if source.is_dir():
                    shutil.copytree(source, copy / name, ignore=ignore)
                else:
                    shutil.copy(source, copy / name)
        for mutation in chosen:
            start, count = time.perf_counter(), places(mutation)
            if count != 1:
                verdict = f"NOT PLANTED: its text occurs {count} times"
            elif options.list:
                verdict = mutation.file
            else:
                test = caught_by(mutation, copy)
                verdict = "SURVIVED" if test is None else f"caught by {test}"
                verdict += f" ({time.perf_counter() - start:.0f} s)"
            bad += count != 1 or verdict.startswith("SURVIVED")
            print(f"{mutation.method:14} {mutation.what:36} {verdict}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} " + ("listed" if options.list else "caught"))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
