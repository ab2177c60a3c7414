import sys

import pytest
import torch

from handspan.cli import main

METHODS = ("local", "fedavg+ft:ft_steps=2", "pflmf:factor=head:scaled=true:rank=2")
COMMON = (
    "--partition", "permuted:2", "--clients", "12", "--cohort", "0.5", "--rounds", "4",
    "--eval-every", "1", "--steps", "3", "--lr", "0.3", "--engine", "loop", "--threads", "1",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Numbers are promised for a fixed number of threads, and small problems need no more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def command(*words):
    """Exit code of ``handspan WORDS``."""
    before, sys.argv = sys.argv, ["handspan", *map(str, words)]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = before
    return 0


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """Folder of a comparison of three methods with two seeds."""
    folder = tmp_path_factory.mktemp("compared") / "c"
    words = ("compare", ",".join(METHODS), *COMMON, "--seeds", "2", "--out", folder)
    assert command(*words) == 0
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Folder of a single run of FedAvg, fine-tuned, on clients with other labels, two held out."""
    folder = tmp_path_factory.mktemp("trained") / "r"
    words = ("run", METHODS[1], *COMMON, "--partition", "dirichlet:0.5", "--holdout-clients", "2")
    words = (*words, "--out", folder)
    assert command(*words) == 0
    return folder
