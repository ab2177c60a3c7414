"""Partitions: seeded, bounded, and exactly what their names promise."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handspan.core.errors import HandspanError
from handspan.data.partition import (
    Partition,
    PartitionKind,
    parse_partition,
    partition,
    registry,
)
from handspan.data.sources import Source


def source(labels, **fields):
    labels = None if labels is None else np.asarray(labels)
    count = 12 if labels is None else len(labels)
    x = np.arange(count, dtype=np.float32)[:, None]
    return Source(x=x, y=labels, name="made", kind="table", fields=fields, **extras(fields))


def extras(fields):
    return {"client": fields["client"]} if "client" in fields else {}


def classes(count, size, seed=0):
    return np.random.default_rng(seed).permutation(np.arange(count * size) % count)


def table(part, labels, num_clients, num_classes):
    """Rows of every client (first axis) and class."""
    flat = part.client.astype(np.int64) * num_classes + labels
    return np.bincount(flat, minlength=num_clients * num_classes).reshape(num_clients, -1)


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(["iid", "dirichlet:0.3", "dirichlet:0.001", "shards:2", "permuted:2"]),
    num_clients=st.integers(2, 20),
    seed=st.integers(0, 2**40),
)
def test_every_client_has_two_rows_and_the_seed_decides(spec, num_clients, seed):
    labels = classes(4, 25)
    part = partition(source(labels), spec, num_clients, seed)
    counts = np.bincount(part.client, minlength=num_clients)
    assert len(part.client) == 100 and len(counts) == num_clients and counts.min() >= 2
    again = partition(source(labels), spec, num_clients, seed)
    assert np.array_equal(part.client, again.client)
    if spec in ("iid", "permuted:2"):
        assert counts.max() - counts.min() <= 1


def test_other_seeds_give_other_partitions():
    for spec in ("iid", "dirichlet:1", "shards:2", "shards:2:exact", "permuted:3"):
        one, two = (partition(source(classes(4, 25)), spec, 10, seed).client for seed in (0, 1))
        assert not np.array_equal(one, two)


@settings(max_examples=60, deadline=None)
@given(
    num_classes=st.integers(2, 8),
    num_clients=st.integers(2, 15),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_exact_shards_give_exactly_that_many_classes(num_classes, num_clients, data, seed):
    count = data.draw(st.integers(1, num_classes))
    labels = classes(num_classes, 2 * num_clients, seed)
    if count * num_clients < num_classes:
        with pytest.raises(HandspanError, match="without a shard"):
            partition(source(labels), f"shards:{count}:exact", num_clients, seed)
        return
    part = partition(source(labels), f"shards:{count}:exact", num_clients, seed)
    has = table(part, labels, num_clients, num_classes)
    assert ((has > 0).sum(axis=1) == count).all() and has.sum(axis=1).min() >= 2


def test_random_shards_give_at_most_that_many_classes_of_even_size():
    labels = classes(10, 600)
    part = partition(source(labels), "shards:2", 100, 0)
    has = table(part, labels, 100, 10)
    drawn = (has > 0).sum(axis=1)
    assert drawn.max() == 2 and drawn.min() == 1  # some drew one class twice
    assert set(has.sum(axis=1)) == {60}


def test_exact_shards_mix_all_pairs_of_classes():
    labels = classes(5, 2000)
    has = table(partition(source(labels), "shards:2:exact", 500, 0), labels, 500, 5) > 0
    pairs = {tuple(np.flatnonzero(row)) for row in has}
    assert pairs == set(itertools.combinations(range(5), 2))


def test_uneven_classes_get_shards_in_proportion():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    part = partition(source(labels), "shards:1", 10, 0)
    owners = (table(part, labels, 10, 3) > 0).sum(axis=0)
    assert owners.tolist() == [6, 3, 1]


@settings(max_examples=40, deadline=None)
@given(
    num_groups=st.integers(1, 6),
    num_classes=st.integers(3, 12),
    num_clients=st.integers(6, 12),
    seed=st.integers(0, 99),
)
def test_permuted_labels_follow_one_permutation_per_group(
    num_groups, num_classes, num_clients, seed
):
    labels = classes(num_classes, 10, seed)
    part = partition(source(labels), f"permuted:{num_groups}", num_clients, seed)
    assert part.groups.shape == (num_clients,)
    assert sorted(set(part.groups.tolist())) == list(range(num_groups))
    assert np.ptp(np.bincount(part.groups)) <= 1
    assert len({tuple(row) for row in part.relabel}) == num_groups
    for row in part.relabel:
        assert sorted(row.tolist()) == list(range(num_classes))
    assert np.array_equal(part.original_labels(part.y, part.client), labels)
    for group in range(num_groups):
        mine = part.groups[part.client] == group
        seen = set(zip(labels[mine].tolist(), part.y[mine].tolist(), strict=True))
        assert len(seen) == len({old for old, _ in seen}) == len({new for _, new in seen})


def test_no_group_keeps_the_identity_by_right():
    firsts = {
        tuple(partition(source(classes(5, 10)), "permuted:2", 10, seed).relabel[0])
        for seed in range(8)
    }
    assert len(firsts) > 4


def test_all_permutations_of_few_classes_can_be_used():
    part = partition(source(classes(3, 20)), "permuted:6", 12, 0)
    assert len({tuple(row) for row in part.relabel}) == 6


@pytest.mark.parametrize("alpha", ["1e-300", "1e-9", "1e-3", "1e9", "1e308"])
def test_dirichlet_is_bounded_at_any_alpha(alpha):
    labels = classes(10, 1000)
    start = time.perf_counter()
    part = partition(source(labels), f"dirichlet:{alpha}", 3000, 0)
    assert time.perf_counter() - start < 5
    assert np.bincount(part.client, minlength=3000).min() >= 2
    if float(alpha) < 1:
        assert "rows were moved" in part.remarks[0]


def test_dirichlet_tells_how_many_rows_it_moved():
    labels = classes(2, 30)
    part = partition(source(labels), "dirichlet:0.00001:5", 12, 0)
    counts = np.bincount(part.client, minlength=12)
    assert counts.tolist() == [5] * 12  # all that there are
    moved = int(part.remarks[0].split("; ")[1].split()[0])
    assert 0 < moved <= 60
    assert partition(source(labels), "dirichlet:100", 3, 0).remarks == ()


def test_smaller_alpha_means_fewer_classes_per_client():
    labels = classes(10, 500)
    spread = [
        (table(partition(source(labels), f"dirichlet:{a}", 20, 0), labels, 20, 10) > 5).sum()
        for a in (0.05, 0.5, 50)
    ]
    assert spread[0] < spread[1] < spread[2] == 200


def test_rows_move_from_the_largest_clients_only():
    labels = classes(3, 100)
    before = partition(source(labels), "dirichlet:0.02", 10, 3)
    assert before.remarks
    counts = np.sort(np.bincount(before.client, minlength=10))
    assert counts[0] == 2 and counts.sum() == 300


def test_natural_clients_are_the_sources_own():
    ids = np.array(["b", "a"] * 6)
    made = source(classes(3, 4), client=ids, hospital=np.arange(12) // 4)
    part = partition(made, "natural", 100, 0)
    assert np.array_equal(part.client, ids) and part.is_natural
    other = partition(made, "natural:hospital", 100, 0)
    assert other.client.max() == 2 and not other.is_natural


def test_a_partition_can_be_added(monkeypatch):
    def halves(source, num_clients, rng, factor):
        client = np.arange(source.num_rows) // 6
        return Partition(client=client, x=source.x * factor, groups=np.array([0, 1]))

    entry = PartitionKind(usage="halves:F", parse=lambda a: (float(a[0]),), make=halves)
    monkeypatch.setitem(registry, "halves", entry)
    part = partition(source(None), "halves:2", 2, 0)
    assert part.x[3, 0] == 6.0


REAL = np.linspace(0, 1, 12)


@pytest.mark.parametrize(
    ("labels", "spec", "num_clients", "words"),
    [
        (classes(3, 4), "dirchlet:0.5", 3, "did you mean 'dirichlet'"),
        (classes(3, 4), "", 3, "unknown partition"),
        (classes(3, 4), "dirichlet", 3, "dirichlet:0.5"),
        (classes(3, 4), "dirichlet:0", 3, "positive number, not '0'"),
        (classes(3, 4), "dirichlet:-1", 3, "positive number"),
        (classes(3, 4), "dirichlet:nan", 3, "positive number"),
        (classes(3, 4), "dirichlet:inf", 3, "positive number"),
        (classes(3, 4), "dirichlet:x", 3, "positive number"),
        (classes(3, 4), "dirichlet:1:1", 3, "at least 2"),
        (classes(3, 4), "dirichlet:1:5", 3, "at least 5 rows"),
        (classes(3, 4), "shards:0", 3, "whole number of at least 1, not '0'"),
        (classes(3, 4), "shards:2:exakt", 3, "shards:2:exact"),
        (classes(3, 4), "shards:4:exact", 3, "with 3 classes"),
        (classes(6, 2), "shards:1", 3, "without a shard"),
        (np.repeat([0, 1], [10, 2]), "shards:2:exact", 4, "too uneven"),
        (np.repeat([0, 1], [3, 9]), "shards:1", 6, "too small"),
        (classes(3, 4), "permuted:0", 3, "at least 1"),
        (classes(3, 4), "permuted:4", 3, "more groups than the 3 clients"),
        (classes(2, 6), "permuted:3", 3, "only 2 permutations"),
        (classes(3, 4), "iid:3", 3, "no arguments"),
        (classes(3, 4), "iid", 7, "at most 6"),
        (classes(3, 4), "iid", 0, "at least 1"),
        (classes(3, 4), "natural", 3, "no client ids"),
        (classes(3, 4), "natural:who", 3, "no array 'who'"),
        (classes(3, 4), "natural:", 3, "natural:FIELD"),
        (None, "dirichlet:1", 3, "needs labels"),
        (REAL, "permuted:2", 3, "real numbers"),
    ],
)
def test_bad_partitions_get_one_clear_sentence(labels, spec, num_clients, words):
    with pytest.raises(HandspanError, match=words):
        partition(source(labels), spec, num_clients, 0)


def test_text_is_read_without_data():
    assert parse_partition("shards:3:exact") == ("shards", (3, True))
    assert parse_partition("natural:writer") == ("natural", ("writer",))
    assert parse_partition("iid") == ("iid", ())
