import numpy as np
import pytest
import torch
from factoring import flat
from sklearn.cluster import KMeans

from handspan.testing.oracles.fedmgs import fedmgs, objective
from handspan.testing.oracles.palm import palm
from handspan.testing.references import Reference, close


def problem_of(run):
    """Matrices with data rows as columns, first W and H, and the numbers that follow from X."""
    config, clients = run.spec.config, run.rows[0]
    columns = [x.T for x, _ in clients]
    whole = np.concatenate(columns, axis=1)
    k = config.num_components
    scale = np.sqrt(np.abs(whole).mean() / k)
    H = [run.first_clients.rows[i, : x.shape[1]].numpy().T * scale for i, x in enumerate(columns)]
    size = (whole**2).sum() / whole.shape[1]
    return {
        "clients": columns,
        "W": run.first_server.basis.numpy() * scale,
        "H": H,
        "q1": config.row_steps,
        "q2": config.shared_steps,
        "rho": config.orthogonality * size,
        "nu": config.shrinkage * size,
        "constants": config.constants,
    }


CASES = (
    "constants=safe",
    "constants=paper:row_steps=3:shared_steps=2",
    "constants=safe:orthogonality=0.01:shrinkage=0.005",
    "constants=paper:orthogonality=0.001:shrinkage=0.01:row_steps=2",
    "constants=safe:orthogonality=0.01:penalty_tolerance=0.5",
)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("text", CASES)
def test_fedmgs_is_algorithm_2_of_its_paper_with_part_of_the_clients(text, sparse, engine):
    run = Reference(f"fedmgs:num_components=3:{text}", engine=engine, sparse=sparse)
    dense = Reference(f"fedmgs:num_components=3:{text}")
    given = problem_of(dense)
    config = run.spec.config
    W, H, objectives, penalties = fedmgs(
        cohorts=dense.rows[1],
        penalty_growth=config.penalty_growth,
        penalty_tolerance=config.penalty_tolerance,
        **given,
    )
    close(run.server.basis, W)
    for got, wanted in zip(flat(run), H, strict=True):
        close(got, wanted)
    grown = penalties[-1]
    last = objective(given["clients"], W, H, grown, given["nu"])
    assert abs(last - objectives[-1]) < 1e-12
    rho = float(run.server.penalty)
    close(run.server.objective, objective(given["clients"], W, H, rho, given["nu"]))
    assert rho == pytest.approx(grown) or rho == pytest.approx(grown * config.penalty_growth)
    if "penalty_tolerance" in text:
        assert rho > given["rho"]


@pytest.mark.parametrize("text", CASES[:4])
def test_fedmgs_with_all_clients_is_centralised_palm(text):
    run = Reference(f"fedmgs:num_components=3:penalty_growth=1:{text}", cohort=11, rounds=5)
    given = problem_of(run)
    X, H = np.concatenate(given.pop("clients"), axis=1), np.concatenate(given.pop("H"), axis=1)
    W, H, objectives = palm(X, H=H, rounds=5, **given)
    close(run.server.basis, W)
    close(np.concatenate(flat(run), axis=1), H)
    close(run.server.objective, objectives[-1])


def test_the_server_keeps_the_sums_of_everybody():
    run = Reference("fedmgs:num_components=3", rounds=5)
    H = np.concatenate(flat(run), axis=1)
    X = np.concatenate([x.T for x, _ in run.rows[0]], axis=1)
    close(run.server.hh, H @ H.T)
    close(run.server.xh, X @ H.T)


def test_safe_constants_never_let_the_objective_rise():
    before = np.inf
    for t in range(8):
        run = Reference("fedmgs:num_components=3:penalty_growth=1:stop_tolerance=0", rounds=t)
        assert float(run.server.objective) <= before + 1e-12
        before = float(run.server.objective)


def test_a_run_that_rests_is_done():
    run = Reference("fedmgs:num_components=1:stop_tolerance=0.01", rounds=30, cohort=11)
    assert run.state.round < 30


def test_a_row_without_component_takes_the_nearest_column():
    run = Reference("fedmgs:num_components=3", rounds=2)
    (_, broadcast, mine), *_ = run.simulation.serve(run.server, torch.arange(1), 2)
    x = run.rows[0][0][0]
    zero = type(mine)(rows=torch.zeros(len(x), 3, dtype=torch.float64))
    batch = type("Rows", (), {"x": torch.from_numpy(x.copy())})()
    W = run.server.basis.numpy()
    wanted = [int(((row[:, None] - W) ** 2).sum(0).argmin()) for row in x]
    assert run.algorithm.labels(broadcast, zero, batch).tolist() == wanted


def test_one_hot_rows_make_federated_k_means():
    text = "fedmgs:num_components=3:row_set=assignment:shrinkage=0:basis_set=none"
    made = Reference(text, rounds=6, cohort=11)
    x, start = made.data.x.numpy(), made.first_server.basis.numpy()
    scale = np.sqrt(np.abs(x).mean() / 3)
    lloyd = KMeans(3, init=scale * start.T, n_init=1, max_iter=6, tol=0)
    lloyd.fit(x)
    labels = np.concatenate(flat(made), axis=1).argmax(0)
    assert (lloyd.labels_ == labels).mean() == 1.0
    close(made.server.objective, lloyd.inertia_ / len(x), 1e-9)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_client_that_is_drawn_twice_counts_once(engine):
    made = Reference("fedmgs:num_components=3:sampling=weighted", rounds=4, cohort=8, engine=engine)
    H = np.concatenate(flat(made), axis=1)
    X = np.concatenate([x.T for x, _ in made.rows[0]], axis=1)
    close(made.server.hh, H @ H.T)
    close(made.server.xh, X @ H.T)
