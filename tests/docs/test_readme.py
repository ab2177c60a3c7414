"""The example of the README runs, and its places for numbers are there."""

import re
from pathlib import Path

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
