"""cluster, factorize and complete: a table on the screen, factors and pictures in the folder."""

import numpy as np
import pytest
from test_command_line import call

QUICK = ("--partition", "natural", "--rounds", "4", "--eval-every", "2", "--engine", "steady")


@pytest.fixture
def blocks(tmp_path):
    """Rows of three kinds at six clients."""
    rng = np.random.default_rng(0)
    label = np.arange(60) % 3
    x = np.kron(np.eye(3), np.ones(3))[label] * rng.uniform(1, 2, (60, 1)) + 0.01
    path = tmp_path / "blocks.npz"
    np.savez(path, x=x.astype("float32"), y=label, client=np.arange(60) // 10)
    return path


@pytest.mark.parametrize("command", ["cluster", "factorize", "complete"])
def test_a_factorisation_leaves_its_factors_and_pictures(command, blocks, capsys, tmp_path):
    out = tmp_path / command
    code, text, _ = call(
        capsys, command, "--components", "3", "--data", str(blocks), *QUICK, "--out", str(out)
    )
    assert code == 0 and "factors.npz" in text
    found = np.load(out / "factors.npz")
    assert found["components"].shape == (3, 9)
    assert found["client"].tolist() == sorted(found["client"].tolist()) and len(found["rows"]) == 60
    assert {"config.json", "summary.json"} <= {path.name for path in out.iterdir()}
    assert {"components.png", "rows.png", "objective.png"} == {
        path.name for path in (out / "pictures").iterdir()
    }
    if command == "cluster":
        assert found["cluster"].max() <= 2
    if command == "factorize":
        assert found["components"].min() >= 0


def test_small_clients_are_told(blocks, capsys, tmp_path):
    options = ("--data", str(blocks), *QUICK, "--out", str(tmp_path / "x"))
    _, text, _ = call(capsys, "cluster", "--components", "10", *options)
    assert "6 of 6 clients have no more rows than components" in " ".join(text.split())


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("cluster", "--components", "99"), "exceeds the 60 rows"),
        (("factorize", "--method", "fedavrg"), "unknown method"),
        (("complete", "--set", "ridge=0"), "ridge must be above 0"),
    ],
)
def test_mistakes_are_one_sentence(arguments, told, blocks, capsys):
    code, _, complaint = call(capsys, *arguments, "--data", str(blocks), *QUICK)
    assert code == 2 and told in complaint and "Traceback" not in complaint


def test_negative_rows_are_refused_and_nothing_is_left(blocks, capsys, tmp_path):
    stored = dict(np.load(blocks))
    np.savez(blocks, **{**stored, "x": stored["x"] - 1})
    out = tmp_path / "y"
    options = ("--components", "2", "--data", str(blocks), *QUICK, "--out", str(out))
    code, _, complaint = call(capsys, "factorize", *options)
    assert code == 2 and "without negative entries" in complaint


def test_a_method_that_factorises_nothing_is_refused(blocks, capsys):
    code, _, told = call(
        capsys, "factorize", "--components", "2", "--method", "fedavg", "--data", str(blocks)
    )
    assert code == 2 and "fedmgs, fedmavg, fedpalm" in told
