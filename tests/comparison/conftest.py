import json
import sys

import pytest
import torch
from little import TERMS, federation

from handspan.cli import main

CLOCKS = ("seconds", "seconds_total")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Toys are too small for more; and numbers are promised for a fixed number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def by_seed():
    """Data as a function of the seed: every seed deals other rows."""
    return lambda seed, problem: (federation(seed), None)


@pytest.fixture
def terms():
    return dict(TERMS)


@pytest.fixture
def timeless():
    """What is left of a summary (or of many) without what the clock said."""

    def strip(value):
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in CLOCKS}
        return [strip(entry) for entry in value] if isinstance(value, list) else value

    return strip


@pytest.fixture
def contents(timeless):
    """What a comparison's folder says, by file; seconds apart."""

    def read(folder):
        found = {}
        for name in ("comparison.json", "tuning.json", "tests.json", "plan.json"):
            found[name] = timeless(json.loads((folder / name).read_text()))
        found["commands.txt"] = (folder / "commands.txt").read_text()
        found["clients.parquet"] = (folder / "clients.parquet").read_bytes()
        for name in ("table.md", "table.tex"):  # the last cell of a row tells seconds
            lines = (folder / name).read_text().splitlines()
            found[name] = [line.rstrip(" |\\").rpartition(" ")[0] for line in lines]
        return found

    return read


@pytest.fixture
def call(capsys):
    """Exit code, output and complaint of ``handspan ARGUMENTS``."""

    def run(*arguments):
        before, sys.argv = sys.argv, ["handspan", *arguments]
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            sys.argv = before
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
