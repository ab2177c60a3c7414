"""Groups of labels, turned images, log-normal sizes, and partitions joined by a plus."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from handspan.core.errors import HandspanError
from handspan.data import load_data
from handspan.data.assignments import lognormal_sizes
from handspan.data.partition import Partition, PartitionKind, partition, registry
from handspan.data.source import Source
from handspan.data.warp import warp_images, warp_matrix

RNG = np.random.default_rng(0)


def images(count=80, size=(6, 6), num_classes=4):
    x = RNG.integers(0, 256, (count, *size)).astype(np.uint8)
    y = np.arange(count) % num_classes
    return Source(x=x, y=y, name="made", kind="image", num_classes=num_classes)


IMAGES = images()
SPECS = ["groups:2", "rotated:3", "affine:2", "quantity:1", "quantity:2+permuted:2"]
SPECS += ["dirichlet:0.5+rotated:2", "shards:2+affine:2", "iid+permuted:3"]


@settings(max_examples=60, deadline=None)
@given(spec=st.sampled_from(SPECS), num_clients=st.integers(4, 20), seed=st.integers(0, 2**40))
def test_every_row_is_used_once_and_the_seed_decides(spec, num_clients, seed):
    part = partition(IMAGES, spec, num_clients, seed)
    sizes = np.bincount(part.client, minlength=num_clients)
    assert len(part.client) == 80 and len(sizes) == num_clients and sizes.min() >= 2
    again = partition(IMAGES, spec, num_clients, seed)
    assert part.fingerprint() == again.fingerprint()
    assert np.array_equal(part.client, again.client)
    if part.groups is not None:
        assert part.groups.shape == (num_clients,)
        assert np.ptp(np.bincount(part.groups)) <= 1
        assert sorted(set(part.groups)) == list(range(int(spec[-1])))
    other = partition(IMAGES, spec, num_clients, seed + 1)
    assert part.fingerprint() != other.fingerprint()


# Groups of labels.


@settings(max_examples=60, deadline=None)
@given(
    num_groups=st.integers(1, 7),
    num_classes=st.integers(7, 12),
    num_clients=st.integers(7, 14),
    seed=st.integers(0, 999),
)
def test_a_clients_labels_are_those_of_its_group(num_groups, num_classes, num_clients, seed):
    y = np.random.default_rng(seed).permutation(np.arange(20 * num_classes) % num_classes)
    source = Source(x=np.zeros((len(y), 1)), y=y, name="made", kind="table")
    part = partition(source, f"groups:{num_groups}", num_clients, seed)
    group = part.groups[part.client]
    sets = [set(y[group == number]) for number in range(num_groups)]
    assert sum(map(len, sets)) == num_classes == len(set.union(*sets))  # disjoint, all of them
    assert max(map(len, sets)) - min(map(len, sets)) <= 1
    for number in range(num_groups):
        sizes = np.bincount(part.client[group == number])
        sizes = sizes[part.groups[: len(sizes)] == number]
        assert np.ptp(sizes) <= 1


def test_labels_that_do_not_occur_belong_to_no_group():
    y = np.repeat([0, 3, 5], 10)
    source = Source(x=np.zeros((30, 1)), y=y, name="made", kind="table", num_classes=9)
    part = partition(source, "groups:3", 3, 0)
    assert [len(set(y[part.client == client])) for client in range(3)] == [1, 1, 1]


def test_five_hundred_clients_in_twenty_groups_of_five_labels():
    y = np.arange(6000) % 100
    source = Source(x=np.zeros((6000, 1)), y=y, name="made", kind="table")
    part = partition(source, "groups:20", 500, 0)
    assert np.bincount(part.groups).tolist() == [25] * 20
    assert {len(set(y[part.groups[part.client] == g])) for g in range(20)} == {5}
    assert set(np.bincount(part.client)) == {12}


# Turned images.


def test_quarter_turns_are_exact_and_clockwise():
    part = partition(IMAGES, "rotated:4", 8, 0)
    assert part.x.dtype == np.uint8 and part.turn[:, 0].tolist() == [0, 90, 180, 270]
    group = part.groups[part.client]
    for number in range(4):
        expected = np.rot90(IMAGES.x[group == number], -number, axes=(1, 2))
        assert np.array_equal(part.x[group == number], expected)
    assert part.relabel is None and part.y is None and part.side is None


@pytest.mark.parametrize("size", [(3, 6, 6), (6, 6, 3), (1, 6, 6), (7, 5), (3, 7, 5)])
def test_channels_and_oblong_images_are_turned_plane_by_plane(size):
    x = RNG.random((4, *size))
    out = np.zeros_like(x)
    warp_images(x, np.arange(4), out, np.array([180.0, 0.0]))
    last = size == (6, 6, 3)
    axes = (1, 2) if last or len(size) == 2 else (2, 3)
    assert np.array_equal(out, np.flip(x, axes))
    planes = [np.moveaxis(x, -1, 1), np.moveaxis(out, -1, 1)] if last else [x, out]
    warp_images(x, np.arange(4), out, np.array([30.0, 5.0]))
    planes[1] = np.moveaxis(out, -1, 1) if last else out
    matrix = warp_matrix(*planes[0].shape[-2:], 30.0, 5.0)
    flat = planes[0].reshape(-1, planes[0].shape[-2] * planes[0].shape[-1])
    assert np.allclose(planes[1].reshape(flat.shape), flat @ matrix.toarray().T)


@settings(max_examples=40, deadline=None)
@given(degrees=st.floats(0, 360), shear=st.floats(0, 20))
def test_interpolation_is_a_mean_of_four_pixels(degrees, shear):
    matrix = warp_matrix(8, 9, degrees, shear).toarray()
    assert matrix.min() >= 0 and matrix.sum(axis=1).max() <= 1 + 1e-9
    assert (matrix > 0).sum(axis=1).max() <= 4
    middle = matrix.reshape(8, 9, 8, 9)[3:5, 4].sum(axis=0)
    assert np.isclose(middle[2:6, 3:6].sum(), 2)  # the centre stays where it is


def test_interpolation_is_exact_for_linear_images():
    down, right = np.meshgrid(np.arange(9) - 4.0, np.arange(9) - 4.0, indexing="ij")
    cos, sin, slope = np.cos(np.radians(30)), np.sin(np.radians(30)), np.tan(np.radians(9))
    turned = warp_matrix(9, 9, 30.0, 9.0) @ right.ravel()
    expected = cos * (right + slope * down) + sin * down
    inner = (np.abs(down) <= 2) & (np.abs(right) <= 2)
    assert np.allclose(turned.reshape(9, 9)[inner], expected[inner])


def test_the_affine_shifts_turn_first_and_shear_afterwards():
    part = partition(IMAGES, "affine:4", 8, 0)
    assert part.turn.tolist() == [[0, 0], [90, 3], [180, 6], [270, 9]]
    assert np.array_equal(part.side, np.eye(4)[part.groups])
    group = part.groups[part.client]
    assert np.array_equal(part.x[group == 0], IMAGES.x[group == 0])
    upright = np.zeros((1, 41, 41))
    upright[0, :, 20] = 1.0  # a vertical line, which a clockwise shear leans to the right
    out = np.zeros_like(upright)
    warp_images(upright, np.array([0]), out, np.array([0.0, 9.0]))
    column = (out[0] * np.arange(41)).sum(axis=1) / out[0].sum(axis=1)
    assert np.allclose(column - 20, np.tan(np.radians(9)) * (20 - np.arange(41)))
    flat = np.zeros((1, 41, 41))
    flat[0, 20] = 1.0  # a horizontal line: upright after a quarter turn, then leaning
    warp_images(flat, np.array([0]), out, np.array([90.0, 9.0]))
    column = (out[0] * np.arange(41)).sum(axis=1) / out[0].sum(axis=1)
    assert np.allclose(column - 20, np.tan(np.radians(9)) * (20 - np.arange(41)))


def test_affine_digits_carry_their_group_as_side_information():
    data = load_data("digits", partition="affine:4", num_clients=12)
    assert data.side.shape == (12, 4)
    assert torch.equal(data.side.argmax(1), data.groups)
    assert load_data("digits", partition="affine:2", num_clients=12).side.shape == (12, 2)
    assert load_data("digits", partition="rotated:4", num_clients=12).side is None


# Sizes.


@settings(max_examples=80, deadline=None)
@given(
    num_clients=st.integers(1, 40),
    spare=st.integers(0, 500),
    sigma=st.sampled_from([1e-9, 0.5, 1.5, 3.0, 100.0, 1e300]),
    seed=st.integers(0, 999),
)
def test_sizes_are_bounded_and_use_every_row(num_clients, spare, sigma, seed):
    num_rows = 2 * num_clients + spare
    sizes = lognormal_sizes(num_rows, num_clients, np.random.default_rng(seed), sigma)
    assert sizes.sum() == num_rows and sizes.min() >= 2
    if sigma == 1e-9:
        assert np.ptp(sizes) <= 1


def test_sizes_are_log_normal():
    sizes = lognormal_sizes(10**8, 20_000, np.random.default_rng(0), 1.5)
    logs = np.log(sizes)
    assert abs(logs.std() - 1.5) < 0.02
    assert abs(((logs - logs.mean()) ** 3).mean() / logs.std() ** 3) < 0.06


def test_sizes_and_permuted_labels_are_joined():
    part = partition(IMAGES, "quantity:1.5+permuted:3", 8, 0)
    plain = partition(IMAGES, "quantity:1.5", 8, 0)
    assert np.array_equal(part.client, plain.client)
    assert np.array_equal(part.original_labels(part.y, part.client), IMAGES.y)
    data = load_data("digits", partition="quantity:2+permuted:3", num_clients=12)
    assert data.num_clients == 12 and torch.bincount(data.groups).tolist() == [4, 4, 4]
    sizes = data.offsets.diff()
    assert int(sizes.max()) > 10 * int(sizes.min())


def test_natural_clients_can_be_shifted_and_keep_their_names_and_side(tmp_path):
    x, y = RNG.random((30, 3)), np.arange(30) % 3
    client = np.array(["u", "v", "w"])[np.arange(30) // 10]
    np.savez(tmp_path / "made.npz", x=x, y=y, client=client, side=np.eye(3))
    data = load_data(str(tmp_path / "made.npz"), partition="natural+permuted:3")
    assert data.names == ("u", "v", "w") and torch.equal(data.side, torch.eye(3).double())
    assert sorted(data.groups.tolist()) == [0, 1, 2]


def test_the_groups_side_information_goes_first(tmp_path):
    x, y = RNG.random((30, 4, 4)), np.arange(30) % 3
    client = np.arange(30) // 10
    np.savez(tmp_path / "made.npz", x=x, y=y, client=client, side=np.ones((3, 5)))
    data = load_data(str(tmp_path / "made.npz"), partition="natural+affine:3")
    assert data.side.shape == (3, 3) and "gives way" in data.info["remarks"][0]


# What a partition's hash hangs on.


def test_the_hash_tells_partitions_apart_and_is_in_the_record():
    data = load_data("digits", partition="permuted:3", num_clients=10)
    same = load_data("digits", partition="permuted:3", num_clients=10, keep_test=False)
    assert data.info["partition_hash"] == same.info["partition_hash"]
    assert len(data.info["partition_hash"]) == 16
    hashes = {
        load_data("digits", partition=spec, num_clients=10, seed=seed).info["partition_hash"]
        for spec in ("iid", "permuted:3", "rotated:3", "affine:3", "groups:3", "quantity:1")
        for seed in (0, 1)
    }
    assert len(hashes) == 12


def test_the_hash_sees_every_part():
    part = partition(IMAGES, "affine:3", 6, 0)
    changes = {
        "groups": (part.groups + 1) % 3,
        "turn": part.turn + 1,
        "side": part.side * 2,
        "client": part.client[::-1],
        "relabel": np.array([[1, 0], [0, 1], [0, 1]]),
    }
    hashes = {dataclasses.replace(part, **{k: v}).fingerprint() for k, v in changes.items()}
    assert len(hashes | {part.fingerprint()}) == 6


def test_the_hash_sees_rows_that_a_partition_of_ones_own_replaces(monkeypatch):
    def scaled(source, num_clients, rng, factor):
        return Partition(client=np.arange(source.num_rows) % num_clients, x=source.x * factor)

    entry = PartitionKind(usage="scaled:F", parse=lambda a: (float(a[0]),), make=scaled)
    monkeypatch.setitem(registry, "scaled", entry)
    one, two = (partition(IMAGES, f"scaled:{factor}", 4, 0) for factor in (2, 3))
    assert one.fingerprint() != two.fingerprint()


TABLE = Source(x=RNG.random((20, 3)), y=np.arange(20) % 4, name="made", kind="table")
LONE = dataclasses.replace(TABLE, client=np.full(20, 3), fields={"ward": np.full(20, "a")})
TARGETS = dataclasses.replace(TABLE, y=RNG.random(20))


@pytest.mark.parametrize(
    ("source", "spec", "num_clients", "words"),
    [
        (IMAGES, "groups:0", 4, "G in groups:G must be a whole number"),
        (IMAGES, "groups", 4, "for example groups:5"),
        (IMAGES, "groups:5", 8, "more groups than there are clients .8. or classes .4."),
        (IMAGES, "groups:3", 2, "clients .2. or classes"),
        (images(10, num_classes=2), "groups:2", 5, "have only 5 rows for its 3 clients"),
        (TARGETS, "groups:2", 4, "real numbers"),
        (IMAGES, "rotated:x", 4, "G in rotated:G"),
        (IMAGES, "rotated:5", 4, "more groups than the 4 clients"),
        (TABLE, "rotated:2", 4, r"turns images, but rows of made have shape \(3,\)"),
        (TABLE, "affine:2", 4, "turns images"),
        (IMAGES, "affine:5", 8, "at most 4, not 5"),
        (IMAGES, "affine:4:2", 8, "for example affine:4"),
        (IMAGES, "quantity", 4, "for example quantity:1.5"),
        (IMAGES, "quantity:0", 4, "SIGMA in quantity:SIGMA must be a positive number"),
        (IMAGES, "quantity:-1", 4, "positive number"),
        (IMAGES, "quantity:inf", 4, "positive number"),
        (IMAGES, "quantity:1", 41, "at most 40"),
        (IMAGES, "quantity:1+permutd:3", 4, "did you mean 'permuted'"),
        (IMAGES, "permuted:2+quantity:1", 4, r"write A\+B, A one of iid.*B one of permuted"),
        (IMAGES, "iid+permuted:2+rotated:2", 4, "cannot be joined"),
        (IMAGES, "groups:2+permuted:2", 4, "both plant groups"),
        (IMAGES, "quantity:1+permuted:5", 4, "more groups than the 4 clients"),
        (LONE, "natural", 4, "belong to one client, 3 in 'client'"),
        (LONE, "natural:ward", 4, "belong to one client, a in 'ward'"),
    ],
)
def test_bad_partitions_get_one_clear_sentence(source, spec, num_clients, words):
    with pytest.raises(HandspanError, match=words):
        partition(source, spec, num_clients, 0)


def test_a_plus_in_a_number_joins_nothing():
    part = partition(IMAGES, "dirichlet:1e+3+permuted:2", 4, 0)
    assert part.groups is not None and np.ptp(np.bincount(part.client)) < 20
