"""What a run folder holds, what it refuses, and that reading it changes nothing."""

import json

import pytest
import torch
from torch import nn

import handspan
from handspan.core.errors import HandspanError
from handspan.disk import held, pack, unpack
from handspan.runs import RunFolder


@pytest.fixture(scope="module")
def finished(play, tmp_path_factory):
    """Make a folder of a finished run, to be copied."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    play(folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy that a test may damage."""
    copy = tmp_path / "run"
    copy.mkdir()
    for path in finished.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_a_run_folder_has_its_files(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json", "history.jsonl", "timing.jsonl", "clients.parquet", "summary.json",
        "checkpoint.safetensors",
    }  # fmt: skip
    assert (folder / "summary.json").stat().st_mode & 0o777 == 0o644
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [row["round"] for row in history] == [2, 4]
    assert history[-1]["bytes_up"] > history[0]["bytes_up"] > 0
    assert not [key for row in history for key in row if "seconds" in key]


def test_the_same_run_gives_the_same_bytes(play, folder, contents, tmp_path):
    play(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)


def test_a_checkpoint_is_packed_alike_every_time(tmp_path):
    named = {"b": torch.arange(3), "a": torch.ones(2, 2), "none": torch.zeros(0)}
    progress = {"round": 3, "history": [{"x": float("nan")}]}
    packed = {pack(named, progress) for _ in range(30)}
    assert len(packed) == 1
    (tmp_path / "c").write_bytes(packed.pop())
    got, about = unpack(tmp_path / "c")
    assert about == {"round": 3, "history": [{"x": None}]}
    assert set(got) == set(named) and all(torch.equal(got[name], named[name]) for name in named)


def test_an_existing_folder_is_refused_unless_the_run_goes_on(play, folder, contents, tmp_path):
    before = contents(folder)
    with pytest.raises(HandspanError, match="exists already: go on with --resume"):
        play(folder, resume=False)
    assert contents(folder) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    for resume in (False, True):
        with pytest.raises(HandspanError, match="is no run folder: choose another"):
            play(tmp_path / "other", resume=resume)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    play(tmp_path / "empty", resume=False)


@pytest.mark.parametrize(
    ("told", "change"),
    [
        ("rounds = 4, not 5", {"rounds": 5}),
        ("seed = 3, not 4", {"seed": 4}),
        ("learning_rate = 0.1, not 0.2", {"learning_rate": 0.2}),
        ("weights = None, not 'examples'", {"weights": "examples"}),
        ("dtype = 'float32', not 'float64'", {"dtype": "float64"}),
        ("store = 'memory', not 'disk'", {"store": "disk"}),
        ("model = None, not 'cnn_bench'", {"model": "mlp"}),
    ],
)
def test_a_run_does_not_go_on_with_another_configuration(told, change, play, folder, contents):
    before = contents(folder)
    with pytest.raises(HandspanError, match=told.replace("cnn_bench", "mlp")):
        play(folder, **change)
    assert contents(folder) == before


def test_a_run_does_not_go_on_with_other_rows(federation, terms, folder):
    other = federation.subset(torch.arange(5))
    with pytest.raises(HandspanError, match="was started with fingerprint"):
        handspan.fit("fedrep", other, **terms, out=folder, resume=True)


def test_how_a_run_is_executed_may_change_and_its_own_engine_is_taken(play, folder, contents):
    before = contents(folder)
    again = play(folder, engine="stacked", block_size=2, threads=None, checkpoint_seconds=0)
    assert (again.choice.engine, again.choice.threads) == ("loop", 1)
    assert contents(folder) == before


def test_one_process_at_a_time(play, folder, contents):
    before = contents(folder)
    with held(folder), pytest.raises(HandspanError, match="another process is running"):
        play(folder)
    assert contents(folder) == before
    play(folder)  # free again


def _format_of(folder, version):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "format": version}))


def test_an_unknown_format_is_refused(play, folder, federation, call):
    _format_of(folder, 99)
    with pytest.raises(HandspanError, match="has format version 99, and this handspan reads 1"):
        play(folder)
    with pytest.raises(HandspanError, match="has format version 99"):
        handspan.load(folder, data=federation)
    for words in (
        ("export", folder, "--client", 1, "--to", folder / "m"),
        ("plot", folder),
        ("run", "fedrep", "--out", folder, "--resume"),
    ):
        code, _, complaint = call(*words)
        assert (code, "format version 99" in complaint) == (2, True), complaint


def test_a_checkpoint_of_an_unknown_format_is_refused(play, folder):
    named, progress = unpack(folder / "checkpoint.safetensors")
    (folder / "checkpoint.safetensors").write_bytes(pack(named, {**progress, "format": 99}))
    with pytest.raises(HandspanError, match="has format version 99"):
        play(folder)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def _empty(path):
    path.write_bytes(b"")


def _turn_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def _make_a_folder(path):
    path.unlink()
    path.mkdir()


def _a_list(path):
    path.write_text("[]\n")


@pytest.mark.parametrize("damage", [_cut, _empty, _turn_a_bit, _make_a_folder])
def test_a_damaged_checkpoint_is_told_by_name(damage, play, folder):
    damage(folder / "checkpoint.safetensors")
    with pytest.raises(HandspanError, match=r"checkpoint\.safetensors is damaged"):
        play(folder)


@pytest.mark.parametrize("damage", [_cut, _empty, _make_a_folder, _a_list])
@pytest.mark.parametrize("name", ["config.json", "summary.json", "clients.parquet"])
def test_a_damaged_file_is_told_by_name(damage, name, folder, federation):
    damage(folder / name)
    with pytest.raises(HandspanError, match=name):
        handspan.load(folder, data=federation)


def test_a_run_without_a_checkpoint_begins_again(play, folder, contents):
    before = contents(folder)
    for name in ("checkpoint.safetensors", "summary.json", "clients.parquet", "history.jsonl"):
        (folder / name).unlink()
    (folder / "checkpoint.safetensors.partial").write_bytes(b"half of it")
    with pytest.raises(HandspanError, match="has not finished"):
        RunFolder(folder).refuse_unfinished()
    play(folder)
    assert contents(folder) == before


def test_times_that_a_crash_cut_short_are_passed_over(play, folder):
    with (folder / "timing.jsonl").open("a") as file:
        file.write('{"round": 4, "sec')
    seconds = RunFolder(folder).seconds()
    assert seconds[0] > 0
    assert play(folder).summary["seconds"] >= seconds[0]


def test_an_opened_run_predicts_as_it_did_and_is_not_changed(play, folder, federation, contents):
    before, result = contents(folder), play(folder)
    opened = handspan.load(folder, data=federation)
    x = federation.x[:5].numpy()
    for client in range(6):
        assert torch.equal(opened.predict(client, x), result.predict(client, x))
    assert opened.summary == result.summary
    assert opened.history == result.history
    assert all(torch.equal(opened.clients[k], result.clients[k]) for k in result.clients)
    newcomer = opened.adapt(x, [0, 1, 2, 1, 0])
    assert newcomer.predict(x).shape == (5, 3)
    assert contents(folder) == before


def test_a_run_from_memory_is_saved_as_out_would_have(play, federation, folder, contents, tmp_path):
    target = play(None).save(tmp_path / "saved")
    assert contents(target) == contents(folder)
    with pytest.raises(HandspanError, match="exists already"):
        play(None).save(target)


def test_given_rows_and_models_are_asked_for(federation, terms, tmp_path):
    def network():
        return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))

    result = handspan.fit("fedrep", federation, model=network, **terms, out=tmp_path / "r")
    with pytest.raises(HandspanError, match="pass them as data="):
        handspan.load(tmp_path / "r", model=network)
    with pytest.raises(HandspanError, match="pass it as model="):
        handspan.load(tmp_path / "r", data=federation)
    with pytest.raises(HandspanError, match="was trained on other data"):
        handspan.load(tmp_path / "r", data=federation.subset(torch.arange(3)), model=network)
    opened = handspan.load(tmp_path / "r", data=federation, model=network)
    x = federation.x[:4]
    assert torch.equal(opened.predict(2, x), result.predict(2, x))


def test_a_hook_sees_every_round_and_may_stop_the_run(federation, terms):
    seen = []

    def stop(state):
        seen.append(state.round)
        return state.round == 3

    result = handspan.fit("local", federation, **terms, hooks=[stop])
    assert seen == [1, 2, 3]
    assert result.summary["rounds"] == 3
    assert [row["round"] for row in result.history] == [2, 3], "the last round is scored"
