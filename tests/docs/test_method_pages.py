"""Every method has its page, the made parts are fresh, and the commands on it run."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from handspan.cli import app
from handspan.core.errors import HandspanError
from handspan.core.method import MethodConfig
from handspan.registry import EXTRAS, methods
from handspan.report import pages

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "methods"
HEADINGS = (
    "What leaves the client",
    "When to use it, and when not",
    "Settings",
    "How to replicate",
    "Deviations",
)
OWN = sorted(n for n, m in methods().items() if m.build.__module__.startswith("handspan."))
NAMES = (*OWN, *EXTRAS)
SMALL = ("--clients", "12", "--rounds", "2", "--eval-every", "0", "--threads", "1")


def commands(name):
    page = PAGES / f"{name}.md"
    text = page.read_text() if page.exists() else ""  # a missing page has its own test
    lines = "\n".join(re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    return [line for line in lines.splitlines() if line.startswith("handspan ")]


def a_users_file(folder):
    """The file that the pages call data/NAME.npz: 12 clients, counts, and something about each."""
    rng = np.random.default_rng(0)
    (folder / "data").mkdir()
    np.savez(
        folder / "data" / "NAME.npz",
        x=rng.random((120, 40)).astype(np.float32),
        y=rng.integers(0, 3, 120),
        client=np.arange(120) % 12,
        side=rng.normal(size=(12, 4)),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_method_has_a_page_with_all_sections(name):
    text = (PAGES / f"{name}.md").read_text()
    missing = [title for title in HEADINGS if f"\n## {title}\n" not in text]
    assert not missing, f"docs/methods/{name}.md lacks {missing}"
    assert f"<!-- made: settings {name} -->" in text
    if name in OWN:
        assert f"<!-- made: deviations {name} -->" in text
        assert f"<!-- made: boundary {name} -->" in text


def test_no_page_speaks_of_a_method_that_is_gone():
    assert {path.stem for path in PAGES.glob("*.md")} == {"README", *NAMES}


def test_made_parts_are_fresh():
    stale = pages.update(ROOT, check=True)
    assert not stale, f"run python -m handspan.report.pages: {[str(page) for page in stale]}"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_a_command(name):
    assert commands(name)


@pytest.mark.parametrize("command", sorted({c for name in NAMES for c in commands(name)}))
def test_the_commands_of_a_page_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_users_file(tmp_path)
    arguments = [*shlex.split(command)[1:], *SMALL, "--engine", "loop"]
    arguments += ["--seeds", "1"] if arguments[0] == "compare" else []
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"


def test_deviations_are_those_of_the_module():
    assert "preset=algorithm1" in pages.deviations("pflmf")
    assert "References" not in pages.deviations("pflmf")


def test_a_setting_without_explanation_is_refused():
    with pytest.raises(HandspanError, match="has no string that explains it"):
        pages.field_docs(Silent)


@dataclass(frozen=True, kw_only=True)
class Silent(MethodConfig):
    """A configuration whose author forgot the string."""

    rank: int = 3


def test_renewing_twice_changes_nothing():
    text = "a\n<!-- made: settings ft -->\nold\n<!-- end -->\nb\n"
    once = pages.renew(text)
    assert "`ft_steps`" in once and "old" not in once
    assert pages.renew(once) == once
