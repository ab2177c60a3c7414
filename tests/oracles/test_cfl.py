import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.numerics.clusters import bipartition
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import cfl as oracle
from handspan.testing.oracles import models
from handspan.testing.playing import step_rows
from handspan.testing.references import Reference, arrays, close

ALWAYS = "mean_bound=10:client_bound=0:deviation=0:first_test=1:test_every=2"


def wanted(run):
    config = run.spec.config
    clients, cohorts, batches = run.rows
    late = range(config.first_test, run.rounds, config.test_every)
    return oracle.cfl(
        clients,
        cohorts,
        batches,
        models.gradient,
        run.start,
        tests=list(late),
        mean_bound=config.mean_bound,
        client_bound=config.client_bound,
        deviation=config.deviation,
        relative=config.relative,
        max_clusters=config.max_clusters,
        weights=config.weights,
        **run.work,
    )


CASES = (  # settings, clients drawn, clusters at the end, local work
    (ALWAYS, 5, 4, None),
    (ALWAYS, 11, 4, None),
    (f"{ALWAYS}:max_clusters=3:weights=uniform", 5, 3, LocalWork(steps=2, batch_size=None)),
    (
        "mean_bound=0.9:client_bound=1.2:deviation=0.4:first_test=2:test_every=1",
        11,
        5,
        LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.5)),
    ),
    (
        "mean_bound=0.8:client_bound=0.5:relative=false:deviation=0.4:first_test=0:test_every=2",
        5,
        2,
        LocalWork(epochs=1, batch_size=4, sgd=Sgd(weight_decay=0.1)),
    ),
    (
        "mean_bound=0.34:client_bound=0.5:relative=false:first_test=0:test_every=1",
        11,
        6,
        LocalWork(steps=2, batch_size=None, learning_rate=0.5),
    ),
    ("first_test=2", 11, 1, None),
)


@pytest.mark.parametrize(("text", "cohort", "count", "work"), CASES)
def test_cfl_is_algorithm_3_of_its_paper(text, cohort, count, work):
    run = Reference(f"cfl:{text}", work, rounds=7, cohort=cohort)
    found, cluster, splits = wanted(run)
    assert run.server.cluster.tolist() == cluster
    assert int(run.server.count) == len(found) == count
    for c, model in enumerate(found):
        close({name: value[c] for name, value in run.server.models.params.items()}, model)
    assert run.clients.cluster.tolist() == cluster  # everybody was told
    for number, (parent, anchor, _, _) in enumerate(splits, start=1):
        assert int(run.server.parent[number]) == parent
        kept = {name: value[number] for name, value in run.server.anchors.params.items()}
        close(kept, anchor)


def test_a_new_client_goes_down_the_tree_by_its_own_updates():
    work = LocalWork(steps=3, batch_size=3, learning_rate=0.2)
    run = Reference(f"cfl:{ALWAYS}:max_clusters=6", work, rounds=7, cohort=11)
    _, cluster, splits = wanted(run)
    everyone = torch.arange(11)
    run.simulation.adapt(run.server, everyone, 9)
    ended = run.simulation.store.read(everyone).cluster.tolist()
    for i in range(11):
        rows, _ = step_rows(run.data, run.algorithm.adapt, 0, i, round=9, seed=run.seed)
        x, y = run.rows[0][i]

        def update(theta, x=x, y=y, rows=rows):
            model = dict(theta)
            for part in rows:
                slope = models.gradient(model, x[part.numpy()], y[part.numpy()])
                model = {name: value - 0.2 * slope[name] for name, value in model.items()}
            return oracle.flat({name: model[name] - theta[name] for name in model})

        assert ended[i] == oracle.descend(splits, update)
    assert len(set(ended)) > 3
    assert sum(a == b for a, b in zip(ended, cluster, strict=True)) >= 6


@pytest.mark.parametrize("seed", range(8))
def test_single_linkage_finds_the_best_bipartition(seed):
    vectors = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    leaves, cross = bipartition((unit @ unit.T * 1e9).round() / 1e9)
    stay, leave, best = oracle.bipartition(list(vectors.numpy()))
    assert leaves.nonzero().flatten().tolist() == leave
    assert (~leaves).nonzero().flatten().tolist() == stay
    assert float(cross) == pytest.approx(best, abs=1e-9)


def test_a_client_is_served_the_model_of_its_cluster():
    run = Reference(f"cfl:{ALWAYS}", rounds=4)
    kept = [arrays({k: v[c] for k, v in run.server.models.params.items()}) for c in range(3)]
    assert int(run.server.count) == 3
    for ids, b, mine in run.simulation.serve(run.server, torch.arange(11), 4):
        for j, i in enumerate(ids.tolist()):
            client = type(mine)(cluster=mine.cluster[j])
            close(run.algorithm.model(b, client).params, kept[int(run.server.cluster[i])])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("max_clusters=0", "max_clusters must be at least 1"),
        ("deviation=1.5", "deviation must lie in"),
        ("mean_bound=-1", "mean_bound must be at least 0"),
        ("test_every=0", "test_every must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong, told):
    with pytest.raises(HandspanError, match=told):
        parse(f"cfl:{wrong}")
