"""At special settings a method becomes another one, to the last digits."""

import dataclasses

import numpy as np
import pytest
import torch

from handspan.core.federation import run
from handspan.evaluation.clustering import clustering_accuracy
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import methods, parse
from handspan.simulation.federation import Simulation
from handspan.testing.case import Case, compare, numbers
from handspan.testing.oracles import models
from handspan.testing.playing import Unrecorded
from handspan.testing.toys import ToyTask, blocks, labelled, problem

WORK = LocalWork(steps=4, batch_size=3, learning_rate=0.2, sgd=Sgd(momentum=0.5))


def trained(text, *, work=WORK, rounds=4, cohort=5, data=None, task=None, algorithm=None, **more):
    spec = parse(text)
    made = problem(spec.method, work=work, cohort=cohort, rounds=rounds, **more)
    setting = made.setting if task is None else dataclasses.replace(made.setting, task=task)
    data = made.data if data is None else data
    setting = dataclasses.replace(setting, num_clients=data.num_clients, row_shape=data.row_shape)
    algorithm = spec.build(setting) if algorithm is None else algorithm(spec, setting)
    simulation = Simulation(algorithm, data, seed=2)
    simulation.executor.recorder = Unrecorded()
    state = run(algorithm, simulation, rounds=rounds, cohort=cohort, seed=2)
    return state, simulation, setting


def served(result):
    state, simulation, setting = result
    return {"outputs": numbers(state, simulation, setting.task)["outputs"]}


def params(server):
    return dict(server.params)


def test_a_server_step_of_one_is_the_plain_mean():
    plain = params(trained("fedavg")[0].server)
    tiny = trained("fedavg:server_momentum=1e-300")[0].server
    compare(params(tiny), plain, 1e-12, "server sgd")


def test_fedavg_with_one_full_step_is_a_gradient_step_on_the_mean_loss():
    work = LocalWork(steps=1, batch_size=None, learning_rate=0.3)
    state, simulation, setting = trained("fedavg", work=work, rounds=1, cohort=11)
    start = setting.task.init(simulation_key(2))[0]
    x, y = train_rows(simulation.data)
    slope = models.gradient({k: v.numpy() for k, v in start.items()}, x, y)
    for name, value in state.server.params.items():
        np.testing.assert_allclose(value, start[name].numpy() - 0.3 * slope[name], atol=1e-12)


def simulation_key(seed):
    from handspan.core import keys

    return keys.key(seed, "init")


def train_rows(data):
    place = torch.cat(
        [
            torch.arange(int(a), int(a + n))
            for a, n in zip(data.offsets, data.num_train, strict=False)
        ]
    )
    return data.x[place].numpy(), data.y[place].numpy()


def test_ifca_with_one_model_is_fedavg_with_uniform_weights():
    # On full batches: the choice comes first, so that the training stage has another number.
    full = LocalWork(steps=4, batch_size=None, learning_rate=0.2)
    one = trained("ifca:k=1", work=full)[0].server.models.params
    avg = trained("fedavg:weights=uniform", work=full)[0].server
    compare({k: v[0] for k, v in one.items()}, params(avg), 1e-12, "k=1")


@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_fedavg_in_one_group_is_fedavg(weights):
    one = trained(f"fedavg_groups:weights={weights}", num_groups=1)[0].server.models.params
    avg = trained(f"fedavg:weights={weights}", num_groups=1)[0].server
    compare({k: v[0] for k, v in one.items()}, params(avg), 1e-12, "one group")


def test_pflmf_of_rank_one_with_v_fixed_at_one_is_federated_sgd():
    work = LocalWork(batch_size=None, learning_rate=0.2)
    base = "pflmf:rank=1:v_learning_rate=0:shared_steps=1:personal_steps=1"

    def with_ones(spec, setting):
        algorithm = spec.build(setting)

        def ones(key, data):
            first = algorithm.init_client(key, data)
            return dataclasses.replace(first, coordinates=torch.ones_like(first.coordinates))

        def start(key, population):
            first, single = algorithm.init_server(key, population), setting.task.init(key)[0]
            return dataclasses.replace(
                first, basis={name: single[name].unsqueeze(0) for name in first.basis}
            )

        return dataclasses.replace(algorithm, init_client=ones, init_server=start)

    state, simulation, _ = trained(base, work=work, algorithm=with_ones)
    one_step = LocalWork(steps=1, batch_size=None, learning_rate=0.2)
    avg = trained("fedavg:weights=uniform", work=one_step)[0].server
    compare({k: v[0] for k, v in state.server.basis.items()}, params(avg), 1e-12, "rank one")
    assert bool((simulation.store.read(torch.arange(11)).coordinates == 1).all())


def serve_a_model():
    labels = (name for name, method in methods().items() if method.problem != "matrix")
    return [name for name in labels if Case(name).algorithm.predict is None]


@pytest.mark.parametrize("name", serve_a_model())
def test_fine_tuning_without_moving_is_the_method_without(name):
    options = {"pflmf": ":rank=2", "ifca": ":k=2"}.get(name, "")
    # Running statistics move even where parameters do not: such a model is tuned for no step.
    steps = 0 if name == "fedbn" else 2
    plain = methods()[name].problem == "regression"  # linear models refuse momentum: they solve
    work = dataclasses.replace(WORK, sgd=Sgd()) if plain else WORK
    tuned = trained(f"{name}+ft{options}:ft_steps={steps}:ft_learning_rate=0", work=work, rounds=2)
    left = trained(f"{name}{options}", work=work, rounds=2)
    compare(served(tuned), served(left), 1e-12, "tuned by nothing")


def test_side_information_that_is_zero_leaves_a_plain_model():
    data = labelled()
    nothing = dataclasses.replace(data, side=torch.zeros_like(data.side))

    class Neutral(ToyTask):
        """Starts as the plain task does; the columns of the head that read z are zero."""

        def init(self, key):
            params, buffers = ToyTask().init(key)
            zeros = {"encoder.weight": torch.zeros(2, 2), "encoder.bias": torch.zeros(2)}
            head = torch.cat([params["head.weight"], torch.zeros(3, 2)], dim=1)
            zeros = {name: value.double() for name, value in zeros.items()}
            return {**params, **zeros, "head.weight": head.double()}, buffers

    state, _, _ = trained("perfedsi", data=nothing, task=Neutral(side_width=2))
    plain, _, _ = trained("fedavg:weights=uniform", data=nothing)
    got = params(state.server)
    assert not got.pop("encoder.weight").any() and not got.pop("encoder.bias").any()
    got["head.weight"] = got["head.weight"][:, :3]
    compare(got, params(plain.server), 1e-12, "without side information")


@pytest.mark.parametrize("text", ["fedavg", "fedrep", "perfedsi", "ifca:k=1", "local"])
def test_one_client_on_full_batches_is_centralised_training(text):
    work = LocalWork(steps=3, batch_size=None, learning_rate=0.2)
    if text == "fedrep":
        text = "fedrep:personal_steps=3:shared_steps=3"
    state, simulation, setting = trained(
        text, work=work, sizes=(9,), cohort=1, rounds=2, num_groups=1
    )
    start = setting.task.init(simulation_key(2))[0]
    theta = {k: v.clone().requires_grad_() for k, v in start.items()}
    x, y = (torch.from_numpy(part) for part in train_rows(simulation.data))
    side = simulation.data.side[0] if setting.task.needs_side else None
    blocks_ = [list(theta)]
    if text.startswith("fedrep"):
        head = list(setting.task.head)
        blocks_ = [head, [name for name in theta if name not in head]]
    for _ in range(2):
        for names in blocks_:
            optimizer = torch.optim.SGD([theta[name] for name in names], lr=0.2)
            for _ in range(3):
                optimizer.zero_grad()
                outputs = setting.task.predict(theta, {}, x, side)
                setting.task.row_loss(outputs, y).mean().backward()
                optimizer.step()
    outputs = served((state, simulation, setting))["outputs"]
    test = simulation.data.x[-int(simulation.data.num_test[0]) :]
    wanted = setting.task.predict(theta, {}, test, side).detach()
    torch.testing.assert_close(outputs, wanted, rtol=1e-10, atol=1e-10)


def test_local_sgd_is_that_of_torch():
    for options in (
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.5, "weight_decay": 0.1},
    ):
        sgd, p = Sgd(**options), {"p": torch.linspace(-1, 1, 5, dtype=torch.float64)}
        leaf = p["p"].clone().requires_grad_()
        optimizer = torch.optim.SGD([leaf], lr=0.1, **options)
        velocity, rate = sgd.start(p), torch.tensor(0.1, dtype=torch.float64)
        for _ in range(5):
            optimizer.zero_grad()
            (leaf**4).sum().backward()
            optimizer.step()
            p, velocity = sgd.step(p, {"p": 4 * p["p"] ** 3}, velocity, rate)
        torch.testing.assert_close(p["p"], leaf.detach(), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_fedmgs_finds_clusters_that_nobody_could_miss(sparse):
    data = blocks(sparse=sparse)
    text = "fedmgs:num_components=3:orthogonality=0.001"
    state, simulation, _ = trained(text, data=data, cohort=3, rounds=40)
    ids = torch.arange(data.num_clients)
    labels = simulation.row_labels(state.server, ids, state.round)
    assert clustering_accuracy(labels, data.y) == 1.0


def test_compressed_rows_are_worth_as_much_as_dense_ones():
    found = [
        numbers(*trained("fedmgs:num_components=3", sparse=sparse)[:2]) for sparse in (False, True)
    ]
    compare(found[1], found[0], 1e-10, "sparse against dense")


def test_padding_does_not_widen_the_box_of_a_factorisation():
    made = problem(parse("fedmgs").method)
    positive = dataclasses.replace(made.data, x=made.data.x + 1)
    algorithm = parse("fedmgs:num_components=3").build(made.setting)
    for engine in ("loop", "stacked"):
        simulation = Simulation(algorithm, positive, seed=2, engine=engine)
        simulation.executor.recorder = Unrecorded()
        state = run(algorithm, simulation, rounds=0, cohort=5, seed=2)
        assert float(state.server.low) == float(positive.x.min()) > 0
        assert float(state.server.high) == float(positive.x.max())
