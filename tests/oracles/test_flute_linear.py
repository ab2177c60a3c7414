import dataclasses

import numpy as np
import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import flute_linear as oracle
from handspan.testing.references import Reference, close
from handspan.testing.toys import LinearTask, numbers

ALL = LocalWork(batch_size=None, learning_rate=0.2)
MEAN = {"server_learning_rate": 0.1, "divisor": 11}
CASES = (
    ("", {}, ALL),
    (
        ":server_learning_rate=0.03:scale=0.5",
        {"server_learning_rate": 0.03},
        LocalWork(batch_size=3, learning_rate=0.1),
    ),
    (":scale=0.3", {}, LocalWork(steps=3, batch_size=3, learning_rate=0.03)),
    (":balance=mean:scale=0.5:server_learning_rate=0.1", MEAN, ALL),
    (":server_learning_rate=0:scale=0.5", {"server_learning_rate": 0.0}, ALL),
)


@pytest.mark.parametrize(("text", "options", "work"), CASES)
def test_flute_linear_equals_the_form_in_which_the_server_holds_all_heads(text, options, work):
    run = Reference(f"flute_linear:rank=2{text}", work, rounds=5)
    first = run.first_clients.head[..., 0].numpy().T
    basis, heads = oracle.flute_linear(
        *run.rows,
        run.first_server.basis.numpy(),
        first,
        learning_rate=work.learning_rate,
        **options,
    )
    close(run.server.basis, basis)
    close(run.clients.head[..., 0].T, heads)
    close(run.server.products, heads @ heads.T)


def test_the_balancing_step_is_the_gradient_of_the_regulariser():
    rng = np.random.default_rng(0)
    basis, heads, step = rng.normal(size=(5, 2)), rng.normal(size=(2, 4)), 1e-6
    difference = basis.T @ basis - heads @ heads.T
    for slope, move in (
        (2 * basis @ difference, lambda e: oracle.balance(basis + e, heads)),
        (-2 * difference @ heads, lambda e: oracle.balance(basis, heads + e)),
    ):
        unit = np.zeros_like(slope)
        unit[1, 1] = step
        numeric = (move(unit) - move(-unit)) / (2 * step)
        assert slope[1, 1] == pytest.approx(numeric, rel=1e-6)


def isotropic(models):
    """Rows with X_i^T X_i / m_i = I, labelled by the columns of ``models`` (d, n)."""
    num_features, n = models.shape
    sizes = (2 * num_features,) * n
    data = numbers(sizes=sizes, num_features=num_features)
    x, y = data.x.clone(), data.y.clone()
    for i, start in enumerate(data.offsets[:-1].tolist()):
        rows = slice(start, start + sizes[0])
        x[rows] = torch.linalg.qr(x[rows]).Q * sizes[0] ** 0.5
        y[rows] = x[rows] @ models[:, i]
    return dataclasses.replace(data, x=x, y=y)


def test_it_ends_at_the_best_low_rank_models_with_balanced_factors():
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(size, 3)))[0] for size in (4, 6))
    models = left * [4.0, 3.0, 0.5] @ right.T  # more dimensions than the basis has
    data = isotropic(torch.tensor(models))
    run = Reference(
        "flute_linear:rank=2:scale=0.3:server_learning_rate=0.02",
        LocalWork(batch_size=None, learning_rate=0.3),
        rounds=120,
        cohort=6,
        data=data,
        task=LinearTask(num_features=4),
        engine="stacked",
    )
    heads = run.clients.head[..., 0].T
    best = left[:, :2] * [4.0, 3.0] @ right[:, :2].T
    close(run.server.basis @ heads, best, 1e-8)
    close(run.server.basis.T @ run.server.basis, (heads @ heads.T).numpy(), 1e-8)
    assert run.algorithm.describe(run.server)["imbalance"] < 1e-8


def test_a_new_client_solves_for_its_head():
    run = Reference("flute_linear:rank=2", ALL)
    i = int(run.data.num_train.argmax())
    x, y = run.rows[0][i]
    run.simulation.adapt(run.server, torch.tensor([i]), 4)
    wanted = np.linalg.lstsq(x @ run.server.basis.numpy(), y, rcond=None)[0]
    close(run.clients.head[i, :, 0], wanted)


def test_what_does_not_fit_is_refused_in_one_sentence():
    with pytest.raises(HandspanError, match="lower it"):
        Reference("flute_linear:rank=5")
    with pytest.raises(HandspanError, match="no momentum"):
        Reference("flute_linear", LocalWork(sgd=Sgd(momentum=0.5)))
    for setting in ("scale=0", "rank=0", "server_learning_rate=-1", "balance=all"):
        with pytest.raises(HandspanError):
            parse(f"flute_linear:{setting}")
