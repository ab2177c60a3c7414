import numpy as np
import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.lrs import lrs
from handspan.testing.references import Reference, arrays, close

RATES = "sparse_learning_rate=0.5:coordinate_learning_rate=0.05:damping=0.1:gram_ridge=0.1"
CASES = {
    "the default": (":sparsity=0.2", {}, None),
    "momentum": (":sparsity=0.1", {}, LocalWork(steps=9, batch_size=3, sgd=Sgd(momentum=0.5))),
    "rates and ridges of its own": (
        f":sparsity=0.1:{RATES}:weights=examples",
        {
            "sparse_learning_rate": 0.5,
            "coordinate_learning_rate": 0.05,
            "damping": 0.1,
            "gram_ridge": 0.1,
            "weights": "examples",
        },
        LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True)),
    ),
    "only the head": (
        ":factor=head:sparsity=0.3:sparse_steps=2:personal_steps=4:shared_steps=3",
        {},
        LocalWork(batch_size=None, learning_rate=0.2),
    ),
    "no sparse part": (":sparsity=0", {}, None),
}


def flat(params):
    return torch.cat([value.flatten(1) for _, value in sorted(params.items())], dim=1)


@pytest.mark.parametrize("case", CASES)
def test_lrs_equals_the_literal_computation_with_one_vector_for_each_model(case):
    text, options, work = CASES[case]
    run = Reference(f"lrs:rank=3{text}", work)
    first, config = run.first_server, run.spec.config
    columns = [arrays({n: v[j] for n, v in first.basis.items()}) for j in range(3)]
    size = sum(value.size for value in columns[0].values())
    basis, body, coordinates, sparse = lrs(
        *run.rows,
        models.gradient,
        columns,
        arrays(first.body),
        run.first_clients.coordinates.numpy(),
        keep=round(config.sparsity * size),
        **run.work,
        **options,
    )
    close(flat(run.server.basis), basis.T)
    close(run.server.body, body)
    close(run.clients.coordinates, coordinates)
    close(flat(run.clients.sparse), sparse)
    counts = (flat(run.clients.sparse) != 0).sum(1)
    assert set(counts.tolist()) <= {0, round(config.sparsity * size)}


def test_without_a_sparse_part_it_is_pflmf_with_scaled_steps():
    work = LocalWork(batch_size=3, learning_rate=0.2, sgd=Sgd(momentum=0.5))
    ours = Reference("lrs:rank=3:sparsity=0:personal_steps=4:shared_steps=2", work)
    text = "pflmf:rank=3:scaled=true:v_for_basis=new:personal_steps=4:shared_steps=2"
    theirs = Reference(text, work)
    close(ours.server.basis, arrays(theirs.server.basis))
    close(ours.clients.coordinates, theirs.clients.coordinates.numpy())


def test_steps_go_in_thirds():
    stages = Reference("lrs", LocalWork(steps=15)).algorithm.rounds[0].stages
    assert [stage.steps for stage in stages] == [5, 5, 5]
    stages = Reference("lrs:sparsity=0", LocalWork(steps=15)).algorithm.rounds[0].stages
    assert [stage.steps for stage in stages] == [10, 5]
    stages = Reference("lrs", LocalWork(epochs=2)).algorithm.rounds[0].stages
    assert [(stage.steps, stage.epochs) for stage in stages] == [(None, 2)] * 3


def test_a_new_client_fits_its_coordinates_and_then_its_sparse_part():
    work = LocalWork(batch_size=None, learning_rate=0.2, adapt_steps=3)
    run = Reference("lrs:rank=2:sparsity=0.1", work, rounds=0)
    i, first = int(run.data.num_train.argmax()), run.first_server.basis
    run.simulation.adapt(run.server, torch.tensor([i]), 4)
    (x, y), u = run.rows[0][i], flat(first).numpy()
    w, names = run.first_clients.coordinates[i].numpy().copy(), sorted(first)
    b = np.zeros(u.shape[1])

    def slope(theta):
        pieces = np.split(theta, np.cumsum([first[n][0].numel() for n in names])[:-1])
        params = {n: p.reshape(first[n][0].shape) for n, p in zip(names, pieces, strict=True)}
        result = models.gradient(params, x, y)
        return np.concatenate([result[n].ravel() for n in names])

    for _ in range(3):
        w = w - 0.2 * np.linalg.inv(u @ u.T + 1e-8 * np.eye(2)) @ (u @ slope(w @ u + b))
    for _ in range(3):
        c = b - 0.2 * slope(w @ u + b)
        b = np.where(np.abs(c) >= np.sort(np.abs(c))[-3], c, 0.0)  # a tenth of 27 entries
    close(run.clients.coordinates[i], w)
    close(flat(run.clients.sparse)[i], b)


def test_what_does_not_fit_is_refused_in_one_sentence():
    with pytest.raises(HandspanError, match="exceeds the 11 clients"):
        Reference("lrs:rank=12")
    with pytest.raises(HandspanError, match="no weight_decay"):
        Reference("lrs", LocalWork(sgd=Sgd(weight_decay=0.1)))
    with pytest.raises(HandspanError, match="matches no parameter"):
        Reference("lrs:factor=none.*")
    for setting in ("sparsity=1.5", "rank=0", "damping=-1", "weights=all", "sparse_steps=0"):
        with pytest.raises(HandspanError):
            parse(f"lrs:{setting}")
