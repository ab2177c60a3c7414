"""The example of the README runs, and its places for numbers are there."""

import re
import shlex
from pathlib import Path

import numpy as np

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs(tmp_path, monkeypatch):
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert "rounds=100" in code
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code.replace("rounds=100", "rounds=3, engine='loop'"), "README.md", "exec"), names)
    assert names["result"].summary["rounds"] == 3
    assert names["outputs"].shape == (5, 10)
    assert names["newcomer"].predict(names["rows"][:5]).shape == (5, 10)
    assert [row["method"] for row in names["table"]] == ["local", "fedavg+ft", "fedrep"]


def test_the_commands_run_one_after_the_other(call, tmp_path, monkeypatch):
    blocks = re.findall(r"^```console\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for line in "".join(blocks).splitlines() if line.startswith("handspan ")]
    assert {line.split()[1] for line in lines} == {"run", "compare", "adapt", "plot"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    for name in ("NAME", "NEW"):
        rows = {"x": rng.normal(size=(96, 5)), "y": rng.integers(0, 3, 96)}
        np.savez(tmp_path / "data" / f"{name}.npz", **rows, client=np.arange(96) % 12)
    small = ["--rounds", "2", "--steps", "2", "--engine", "loop", "--threads", "1"]
    for line in lines:
        words = shlex.split(line)[1:]
        words += small if words[0] in ("run", "compare") else []
        words += ["--seeds", "1", "--clients", "12"] if words[0] == "compare" else []
        code, _, complaint = call(*words)
        assert code == 0, f"{line}: {complaint}"


def test_the_example_is_short():
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15


def test_the_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        if not target.startswith("http"):
            assert (README.parent / target).exists(), f"README.md links to {target}"


def test_numbers_have_their_places():
    text = README.read_text()
    for name in ("DEMO TABLE", "SPEED TABLE"):
        assert text.index(f"<!-- {name}: begin -->") < text.index(f"<!-- {name}: end -->")
