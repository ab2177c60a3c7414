import dataclasses

import numpy as np
import pytest
import torch
from factoring import flat, problem_of

from handspan.methods.fedmavg import powers
from handspan.testing.oracles.fedmavg import fedmavg
from handspan.testing.references import Reference, close


def steps_of(config):
    return {
        "q1": config.row_steps,
        "q2": config.shared_steps,
        "diminishing": config.schedule == "diminishing",
        "missing": config.missing,
        "penalty_growth": config.penalty_growth,
        "penalty_tolerance": config.penalty_tolerance,
    }


CASES = (
    "constants=safe",
    "constants=paper:schedule=constant:shared_steps=3:row_steps=2",
    "constants=safe:sampling=uniform:idle_clients=freeze:orthogonality=0.01:shrinkage=0.005",
    "constants=safe:orthogonality=0.01:penalty_tolerance=0.5",
    "constants=safe:missing=true:shared_steps=3:orthogonality=0.01",
    "constants=paper:missing=true:schedule=constant:sampling=uniform",
)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("text", CASES)
def test_fedmavg_is_algorithm_1_of_its_paper_with_part_of_the_clients(text, sparse, engine):
    run = Reference(f"fedmavg:num_components=3:{text}", engine=engine, sparse=sparse)
    dense = Reference(f"fedmavg:num_components=3:{text}")
    W, H, objectives, penalties = fedmavg(**problem_of(dense), **steps_of(run.spec.config))
    close(run.server.basis, W)
    for got, wanted in zip(flat(run), H, strict=True):
        close(got, wanted)
    if "penalty_tolerance" in text:
        assert penalties[-1] > penalties[0]
    else:
        close(run.server.objective, objectives[-1])


def test_all_clients_are_weighted_by_their_rows():
    run = Reference("fedmavg:num_components=3", cohort=11)
    W, *_ = fedmavg(**problem_of(run), **steps_of(run.spec.config))
    close(run.server.basis, W)


@pytest.mark.parametrize("count", [1, 2, 9, 40])
@pytest.mark.parametrize("eta", [0.0, 1e-9, 0.3, 1.2])
def test_powers_are_so_many_steps(count, eta):
    rng = np.random.default_rng(0)
    root = rng.normal(size=(3, 2))  # one eigenvalue is 0
    U = root @ root.T / np.linalg.eigvalsh(root @ root.T)[-1]
    power, total = powers(*(torch.tensor(value, dtype=torch.float64) for value in (U, eta, count)))
    first, second = np.eye(3), np.zeros((3, 3))
    for _ in range(count):
        second = eta * np.eye(3) + second @ (np.eye(3) - eta * U)
        first = first @ (np.eye(3) - eta * U)
    close(power, first, 1e-12)
    close(total, second, 1e-12)


def test_the_bound_of_a_client_with_large_rows_is_kept():
    """One row of one client, 30 times as large: its own constant is above five times the mean."""
    plain = Reference("fedmavg:num_components=2").data
    x = torch.cat([30 * plain.x[:1], 0.1 * plain.x[1:]])
    data = dataclasses.replace(plain, x=x)
    text = "fedmavg:num_components=2:schedule=constant:shared_steps=60"
    run = Reference(text, data=data, rounds=6, cohort=11)
    W, H, *_ = fedmavg(**problem_of(run), **steps_of(run.spec.config))
    close(run.server.basis, W)
    printed = 10 / 52 * np.linalg.eigvalsh(sum(h @ h.T for h in H))[-1]
    assert float(run.server.constant) > 1.5 * printed
