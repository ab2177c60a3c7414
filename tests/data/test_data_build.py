"""Clients, splits and scaling: what every federation must satisfy, whatever it is built from."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from torch.utils.data import Dataset, TensorDataset

from handspan.core.data import Csr, FederatedData
from handspan.core.errors import HandspanError
from handspan.data import apply_transform, from_arrays, from_clients

SIZES = st.lists(st.integers(2, 23), min_size=1, max_size=8)


def numbered(sizes, ids=None, shuffle=0):
    """Rows that hold their own number, and whose they are."""
    ids = range(len(sizes)) if ids is None else ids
    groups = np.repeat(np.asarray(list(ids)), sizes)
    if shuffle:
        groups = np.random.default_rng(shuffle).permutation(groups)
    return np.arange(len(groups), dtype=np.float32)[:, None], groups


def parts(data, client):
    """A client's values in training, validation and test."""
    start = int(data.offsets[client])
    sizes = [int(c[client]) for c in (data.num_train, data.num_validation, data.num_test)]
    rows = data.x[start : start + sum(sizes)]
    return [sorted(piece.flatten().tolist()) for piece in torch.split(rows, sizes)]


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 2**40), shuffle=st.integers(0, 3))
def test_every_row_is_used_once_by_its_own_client(sizes, seed, shuffle):
    x, groups = numbered(sizes, shuffle=shuffle)
    data = from_arrays(x, x[:, 0], groups=groups, seed=seed, standardize=False)
    assert sorted(data.x[:, 0].tolist()) == x[:, 0].tolist()
    assert torch.equal(data.x[:, 0], data.y)
    for client in range(len(sizes)):
        train, validation, test = parts(data, client)
        assert sorted(train + validation + test) == x[groups == client, 0].tolist()
        assert len(train) >= 1 and len(test) >= 1
        fitted = len(train) + len(validation)
        assert (len(validation) >= 1) == (fitted >= 5)
        assert abs(len(test) - sizes[client] / 4) <= 0.5 or len(test) == 1
        assert abs(len(validation) - fitted / 5) <= 0.5 or fitted < 5


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 2**40))
def test_a_split_is_a_function_of_the_seed_and_the_client_alone(sizes, seed):
    ids = [f"name-{'x' * i}{i}" for i in range(len(sizes))]
    x, groups = numbered(sizes, ids)
    whole = from_arrays(x, groups=groups, seed=seed)
    again = from_arrays(x, groups=groups, seed=seed)
    assert whole.fingerprint() == again.fingerprint()
    for client, name in enumerate(ids):
        alone = from_arrays(x[groups == name], groups=groups[groups == name], seed=seed)
        assert parts(alone, 0) == parts(whole, client)
        assert alone.names == (name,)


def test_interleaved_rows_split_like_sorted_rows():
    sizes = [7, 30, 12]
    x, groups = numbered(sizes, shuffle=4)
    order = np.argsort(groups, kind="stable")
    mixed = from_arrays(x, groups=groups, seed=3)
    sorted_ = from_arrays(x[order], groups=groups[order], seed=3)
    assert torch.equal(mixed.x, sorted_.x)


def test_seeds_differ():
    x, groups = numbered([40, 40])
    one, two = (from_arrays(x, groups=groups, seed=seed) for seed in (0, 1))
    assert parts(one, 0) != parts(two, 0)
    first = [row - 40 for row in parts(one, 1)[2]]
    assert first != parts(one, 0)[2]


def test_pairs_arrays_and_datasets_give_the_same_federation():
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(m, 3)).astype(np.float32) for m in (9, 5, 14)]
    ys = [rng.integers(0, 3, len(x)) for x in xs]

    class Rows(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return torch.from_numpy(self.x[index]), int(self.y[index])

    pairs = list(zip(xs, ys, strict=True))
    wanted = FederatedData.from_clients(pairs, seed=5, names=("a", "b", "c"))
    flat = FederatedData.from_arrays(
        np.concatenate(xs), np.concatenate(ys), groups=np.repeat([0, 1, 2], [9, 5, 14]), seed=5
    )
    tensors = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pairs]
    assert wanted.names == ("a", "b", "c") and flat.names == ()
    for clients in ([Rows(*pair) for pair in pairs], tensors):
        assert from_clients(clients, seed=5).fingerprint() == wanted.fingerprint()
    assert flat.fingerprint() == wanted.fingerprint()


def test_ids_may_be_texts_numbers_or_other_hashables():
    x, _ = numbered([6])
    for ids, names in [
        (["b", "a", "b", "a", "c", "c"], ("a", "b", "c")),
        ([7, 3, 7, 3, 9, 9], ("3", "7", "9")),
        (np.array([-4, 10**15, -4, 10**15, 0, 0]), ("-4", "0", "1000000000000000")),
        (np.array([-128, 127, 127, -128, 0, 0], np.int8), ("-128", "0", "127")),
        ([("u", 1), ("u", 0), ("u", 1), ("u", 0), 5, 5], ("5", "('u', 0)", "('u', 1)")),
        ([1, "1", 1, "1", 2, 2], ("1", "2", "1")),
        (np.array([0.5, 1.5, 0.5, 1.5, 0.5, 1.5]), ("0.5", "1.5")),
        (np.array([True, False, True, False, True, False]), ()),
        (torch.tensor([0, 1, 0, 1, 0, 1]), ()),
        (np.array([b"p", b"q", b"p", b"q", b"p", b"q"]), ("p", "q")),
    ]:
        data = from_arrays(x, groups=ids)
        assert data.names == names
        assert data.num_clients == (len(names) or 2)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(3, 30), min_size=2, max_size=6),
    seed=st.integers(0, 99),
    image=st.booleans(),
)
def test_scaling_looks_at_training_rows_only(sizes, seed, image):
    _, groups = numbered(sizes)
    rng = np.random.default_rng(seed)
    shape = (len(groups), 3, 2) if image else (len(groups), 4)
    x = rng.normal(2.0, 3.0, size=shape)
    data = from_arrays(x, groups=groups, seed=seed)
    fitted = torch.repeat_interleave(
        torch.tensor([True, False] * len(sizes)),
        torch.stack([data.num_train, data.offsets.diff() - data.num_train], 1).flatten(),
    )
    scaled = data.x[fitted]
    dims = tuple(range(3)) if image else 0
    assert torch.allclose(scaled.mean(dims), torch.zeros(()).double(), atol=1e-9)
    # Which source rows are for training does not hang on their values: change all the others.
    marks = from_arrays(np.arange(len(x))[:, None] + 0.5, groups=groups, seed=seed)
    raw = apply_inverse(marks)
    changed = x.copy()
    changed[raw[~fitted]] = 1e6
    again = from_arrays(changed, groups=groups, seed=seed)
    assert again.info["transform"] == data.info["transform"]
    assert torch.equal(again.x[fitted], scaled)


def apply_inverse(data):
    """Undo the scaling of numbered rows."""
    transform = data.info["transform"]
    values = data.x[:, 0] * transform["std"][0] + transform["mean"][0] - 0.5
    return values.round().long()


def test_held_out_clients_do_not_enter_the_scaling():
    x, groups = numbered([10, 10, 10])
    mask = np.array([False, True, False])
    data = from_arrays(x + 0.5, groups=groups, held_out=mask)
    x[groups == 1] = 1e5
    again = from_arrays(x + 0.5, groups=groups, held_out=mask)
    assert data.info["transform"] == again.info["transform"]


def test_kinds_of_features_are_told_apart():
    groups = np.repeat([0, 1], 6)
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 12)
    pixels = rng.integers(0, 256, (12, 4, 4)).astype(np.uint8)
    for x, y, kind in [
        (pixels, labels, "image"),
        (rng.normal(size=(12, 3)), labels, "table"),
        (rng.integers(0, 9, (12, 3)).astype(np.int32), labels, "counts"),
        (rng.integers(0, 9, (12, 3)).astype(np.float32), labels, "counts"),
        (rng.integers(0, 9, (12, 3)).astype(np.int16), rng.normal(size=12), "table"),
        (rng.integers(0, 9, (12, 3)), labels, "tokens"),
        (rng.integers(0, 9, (12, 3)), None, "counts"),
        (rng.normal(size=12), labels, "table"),
    ]:
        data = from_arrays(x, y, groups=groups)
        transform = data.info["transform"]
        assert transform["kind"] == kind
        assert (transform["mean"] is not None) == (kind in ("image", "table"))
        assert data.x.dtype == getattr(torch, transform["dtype"])
        json.dumps(data.info)
    unscaled = from_arrays(pixels, labels, groups=groups, standardize=False)
    assert 0.5 < float(unscaled.x.max()) <= 1.0
    flat = pixels.reshape(12, 16)
    image = from_arrays(flat, labels, groups=groups, kind="image")
    whole = from_arrays(pixels, labels, groups=groups)
    assert torch.equal(image.x, whole.x.reshape(12, 16))


def test_new_rows_are_scaled_like_old_ones():
    rng = np.random.default_rng(2)
    groups = np.repeat([0, 1, 2], 8)
    for x in (
        rng.normal(5, 2, (24, 3)),
        rng.integers(0, 256, (24, 5, 5)).astype(np.uint8),
        sparse.csr_array(rng.integers(0, 2, (24, 6)).astype(np.float64)),
    ):
        data = from_arrays(x, groups=groups, dtype="float64")
        info = json.loads(json.dumps(dict(data.info)))
        new = apply_transform(info, x)
        if isinstance(new, Csr):
            new, old = new.to_dense(), data.x.to_dense()
        else:
            old = data.x
        key = lambda rows: sorted(map(tuple, rows.flatten(1).tolist()))  # noqa: E731
        assert key(new) == key(old)
    with pytest.raises(HandspanError, match="shape"):
        apply_transform(from_arrays(np.ones((4, 2)), groups=[0, 0, 1, 1]).info, np.ones((4, 3)))


def test_a_constant_column_stays_finite():
    x = np.stack([np.full(8, 1e7 + 0.1), np.arange(8) + 0.5], 1)
    data = from_arrays(x, groups=[0] * 8)
    assert data.x.isfinite().all() and float(data.x[:, 0].abs().max()) < 1e-6


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(2, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_sparse_rows_are_split_like_dense_ones(sizes, seed):
    _, groups = numbered(sizes, shuffle=seed)
    rng = np.random.default_rng(seed)
    dense = rng.integers(0, 3, (len(groups), 5)).astype(np.float32)
    y = rng.integers(0, 3, len(groups))
    flat = from_arrays(dense, y, groups=groups, seed=seed)
    thin = from_arrays(sparse.csr_matrix(dense), y, groups=groups, seed=seed)
    assert thin.is_sparse and torch.equal(thin.x.to_dense(), flat.x)
    assert torch.equal(thin.y, flat.y) and torch.equal(thin.num_test, flat.num_test)
    ordered = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups))[:-1]
    pieces = zip(np.split(dense[ordered], ends), np.split(y[ordered], ends), strict=True)
    listed = from_clients([(sparse.csr_array(a), b) for a, b in pieces], seed=seed)
    assert listed.fingerprint() == thin.fingerprint()


def test_own_test_rows_are_kept():
    x, groups = numbered([8, 8, 8, 8])
    is_test = np.zeros(32, bool)
    is_test[[1, 5, 9]] = True
    is_test[16:24] = True  # a client with nothing but test rows
    data = from_arrays(x, groups=groups, is_test=is_test, standardize=False)
    assert parts(data, 0)[2] == [1.0, 5.0] and parts(data, 1)[2] == [9.0]
    assert data.num_test.tolist() == [2, 1, 7, 1]
    assert "2 rows changed" in data.info["remarks"][0]


def test_side_information_goes_with_its_client():
    x, groups = numbered([3, 4, 5], ids=["b", "c", "a"])
    per_client = np.array([[5.0, 0.0], [3.0, 1.0], [4.0, 2.0]])
    per_row = np.repeat(per_client[[1, 2, 0]], [3, 4, 5], axis=0)
    one = from_arrays(x, groups=groups, side=per_client)
    two = from_arrays(x, groups=groups, side=per_row)
    assert torch.equal(one.side, two.side) and one.side.tolist() == per_client.tolist()
    per_row[4, 1] = 9.0
    with pytest.raises(HandspanError, match="side changes within client 'c'"):
        from_arrays(x, groups=groups, side=per_row)
    with pytest.raises(HandspanError, match="side has 2 rows for 3 clients"):
        from_arrays(x, groups=groups, side=per_client[:2])


def test_tasks_follow_the_labels():
    x, groups = numbered([6, 6])
    whole = np.arange(12) % 3
    classes = from_arrays(x, whole.astype(np.uint8), groups=groups)
    assert classes.task == "classification" and classes.num_classes == 3
    assert classes.y.dtype == torch.int64
    real = from_arrays(x, whole + 0.5, groups=groups)
    assert real.task == "regression" and real.y.dtype == torch.float32
    assert from_arrays(x, whole, groups=groups, task="regression").task == "regression"
    forced = from_arrays(x, whole.astype(float), groups=groups, task="classification")
    assert torch.equal(forced.y, classes.y)
    assert from_arrays(x, groups=groups).task == "matrix"
    assert from_arrays(x, whole, groups=groups, task="matrix").y is None
    assert from_arrays(x, whole, groups=groups, num_classes=7).num_classes == 7


def test_many_clients_need_no_python_object_each():
    count = 20_000
    groups = np.repeat(np.arange(count), 4)
    x = np.random.default_rng(0).normal(size=(len(groups), 2)).astype(np.float32)
    data = from_arrays(x, groups=groups)
    values = [getattr(data, f.name) for f in dataclasses.fields(data)]
    assert data.num_clients == count and data.names == ()
    assert all(isinstance(v, torch.Tensor | tuple | dict | None) for v in values)
