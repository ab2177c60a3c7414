"""What the paper of PerFedSI proves: biases (appendix B), and matrix completion (section 3)."""

from functools import partial

import numpy as np
import torch
from torch import nn

from handspan.core.data import FederatedData
from handspan.models.convert import task_from_module
from handspan.models.side_info import join_side
from handspan.numerics.local_work import LocalWork
from handspan.testing.references import Reference, close

F64 = torch.float64


def federation(rows, targets, side):
    """Clients with (m, rows, d) inputs and (m, rows) targets; they are tested on the same rows."""
    m, count, _ = rows.shape
    num = torch.full((m,), count)
    return FederatedData(
        x=torch.from_numpy(np.concatenate([rows, rows], 1).reshape(2 * m * count, -1)),
        y=torch.from_numpy(np.concatenate([targets, targets], 1).reshape(-1)),
        offsets=2 * count * torch.arange(m + 1),
        num_train=num,
        num_validation=0 * num,
        num_test=num,
        side=torch.from_numpy(side),
    )


def excess(run):
    """Half the mean squared error of each client's model."""
    error = run.served[:, 0] - run.data.y[test_rows(run.data)]
    return 0.5 * error.square().reshape(run.data.num_clients, -1).mean(1)


def test_rows(data):
    position = torch.arange(data.num_rows)
    count = int(data.num_test[0])
    return position[position % (2 * count) >= count]


test_rows.__test__ = False


# -- appendix B: y = <theta*, x> + b_m, b_m = <theta_2, z_m> -----------------------------------

RNG = np.random.default_rng(0)
THETA, OWN = RNG.normal(size=3), RNG.normal(size=2)
Z = RNG.normal(size=(12, 2))
HALF = np.sqrt(3) * np.eye(3)
ROWS = np.broadcast_to(np.concatenate([HALF, -HALF]), (12, 6, 3))  # mean 0, covariance 1
BIASES = Z @ OWN
TOY = federation(ROWS, ROWS @ THETA + BIASES[:, None], Z)
DESCENT = LocalWork(steps=1, batch_size=None, learning_rate=0.2)


def toy(text, factory, rounds=250):
    task = task_from_module(
        factory, kind="regression", needs_side=text.startswith("perfedsi"), dtype=F64
    )
    return Reference(text, DESCENT, rounds=rounds, cohort=12, data=TOY, task=task, engine="stacked")


def test_without_side_information_each_client_pays_for_its_distance_from_the_mean_bias():
    run = toy("fedavg:weights=uniform", lambda: nn.Linear(3, 1))
    close(run.server.params["weight"][0], THETA, 1e-8)
    close(excess(run), 0.5 * (BIASES - BIASES.mean()) ** 2, 1e-7)


def test_with_side_information_nobody_pays_not_even_new_clients():
    base = partial(nn.Linear, 3, 1)
    run = toy("perfedsi", join_side(base, 2, side_encoder="none"))
    close(run.server.params["base.head.joined.weight"][0], np.concatenate([THETA, OWN]), 1e-7)
    assert float(excess(run).max()) < 1e-14
    x, z = torch.ones(1, 3, dtype=F64), torch.tensor([3.0, -5.0], dtype=F64)
    told = run.setting.task.predict(run.server.params, {}, x, z)
    close(told[0, 0], THETA.sum() + OWN @ z.numpy(), 1e-6)


# -- section 3: client m predicts e_i^T U V^T z_m -----------------------------------------------


class Completion(nn.Module):
    """G(e_i) = U^T e_i, and H is the sum; masked in between by V^T z."""

    def __init__(self, items, rank):
        super().__init__()
        self.u = nn.Linear(items, rank, bias=False)
        self.total = Total()

    def forward(self, x):
        return self.total(self.u(x))


class Total(nn.Module):
    def forward(self, x):
        return x.sum(-1, keepdim=True)


def completion(items, rank, width):
    """The model of (5), as Model 2 on a base network that anybody could have written."""
    return join_side(
        partial(Completion, items, rank),
        width,
        form="mask",
        join="total",
        side_encoder=partial(nn.Linear, width, rank, bias=False),
        rows=torch.eye(items),
    )


def ratings(items=10, clients=12, width=3, rank=2, seen=None, seed=0, informed=True):
    """Planted ratings L* = M* Z^T; each client has seen some of them, and is tested on all."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(n, rank)))[0] for n in (items, width))
    z = rng.normal(size=(clients, width))
    z *= np.sqrt(width) / np.linalg.norm(z, axis=1, keepdims=True)
    every = np.eye(items)
    chosen = [rng.permutation(items)[: seen or items] for _ in range(clients)]
    rows = np.stack([every[picks] for picks in chosen])
    wanted = rows @ u @ v.T
    targets = np.einsum("mrk,mk->mr", wanted, z)
    data = federation(rows, targets, z if informed else np.eye(clients))
    truth = torch.from_numpy(u @ v.T @ z.T)
    return data, truth


def completed(work, rounds, *, items=10, rank=2, cohort=12, **planted):
    data, truth = ratings(items=items, rank=rank, **planted)
    task = task_from_module(
        completion(items, rank, data.side.shape[1]), kind="regression", needs_side=True, dtype=F64
    )
    run = Reference(
        "perfedsi",
        work,
        rounds=rounds,
        cohort=cohort,
        data=data,
        task=task,
        engine="stacked",
        seed=1,
    )
    return run, truth


def distance(run, truth):
    """Relative squared distance of U V^T Z^T from L*."""
    u, v = run.server.params["base.u.weight"].T, run.server.params["encoder.weight"].T
    return float((u @ v.T @ run.data.side.T - truth).square().sum() / truth.square().sum())


def test_a_local_step_is_the_papers_simultaneous_update():
    """Equations (11) and (12), with the entry that the client has."""
    work = LocalWork(steps=1, batch_size=None, learning_rate=0.3)
    run, _ = completed(work, 1, clients=1, seen=1, cohort=1)
    u, v = run.start["base.u.weight"].T, run.start["encoder.weight"].T
    z, e, y = run.data.side[0].numpy(), run.data.x[0].numpy(), float(run.data.y[0])
    error = e @ u @ v.T @ z - y
    close(run.server.params["base.u.weight"].T, u - 0.3 * error * np.outer(e, z @ v))
    close(run.server.params["encoder.weight"].T, v - 0.3 * error * np.outer(z, e @ u))


LOCAL = LocalWork(steps=5, batch_size=None, learning_rate=0.5)


def test_the_error_falls_linearly_in_the_number_of_rounds():
    """Theorem 3.3: a line on the logarithmic scale; its constant is not tested (15, 56, 62)."""
    rounds = np.array([40, 90, 140])
    logs = [np.log10(distance(*completed(LOCAL, int(count)))) for count in rounds]
    slope, start = np.polyfit(rounds, logs, 1)
    assert logs[-1] < -8 and slope < -0.02
    assert np.abs(logs - (slope * rounds + start)).max() < 0.5


def test_side_information_finds_ratings_that_nobody_has_seen_far_sooner():
    """Figure 3: seven of ten entries are seen; without z the client's id takes its place."""
    given, ids = (distance(*completed(LOCAL, 100, seen=7, informed=yes)) for yes in (True, False))
    assert given < 1e-4 and given < 0.01 * ids


def test_weaker_side_information_takes_longer():
    """The sweep over k, at one step size: the more numbers z has, the more rounds."""
    left = [distance(*completed(LOCAL, 60, width=width)) for width in (2, 6)]
    assert left[0] < 0.1 * left[1]


def test_what_is_planted_is_what_is_seen():
    data, truth = ratings(seen=4)
    picks = data.x.reshape(12, 8, 10).argmax(2)
    wanted = torch.stack([truth[picks[m], m] for m in range(12)])
    close(data.y.reshape(12, 8), wanted.numpy())
