"""Recorded steps on a CPU: other kernels, the same numbers but for the last bits."""

import functools

import pytest
import torch
from torch import nn

from handspan.core.federation import run
from handspan.core.method import Setting
from handspan.models.convert import task_from_module
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.simulation import kernels
from handspan.simulation.federation import Simulation
from handspan.simulation.replay import Replay
from handspan.simulation.tracing import Unrecorded, record
from handspan.testing.case import compare, numbers
from handspan.testing.toys import labelled

ATEN = torch.ops.aten


def images(channels=1):
    """Images of 11 x 11 pixels; most clients have full batches of 4 rows."""
    data = labelled(sizes=(9, 8, 4, 3), side=False, dtype=torch.float32)
    shape = (len(data.x), channels, 11, 11)
    generator = torch.Generator().manual_seed(0)
    return type(data)(**{**vars(data), "x": torch.rand(shape, generator=generator)})


def network(channels=1):
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def trained(text, factory, data, recorder=None, engine="loop", momentum=0.5):
    spec = parse(text)
    task = task_from_module(factory, num_outputs=3)
    setting = Setting(
        task=task,
        work=LocalWork(steps=5, batch_size=4, learning_rate=0.1, sgd=Sgd(momentum=momentum)),
        num_clients=data.num_clients,
        cohort=3,
        rounds=10,
        row_shape=data.row_shape,
        dtype=torch.float32,
    )
    algorithm = spec.build(setting)
    simulation = Simulation(algorithm, data, seed=1, engine=engine, block_size=2)
    if recorder is not None:
        simulation.executor.recorder = recorder
    state = run(algorithm, simulation, rounds=3, cohort=3, seed=1)
    return numbers(state, simulation, task)


@pytest.mark.parametrize("text", ["fedavg", "pflmf:rank=2", "fedrep"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_images_channels_last_give_the_numbers_of_others(text, engine):
    plain = trained(text, network, images(), Unrecorded())
    compare(trained(text, network, images(), engine=engine), plain, 1e-4, engine)


def test_images_of_several_colours_as_well():
    coloured = functools.partial(network, 3)
    plain = trained("fedavg", coloured, images(3), Unrecorded())
    compare(trained("fedavg", coloured, images(3)), plain, 1e-4, "three channels")


def recorded(function, *leaves):
    return record(function, list(leaves), fuse=True)


def operations(replay):
    return [node.target for node in replay._nodes if node.op == "call_function"]


def test_pooling_sees_channels_last():
    def pool(image):
        return [torch.max_pool2d(image, 2)]

    replay = recorded(pool, torch.rand(2, 3, 4, 4))
    image = torch.rand(2, 3, 4, 4)
    (result,) = replay(image)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(result, pool(image)[0])


def test_double_precision_stays_as_it_is():
    replay = recorded(lambda image: [torch.max_pool2d(image, 2)], torch.rand(2, 3, 4, 4).double())
    assert ATEN.contiguous.default not in operations(replay)


@pytest.fixture
def onednn(monkeypatch):
    """As on a processor whose best instructions MKL leaves unused; all products are large."""
    monkeypatch.setattr(kernels, "_has_unused_instructions", lambda: True)
    monkeypatch.setattr(kernels, "_LEAST", 1)
    monkeypatch.setattr(kernels, "_LEAST_ADDED", 1)


PRODUCTS = {
    "product": lambda a, b, c, p: [a @ b],
    "turned": lambda a, b, c, p: [a @ c.T],
    "with a bias": lambda a, b, c, p: [torch.addmm(p[0, :5], a, b)],
    "step": lambda a, b, c, p: [p - 0.5 * (a @ b)],
    "momentum": lambda a, b, c, p: [p * 0.5 + a @ b],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_by_onednn_are_the_same_products(name, onednn):
    shapes = ((4, 3), (3, 5), (5, 3), (4, 5))
    replay = recorded(PRODUCTS[name], *map(torch.rand, shapes))
    leaves = [torch.rand(shape) for shape in shapes]
    wanted = PRODUCTS[name](*leaves)
    torch.testing.assert_close(replay(*leaves), wanted)
    assert torch.ops.mkldnn._linear_pointwise.default in operations(replay)


@pytest.mark.parametrize("text", ["fedavg", "fedrep", "pflmf:rank=2"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("least_added", [1, 1 << 60])
def test_a_run_by_onednn_agrees_with_one_by_mkl(text, momentum, least_added, onednn, monkeypatch):
    monkeypatch.setattr(kernels, "_LEAST_ADDED", least_added)
    plain, other = (
        trained(text, dense, images(), recorder, momentum=momentum)
        for recorder in (Unrecorded(), None)
    )
    compare(other, plain, 1e-4, "by oneDNN")


def test_weights_lie_column_by_column_where_onednn_takes_them(onednn, monkeypatch):
    monkeypatch.setattr(kernels, "_LEAST_ADDED", 1 << 60)
    laid_out, seen = Replay.laid_out, []

    def watched(replay, state):
        seen.append(laid_out(replay, state))
        return seen[-1]

    monkeypatch.setattr(Replay, "laid_out", watched)
    trained("fedavg", dense, images(), momentum=0.0)
    turned = [[value.dim() == 2 and value.stride(0) == 1 for value in state] for state in seen]
    assert turned and all(any(state) for state in turned)
    seen.clear()
    trained("fedavg", dense, images(), momentum=0.5)  # what is added to them is not turned
    assert not seen


def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(121, 8), nn.ReLU(), nn.Linear(8, 3))
