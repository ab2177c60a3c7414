"""Keys, records, reductions and the store of private records."""

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Phase, by_examples
from handspan.core.records import (
    Params,
    Record,
    from_named,
    num_bytes,
    put_,
    stack,
    take,
    tensors,
    to_named,
)
from handspan.simulation import reduction
from handspan.simulation.loop import through_bytes
from handspan.simulation.reduction import Reduction
from handspan.simulation.store import ClientStore


class Inner(Record):
    number: Tensor


class Outer(Record):
    weights: Params
    inner: Inner
    rows: Tensor
    extra: Tensor | None = None


def outer(seed=0, rows=2):
    k = keys.key(seed)
    return Outer(
        weights={"b": keys.normal(k, (2,)), "a.c": keys.normal(keys.fold(k, 1), (1, 3))},
        inner=Inner(number=torch.tensor(float(seed))),
        rows=keys.normal(keys.fold(k, 2), (rows, 2)),
    )


def test_uniform_and_normal_numbers_have_their_moments():
    k = keys.key(0, "moments")
    for numbers, mean, variance in (
        (keys.uniform(k, (20000,)), 0.5, 1 / 12),
        (keys.normal(k, (20000,)), 0.0, 1.0),
    ):
        assert abs(float(numbers.mean()) - mean) < 0.02
        assert abs(float(numbers.var()) - variance) < 0.03
    uniform = keys.uniform(k, (20000,))
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1
    lagged = torch.corrcoef(torch.stack([uniform[:-1], uniform[1:]]))[0, 1]
    assert abs(float(lagged)) < 0.03


def test_keys_do_not_collide_and_do_not_depend_on_company():
    k = keys.key(0)
    ids = torch.arange(5000)
    many = torch.cat([keys.fold(k, name, ids) for name in ("a", "b", 0, 1)])
    assert len(many.unique()) == len(many)
    assert torch.equal(keys.fold(k, "a", ids)[[17]], keys.fold(k, "a", torch.tensor([17])))
    assert int(keys.fold(k, 1, 2)) != int(keys.fold(k, 2, 1))
    longer = keys.uniform(k, (10, 3))
    assert torch.equal(keys.uniform(k, (4, 3)), longer[:4])


def test_a_generator_is_a_function_of_its_key():
    draws = [keys.generator(keys.key(seed)).random(3).tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_records_survive_trees_and_names():
    record = outer()
    leaves, spec = pytree.tree_flatten(record)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    for again in (pytree.tree_unflatten(leaves, spec), through_bytes(record)):
        assert type(again) is Outer and again.extra is None
        assert [torch.equal(a, b) for a, b in zip(tensors(again), leaves, strict=True)] == [
            True
        ] * 4
    named = to_named(record)
    assert set(named) == {"weights:a.c", "weights:b", "inner/number", "rows"}
    assert to_named(from_named(outer(1), named)).keys() == named.keys()
    assert num_bytes(record) == sum(t.numel() * t.element_size() for t in leaves)


def test_parameters_have_one_order_whoever_made_them():
    one = Outer(**{**vars(outer()), "weights": {"a": torch.zeros(1), "b": torch.ones(1)}})
    two = Outer(**{**vars(outer()), "weights": {"b": torch.ones(1), "a": torch.zeros(1)}})
    assert list(one.weights) == list(two.weights) == ["a", "b"]


def test_records_refuse_what_is_no_tensor():
    with pytest.raises(TypeError, match="must be a tensor"):
        Inner(number=1.0)
    with pytest.raises(TypeError, match="is not a tensor"):
        Outer(**{**vars(outer()), "weights": {"a": [1.0]}})


def test_rows_are_taken_and_put():
    block = stack([outer(j) for j in range(3)])
    assert torch.equal(take(block, 1).rows, outer(1).rows)
    put_(block, torch.tensor([0, 2]), take(block, torch.tensor([2, 0])))
    assert block.inner.number.tolist() == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("many", [1, 1 << 14])
@pytest.mark.parametrize("sizes", [(1,) * 70, (2,) * 35, (33, 37), (70,)])
def test_sums_do_not_depend_on_the_size_of_the_blocks(sizes, many, monkeypatch):
    """Neither where uploads are large nor where they are small."""
    monkeypatch.setattr(reduction, "_MANY", many)
    phase = Phase(name="p", broadcast=None, begin=None, end=None, combine=None, weight=by_examples)
    ids = torch.arange(70)
    weights = torch.arange(70, dtype=torch.float64) % 5  # some are 0: they were never sent
    uploads = Inner(number=keys.normal(keys.key(1), (70, 3), torch.float32))
    whole, parts = Reduction(phase, ids, weights), Reduction(phase, ids, weights)
    whole.add(ids, uploads)
    start = 0
    for size in sizes:
        chunk = slice(start, start + size)
        parts.add(ids[chunk], take(uploads, chunk))
        start += size
    got, wanted = parts.result(), whole.result()
    assert torch.equal(got.total.number, wanted.total.number)
    literal = sum(w * u for w, u in zip(weights, uploads.number.double(), strict=True))
    torch.testing.assert_close(got.total.number, literal, rtol=1e-12, atol=1e-12)
    assert float(got.weight) == float(weights.sum())
    assert float(got.count) == float((weights > 0).sum())


@pytest.mark.parametrize("reduce", ["sum", "stack"])
def test_a_client_that_sends_nothing_is_in_no_reduction(reduce):
    phase = Phase(name="p", broadcast=None, begin=None, end=None, combine=None, reduce=reduce)
    ids, weights = torch.arange(4), torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    made = Reduction(phase, ids, weights)
    numbers = torch.tensor([1.0, torch.nan, 3.0, torch.inf])  # what was never sent may be anything
    for part in (ids[:3], ids[3:]):
        made.add(part, Inner(number=numbers[part]))
    got = made.result()
    if reduce == "sum":
        assert (float(got.total.number), float(got.count)) == (7.0, 2.0)
    else:
        assert got.uploads.number.tolist() == [1.0, 3.0]
        assert got.ids.tolist() == [0, 2] and got.weights.tolist() == [1.0, 2.0]


class Private(Record):
    v: Tensor
    rows: Tensor


NUM = torch.tensor([1, 3, 2, 4])


def initial(ids):
    k = keys.fold(keys.key(0), ids)
    width = int(NUM[ids].max())
    return Private(v=keys.normal(k, (2,)), rows=keys.uniform(k, (width, 2)))


def store(**options):
    return ClientStore(initial, NUM, frozenset({"rows"}), **options)


def test_records_that_were_never_written_are_what_init_client_makes_of_them():
    kept = store()
    got = kept.read(torch.tensor([0, 3]))
    wanted = initial(torch.tensor([0, 3]))
    assert torch.equal(got.v, wanted.v)
    assert torch.equal(got.rows[1], wanted.rows[1])
    assert torch.equal(got.rows[0, :1], wanted.rows[0, :1])
    assert not got.rows[0, 1:].any()
    assert not kept.written.any()


def test_a_record_has_another_version_whenever_it_changes():
    """Whoever holds a copy knows whether it is still the record."""
    kept, ids, others = store(), torch.tensor([1, 2]), torch.tensor([0, 3])
    seen = [kept.versions(ids)]

    def is_new():
        seen.append(kept.versions(ids))
        return all(not torch.isin(seen[-1], before).any() for before in seen[:-1])

    kept.stage(ids, kept.read(ids))
    assert is_new()
    kept.commit()
    assert not is_new()  # what was seen before is now the stored record
    kept.stage(ids, kept.read(ids))
    assert is_new()
    kept.discard()
    assert is_new()
    assert (kept.versions(others) == 0).all()
    kept.load_named(kept.to_named())
    assert is_new() and (kept.versions(others) > 0).all()


@pytest.mark.parametrize("is_committed", [True, False])
def test_staged_records_are_seen_at_once_and_stay_only_if_committed(is_committed):
    kept, ids = store(), torch.tensor([1, 2])
    before = kept.read(torch.arange(4))
    changed = Private(v=torch.full((2, 2), 5.0), rows=torch.full((2, 3, 2), 7.0))
    kept.stage(ids, changed.__class__(v=changed.v.double(), rows=changed.rows.double()))
    seen = kept.read(torch.tensor([2, 3]))
    assert seen.v[0].tolist() == [5.0, 5.0]
    assert seen.rows[0, :, 0].tolist() == [7.0, 7.0, 0.0, 0.0]
    assert torch.equal(seen.v[1], before.v[3])
    (kept.commit if is_committed else kept.discard)()
    after = kept.read(torch.arange(4))
    assert bool((after.v[1:3] == 5).all()) is is_committed
    assert torch.equal(after.v[[0, 3]], before.v[[0, 3]])
    assert kept.written.tolist() == [False, is_committed, is_committed, False]


def test_what_is_discarded_leaves_what_was_committed_before(tmp_path):
    kept = store(folder=tmp_path / "clients")
    kept.stage(torch.tensor([1, 2]), kept.read(torch.tensor([0, 3])))
    kept.commit()
    committed = kept.read(torch.tensor([1, 2]))
    kept.stage(torch.tensor([2]), kept.read(torch.tensor([0])))
    kept.discard()
    after = kept.read(torch.tensor([1, 2]))
    assert torch.equal(after.v, committed.v) and torch.equal(after.rows, committed.rows)
    assert not torch.equal(committed.v[0], committed.v[1])


def test_rows_are_the_same_flat_and_padded():
    kept, ids = store(), torch.tensor([0, 1, 3])
    flat = kept.read_flat(ids)
    padded = kept.read(ids)
    assert len(flat.rows) == 8
    joined = torch.cat([padded.rows[j, :n] for j, n in enumerate((1, 3, 4))])
    assert torch.equal(flat.rows, joined)
    kept.stage_flat(ids, Private(v=flat.v, rows=flat.rows + 1))
    kept.stage(torch.tensor([1]), take(kept.read(torch.tensor([1])), slice(1)))
    assert torch.equal(kept.read_flat(ids).rows, flat.rows + 1)
    kept.commit()
    assert torch.equal(kept.read(ids).rows[1, :3], padded.rows[1, :3] + 1)


def test_a_store_in_files_holds_what_one_in_memory_holds(tmp_path):
    memory, files = store(), store(folder=tmp_path / "clients")
    for kept in (memory, files):
        for ids in (torch.tensor([0, 1]), torch.tensor([1, 3])):
            old = kept.read(ids)
            kept.stage(ids, Private(v=old.v + 1, rows=old.rows * 2))
            kept.commit()
    for a, b in zip(
        tensors(memory.read(torch.arange(4))), tensors(files.read(torch.arange(4))), strict=True
    ):
        assert torch.equal(a, b)
    assert {path.suffix for path in (tmp_path / "clients").iterdir()} == {".bin"}


def test_a_saved_store_is_taken_over():
    kept = store()
    old = kept.read(torch.arange(4))
    kept.stage(torch.arange(4), Private(v=old.v + 1, rows=old.rows))
    kept.commit()
    other = store()
    other.load_named({name: tensor.clone() for name, tensor in kept.to_named().items()})
    for a, b in zip(
        tensors(other.read(torch.arange(4))), tensors(kept.read(torch.arange(4))), strict=True
    ):
        assert torch.equal(a, b)
