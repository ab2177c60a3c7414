import numpy as np
import pytest

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.pflmf import pflmf
from handspan.testing.references import Reference, arrays, close

MOMENTUM = LocalWork(steps=None, batch_size=3, learning_rate=0.2, sgd=Sgd(momentum=0.5))
NESTEROV = LocalWork(batch_size=None, learning_rate=0.2, sgd=Sgd(momentum=0.5, nesterov=True))
PLAIN = LocalWork(batch_size=3, learning_rate=0.2)
SCALED = {"scaled": True, "gram_ridge": 1e-8, "damping": 1e-3}
SMALL = {"v_learning_rate": 0.05, "u_learning_rate": 0.3}
CASES = {
    "the default": ("", {}, PLAIN),
    "one basis step is Algorithm 1": (":shared_steps=1", {}, PLAIN),
    "ten basis steps": (":shared_steps=10", {}, PLAIN),
    "ten basis steps with momentum": (":shared_steps=10", {}, MOMENTUM),
    "one basis step with momentum": (":shared_steps=1", {}, MOMENTUM),
    "nesterov on full batches": (":shared_steps=4:personal_steps=3", {}, NESTEROV),
    "the printed text": (":preset=algorithm1", {"v_gradient": "printed"}, PLAIN),
    "the new v": (":v_for_basis=new:shared_steps=3", {"v_for_basis": "new"}, PLAIN),
    "own step sizes": (":v_learning_rate=0.05:u_learning_rate=0.3:shared_steps=2", SMALL, PLAIN),
    "weights by examples": (":weights=examples:shared_steps=2", {"weights": "examples"}, PLAIN),
    "single uploads": (":upload=rank_one:shared_steps=2", {}, PLAIN),
    "an offset": (":affine=true:shared_steps=3", {"affine": True}, MOMENTUM),
    "an offset with the new v": (
        ":affine=true:v_for_basis=new:shared_steps=2",
        {"affine": True, "v_for_basis": "new"},
        PLAIN,
    ),
    "scaled steps": (":scaled=true:shared_steps=3", SCALED, PLAIN),
    "scaled steps with momentum": (
        ":scaled=true:shared_steps=3:damping=0.1:gram_ridge=0.1",
        {"scaled": True, "gram_ridge": 0.1, "damping": 0.1},
        MOMENTUM,
    ),
    "scaled steps with an offset": (
        ":scaled=true:affine=true:shared_steps=2:v_for_basis=new",
        {**SCALED, "affine": True, "v_for_basis": "new"},
        PLAIN,
    ),
    "only the head": (":factor=head:shared_steps=3", {}, MOMENTUM),
    "only a pattern of names": (":factor=hidden.*:shared_steps=2", {}, PLAIN),
    "only the head, scaled": (":factor=head:scaled=true:shared_steps=2", SCALED, PLAIN),
    "a drawn cohort, divided by its size": (
        ":participation=bernoulli:shared_steps=2",
        {},
        PLAIN,
    ),
    "a drawn cohort, divided by its expected size": (
        ":participation=bernoulli:bernoulli_mean=expected:shared_steps=2:factor=head",
        {"weights": "bernoulli", "participation": 5 / 11},
        PLAIN,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_pflmf_equals_the_literal_computation_with_whole_d_by_r_matrices(case):
    text, options, work = CASES[case]
    rank = 1 if case == "own step sizes" else 3
    run = Reference(f"pflmf:rank={rank}{text}", work)
    first = run.first_server
    rates = {"v_learning_rate": 0.2, "u_learning_rate": 0.2}
    basis, body, coordinates = pflmf(
        *run.rows,
        models.gradient,
        arrays(first.basis),
        run.first_clients.coordinates.numpy(),
        arrays(first.body),
        momentum=work.sgd.momentum,
        nesterov=work.sgd.nesterov,
        **{**rates, **options},
    )
    close(run.server.basis, basis)
    close(run.server.body, body)
    close(run.clients.coordinates, coordinates)


def test_the_first_models_have_the_scale_of_a_model():
    run = Reference("pflmf:rank=10", rounds=0)
    v = run.first_clients.coordinates
    assert 0.3 < float((v * v).sum(1).mean()) < 3
    columns = run.first_server.basis["hidden.weight"]
    assert len({round(float(c.sum()), 9) for c in columns}) == 10


def test_a_new_client_moves_its_coordinates_and_nothing_else():
    work = LocalWork(batch_size=None, learning_rate=0.2, adapt_steps=3)
    run = Reference("pflmf:rank=2", work, rounds=0)
    assert run.state.round == 0
    first = arrays(run.first_server.basis)
    run.simulation.adapt(run.server, run.data.num_train.argmax().reshape(1), 4)
    i = int(run.data.num_train.argmax())
    x, y = run.rows[0][i]
    v = run.first_clients.coordinates[i].numpy().copy()
    for _ in range(3):
        theta = {k: v[0] * u[0] + v[1] * u[1] for k, u in first.items()}
        slope = models.gradient(theta, x, y)
        along = [sum((slope[name] * first[name][j]).sum() for name in first) for j in range(2)]
        v = v - 0.2 * np.array(along)
    close(run.clients.coordinates[i], v)


@pytest.mark.parametrize("affine", ["false", "true"])
def test_the_summary_tells_the_singular_values_of_u_v(affine):
    # With all clients in the cohort and the new v in the basis step the server has seen all of V.
    run = Reference(f"pflmf:rank=3:scaled=true:v_for_basis=new:affine={affine}", cohort=11)
    told = run.algorithm.describe(run.server)
    v = run.clients.coordinates.numpy()
    v = np.column_stack([np.ones(len(v)), v]) if affine == "true" else v
    columns = np.column_stack([u.reshape(len(u), -1) for u in arrays(run.server.basis).values()])
    singular = np.linalg.svd(v @ columns, compute_uv=False)[: v.shape[1]] / len(v) ** 0.5
    assert told.pop("rank") == v.shape[1], "the offset is a direction"
    assert list(told) == [f"spectrum_{k}" for k in range(1, v.shape[1] + 1)]
    # Squares of singular values are found to 1e-16 of the largest, so roots of them to 1e-8.
    np.testing.assert_allclose(list(told.values()), singular, rtol=1e-6, atol=1e-8 * singular[0])


def test_a_run_that_diverged_has_no_spectrum_and_does_not_fail():
    run = Reference("pflmf:rank=2:scaled=true:v_learning_rate=1e300", rounds=3)
    told = run.algorithm.describe(run.server)
    assert np.isnan([told["spectrum_1"], told["spectrum_2"]]).all()


def test_without_scaled_steps_the_server_sees_no_moments_and_tells_no_spectrum():
    run = Reference("pflmf:rank=2", rounds=1)
    assert run.algorithm.describe(run.server) == {"rank": 2.0}
