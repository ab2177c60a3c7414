import importlib.util
import sys

import pytest
import torch

from handspan.cli import main

# Ray is 260 MB and no part of the development set-up: ``make cluster`` installs it and runs these.
collect_ignore = [] if importlib.util.find_spec("ray") else ["cluster"]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Toys are too small for more; and numbers are promised for a fixed number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def call(capsys):
    """Exit code, output and complaint of ``handspan WORDS``."""

    def run(*words):
        before, sys.argv = sys.argv, ["handspan", *map(str, words)]
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            sys.argv = before
        told = capsys.readouterr()
        return code, told.out, told.err

    return run
