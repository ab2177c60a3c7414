import dataclasses

import numpy as np
import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.numerics.subspaces import principal_angle
from handspan.registry import parse
from handspan.testing.oracles import fedrep_linear as oracle
from handspan.testing.playing import step_rows
from handspan.testing.references import Reference, close
from handspan.testing.toys import NUM_FEATURES, LinearTask, ToyTask, numbers, teachers

ALL = LocalWork(batch_size=None, learning_rate=0.2)
FRESH = LocalWork(batch_size=3, learning_rate=0.2)
CASES = {
    "algorithm 2 on fresh batches": ("", {}, FRESH),
    "the same rows in all rounds": ("", {}, ALL),
    "the step size of theorem 1": (":step_size=theorem", {"learning_rate": None}, ALL),
    "weights by rows": (":weights=examples", {"weights": "examples"}, FRESH),
    "several steps in a round": ("", {}, LocalWork(steps=3, batch_size=3, learning_rate=0.1)),
    "an epoch in a round": ("", {}, LocalWork(epochs=1, batch_size=4, learning_rate=0.1)),
    "gd-gd": (":head=gradient", {"head": "gradient"}, FRESH),
    "10gd-gd": (
        ":head=gradient:head_steps=10:head_learning_rate=0.02",
        {"head": "gradient", "head_steps": 10, "head_learning_rate": 0.02},
        ALL,
    ),
    "gd-gd without qr": (
        ":head=gradient:orthonormal=false:start=random",
        {"head": "gradient", "orthonormal": False},
        ALL,
    ),
    "fedsgd": (":head=shared", {"head": "shared"}, FRESH),
    "a projected start": (":start=projected:projected_rounds=4", {}, ALL),
}


def start(run):
    """B^0 by the oracle."""
    config, data = run.spec.config, run.data
    if config.start == "random":
        return run.first_server.basis.numpy()
    clients = run.rows[0]
    if config.start == "projected":
        return oracle.projected_start(clients, config.rank, config.projected_rounds)
    phase = run.algorithm.setup[0]

    def batch(i):
        return step_rows(data, phase, 0, i, round=0, seed=run.seed)[0][0].tolist()

    sizes = np.array([len(y) for _, y in clients], dtype=float)
    shares = np.ones_like(sizes) if config.weights == "uniform" else sizes
    return oracle.moments_start(clients, config.rank, batch, shares / shares.sum())


@pytest.mark.parametrize("case", CASES)
def test_fedrep_linear_is_algorithm_2_of_its_paper_or_a_baseline(case):
    text, options, work = CASES[case]
    run = Reference(f"fedrep_linear:rank=2{text}", work)
    first = start(run)
    options = {"learning_rate": work.learning_rate, **options}
    basis, heads = oracle.fedrep_linear(*run.rows, first, **options)
    if run.spec.config.start == "projected":  # a singular vector's sign is free
        turn = run.server.basis.numpy().T @ basis
        close(run.server.basis, basis @ turn.T)
        return
    close(run.server.basis, basis)
    if run.spec.config.head == "shared":
        close(run.server.head[:, 0], heads[0])
    if run.spec.config.head == "gradient":
        close(run.server.turn @ run.clients.head[..., 0].T, np.stack(heads, axis=1))


def served(run, i):
    return run.simulation, next(iter(run.simulation.serve(run.server, torch.tensor([i]), 4)))


def test_a_client_is_served_the_head_that_is_best_for_the_last_basis():
    run = Reference("fedrep_linear:rank=2", FRESH)
    i = int(run.data.num_train.argmax())
    (x, y), basis = run.rows[0][i], run.server.basis.numpy()
    _, (_, broadcast, mine) = served(run, i)
    head = np.linalg.lstsq(x @ basis, y, rcond=None)[0]
    close(mine.head[0, :, 0], head)
    model = run.algorithm.model(broadcast, type(mine)(head=mine.head[0]))
    close(model.params["weight"][0], basis @ head)
    assert not model.params["bias"].any()


@pytest.mark.parametrize("head", ["gradient", "shared"])
def test_a_new_client_solves_for_its_head(head):
    run = Reference(f"fedrep_linear:rank=2:head={head}", FRESH)
    i = int(run.data.num_train.argmax())
    (x, y), basis = run.rows[0][i], run.server.basis.numpy()
    wanted = basis @ np.linalg.lstsq(x @ basis, y, rcond=None)[0]
    run.simulation.adapt(run.server, torch.tensor([i]), 4)
    _, (_, broadcast, mine) = served(run, i)
    alone = type(mine)(**{n: v[0] for n, v in vars(mine).items() if v is not None})
    close(run.algorithm.model(broadcast, alone).params["weight"][0], wanted)


def test_the_distance_is_that_of_the_definition_and_exact_near_zero():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 7, 3))
    got = principal_angle(torch.tensor(first), torch.tensor(second))
    assert float(got) == pytest.approx(oracle.distance(first, second), abs=1e-12)
    near = first + 1e-12 * second
    assert 1e-14 < float(principal_angle(torch.tensor(first), torch.tensor(near))) < 1e-11


def test_the_summary_tells_the_distance_to_a_planted_basis(tmp_path):
    planted = teachers(rank=2).basis
    np.save(tmp_path / "truth.npy", planted.numpy())
    run = Reference(f"fedrep_linear:truth={tmp_path}/truth.npy", ALL, rounds=3)
    told = run.algorithm.describe(run.server)
    wanted = oracle.distance(planted.numpy(), run.server.basis.numpy())
    assert told["angle_to_truth"] == pytest.approx(wanted, abs=1e-12)
    before = Reference("fedrep_linear", ALL, rounds=2).server.basis.numpy()
    moved = oracle.distance(before, run.server.basis.numpy())
    assert told["angle_moved"] == pytest.approx(moved, abs=1e-12)


# -- theory ----------------------------------------------------------------------------------

SIZES = (40,) * 12
LARGE = {"sizes": SIZES, "num_features": 8, "rank": 2}


LARGE_STEPS = LocalWork(batch_size=None, learning_rate=0.6)


def recovered(text="", *, rounds, work=LARGE_STEPS, cohort=12, **options):
    """Run on noise-free planted rows."""
    data = numbers(**{**LARGE, **options})
    run = Reference(
        f"fedrep_linear:rank=2{text}",
        work,
        rounds=rounds,
        cohort=cohort,
        data=data,
        task=linear(data),
        engine="stacked",
    )
    return run


def linear(data):
    return LinearTask(num_features=data.row_shape[0])


def angle(run):
    options = {k: LARGE[k] for k in ("num_features", "rank")}
    planted = teachers(num_clients=len(SIZES), **options).basis
    return float(principal_angle(run.server.basis, planted))


@pytest.mark.parametrize("start", ["moments", "projected", "random"])
def test_without_noise_the_planted_basis_is_recovered_from_every_start(start):
    run = recovered(f":start={start}", rounds=50)
    assert angle(run) < 1e-8
    models = teachers(num_clients=12, num_features=8, rank=2)
    _, (_, _, mine) = served(run, 5)
    theta = run.server.basis @ mine.head[0]
    torch.testing.assert_close(theta[:, 0], models.basis @ models.heads[5], rtol=0, atol=1e-7)


def test_part_of_the_clients_recovers_it_as_well():
    assert angle(recovered(rounds=80, cohort=4)) < 1e-8


def test_the_distance_falls_as_fast_as_theorem_1_says():
    heads = teachers(num_clients=12, num_features=8, rank=2).heads
    singular = torch.linalg.svdvals(heads / 12**0.5)
    eta = float(1 / (4 * singular[0] ** 2))
    first = angle(recovered(rounds=0))
    work = LocalWork(batch_size=None, learning_rate=eta)
    share = eta * (1 - first**2) * float(singular[-1] ** 2) / 2
    for rounds in (1, 5, 25):
        bound = (1 - share) ** (rounds / 2) * first
        assert angle(recovered(rounds=rounds, work=work)) <= bound
    slow = LocalWork(batch_size=None, learning_rate=eta / 100)
    assert angle(recovered(rounds=20, work=slow)) > (1 - share) ** 10 * first, "the bound can fail"


def test_a_single_model_ends_where_the_mean_head_is_and_does_not_find_the_basis():
    # B w = B* mean(w*): error 1/2 mean |B* (wbar - w_i*)|^2 over rows of covariance I.
    orthogonal = whitened(numbers(**LARGE))
    run = Reference(
        "fedrep_linear:rank=2:head=shared",
        LocalWork(batch_size=None, learning_rate=1.0),
        rounds=200,
        cohort=12,
        data=orthogonal,
        task=linear(orthogonal),
        engine="stacked",
    )
    planted = teachers(num_clients=12, num_features=8, rank=2)
    single = run.server.basis @ run.server.head[:, 0]
    close(single, (planted.basis @ planted.heads.mean(0)).numpy(), 1e-5)
    assert angle(run) > 0.1


def whitened(data):
    """Return the data with X_i^T X_i / m_i = I on the training rows of every client."""
    x, y = data.x.clone(), data.y.clone()
    models = teachers(num_clients=12, num_features=8, rank=2)
    for i in range(data.num_clients):
        a = int(data.offsets[i])
        rows = slice(a, a + int(data.num_train[i]))
        x[rows] = torch.linalg.qr(x[rows]).Q * int(data.num_train[i]) ** 0.5
        y[rows] = x[rows] @ (models.basis @ models.heads[i])
    return dataclasses.replace(data, x=x, y=y)


def test_a_new_client_needs_as_many_rows_as_the_basis_has_columns():
    run = recovered(rounds=40)
    planted = teachers(num_clients=12, num_features=8, rank=2)
    rng = torch.Generator().manual_seed(1)
    model = planted.basis @ torch.tensor([0.3, -1.2], dtype=torch.float64)
    errors = []
    for rows in (1, 2, 3):
        x = torch.randn(rows, 8, generator=rng, dtype=torch.float64)
        head = np.linalg.lstsq((x @ run.server.basis).numpy(), (x @ model).numpy(), rcond=None)[0]
        errors.append(float((run.server.basis @ torch.tensor(head) - model).norm()))
    assert errors[0] > 0.1 and max(errors[1:]) < 1e-5


# -- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        "head=best",
        "head_steps=3",
        "projected_rounds=3",
        "head_learning_rate=1",
        "rank=0",
        "start=zero",
        "orthonormal=false",
        "step_size=none",
        "weights=all",
    ],
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(HandspanError):
        parse(f"fedrep_linear:{setting}")


@pytest.mark.parametrize(
    ("text", "work", "message"),
    [
        (f":rank={NUM_FEATURES + 1}", None, "lower it"),
        ("", LocalWork(sgd=Sgd(momentum=0.5)), "no momentum"),
        (":step_size=theorem", LocalWork(steps=3), "one step in a round"),
        (":truth=nowhere.npy", None, "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(text, work, message):
    with pytest.raises(HandspanError, match=message):
        Reference(f"fedrep_linear{text}", work)


def test_classes_are_no_numbers():
    with pytest.raises(HandspanError, match="labels are numbers"):
        Reference("fedrep_linear", task=ToyTask())
