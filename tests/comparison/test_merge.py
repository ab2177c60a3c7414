"""Shards, joined, are the comparison run as a whole."""

import json
import shutil

import pytest
from little import TERMS, federation

import handspan
from handspan.comparison import merge
from handspan.core.errors import HandspanError

METHODS = ["local", "ifca:k=2", "fedavg+ft:ft_steps=2"]
ASKED = {"seeds": 2, "engine": "loop", "threads": 1}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A comparison with trials and one without, each in one sitting."""
    folders = {}
    for tune in (None, 2):
        folders[tune] = tmp_path_factory.mktemp("whole")
        handspan.compare(
            METHODS, lambda seed, _: (federation(seed), None), out=folders[tune], tune=tune,
            **TERMS, **ASKED,
        )  # fmt: skip
    return folders


@pytest.fixture
def part(by_seed, terms, tmp_path):
    """Run a part of it in a folder of its own."""

    def run(name, methods=METHODS, **options):
        return handspan.compare(
            methods, by_seed, out=tmp_path / name, **{**terms, **ASKED, **options}
        )

    return run


@pytest.mark.parametrize("tune", [None, 2])
@pytest.mark.parametrize("count", [2, 5])
def test_shards_merged_are_the_whole(tune, count, both, part, contents, tmp_path):
    for i in range(1, count + 1):
        part(f"s{i}", shard=f"{i}/{count}", tune=tune)
    shards = [tmp_path / f"s{i}" for i in range(count, 0, -1)]  # in any order
    assert not any((shard / "table.md").exists() for shard in shards)
    table = merge(shards, tmp_path / "merged")
    assert not table.missing
    assert contents(tmp_path / "merged") == contents(both[tune])


def test_trials_and_final_runs_may_be_divided_apart(both, part, contents, tmp_path):
    for i in (1, 2):
        part(f"t{i}", shard=f"{i}/2", tune=2, stage="tune")
    merge([tmp_path / "t1", tmp_path / "t2"], tmp_path / "trials")
    for i in (1, 2, 3):
        shutil.copytree(tmp_path / "trials", tmp_path / f"f{i}")
        part(f"f{i}", shard=f"{i}/3", tune=2, stage="final")
    merge([tmp_path / f"f{i}" for i in (1, 2, 3)], tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(both[2])


def test_the_order_of_methods_and_settings_is_that_of_the_question(part, contents, tmp_path):
    grid = ["ifca:upload=sum,one_hot:k=2,3", "fedavg:weights=uniform,examples:lr=0.1,1"]
    given = {"methods": ["ifca", "fedavg"], "grid": grid, "seeds": 1}
    part("whole", **given)
    for i in (1, 2):
        part(f"s{i}", shard=f"{i}/2", **given)
    merge([tmp_path / "s1", tmp_path / "s2"], tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


def test_shards_may_share_one_folder(both, part, contents, tmp_path):
    for stage in ("tune", "final"):
        for i in (1, 2, 3):
            part("c", shard=f"{i}/3", tune=2, stage=stage)
    assert contents(tmp_path / "c") == contents(both[2])


def test_what_is_still_missing_is_told_and_there_is_no_table_yet(part, tmp_path, call):
    part("s1", shard="1/2")
    table = merge([tmp_path / "s1"], tmp_path / "merged")
    assert table.missing == ["ifca:k=2, seed 0", "local, seed 1", "fedavg+ft:ft_steps=2, seed 1"]
    assert not (tmp_path / "merged" / "table.md").exists()
    code, out, _ = call("merge", str(tmp_path / "s1"), "--out", str(tmp_path / "merged"))
    assert (code, "3 runs are missing, the table waits for them" in out) == (0, True)
    part("s2", shard="2/2")
    merge([tmp_path / "s2"], tmp_path / "merged")
    assert (tmp_path / "merged" / "table.md").exists(), "what was there stays"


def test_merging_again_changes_nothing(part, contents, tmp_path):
    for i in (1, 2):
        part(f"s{i}", shard=f"{i}/2")
    shards = [tmp_path / "s1", tmp_path / "s2"]
    merge(shards, tmp_path / "merged")
    before = contents(tmp_path / "merged")
    merge(shards, tmp_path / "merged")
    assert contents(tmp_path / "merged") == before


def test_a_copy_that_was_cut_short_is_made_again(both, contents, tmp_path):
    target = tmp_path / "merged"
    row = json.loads((both[None] / "comparison.json").read_text())[0]
    (target / row["cell"]).mkdir(parents=True)
    (target / row["cell"] / "history.jsonl").write_text("half a li")
    merge([both[None]], target)
    assert contents(target) == contents(both[None])
    copied = (target / row["cell"] / "history.jsonl").read_text()
    assert copied == (both[None] / row["cell"] / "history.jsonl").read_text()


def test_a_folder_with_other_files_is_left_alone(both, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.tex").write_text("mine")
    with pytest.raises(HandspanError, match="is no comparison"):
        merge([both[None]], tmp_path / "m")
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["thesis.tex"]


def test_parts_of_different_comparisons_are_refused(both, part, tmp_path):
    part("s1", rounds=2, shard="1/2")
    with pytest.raises(HandspanError, match=r"not parts of one comparison: they differ in options"):
        merge([tmp_path / "s1", both[None]], tmp_path / "merged")
    with pytest.raises(HandspanError, match=r"they differ in trials"):
        merge([both[2], both[None]], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_final_run_with_a_setting_that_the_trials_do_not_choose_is_refused(both, tmp_path):
    shutil.copytree(both[2], tmp_path / "s1")
    rows = json.loads((tmp_path / "s1" / "comparison.json").read_text())
    rows[0]["chosen"] = {"learning_rate": 123.0}
    (tmp_path / "s1" / "comparison.json").write_text(json.dumps(rows))
    with pytest.raises(HandspanError, match=r"ran local with lr=123.*the trials of all folders"):
        merge([tmp_path / "s1"], tmp_path / "merged")


def test_final_runs_wait_for_all_trials(part):
    part("c", shard="1/2", tune=2, stage="tune")
    with pytest.raises(HandspanError, match=r"needs all trials, and \d are missing: .*merge"):
        part("c", shard="1/2", tune=2, stage="final")


def test_what_is_no_comparison_is_refused(tmp_path, call):
    code, _, err = call("merge", str(tmp_path), "--out", str(tmp_path / "m"))
    assert (code, "is no comparison: it has no plan.json" in err) == (2, True)
    code, _, err = call("merge", "--out", str(tmp_path / "m"))
    assert code == 2 and err.count("\n") == 1


def test_another_format_version_is_refused(both, tmp_path):
    folder = shutil.copytree(both[None], tmp_path / "c")
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "format": 99}))
    with pytest.raises(HandspanError, match="format version 99"):
        merge([folder], tmp_path / "m")


def test_a_part_needs_a_folder(by_seed, terms):
    with pytest.raises(HandspanError, match="needs a folder to leave its results in: --out"):
        handspan.compare(METHODS, by_seed, shard="1/2", **terms, **ASKED)
