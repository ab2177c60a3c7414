"""A run that is interrupted, at any moment and by anything, goes on to the same files."""

import errno
import os
import resource
from contextlib import contextmanager

import pytest

from handspan.core.errors import HandspanError
from handspan.simulation.federation import Simulation

SHORT = {"rounds": 2, "steps": 2, "cohort": 2, "eval_every": 0}


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_crash_at_any_moment_loses_nothing(
    store, play, contents, crash_at, saving_every_round, tmp_path
):
    with crash_at(10**6) as moments:
        play(tmp_path / "whole", store=store, **SHORT)
    wanted = contents(tmp_path / "whole")
    assert len(moments) > 20
    for moment in moments:
        folder = tmp_path / str(moment)
        with crash_at(moment), pytest.raises(crash_at.Crash):
            play(folder, store=store, **SHORT)
        play(folder, store=store, **SHORT)
        assert contents(folder) == wanted, f"killed before operation {moment}"


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_run_goes_on_where_it_stopped_and_plays_no_round_again(
    store, engine, play, contents, tmp_path, monkeypatch
):
    way = {"store": store, "engine": engine}
    play(tmp_path / "whole", **way)
    play(tmp_path / "parts", hooks=[lambda state: state.round == 2], **way)
    played = []
    exchange = Simulation.exchange

    def noting(self, phase, broadcast, round):
        played.append(int(round.index))
        return exchange(self, phase, broadcast, round)

    monkeypatch.setattr(Simulation, "exchange", noting)
    play(tmp_path / "parts", **way)
    assert played == [2, 3]
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_finished_run_stays_as_it_is(play, contents, tmp_path, monkeypatch):
    play(tmp_path / "r")
    before = contents(tmp_path / "r")
    monkeypatch.setattr(Simulation, "exchange", None)  # no round is played
    again = play(tmp_path / "r")
    assert contents(tmp_path / "r") == before
    assert again.summary["rounds"] == 4


def test_records_on_disk_and_in_memory_give_the_same_run(play, contents, tmp_path):
    found = {}
    for store in ("memory", "disk"):
        result = play(tmp_path / store, store=store)
        found[store] = contents(tmp_path / store)
        private = result.simulation.store.to_named()
        found[store]["private"] = {name: t.tolist() for name, t in private.items()}
    for name in ("history.jsonl", "clients.parquet", "summary.json", "private"):
        assert found["disk"][name] == found["memory"][name], name
    assert any(name.startswith("clients/") for name in found["disk"])


@contextmanager
def small_files(most):
    """As on a full disk: no file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_full_disk_is_told_and_costs_nothing_that_was_saved(store, play, contents, tmp_path):
    play(tmp_path / "whole", store=store)
    folder = tmp_path / "full"
    play(folder, hooks=[lambda state: state.round == 2], store=store)
    before = contents(folder)
    for most in (0, 300, 2000):
        with small_files(most), pytest.raises(HandspanError, match="cannot write") as told:
            play(folder, store=store)
        assert "\n" not in str(told.value)
        kept = contents(folder)
        assert {name: kept[name] for name in before if name != "history.jsonl"} == {
            name: before[name] for name in before if name != "history.jsonl"
        }
    play(folder, store=store)
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("most", [0, 300, 2000])
def test_a_run_that_cannot_even_begin_leaves_nothing_behind(store, most, play, tmp_path):
    with small_files(most), pytest.raises(HandspanError, match=r"cannot (write|create)"):
        play(tmp_path / "full", store=store)
    assert not (tmp_path / "full").exists()


def test_a_disk_that_fills_up_while_a_file_is_written_keeps_the_file(tmp_path, monkeypatch):
    from handspan.disk import write

    path = tmp_path / "a.json"
    write(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HandspanError, match="No space left on device; what was there before"):
        write(path, b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a.json", b"old")]
