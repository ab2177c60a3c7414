"""Whatever ends a comparison, the next sitting goes on, and the table is the same."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from little import TERMS, federation

import handspan
from handspan.comparison import read
from handspan.core.errors import HandspanError

METHODS = ["local", "ifca:k=2", "fedavg+ft:ft_steps=2"]
ASKED = {"seeds": 2, "tune": 2, "engine": "loop", "threads": 1}
HERE = Path(__file__).parent

KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from little import TERMS, federation
from test_resume import ASKED, METHODS
import handspan

left = [int(sys.argv[3])]

def progress(text, seed):
    def tell(done, total, latest):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    return tell

handspan.compare(METHODS, lambda seed, problem: (federation(seed), None), out=sys.argv[2],
                 progress=progress, checkpoint_seconds=0, **TERMS, **ASKED)
"""


class Crash(BaseException):
    """Ends a sitting, as nothing else would catch it."""


def crashing(after):
    """Progress that ends the sitting after so many rounds of any runs."""
    left = [after]

    def tell(done, total, latest):
        left[0] -= 1
        if not left[0]:
            raise Crash

    return lambda text, seed: tell


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The comparison in one sitting."""
    out = tmp_path_factory.mktemp("whole")
    handspan.compare(METHODS, lambda seed, _: (federation(seed), None), out=out, **TERMS, **ASKED)
    return out


@pytest.mark.parametrize("every", [1, 5])
def test_a_comparison_that_crashes_again_and_again_gives_the_same_table(
    every, whole, by_seed, terms, contents, tmp_path
):
    sittings = 0
    while True:
        sittings += 1
        try:
            handspan.compare(
                METHODS, by_seed, out=tmp_path / "c", progress=crashing(every),
                checkpoint_seconds=0, **terms, **ASKED,
            )  # fmt: skip
            break
        except Crash:
            continue
    rounds = (3 * 2 + 3 * 2) * terms["rounds"]
    assert sittings >= rounds // every
    assert contents(tmp_path / "c") == contents(whole)


def test_killed_by_the_system_twice_it_gives_the_same_table(
    whole, by_seed, terms, contents, tmp_path
):
    for rounds in (8, 20):  # in the third trial; among the final runs
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(HERE), str(tmp_path / "c"), str(rounds)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (tmp_path / "c" / "table.md").exists()
    told = []
    table = handspan.compare(
        METHODS, by_seed, out=tmp_path / "c", watch=told.append, checkpoint_seconds=0,
        **terms, **ASKED,
    )  # fmt: skip
    assert contents(tmp_path / "c") == contents(whole)
    assert not table.missing
    assert [standing.done for standing in told] == list(range(1, 13)), "progress over the table"
    assert {standing.total for standing in told} == {12}
    assert told[-1].seconds_left == 0


def test_a_finished_comparison_runs_nothing_again(whole, by_seed, terms, contents, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "c")
    runs = {path: path.stat().st_mtime_ns for path in folder.glob("**/summary.json")}

    def never(text, seed):
        raise AssertionError(f"{text} runs again")

    table = handspan.compare(METHODS, by_seed, out=folder, progress=never, **terms, **ASKED)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("**/summary.json")} == runs
    assert contents(folder) == contents(whole)
    assert list(read(folder)) == list(table)


def test_runs_of_another_configuration_are_not_taken_over(whole, by_seed, terms, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "c")
    terms["rounds"] = 4
    with pytest.raises(HandspanError, match="rounds"):
        handspan.compare(METHODS, by_seed, out=folder, **terms, **ASKED)


def test_more_seeds_keep_what_is_there(whole, by_seed, terms, contents, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "c")
    more = {**ASKED, "seeds": 3}
    ran = []
    handspan.compare(
        METHODS, by_seed, out=folder, progress=lambda t, s: ran.append(s), **terms, **more
    )
    assert ran == [2, 2, 2]
    fresh = tmp_path / "fresh"
    handspan.compare(METHODS, by_seed, out=fresh, **terms, **more)
    assert contents(folder) == contents(fresh)


@pytest.mark.parametrize("name", ["comparison.json", "plan.json", "tuning.json"])
def test_a_damaged_file_is_named_and_mended_by_running_again(
    name, whole, by_seed, terms, contents, tmp_path
):
    folder = shutil.copytree(whole, tmp_path / "c")
    (folder / name).write_text((folder / name).read_text()[:-20])
    with pytest.raises(HandspanError, match=name.replace(".", r"\.")):
        read(folder)
    handspan.compare(METHODS, by_seed, out=folder, **terms, **ASKED)
    assert contents(folder) == contents(whole)


def test_a_folder_of_another_kind_is_left_alone(by_seed, terms, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(HandspanError, match="is no comparison"):
        handspan.compare(METHODS, by_seed, out=tmp_path, **terms, **ASKED)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_processes_do_not_run_one_cell(whole, by_seed, terms, tmp_path):
    from handspan.disk import held

    name = json.loads((whole / "comparison.json").read_text())[0]["cell"]
    with held(tmp_path / "c" / name):
        with pytest.raises(HandspanError, match=r"another process is running .*--shard"):
            handspan.compare(METHODS, by_seed, out=tmp_path / "c", **terms, **ASKED)
