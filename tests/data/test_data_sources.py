"""Files in, federations out: every layout that is read, and every file that is refused."""

import json

import numpy as np
import pytest
import torch
from scipy import sparse

from handspan.core.errors import HandspanError
from handspan.data import load_data, load_source, split_holdout

RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 4)).astype(np.float32)
Y = np.arange(30) % 3


def write(tmp_path, **arrays):
    np.savez_compressed(tmp_path / "made.npz", **arrays)
    return str(tmp_path / "made.npz")


def write_sparse(tmp_path, **more):
    matrix = sparse.random_array((30, 7), density=0.4, format="csr", rng=np.random.default_rng(1))
    fields = dict(data=matrix.data, indices=matrix.indices.astype(np.uint16), indptr=matrix.indptr)
    return write(tmp_path, **fields, shape=np.array(matrix.shape), **more), matrix


def test_digits_are_images_of_sixteen_levels():
    data = load_data("digits", num_clients=10)
    assert data.num_rows == 1797 and data.row_shape == (8, 8) and data.num_classes == 10
    transform = data.info["transform"]
    assert transform["divide"] == 16.0
    levels = data.x * transform["std"] + transform["mean"]
    assert -1e-6 < float(levels.min()) and 1 - 1e-6 < float(levels.max()) < 1 + 1e-6
    expected = dict(source="digits", partition="iid", seed=0, num_clients=10, remarks=[])
    assert expected.items() <= data.info.items()
    json.dumps(data.info)


def test_permuted_digits_know_their_groups():
    data = load_data("digits", partition="permuted:5", num_clients=100)
    assert data.groups.dtype == torch.int64 and torch.bincount(data.groups).tolist() == [20] * 5
    assert load_data("digits").groups is None


def test_two_parts_are_pooled_or_kept(tmp_path):
    path = write(tmp_path, x_train=X[:20], y_train=Y[:20], x_test=X[20:], y_test=Y[20:])
    pooled = load_data(path, num_clients=3)
    assert int(pooled.num_test.sum()) == 9  # a quarter of ten rows, three times
    kept = load_data(path, num_clients=3, keep_test=True, standardize=False)
    tests = torch.cat(
        [kept.x[int(b) - int(n) : int(b)] for b, n in zip(kept.offsets[1:], kept.num_test)]  # noqa: B905
    )
    assert sorted(tests[:, 0].tolist()) == sorted(X[20:, 0].tolist())
    with pytest.raises(HandspanError, match="no test rows of its own"):
        load_data("digits", keep_test=True)


def test_client_ids_names_side_and_other_fields_are_found(tmp_path):
    client = np.array(["u", "v", "w"])[np.arange(30) % 3]
    side = RNG.normal(size=(3, 2)).astype(np.float32)
    path = write(
        tmp_path, x=X, y=Y, client=client, side=side, ward=np.arange(30) // 10, note=np.array("hi")
    )
    data = load_data(path, partition="natural")
    assert data.names == ("u", "v", "w") and torch.equal(data.side, torch.from_numpy(side))
    wards = load_data(path, partition="natural:ward")
    assert wards.num_clients == 3 and wards.side is None
    assert "left out" in wards.info["remarks"][0]
    with pytest.raises(HandspanError, match="it has: client, ward"):
        load_data(path, partition="natural:wart")
    named = write(tmp_path, x=X, y=Y, client=np.arange(30) % 2, names=np.array(["north", "south"]))
    assert load_data(named, partition="natural").names == ("north", "south")


def test_ids_of_both_parts_are_joined(tmp_path):
    path = write(
        tmp_path,
        x_train=X[:20],
        y_train=Y[:20],
        client_train=np.arange(20) % 2,
        x_test=X[20:],
        y_test=Y[20:],
        client_test=np.arange(10) % 2,
    )
    assert load_data(path, partition="natural").offsets.tolist() == [0, 15, 30]


def test_sparse_files_stay_sparse(tmp_path):
    path, matrix = write_sparse(tmp_path, y=Y, is_test=np.arange(30) % 5 == 0)
    data = load_data(path, num_clients=3, keep_test=True)
    assert data.is_sparse and data.row_shape == (7,) and int(data.num_test.sum()) == 6
    rows = lambda dense: sorted(map(tuple, np.asarray(dense).tolist()))  # noqa: E731
    assert rows(data.x.to_dense()) == rows(matrix.toarray())
    unlabelled, _ = write_sparse(tmp_path)
    assert load_data(unlabelled, num_clients=3).task == "matrix"


def test_task_can_be_forced(tmp_path):
    path = write(tmp_path, x=X, y=Y.astype(np.float64))
    assert load_data(path, num_clients=3).task == "regression"
    classes = load_data(path, num_clients=3, task="classification", partition="shards:1:exact")
    assert classes.num_classes == 3
    matrix = load_data(path, num_clients=3, task="matrix")
    assert matrix.task == "matrix" and matrix.num_classes is None


def test_held_out_clients_are_set_aside(tmp_path):
    data = load_data("digits", partition="permuted:2", num_clients=20, holdout_clients=4, seed=1)
    training, held_out = split_holdout(data, 4, 1)
    assert (training.num_clients, held_out.num_clients) == (16, 4)
    assert training.num_rows + held_out.num_rows == 1797
    ids = held_out.info["held_out"]
    assert torch.equal(held_out.groups, data.groups[ids])
    fewer = split_holdout(data, 2, 1)[1]
    assert set(fewer.info["held_out"]) < set(ids)
    assert split_holdout(data, 0, 1) == (data, None)
    for count in (20, -1):
        with pytest.raises(HandspanError, match="cannot hold out"):
            split_holdout(data, count, 1)
    with pytest.raises(HandspanError, match="cannot hold out 20 of 20"):
        load_data("digits", num_clients=20, holdout_clients=20)
    train = training.info["transform"]
    kept = load_data("digits", partition="permuted:2", num_clients=20, seed=1).info["transform"]
    assert train["mean"] != kept["mean"]


def test_names_and_paths_that_lead_nowhere(tmp_path):
    for name, words in [
        ("digit", "did you mean 'digits'"),
        (str(tmp_path / "none.npz"), "there is no file"),
        (str(tmp_path / "rows.txt"), "ends in .npz, .csv or .parquet"),
    ]:
        with pytest.raises(HandspanError, match=words):
            load_source(name)
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(HandspanError, match="is a folder"):
        load_source(str(tmp_path / "folder.npz"))


def test_damaged_files_are_refused_at_any_length(tmp_path):
    path = tmp_path / "cut.npz"
    np.savez(tmp_path / "made.npz", x=X, y=Y)
    whole = (tmp_path / "made.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[400] ^= 255
    cuts = [whole[: len(whole) * part // 10] for part in range(10)]
    for content in [
        *cuts,
        bytes(flipped),
        b"no archive at all",
        np.random.default_rng(0).bytes(999),
    ]:
        path.write_bytes(content)
        with pytest.raises(HandspanError, match=r"cut\.npz is damaged"):
            load_source(str(path))


NAN = X.copy()
NAN[7, 2] = np.nan


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (dict(a=X, b=Y), "it holds a, b"),
        (dict(y=Y), "must hold x"),
        (dict(x=X, y=Y[:9]), r"y of .* has shape \(9,\), but there are 30 rows"),
        (dict(x=X, y=Y, client=Y[:5]), "client of"),
        (dict(x=X, y=Y, is_test=Y), "is_test of"),
        (dict(x=np.float32(3.0), y=Y), "one entry per row"),
        (dict(x=X[:0], y=Y[:0]), "is empty"),
        (dict(x=np.array([{}, {}], dtype=object)), "array of Python objects"),
        (dict(x=np.array(["a", "b"])), "must hold numbers"),
        (dict(x=NAN, y=Y), r"NaN or infinity in row 7 .* of .*made\.npz"),
        (dict(x=X, y=np.where(Y == 1, np.nan, 0.5)), "y has NaN or infinity in row 1"),
        (dict(x=X, y=Y - 1), "label -1 in row 0"),
        (dict(x=X, y=Y, classes=np.array(["cat", "dog"])), "label 2 in row 2 .*out of range"),
        (dict(x=X, y=Y, num_classes=np.array(2)), "out of range; classes go from 0 to 1"),
        (dict(x_train=X, y_train=Y, x_test=X[:, :2], y_test=Y), "different shapes"),
        (dict(x_train=X, y_train=Y, x_test=X), "y_train and y_test"),
        (dict(x_train=X, y_train=Y[:4]), "y_train and y_test"),
        (dict(data=X[0], indices=Y, indptr=Y), "must hold x"),
        (dict(data=X[0], indices=Y[:2], indptr=Y, shape=Y[:2]), "sparse matrix"),
        (
            dict(data=X[0], indices=np.array([0, 1, 9, 2]), indptr=[0, 2, 4], shape=[2, 3]),
            "sparse matrix",
        ),
    ],
)
def test_bad_files_get_one_clear_sentence(tmp_path, arrays, words):
    with pytest.raises(HandspanError, match=words):
        load_source(write(tmp_path, **arrays))


def test_a_client_with_one_row_is_named(tmp_path):
    client = np.array(["many"] * 29 + ["lonely"])
    with pytest.raises(HandspanError, match="client 'lonely' has only one row"):
        load_data(write(tmp_path, x=X, y=Y, client=client), partition="natural")
