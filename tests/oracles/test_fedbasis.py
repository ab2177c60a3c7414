import dataclasses

import pytest
import torch

from handspan.core import keys
from handspan.core.errors import HandspanError
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.fedavg import fedavg_groups
from handspan.testing.oracles.fedbasis import fedbasis
from handspan.testing.references import Reference, arrays, close

NESTEROV = Sgd(momentum=0.5, nesterov=True)
SOFT = {"share_learning_rate": 0.7, "temperature": 0.5}
CASES = {
    "the default": ("", {}, None),
    "softer shares with momentum": (
        ":share_learning_rate=0.7:temperature=0.5",
        SOFT,
        LocalWork(steps=6, batch_size=3, sgd=Sgd(momentum=0.5)),
    ),
    "means weighted by clients": (
        ":mean=clients:temperature=1",
        {"mean": "clients", "temperature": 1},
        LocalWork(epochs=1, batch_size=4, sgd=NESTEROV),
    ),
    "equal shares at the start of each round": (":start=uniform", {"start": "uniform"}, None),
    "single uploads": (":upload=rank_one:weights=uniform", {"weights": "uniform"}, None),
    "epochs of their own": (":personal_epochs=2:shared_epochs=1", {}, None),
}


def unstacked(bases):
    count = len(next(iter(bases.values())))
    return [arrays({name: value[k] for name, value in bases.items()}) for k in range(count)]


@pytest.mark.parametrize("case", CASES)
def test_fedbasis_equals_the_literal_computation_with_whole_local_bases(case):
    text, options, work = CASES[case]
    run = Reference(f"fedbasis:num_bases=3{text}", work)
    starts = unstacked(run.first_server.bases)
    wanted, psi = fedbasis(*run.rows, models.gradient, starts, **run.work, **options)
    for got, basis in zip(unstacked(run.server.bases), wanted, strict=True):
        close(got, basis)
    close(run.clients.psi, psi)
    assert psi.std() > 1e-3


def test_the_bases_start_around_the_start_of_fedavg():
    near = Reference("fedbasis:num_bases=3:spread=0.1").first_server.bases
    run = Reference("fedbasis:num_bases=3:spread=1")
    far, start = run.first_server.bases, run.start
    fresh = run.setting.model.init(keys.fold(run.key, "basis", 2))[0]
    for name in start:
        close(near[name][0], start[name], 0)
        close(far[name][2], fresh[name].numpy(), 1e-14)
        close(near[name][2], 0.9 * start[name] + 0.1 * fresh[name].numpy(), 1e-14)


def test_one_basis_is_fedavg():
    work = LocalWork(steps=4, batch_size=None, learning_rate=0.2, sgd=Sgd(momentum=0.5))
    one = Reference("fedbasis:num_bases=1:shared_steps=4", work).server.bases
    avg = Reference("fedavg", work).server.params
    close({k: v[0] for k, v in one.items()}, arrays(avg), 1e-13)


def starting_at(run, first_client=None, **server):
    """Replace the first records of a run that has not begun."""
    init_server, init_client = run.algorithm.init_server, run.algorithm.init_client
    changed = dataclasses.replace(
        run.algorithm,
        init_server=lambda key, n: dataclasses.replace(init_server(key, n), **server),
        init_client=first_client or init_client,
    )
    run.algorithm = run.simulation.algorithm = changed
    return run


def test_free_shares_are_pflmf_of_rank_k():
    work = LocalWork(steps=6, batch_size=3, learning_rate=0.1, sgd=Sgd(momentum=0.5))
    ours = Reference(
        "fedbasis:num_bases=3:shares=free:mean=clients:weights=uniform:share_learning_rate=0.1",
        work,
    )
    theirs = Reference("pflmf:rank=3:v_for_basis=new", work)
    same, algorithm = ours.first_server.bases, theirs.algorithm

    def thirds(key, data):
        first = algorithm.init_client(key, data)
        full = torch.full_like(first.coordinates, 1 / 3)
        return dataclasses.replace(first, coordinates=full)

    theirs = starting_at(theirs, thirds, basis=same)
    close(ours.server.bases, arrays(theirs.server.basis))
    close(ours.clients.psi, theirs.clients.coordinates.numpy())


def test_wholly_sharp_shares_are_fedavg_inside_groups():
    text = "fedbasis:num_bases=3:spread=0:share_learning_rate=0:temperature=1e-6"
    run = Reference(text)
    groups, record = [i % 3 for i in range(11)], type(run.first_clients)

    def one_hot(key, data):
        return record(psi=(data.group.unsqueeze(1) == torch.arange(3)).double())

    clients, cohorts, batches = run.rows

    def basis_steps(round, phase, stage, client):
        return batches(round, phase, 1, client)

    wanted = fedavg_groups(
        clients, cohorts, basis_steps, models.gradient, run.start, groups, **run.work
    )
    run = starting_at(run, one_hot)
    for k, got in enumerate(unstacked(run.server.bases)):
        close(got, wanted[k])


def test_a_new_client_learns_its_shares_and_nothing_else():
    work = LocalWork(batch_size=None, learning_rate=0.2, adapt_steps=3)
    run = Reference("fedbasis:num_bases=2", work, rounds=0)
    first, i = unstacked(run.server.bases), int(run.data.num_train.argmax())
    run.simulation.adapt(run.server, torch.tensor([i]), 4)
    x, y = run.rows[0][i]
    # Steps on psi alone are the first stage of a round.
    _, psi = fedbasis(
        [(x, y)], [[0]], lambda *at: [range(len(y))] * 3, models.gradient, first, learning_rate=0.2
    )
    close(run.clients.psi[i], psi[0])


@pytest.mark.parametrize(
    "setting",
    [
        "num_bases=0",
        "shares=free:mean=clients:temperature=1",
        "temperature=0",
        "shares=free",
        "start=last",
        "spread=-1",
    ],
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(HandspanError):
        parse(f"fedbasis:{setting}")


def test_more_bases_than_clients_are_refused():
    with pytest.raises(HandspanError, match="exceeds the 11 clients"):
        Reference("fedbasis:num_bases=12")


def test_weight_decay_is_refused():
    with pytest.raises(HandspanError, match="weight_decay"):
        Reference("fedbasis", LocalWork(sgd=Sgd(weight_decay=0.1)))
