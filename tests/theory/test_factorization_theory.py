"""What the paper proves and claims of its factorisations, on small problems."""

import dataclasses

import numpy as np
import pytest
import torch

from handspan.numerics.factorization import averaging, problem
from handspan.registry import parse
from handspan.testing.case import compare
from handspan.testing.references import Reference, close
from handspan.testing.toys import blocks, matrix

STILL = "num_components=3:penalty_growth=1:stop_tolerance=0"


def rows_of(run):
    num = run.data.num_train.tolist()
    return torch.cat([run.clients.rows[i, :n] for i, n in enumerate(num)])


def objective_of(run):
    """F by its definition: the function in the docstrings, from the rows themselves."""
    H, W, server = rows_of(run), run.server.basis, run.server
    left = ((run.data.x - H @ W.T) ** 2).sum()
    return problem.objective(left, H.T @ H, server.num_rows, server.penalty, server.shrinkage)


@pytest.mark.parametrize("rows", ["non_negative", "simplex", "l1", "l2", "box", "none"])
@pytest.mark.parametrize("basis", ["box", "non_negative", "l2", "none"])
def test_fedmgs_descends_on_every_set_with_any_cohort(rows, basis):
    text = f"fedmgs:{STILL}:row_set={rows}:basis_set={basis}:orthogonality=0.01"
    before = np.inf
    for t in range(5):
        made = Reference(text, rounds=t, cohort=2)
        now = float(objective_of(made))
        assert now == pytest.approx(float(made.server.objective), rel=1e-10)
        assert now <= before + 1e-12
        before = now


def test_row_steps_descend_and_averaging_need_not():
    """Of FedMAvg only the steps on H descend at fixed W: measured before and after them."""
    made = Reference(f"fedmavg:{STILL}", rounds=2, cohort=4)
    broadcast = made.algorithm.rounds[0].broadcast(made.server, None)
    old = rows_of(made)
    method = parse(f"fedmavg:{STILL}").build(made.setting)
    moved = method.rounds[0].stages[0].step.__self__.moved(broadcast, old, made.data.x)

    def value(H):
        fit = ((made.data.x - H @ broadcast.basis.T) ** 2).sum()
        s = made.server
        return float(problem.objective(fit, H.T @ H, s.num_rows, s.penalty, s.shrinkage))

    assert value(moved) < value(old)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_fedmavg_with_one_step_of_all_clients_is_fedmgs(monkeypatch, share):
    """Full participation, Q2 = 1, the same c and d: the mean of steps is a step on the mean."""
    monkeypatch.setattr(averaging, "_PAPER", share)
    mavg = Reference(f"fedmavg:{STILL}:constants=paper:schedule=constant:shared_steps=1", cohort=11)
    mgs = Reference(f"fedmgs:{STILL}:constants=paper:shared_steps=1", cohort=11)
    method = mgs.algorithm.rounds[0].combine.__self__
    monkeypatch.setattr(
        type(method),
        "constant",
        lambda self, server, hh: share * problem.largest(2 * hh / server.num_rows),
    )
    close(mavg.server.basis, mgs.server.basis.numpy())
    close(rows_of(mavg), rows_of(mgs).numpy())


def test_a_start_at_zero_uploads_nothing_beforehand():
    made = Reference("fedmgs:num_components=3:start=zero", rounds=3)
    H = rows_of(made)
    close(made.server.hh, (H.T @ H).numpy())
    close(made.server.xh, (made.data.x.T @ H).numpy())
    assert {phase.name for phase in made.algorithm.setup} == {"scan"}


@pytest.mark.parametrize("text", ["fedmgs", "fedmavg", "fedpalm:constants=paper"])
def test_gaps_are_those_of_the_definition(text):
    made = Reference(f"{text}:num_components=3:gap_tolerance=1e-9", rounds=3, cohort=4)
    server, x, H = made.server, made.data.x, rows_of(made)
    W, N = server.basis, float(server.num_rows)
    eye = torch.eye(3, dtype=torch.float64)
    penalty = server.penalty * (1 - eye) + server.shrinkage * eye
    hessian = 2 * W.T @ W / N + penalty
    c = 0.51 * problem.largest(hessian)
    if "paper" in text:
        c = problem.largest(W.T @ W) / N
    step = (H - (H @ hessian - 2 * (x @ W) / N) / c).clamp(min=0)
    share = torch.repeat_interleave(made.data.num_train, made.data.num_train).double() / N
    close(server.gap_rows, (c**2 * ((H - step) ** 2).sum(1) / share).sum().numpy())
    hh, xh = H.T @ H, x.T @ H
    d = 0.51 * problem.largest(2 * hh / N) if text == "fedmgs" else server.constant
    moved = (W - 2 * (W @ hh - xh) / N / d).clamp(server.low, server.high)
    close(server.gap_basis, (d**2 * ((W - moved) ** 2).sum()).numpy())


def test_a_run_whose_gaps_are_closed_is_done():
    text = f"fedmgs:{STILL}:gap_tolerance=0.5"
    made = Reference(text, rounds=60, cohort=11)
    assert 0 < made.state.round < 60
    assert float(made.server.gap_rows + made.server.gap_basis) < 0.5


def test_the_gaps_of_fedmgs_keep_the_bound_of_theorem_2():
    gamma, rounds, share = 1.02, 12, 11 / 4
    text = f"fedmgs:{STILL}:gap_tolerance=1e-12:row_steps=1:shared_steps=1"
    seen = [Reference(text, rounds=t, cohort=4) for t in range(1, rounds + 1)]
    start = Reference(text, rounds=0, cohort=4)
    total = sum(float(made.server.gap_rows) for made in seen)
    N, least = float(start.server.num_rows), int(start.data.num_train.min())
    L_H = max(float(problem.largest(2 * m.server.basis.T @ m.server.basis / least)) for m in seen)
    L_W = max(float(problem.largest(2 * m.server.hh / N)) for m in seen)
    bound = gamma**2 / (2 * (gamma - 1)) * (share * 1.1 * L_H + L_W) * float(start.server.objective)
    assert 0 < total <= bound


def test_penalties_grow_every_so_many_rounds():
    made = Reference("fedmgs:num_components=3:penalty_tolerance=0:penalty_every=2", rounds=4)
    start = Reference("fedmgs:num_components=3", rounds=0)
    assert float(made.server.penalty) == pytest.approx(1.5**2 * float(start.server.penalty))


def test_single_precision_is_close_to_double():
    found = []
    for dtype in (torch.float32, torch.float64):
        made = Reference(f"fedmgs:{STILL}", cohort=11, dtype=dtype, rounds=6)
        found.append({"basis": made.server.basis, "rows": rows_of(made).double()})
    compare(*found, 1e-4, "float32")


def test_missing_entries_are_completed():
    """Rank-one rows, a third of the entries unknown: what is not stored is found."""
    full = torch.outer(torch.arange(1.0, 31), torch.tensor([1.0, 2, 3, 4, 5])).double() / 30
    hidden = torch.from_numpy(np.random.default_rng(0).random(full.shape) < 1 / 3)
    data = blocks(num_clients=3, rows=10)
    data = dataclasses.replace(data, x=torch.where(hidden, 0.0, full), y=None, num_classes=None)
    text = (
        "fedmavg:num_components=1:missing=true:row_steps=20:shared_steps=20:basis_set=none"
        ":schedule=constant:shrinkage=0:stop_tolerance=0"
    )
    made = Reference(text, data=data, cohort=3, rounds=60)
    left = (rows_of(made) @ made.server.basis.T - full)[hidden]
    assert left.abs().max() < 0.02


def test_negative_data_are_refused_where_w_must_not_be_negative():
    data = matrix()
    data = dataclasses.replace(data, x=data.x - 0.5)
    made = Reference("fedmgs:num_components=2:basis_set=non_negative", data=data)
    with pytest.raises(Exception, match="without negative entries"):
        assert made.state
