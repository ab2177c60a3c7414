"""New clients against the rows they give: for every method, from none upward."""

import numpy as np
import pytest
import torch

import handspan
from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.data import split_holdout
from handspan.evaluation.newcomers import COUNTS, first_rows, newcomer_curve
from handspan.registry import EXTRAS, methods
from handspan.testing.oracles.label_prior import prior_term

FEW = (0, 1, 3, 8, None)
MODELS = [name for name, method in methods().items() if method.problem == "labels"]
LINEAR = [name for name, method in methods().items() if method.problem == "regression"]
QUICK = {"rounds": 2, "steps": 2, "adapt_steps": 2, "cohort": 4, "engine": "loop", "threads": 1}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def federation(kind="labels", sizes=(20, 24, 28, 32, 36, 40, 16, 44, 18, 22, 26, 30)):
    """Clients in two groups with opposite rules, with a row of side information each."""
    rng = np.random.default_rng(0)
    clients = []
    for i, size in enumerate(sizes):
        x = rng.normal(size=(size, 4))
        value = (1 - 2 * (i % 2)) * x.sum(1)
        clients.append((x, value if kind == "regression" else (value > 0).astype(int)))
    data = FederatedData.from_clients(clients, side=rng.normal(size=(len(sizes), 2)))
    groups = torch.arange(len(sizes)) % 2
    return split_holdout(FederatedData(**{**vars(data), "groups": groups}), 2, 0)


def numbered(sizes):
    """Each row is its own number."""
    parts = np.split(np.arange(sum(sizes), dtype="float64"), np.cumsum(sizes)[:-1])
    return FederatedData.from_clients(
        [(part[:, None], part) for part in parts], standardize=False, task="regression"
    )


def rows_of(data, kind):
    first, count = data.span(kind)
    begin = (data.offsets[:-1] + first).tolist()
    return [data.y[a : a + n].tolist() for a, n in zip(begin, count.tolist(), strict=True)]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7, 20, None])
def test_a_new_client_gives_its_first_rows_and_is_scored_on_all_its_test_rows(count):
    data = numbered([3, 20, 9, 40])
    given = first_rows(data, count)
    assert rows_of(given, "test") == rows_of(data, "test")
    assert torch.equal(given.x[:, 0], given.y), "rows and labels stay together"
    everything, kept = rows_of(data, "all"), rows_of(given, "all")
    for mine, whole in zip(kept, everything, strict=True):
        assert mine == whole[: len(whole) if count is None else count]


def test_fewer_rows_are_always_among_more_and_the_share_of_validation_rows_stays():
    data = numbered([3, 20, 9, 40])
    for fewer, more in zip((0, 1, 2, 5), (1, 2, 5, 20), strict=True):
        one, other = (rows_of(first_rows(data, count), "all") for count in (fewer, more))
        assert all(set(a) <= set(b) for a, b in zip(one, other, strict=True))
    given = first_rows(data, 10)
    share = data.num_validation / (data.num_train + data.num_validation)
    assert (given.num_validation <= share * (given.num_train + given.num_validation) + 1e-9).all()
    assert (given.num_validation + 1 > share * (given.num_train + given.num_validation)).all()


@pytest.mark.parametrize("name", [*MODELS, *LINEAR])
def test_every_method_serves_new_clients_from_no_row_upward(name):
    kind = methods()[name].problem
    data, guests = federation(kind)
    model = "linear" if kind == "regression" else None
    if name == "fedbn":
        model = "mlp_batchnorm"
    result = handspan.fit(name, data, held_out=guests, model=model, **QUICK)
    curve = newcomer_curve(result, counts=FEW)
    assert [entry["given"] for entry in curve] == [0, 1, 3, 8, "all"]
    assert [entry["given_mean"] for entry in curve][:4] == [0, 1, 3, 8]
    for entry in curve:
        assert entry["mean"] is not None and np.isfinite(entry["mean"])
        assert entry["metric"] == ("rmse" if kind == "regression" else "accuracy")
    assert curve[0]["rows"] == 0, "without rows nothing is trained"
    rows = [entry["rows"] for entry in curve]
    assert rows == sorted(rows)
    # Every run with held-out clients has the same in its summary, at the usual numbers of rows.
    told = result.summary["newcomers"]
    assert [entry["given"] for entry in told] == [0, 1, 2, 5, 10, 20, "all"] and len(COUNTS) == 7
    assert {**told[-1]} == {**curve[-1]} and told[0] == curve[0]
    assert result.summary[f"heldout_{told[-1]['metric']}_mean"] == told[-1]["mean"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_serve_new_clients_from_no_row_upward(extra):
    data, guests = federation()
    result = handspan.fit(f"fedper+{extra}", data, held_out=guests, **QUICK)
    curve = newcomer_curve(result, counts=FEW)
    assert curve[0]["rows"] == 0
    assert all(entry["mean"] is not None for entry in curve)
    assert (curve[-1]["forward_rows"] > 0) == (extra == "gate")


def test_without_rows_a_new_client_of_fedavg_has_the_shared_model():
    data, guests = federation()
    result = handspan.fit("fedavg+prior+ft", data, held_out=guests, **QUICK)
    server, task = result.state.server, result.problem.task
    (entry,) = newcomer_curve(result, counts=(0,))
    right = []
    for x, y in zip(rows_of_x(result.problem.held_out), rows_of(guests, "test"), strict=True):
        outputs = task.predict(server.params, server.buffers, x, None)
        right.append(float((outputs.argmax(1) == torch.tensor(y)).double().mean()))
    assert entry["mean"] == pytest.approx(np.mean(right))


def rows_of_x(data, kind="test"):
    first, count = data.span(kind)
    begin = (data.offsets[:-1] + first).tolist()
    return [data.x[a : a + n] for a, n in zip(begin, count.tolist(), strict=True)]


@pytest.mark.parametrize("count", [1, 8])
def test_the_label_prior_of_a_new_client_is_that_of_the_rows_it_gives(count):
    data, guests = federation()
    result = handspan.fit("fedavg+prior", data, held_out=guests, **QUICK)
    server, task, held = result.state.server, result.problem.task, result.problem.held_out
    (entry,) = newcomer_curve(result, counts=(count,))
    right = []
    for x, y, known in zip(
        rows_of_x(held), rows_of(held, "test"), rows_of(held, "train"), strict=True
    ):
        term = torch.from_numpy(prior_term(np.array(known[:count]), 2)).to(x)
        outputs = task.predict(server.params, server.buffers, x, None) + term
        right.append(float((outputs.argmax(1) == torch.tensor(y)).double().mean()))
    assert entry["mean"] == pytest.approx(np.mean(right))


def test_serving_new_clients_changes_nothing_of_the_run():
    data, guests = federation()
    result = handspan.fit("fedper", data, held_out=guests, **QUICK)
    before = {k: v.clone() for k, v in result.simulation.store.to_named().items()}
    one, other = newcomer_curve(result), newcomer_curve(result)
    assert one == other
    assert all(torch.equal(v, before[k]) for k, v in result.simulation.store.to_named().items())


def test_more_steps_of_the_fit_can_be_asked_for():
    data, guests = federation()
    result = handspan.fit("fedper", data, held_out=guests, **QUICK)
    few, many = (newcomer_curve(result, counts=(8,), steps=steps)[0] for steps in (1, 30))
    assert many["rows"] == 30 * few["rows"]


def test_other_new_clients_may_be_given_and_nobody_to_serve_is_told():
    data, guests = federation()
    result = handspan.fit("fedavg", data, **QUICK)
    assert newcomer_curve(result, guests, counts=(0,))[0]["given"] == 0
    with pytest.raises(HandspanError, match="train it with --holdout-clients"):
        newcomer_curve(result)


def test_a_factorisation_serves_no_new_clients():
    rng = np.random.default_rng(0)
    data = FederatedData.from_clients([(rng.random((6, 4)), None)] * 3, task="matrix")
    result = handspan.fit("fedmgs", data, rounds=1, cohort=2, num_components=2, engine="loop")
    with pytest.raises(HandspanError, match="serves no new clients"):
        newcomer_curve(result)
