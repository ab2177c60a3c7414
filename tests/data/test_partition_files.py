"""Partitions as files: written, read again, and refused where they do not belong."""

import json
import sys

import numpy as np
import pytest

from handspan.cli import main
from handspan.core.errors import HandspanError
from handspan.data import load_data, load_source
from handspan.data.partition import Partition, PartitionKind, partition, registry
from handspan.data.partition_file import pack_partition
from handspan.data.partition_report import report_partition

DIGITS = load_source("digits")
SPECS = ["iid", "dirichlet:0.5", "permuted:3", "rotated:3", "affine:4", "quantity:1.5+permuted:3"]


def call(capsys, *arguments):
    before, sys.argv = sys.argv, ["handspan", *map(str, arguments)]
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    return code, *capsys.readouterr()


def write(path, spec="permuted:3", num_clients=20, seed=0, source=DIGITS):
    part = partition(source, spec, num_clients, seed)
    path.write_bytes(pack_partition(source, part, spec, seed))
    return part


@pytest.mark.parametrize("spec", SPECS)
def test_a_stored_partition_gives_the_same_data(tmp_path, spec):
    write(tmp_path / "p.npz", spec)
    made = load_data("digits", partition=spec, num_clients=20)
    again = load_data("digits", partition=f"file:{tmp_path / 'p.npz'}", num_clients=7)
    assert again.fingerprint() == made.fingerprint()
    assert again.info["partition_hash"] == made.info["partition_hash"]
    assert made.groups is None or (again.groups == made.groups).all()
    assert spec in again.info["remarks"][0]


def test_the_seed_of_the_run_changes_the_split_and_not_the_partition(tmp_path):
    write(tmp_path / "p.npz")
    spec = f"file:{tmp_path / 'p.npz'}"
    zero, one = (load_data("digits", partition=spec, seed=seed) for seed in (0, 1))
    assert zero.info["partition_hash"] == one.info["partition_hash"]
    assert zero.fingerprint() != one.fingerprint()


def test_natural_clients_keep_names_and_side(tmp_path):
    x, y = np.random.default_rng(0).random((30, 3)), np.arange(30) % 3
    client = np.array(["u", "v", "w"])[np.arange(30) // 10]
    path = str(tmp_path / "made.npz")
    np.savez(path, x=x, y=y, client=client, side=np.eye(3))
    source = load_source(path)
    write(tmp_path / "p.npz", "natural+permuted:2", source=source)
    made = load_data(path, partition="natural+permuted:2")
    again = load_data(path, partition=f"file:{tmp_path / 'p.npz'}")
    assert again.fingerprint() == made.fingerprint() and again.names == ("u", "v", "w")
    assert again.side is not None


def test_the_same_partition_gives_the_same_bytes(tmp_path):
    write(tmp_path / "a.npz")
    write(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        about = json.loads(str(file["about"]))
    assert about["source"] == "digits" and about["num_rows"] == 1797
    assert about["partition"] == "permuted:3" and len(about["hash"]) == len(about["content"]) == 16


def test_another_source_is_refused(tmp_path):
    write(tmp_path / "p.npz")
    spec = f"file:{tmp_path / 'p.npz'}"
    x, y = DIGITS.x, DIGITS.y
    np.savez(tmp_path / "short.npz", x=x[:-1], y=y[:-1])
    with pytest.raises(HandspanError, match=r"divides 1797 rows of digits, but .* has 1796"):
        load_data(str(tmp_path / "short.npz"), partition=spec)
    for changed_x, changed_y in [(x[::-1], y), (x, y[::-1]), (x.astype(np.int64), y)]:
        np.savez(tmp_path / "other.npz", x=changed_x, y=changed_y)
        with pytest.raises(HandspanError, match=r"made for digits, and the rows of .* are others"):
            load_data(str(tmp_path / "other.npz"), partition=spec)
    np.savez(tmp_path / "same.npz", x=x, y=y)  # other name, same rows
    assert load_data(str(tmp_path / "same.npz"), partition=spec).num_clients == 20


def test_sparse_sources_have_a_content_too(tmp_path):
    parts = dict(indices=np.arange(12) % 5, indptr=np.arange(0, 13, 2), shape=[6, 5])
    for name, values in [("a", np.ones(12)), ("b", np.arange(12.0) + 1)]:
        np.savez(tmp_path / f"{name}.npz", data=values, y=np.arange(6) % 2, **parts)
    write(tmp_path / "p.npz", "iid", 3, source=load_source(str(tmp_path / "a.npz")))
    spec = f"file:{tmp_path / 'p.npz'}"
    assert load_data(str(tmp_path / "a.npz"), partition=spec).num_clients == 3
    with pytest.raises(HandspanError, match="are others"):
        load_data(str(tmp_path / "b.npz"), partition=spec)


def rewrite(path, **changes):
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    about = json.loads(str(arrays["about"]))
    about.update(changes.pop("about", {}))
    arrays = {**arrays, "about": np.array(json.dumps(about)), **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"about": {"format": "x"}}, "no stored partition"),
        ({"about": {"version": 2}}, "format version 2"),
        ({"about": np.array("{")}, "no stored partition"),
        ({"about": None}, "no stored partition"),
        ({"client": None}, "no stored partition"),
        ({"client": np.zeros(1797, int)}, "hash is no longer"),
        ({"client": np.arange(5)}, "hash is no longer"),
        ({"groups": np.zeros(20, int)}, "hash is no longer"),
        ({"relabel": np.zeros((3, 10), int)}, "hash is no longer"),
        ({"relabel": np.array(["a"])}, "hash is no longer"),
    ],
)
def test_changed_files_are_refused(tmp_path, changes, words):
    path = tmp_path / "p.npz"
    write(path)
    if isinstance(changes.get("about"), dict):
        rewrite(path, **changes)
    else:
        with np.load(path, allow_pickle=False) as file:
            arrays = {**{name: file[name] for name in file.files}, **changes}
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(HandspanError, match=words):
        load_data("digits", partition=f"file:{path}")


def test_truncated_files_and_names_without_a_file_are_refused(tmp_path):
    path = tmp_path / "p.npz"
    write(path)
    whole = path.read_bytes()
    for part in range(10):
        path.write_bytes(whole[: len(whole) * part // 10])
        with pytest.raises(HandspanError, match="damaged or no stored partition"):
            load_data("digits", partition=f"file:{path}")
    with pytest.raises(HandspanError, match="there is no file"):
        load_data("digits", partition=f"file:{tmp_path / 'none.npz'}")
    with pytest.raises(HandspanError, match=r"for example file:p\.npz"):
        load_data("digits", partition="file:")
    with pytest.raises(HandspanError, match="cannot be joined"):
        load_data("digits", partition="iid+file:p.npz")


def test_rows_replaced_in_an_own_way_cannot_be_stored(monkeypatch):
    def scaled(source, num_clients, rng):
        return Partition(client=np.arange(source.num_rows) % num_clients, x=source.x * 2.0)

    entry = PartitionKind(usage="scaled", parse=lambda a: (), make=scaled)
    monkeypatch.setitem(registry, "scaled", entry)
    assert report_partition("digits", "scaled", 5, 0, pack=False)[1] is None
    with pytest.raises(HandspanError, match="cannot be stored"):
        report_partition("digits", "scaled", 5, 0)


# The command.


def test_the_command_tells_sizes_and_hash_and_writes_the_file(capsys, tmp_path):
    path = tmp_path / "below" / "p.npz"
    arguments = ("--partition", "quantity:1.5+permuted:3", "--clients", "12", "--seed", "4")
    path.parent.mkdir()
    code, out, _ = call(capsys, "partition", *arguments, "--out", path)
    assert code == 0
    part = partition(DIGITS, "quantity:1.5+permuted:3", 12, 4)
    sizes = np.bincount(part.client)
    assert "digits, quantity:1.5+permuted:3, seed 4\n12 clients, 1797 rows\n" in out
    assert f"rows of a client: min {sizes.min()}, median" in out and f"max {sizes.max()}\n" in out
    assert "classes of a client: min " in out and "planted groups: 3\n" in out
    assert f"hash: {part.fingerprint()}\n" in out and f"file:{path}" in out
    again = load_data("digits", partition=f"file:{path}")
    assert again.info["partition_hash"] == part.fingerprint()


def test_the_command_without_out_only_tells(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "partition", "--partition", "iid", "--clients", "10")
    assert code == 0 and "rows of a client: min 179, median 180, max 180" in out
    assert "groups" not in out and not list(tmp_path.iterdir())


def test_the_command_reads_tables(capsys, tmp_path):
    lines = ["ward,age,died"] + [f"{row % 3},{row},{row % 2}" for row in range(12)]
    (tmp_path / "beds.csv").write_text("\n".join(lines))
    told = ("--data", tmp_path / "beds.csv", "--client-column", "ward", "--label-column", "died")
    code, out, _ = call(capsys, "partition", *told, "--partition", "natural")
    assert code == 0 and "3 clients, 12 rows" in out
    assert f"{tmp_path}/beds.csv:client=ward:label=died, natural" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--data nothing", "unknown source 'nothing'"),
        ("--data none.csv", "there is no file none.csv"),
        ("--partition quantity:x", "SIGMA"),
        ("--clients many", "many"),
        ("--client-column ward", "belong to a .csv or .parquet table, not to digits"),
        ("--out none/p.npz", "none"),
    ],
)
def test_mistakes_are_told_in_one_sentence(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, complaint = call(capsys, "partition", *arguments.split())
    assert code == 2 and words in complaint and complaint.count("\n") == 1
    assert complaint.startswith("handspan: ")
