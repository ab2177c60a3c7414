"""The example of docs/adding_a_method.md works, installed as a package of its own."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_method.md"
FILE = re.compile(r'^```\w+ title="(?P<name>[^"]+)"\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder that holds the example as pip would have installed it."""
    folder = tmp_path_factory.mktemp("external")
    files = {found["name"]: found["text"] for found in FILE.finditer(PAGE.read_text())}
    assert set(files) == {"handspan_localhead.py", "pyproject.toml", "test_localhead.py"}
    for name, text in files.items():
        if name.endswith(".py"):
            (folder / name).write_text(text)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    about = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    points = project["entry-points"]["handspan.methods"]
    lines = "".join(f"{name} = {module}\n" for name, module in points.items())
    (about / "entry_points.txt").write_text(f"[handspan.methods]\n{lines}")
    return folder


def run(package, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=package,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_example_stands_in_the_list_of_methods(package):
    done = run(package, "-m", "handspan.cli", "list")
    assert done.returncode == 0, done.stderr
    assert "localhead" in done.stdout


def test_the_example_passes_its_own_tests(package):
    done = run(package, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", ".")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_the_example_trains_from_the_command_line(package):
    done = run(
        package,
        *("-m", "handspan.cli", "run", "localhead", "--clients", "10", "--rounds", "2"),
        *("--engine", "stacked", "--set", "weights=uniform"),
    )
    assert done.returncode == 0, done.stderr
    assert "localhead" in done.stdout
