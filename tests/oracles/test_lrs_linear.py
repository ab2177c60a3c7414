import dataclasses

import numpy as np
import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.numerics.subspaces import principal_angle
from handspan.numerics.thresholding import largest_entries
from handspan.registry import parse
from handspan.testing.oracles import lrs_linear as oracle
from handspan.testing.references import Reference, close
from handspan.testing.toys import LinearTask, numbers, teachers

ALL = LocalWork(batch_size=None)
SCHEDULE = "threshold=schedule:sparsity=2:bound=0.5:c1=0.3:c3=0.7:c4=0.6:c5=0.9"
CASES = {
    "the largest entry stays": ("", {"keep": 1}, ALL),
    "two entries, on fresh batches": (
        ":sparsity=2:sparse_steps=3",
        {"keep": 2, "steps": 3},
        LocalWork(batch_size=5),
    ),
    "the paper's threshold": (
        f":{SCHEDULE}:sparse_learning_rate=0.1",
        {"keep": 2, "bound": 0.5, "c1": 0.3, "c3": 0.7, "c4": 0.6, "c5": 0.9, "rate": 0.1},
        ALL,
    ),
    "no sparse part": (":sparsity=0", {"keep": 0}, ALL),
}


@pytest.mark.parametrize("case", CASES)
def test_lrs_linear_is_the_algorithm_of_its_paper(case):
    text, options, work = CASES[case]
    run = Reference(f"lrs_linear:rank=2:start=random{text}", work, cohort=11)
    basis, coordinates, sparse = oracle.lrs_linear(
        *run.rows, run.first_server.basis.numpy(), **options
    )
    close(run.server.basis, basis, 1e-8)
    close(run.clients.coordinates[..., 0], coordinates, 1e-8)
    close(run.clients.sparse[..., 0], sparse, 1e-8)
    assert options["keep"] == 0 or np.abs(sparse).max() > 1e-2


def test_part_of_the_clients_moves_only_what_their_rows_tell():
    run = Reference("lrs_linear:rank=2:start=random:sparsity=0", ALL, cohort=1, rounds=1)
    basis, _, _ = oracle.lrs_linear(*run.rows, run.first_server.basis.numpy(), keep=0)
    close(run.server.basis, basis, 1e-8)


def test_without_a_sparse_part_it_is_alternating_least_squares():
    # Both blocks solved exactly: the sum of squares never rises, and planted rows are explained.
    data = numbers(sizes=(12,) * 9, num_features=5)
    losses = []
    for rounds in range(0, 9, 2):
        run = Reference(
            "lrs_linear:rank=2:sparsity=0:start=random",
            ALL,
            rounds=rounds,
            cohort=9,
            data=data,
            task=LinearTask(num_features=5),
        )
        basis, loss = run.server.basis.numpy(), 0.0
        for x, y in run.rows[0]:
            head = np.linalg.lstsq(x @ basis, y, rcond=None)[0]
            loss += float(((x @ basis @ head - y) ** 2).sum())
        losses.append(loss)
    assert (np.diff(losses) <= 1e-9).all(), losses
    assert losses[-1] < 1e-6 * losses[0]


def planted(num_clients=12, rows=60, num_features=10, rank=2, keep=1):
    """Rows of low-rank models with one large entry of its own each, at different places."""
    shape = {"num_features": num_features, "rank": rank}
    data = numbers(sizes=(rows,) * num_clients, **shape)
    models = teachers(num_clients=num_clients, **shape)
    sparse = torch.zeros(num_clients, num_features, dtype=torch.float64)
    for i in range(num_clients):
        sparse[i, torch.arange(keep) * 3 + i % num_features - keep] = 1.0 + 0.1 * i
    thetas = models.heads @ models.basis.T + sparse
    owner = torch.repeat_interleave(torch.arange(num_clients), data.offsets.diff())
    return dataclasses.replace(data, y=(data.x * thetas[owner]).sum(1)), models.basis, sparse


def test_planted_low_rank_and_sparse_parts_are_recovered():
    data, basis, sparse = planted()
    run = Reference(
        "lrs_linear:rank=2:sparsity=1",
        ALL,
        rounds=40,
        cohort=12,
        data=data,
        task=LinearTask(num_features=10),
        engine="stacked",
    )
    assert float(principal_angle(run.server.basis, basis)) < 1e-8
    close(run.clients.sparse[..., 0], sparse.numpy(), 1e-7)


def test_with_the_shared_part_fixed_thresholding_finds_a_sparse_vector():
    rng = np.random.default_rng(0)
    x, truth = rng.normal(size=(40, 12)), np.zeros(12)
    truth[[2, 7]] = [1.5, -0.8]
    shared = rng.normal(size=12)
    got = oracle.optimize_sparse_vector(x, x @ (truth + shared), shared, 0 * truth, 150, keep=2)
    np.testing.assert_allclose(got, truth, atol=1e-8)


def test_the_largest_entries_stay_and_equals_stay_together():
    vector = torch.tensor([[1.0], [-3.0], [2.0], [-2.0]])
    assert largest_entries(vector, 1).flatten().tolist() == [0, -3, 0, 0]
    assert largest_entries(vector, 2).flatten().tolist() == [0, -3, 2, -2]
    assert not largest_entries(vector, 0).any()


def test_a_new_client_alternates_between_its_parts():
    work = LocalWork(batch_size=None, adapt_steps=4)
    run = Reference("lrs_linear:rank=2:sparsity=1", work)
    i = int(run.data.num_train.argmax())
    fresh = Reference("lrs_linear:rank=2:sparsity=1", work, rounds=0)
    fresh.simulation.adapt(run.server, torch.tensor([i]), 4)
    x, y = run.rows[0][i]
    w, b = oracle.new_user(x, y, run.server.basis.numpy(), 4, 10, 1)
    got = fresh.simulation.store.read(torch.tensor([i]))
    close(got.coordinates[0, :, 0], w, 1e-9)
    close(got.sparse[0, :, 0], b, 1e-9)


def test_a_client_is_served_coordinates_for_the_last_basis():
    run = Reference("lrs_linear:rank=2", ALL)
    i = int(run.data.num_train.argmax())
    (x, y), basis = run.rows[0][i], run.server.basis.numpy()
    sparse = run.clients.sparse[i, :, 0].numpy()
    w = np.linalg.lstsq(x @ basis, y - x @ sparse, rcond=None)[0]
    for _, broadcast, mine in run.simulation.serve(run.server, torch.tensor([i]), 4):
        alone = type(mine)(coordinates=mine.coordinates[0], sparse=mine.sparse[0])
        theta = run.algorithm.model(broadcast, alone).params["weight"][0]
        close(theta, basis @ w + sparse)


@pytest.mark.parametrize(
    "setting",
    [
        "rank=0",
        "sparsity=-1",
        "c1=0.3",
        "threshold=schedule:c1=0.7",
        "threshold=schedule:sparsity=0",
    ],
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(HandspanError):
        parse(f"lrs_linear:{setting}")


@pytest.mark.parametrize(
    ("text", "work", "message"),
    [
        (":rank=5", None, "lower it"),
        (":sparsity=5", None, "lower it"),
        ("", LocalWork(sgd=Sgd(momentum=0.5)), "no momentum"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(text, work, message):
    with pytest.raises(HandspanError, match=message):
        Reference(f"lrs_linear{text}", work)
