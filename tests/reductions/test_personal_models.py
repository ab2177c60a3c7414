"""What methods with personal models become at the ends of their settings."""

import dataclasses

import pytest
import torch

from handspan.core.data import Batch
from handspan.methods.fedas import row_traces
from handspan.methods.fedmtl import learned_relation
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.case import compare, numbers
from handspan.testing.quadratics import QuadraticTask, quadratic
from handspan.testing.references import Reference, close
from handspan.testing.toys import ToyTask

FULL = LocalWork(steps=3, batch_size=None, learning_rate=0.2, sgd=Sgd(momentum=0.5))


def outputs(run):
    return {"outputs": numbers(run.state, run.simulation, run.setting.task)["outputs"]}


@pytest.mark.parametrize("text", ["mix=0", "mix=0.7", "adaptive=true", "mix=1"])
def test_the_shared_model_of_apfl_is_that_of_fedavg_bit_for_bit(text):
    apfl, fedavg = Reference(f"apfl:{text}"), Reference("fedavg:weights=uniform")
    compare(dict(apfl.server.params), dict(fedavg.server.params), 0.0, "shared model")


def test_apfl_that_mixes_nothing_in_is_fedavg():
    apfl = Reference("apfl:mix=0")
    compare(outputs(apfl), outputs(Reference("fedavg:weights=uniform")), 0.0, "served")
    compare(dict(apfl.clients.params), dict(apfl.first_clients.params), 0.0, "own models")


def test_apfl_that_mixes_nothing_else_in_is_local():
    apfl, local = Reference("apfl:mix=1", FULL), Reference("local", FULL)
    compare(dict(apfl.clients.params), dict(local.clients.params), 1e-12, "own models")
    compare(outputs(apfl), outputs(local), 1e-12, "served")


def test_one_step_of_apfl_moves_its_own_model_by_the_share_of_the_slope():
    targets = torch.tensor([[1.0, 3.0], [-2.0, 0.5], [4.0, -1.0]], dtype=torch.float64)
    options = {
        "work": LocalWork(steps=1, batch_size=None, learning_rate=0.3),
        "cohort": 3,
        "data": quadratic(targets),
        "task": QuadraticTask(w=torch.tensor([0.2, -0.4], dtype=torch.float64)),
    }
    before, after = (Reference("apfl:mix=0.25", rounds=rounds, **options) for rounds in (2, 3))
    own, shared = before.clients.params["w"], before.server.params["w"]
    mixed = 0.25 * own + 0.75 * shared
    close(after.clients.params["w"], (own - 0.3 * 0.25 * (mixed - targets)).numpy(), 1e-12)
    close(after.server.params["w"], (shared - 0.3 * (shared - targets.mean(0))).numpy(), 1e-12)


def test_l2gd_without_regularization_is_local_while_the_coin_says_so():
    cohort, rounds = 11, 4
    for p, trains in ((1e-12, 4), (0.7, 1)):  # the coins of seed 5: local, pull, ...
        l2gd = Reference(
            f"l2gd:regularization=0:pull_probability={p}", seed=5, cohort=cohort, rounds=rounds
        )
        local = Reference("local", seed=5, cohort=cohort, rounds=trains)
        compare(dict(l2gd.clients.own.params), dict(local.clients.params), 0.0, f"p={p}")


def test_l2gd_stands_still_on_average_at_its_optimum():
    """x_i = (a_i + lambda abar) / (1 + lambda), where a new client ends that starts at abar."""
    targets = torch.tensor([[1.0, 3.0], [-2.0, 0.5], [4.0, -1.0]], dtype=torch.float64)
    mean, strength, p, everyone = targets.mean(0), 0.6, 0.3, torch.arange(3)
    changes = []
    for seed in (3, 5):  # the coin of the first round says pull, and train
        run = Reference(
            f"l2gd:regularization={strength}:pull_probability={p}",
            LocalWork(steps=1, batch_size=None, learning_rate=0.3, adapt_steps=80),
            rounds=1,
            cohort=3,
            seed=seed,
            data=quadratic(targets),
            task=QuadraticTask(w=mean),
        )
        run.simulation.adapt(run.first_server, everyone, 0)
        optimum = run.simulation.store.read(everyone).own.params["w"]
        close(optimum, ((targets + strength * mean) / (1 + strength)).numpy())
        changes.append(run.clients.own.params["w"] - optimum)
        assert float(changes[-1].abs().max()) > 0.1
    pulled, trained = changes
    close(p * pulled + (1 - p) * trained, torch.zeros(3, 2).numpy())


@pytest.mark.parametrize("strength", [2, 1e6])
def test_a_pull_of_l2gd_leaves_the_mean_and_a_full_one_leaves_nothing_else(strength):
    text = f"l2gd:regularization={strength}"
    before, after = (Reference(text, seed=2, rounds=rounds, cohort=11) for rounds in (3, 4))
    for name, new in after.clients.own.params.items():  # round 3 of this seed is a pull
        mean = before.clients.own.params[name].mean(0).numpy()
        close(new.mean(0), mean, 1e-12)
        close(after.server.mean.params[name], mean, 1e-12)
        spread = float((new - new.mean(0)).abs().max())
        assert spread < 1e-12 if strength > 2 else spread > 1e-3


def test_fedala_whose_weights_stay_at_one_is_fedavg():
    ala, avg = Reference("fedala:weight_learning_rate=0", FULL), Reference("fedavg", FULL)
    compare(dict(ala.server.params), dict(avg.server.params), 1e-12, "shared model")
    compare(outputs(ala), outputs(avg), 1e-12, "served")


def test_fedala_whose_weights_stay_at_zero_is_local():
    ala = Reference("fedala:names=all:weight_learning_rate=0", FULL, cohort=11)
    first = ala.algorithm.init_client

    def zeros(key, data):
        client = first(key, data)
        weights = {name: torch.zeros_like(value) for name, value in client.weights.items()}
        return dataclasses.replace(client, weights=weights)

    ala.simulation.algorithm = dataclasses.replace(ala.algorithm, init_client=zeros)
    local = Reference("local", FULL, cohort=11)
    compare(dict(ala.clients.local), dict(local.clients.params), 1e-12, "own models")
    compare(outputs(ala), outputs(local), 1e-12, "served")


def test_fedala_finds_its_target_cut_to_the_box_between_both_models():
    """Where f is a square distance, Theta ends at a_i, or as near as theta_i and theta allow."""
    target, curvature = torch.tensor([[1.0, 3.0, -2.0], [1.0, 0.2, 1.0]], dtype=torch.float64)
    shared = torch.tensor([4.0, 1.0, 2.0], dtype=torch.float64)
    run = Reference(
        "fedala:weight_learning_rate=0.05:start_epochs=400",
        LocalWork(steps=1, batch_size=None, learning_rate=1.5, adapt_steps=1),
        rounds=0,
        cohort=1,
        data=quadratic(target.unsqueeze(0), curvature.unsqueeze(0)),
        task=QuadraticTask(w=shared),
    )
    run.simulation.adapt(run.server, torch.arange(1), 0)
    local = run.clients.local["w"][0]
    close(local, (shared + 1.5 * curvature * (target - shared)).numpy(), 1e-12)
    assert ((local - target) * (shared - target) < 0).tolist() == [True, False, True]
    found = local + (shared - local) * run.clients.weights["w"][0]
    box = torch.minimum(local, shared), torch.maximum(local, shared)
    close(found, target.clamp(*box).numpy(), 1e-8)


def test_fedas_without_alignment_and_with_equal_weights_is_fedper():
    fedas = Reference("fedas:align_epochs=0:trace_power=0", FULL)
    fedper = Reference("fedper:start=common:weights=uniform", FULL)
    compare(dict(fedas.server.shared), dict(fedper.server.shared), 1e-12, "body")
    compare(dict(fedas.clients.own.personal), dict(fedper.clients.personal), 1e-12, "heads")


def test_the_trace_of_a_row_is_that_of_its_own_gradient():
    """|p - e_y|^2 (|z|^2 + 1) of the head, and what comes through tanh of the layer below."""
    task = ToyTask()
    params, _ = task.init(torch.tensor(5))
    x, y = torch.randn(6, 4, dtype=torch.float64, generator=seeded()), torch.arange(6) % 3
    batch = Batch(x=x, y=y, weight=torch.ones(6), key=torch.tensor(0), rows=torch.arange(6))
    z = task.features(params, {}, x, None)
    slope = task.predict(params, {}, x, None).softmax(1) - torch.nn.functional.one_hot(y, 3)
    below = slope @ params["head.weight"] * (1 - z**2)
    head = slope.square().sum(1) * (z.square().sum(1) + 1)
    wanted = head + below.square().sum(1) * (x.square().sum(1) + 1)
    close(row_traces(task, params, {}, batch), wanted.numpy(), 1e-12)


def seeded():
    return torch.Generator().manual_seed(4)


def test_alignment_with_the_body_that_came_changes_nothing():
    """One client: the body that comes back is the one it sent."""
    work, options = LocalWork(steps=3, batch_size=None), {"sizes": (9,), "cohort": 1}
    aligned = Reference("fedas:align_learning_rate=5", work, **options)
    plain = Reference("fedas:align_epochs=0", work, **options)
    compare(dict(aligned.server.shared), dict(plain.server.shared), 1e-12, "body")


ALWAYS = "first_test=0:test_every=1:mean_bound=1e9"
SPLITS = "first_test=3:test_every=1:mean_bound=0.05:client_bound=0.05"


def squares(targets, **options):
    """Clients with f_i(w) = 1/2 |w - a_i|^2, all of them in every round."""
    targets = torch.tensor(targets, dtype=torch.float64)
    work = LocalWork(steps=2, batch_size=None, learning_rate=0.4)
    options = {"work": work, "rounds": 12, "cohort": len(targets), **options}
    task = QuadraticTask(w=torch.zeros(targets.shape[1], dtype=torch.float64))
    return lambda text: Reference(text, data=quadratic(targets), task=task, **options)


@pytest.mark.parametrize("deviation", [0, 0.5, 0.99])
def test_cfl_tells_two_opposite_targets_apart_and_ends_at_both(deviation):
    a, b = [3.0, 1.0], [-1.0, 2.0]
    run = squares([a, b, b, a, b], rounds=25)(f"cfl:{SPLITS}:deviation={deviation}")
    assert run.server.cluster.tolist() == [0, 1, 1, 0, 1]
    assert int(run.server.count) == 2
    close(run.server.models.params["w"][:2], torch.tensor([a, b]).numpy(), 1e-6)


def test_cfl_splits_again_and_its_clusters_hold_the_right_clients():
    corners = [[12.0, 4.0], [9.0, -4.0], [-9.0, 2.0], [-8.0, -2.0]]
    groups = [2, 0, 3, 1, 0, 2, 1, 3, 0, 1, 2, 3]
    run = squares([corners[g] for g in groups], rounds=30)(f"cfl:{SPLITS}")
    found = run.server.cluster.tolist()
    pairs = set(zip(groups, found, strict=True))
    assert len(pairs) == len({g for g, _ in pairs}) == len({c for _, c in pairs}) == 4
    for g, c in pairs:
        close(run.server.models.params["w"][c], torch.tensor(corners[g]).numpy(), 1e-6)


def test_a_new_client_of_cfl_finds_the_cluster_of_its_like():
    a, b = [3.0, 1.0], [-1.0, 2.0]
    run = squares([a, b, b, a, b], rounds=20)(f"cfl:{SPLITS}")
    mine = run.server.cluster.tolist()
    run.simulation.adapt(run.server, torch.arange(5), 30)
    assert run.simulation.store.read(torch.arange(5)).cluster.tolist() == mine


def test_cfl_leaves_equal_clients_together():
    run = squares([[3.0, 1.0]] * 4)("cfl:first_test=0:test_every=1:mean_bound=0.9:client_bound=0.9")
    assert int(run.server.count) == 1


@pytest.mark.parametrize(
    ("text", "cohort"),
    [
        (f"{ALWAYS}:deviation=1:client_bound=0", 11),
        (f"{ALWAYS}:deviation=0:client_bound=1e9", 11),
        (f"{ALWAYS}:deviation=0:client_bound=0:max_clusters=1", 11),
        ("first_test=100", 5),
    ],
)
def test_cfl_that_is_never_split_is_fedavg(text, cohort):
    cfl, fedavg = (Reference(name, cohort=cohort) for name in (f"cfl:{text}", "fedavg"))
    first = {name: value[0] for name, value in cfl.server.models.params.items()}
    compare(first, dict(fedavg.server.params), 1e-12, "never split")
    compare(outputs(cfl), outputs(fedavg), 1e-12, "served")


def test_fedmtl_without_relation_is_local():
    for cohort in (5, 11):
        mtl = Reference("fedmtl:relation_weight=0", FULL, cohort=cohort)
        local = Reference("local", FULL, cohort=cohort)
        compare(dict(mtl.clients.params), dict(local.clients.params), 1e-12, "own models")
        compare(outputs(mtl), outputs(local), 1e-12, "served")


def test_fedmtl_ends_where_its_objective_is_least():
    """f_i(w) = 1/2 |w - a_i|^2: the mean shrinks with l2 alone, the spread with both weights."""
    a = torch.tensor([[1.0, 3.0], [-2.0, 0.5], [4.0, -1.0]], dtype=torch.float64)
    run = squares(a.tolist(), rounds=60)("fedmtl:relation_weight=0.3:shrinkage=0.1")
    mean = a.mean(0) / (1 + 2 * 0.1)
    wanted = mean + (a - a.mean(0)) / (1 + 2 * 0.3 + 2 * 0.1)
    close(run.clients.params["w"], wanted.numpy(), 1e-8)


def test_at_the_learned_relation_the_penalty_is_the_square_of_the_nuclear_norm():
    models = torch.randn(9, 4, dtype=torch.float64, generator=seeded())  # d x n
    inverse = torch.linalg.inv(learned_relation(models.T @ models, 0.0))
    close(inverse.trace(), 1.0)

    def penalty(relation):
        return float((models @ relation @ models.T).trace())

    least = penalty(torch.linalg.inv(inverse))
    assert least == pytest.approx(float(torch.linalg.svdvals(models).sum()) ** 2, rel=1e-10)
    uneven = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)
    for other in (torch.eye(4, dtype=torch.float64) / 4, torch.diag(uneven)):
        for share in (0.01, 1.0):  # any other one of trace 1 costs more
            assert penalty(torch.linalg.inv((1 - share) * inverse + share * other)) > least
