"""Records that go to disk do not pile up in memory while checkpoints are rare."""

import pytest

from handspan import fit, session
from handspan.runs import RunFolder


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_records_that_fill_the_memory_are_written_before_it_is_time(
    store, federation, terms, tmp_path, monkeypatch
):
    saved, save = [], RunFolder.save

    def saving(folder, state, records):
        saved.append((state.round, records.waiting_bytes()))
        save(folder, state, records)
        assert not records.waiting_bytes()

    monkeypatch.setattr(RunFolder, "save", saving)
    monkeypatch.setattr(session, "_MOST_WAITING", 5_000)  # a round writes 2340 bytes
    terms |= {"store": store, "checkpoint_seconds": 1e9, "eval_every": 0, "rounds": 10}
    fit("fedrep", federation, out=tmp_path / "run", **terms)
    rounds, waiting = zip(*saved, strict=True)
    assert rounds == ((3, 6, 9, 10) if store == "disk" else (10,))
    assert max(waiting) < (8_000 if store == "disk" else 1)
