import numpy as np
import pytest

from handspan.testing.oracles.fedcomplete import fedcomplete
from handspan.testing.references import Reference, close


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("text", ["ridge=0.1", "ridge=0.5:step_size=0.5"])
def test_fedcomplete_is_its_oracle(text, sparse, engine):
    text = f"fedcomplete:num_components=2:{text}"
    run, dense = Reference(text, engine=engine, sparse=sparse), Reference(text)
    clients = [x for x, _ in dense.rows[0]]
    items, mean, rows = fedcomplete(
        clients,
        dense.rows[1],
        dense.first_server.items.numpy(),
        ridge=run.spec.config.ridge,
        step_size=run.spec.config.step_size,
    )
    close(run.server.items, items)
    close(run.server.mean, mean)
    for i, wanted in enumerate(rows):
        close(run.clients.rows[i, : len(wanted)], wanted)


def test_all_clients_end_where_alternating_least_squares_does():
    """Scaled steps change the way, not the end: at a fixed point the gradient is 0."""
    text = "fedcomplete:num_components=1:ridge=0.3"
    run = Reference(text, cohort=11, rounds=200, engine="stacked")
    x = np.concatenate([x for x, _ in run.rows[0]])
    items, mean = run.server.items.numpy(), float(run.server.mean)
    for _ in range(3):
        rows = []
        for row in x:
            at = np.flatnonzero(row)
            A = np.column_stack([items[at, :-1], np.ones(len(at))])
            own = 0.3 * max(1, len(at)) * np.eye(2)
            rows.append(np.linalg.solve(A.T @ A + own, A.T @ (row[at] - mean - items[at, -1])))
        rows, again = np.array(rows), items.copy()
        for i, column in enumerate(x.T):
            at = np.flatnonzero(column)
            A = np.column_stack([rows[at, :-1], np.ones(len(at))])
            target = column[at] - mean - rows[at, -1]
            again[i] = np.linalg.solve(A.T @ A + 0.3 * len(at) * np.eye(2), A.T @ target)
        np.testing.assert_allclose(again, items, atol=1e-6)
        items = again


def test_the_objective_tells_when_to_stop():
    run = Reference("fedcomplete:num_components=1:stop_tolerance=0.05", cohort=11, rounds=50)
    assert 1 < run.state.round < 50
