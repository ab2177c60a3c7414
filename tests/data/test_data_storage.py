"""Federations on disk: saved ones, and rows that do not fit into memory."""

import gc
import json

import numpy as np
import pytest
import torch
from scipy import sparse

from handspan.core.errors import HandspanError
from handspan.data import from_arrays, from_clients, open_saved, save


def make(**options):
    rng = np.random.default_rng(0)
    groups = np.repeat(["a", "b", "c"], [400, 900, 700])
    x = rng.normal(3.0, 2.0, size=(2000, 30)).astype(np.float32)
    side = rng.normal(size=(3, 2))
    return from_arrays(x, rng.integers(0, 4, 2000), groups=groups, side=side, **options)


def test_mapped_rows_equal_rows_in_memory(tmp_path):
    plain = make()
    mapped = make(max_memory=1000, scratch=tmp_path / "scratch")
    files = list((tmp_path / "scratch").iterdir())
    assert len(files) == 1 and files[0].stat().st_size > 2000 * 30 * 4
    assert torch.equal(mapped.x, plain.x)
    assert mapped.fingerprint() == plain.fingerprint()
    subset = mapped.subset(torch.tensor([0, 2]))
    del mapped
    gc.collect()
    assert not list((tmp_path / "scratch").iterdir())
    assert torch.equal(subset.x, plain.subset(torch.tensor([0, 2])).x)


def test_mapped_clients_equal_clients_in_memory(tmp_path):
    rng = np.random.default_rng(1)
    clients = [(rng.normal(size=(m, 3)), rng.normal(size=m)) for m in (50, 2, 31)]
    mapped = from_clients(clients, max_memory=0, scratch=tmp_path)
    assert mapped.fingerprint() == from_clients(clients).fingerprint()


def test_a_mapped_source_is_read(tmp_path):
    x = np.random.default_rng(2).normal(size=(40, 3))
    np.save(tmp_path / "x.npy", x)
    groups = np.repeat([0, 1], 20)
    mapped = from_arrays(np.load(tmp_path / "x.npy", mmap_mode="r"), groups=groups)
    assert mapped.fingerprint() == from_arrays(x, groups=groups).fingerprint()


def test_an_unwritable_scratch_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HandspanError, match="scratch folder"):
        make(max_memory=0, scratch=tmp_path / "file" / "below")


@pytest.mark.parametrize("is_sparse", [False, True])
def test_saved_data_come_back(tmp_path, is_sparse):
    data = make()
    if is_sparse:
        x = sparse.random_array((60, 9), density=0.2, format="csr", rng=np.random.default_rng(0))
        data = from_arrays(x, groups=np.repeat([0, 1, 2], 20))
    save(data, tmp_path / "saved")
    again = open_saved(tmp_path / "saved")
    assert again.fingerprint() == data.fingerprint()
    assert (again.names, again.num_classes) == (data.names, data.num_classes)
    assert again.info == data.info and again.is_sparse == is_sparse
    before = (tmp_path / "saved" / "offsets.npy").read_bytes()
    again.offsets[0] = 0
    if not is_sparse:
        again.x[0] = 0.0
        assert open_saved(tmp_path / "saved").fingerprint() == data.fingerprint()
    assert (tmp_path / "saved" / "offsets.npy").read_bytes() == before


def test_a_full_folder_is_not_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(HandspanError, match="not empty"):
        save(make(), tmp_path)
    with pytest.raises(HandspanError, match="cannot save"):
        save(make(), tmp_path / "mine.txt" / "below")
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_damaged_and_unknown_folders_are_refused(tmp_path):
    with pytest.raises(HandspanError, match="no saved data"):
        open_saved(tmp_path)
    folder = tmp_path / "saved"
    save(make(), folder)
    meta = json.loads((folder / "meta.json").read_text())
    for change, words in [({"version": 2}, "format version 2"), ({"format": "x"}, "not written")]:
        (folder / "meta.json").write_text(json.dumps({**meta, **change}))
        with pytest.raises(HandspanError, match=words):
            open_saved(folder)
    (folder / "meta.json").write_text("{")
    with pytest.raises(HandspanError, match="damaged"):
        open_saved(folder)
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes()[:70000])
    with pytest.raises(HandspanError, match="damaged"):
        open_saved(folder)
