import pytest
import torch

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.scaffold import scaffold
from handspan.testing.quadratics import QuadraticTask, quadratic
from handspan.testing.references import Reference, close

CASES = (
    ({}, None, "loop"),
    ({"server_learning_rate": 0.5}, LocalWork(epochs=2, batch_size=4), "stacked"),
    ({"option": "I"}, None, "loop"),
)
TARGETS = torch.tensor([[1.0, -2.0], [0.3, 0.8], [-1.0, 0.5]]).double()
CURVATURES = torch.tensor([[1.0, 2.0], [0.5, 1.0], [3.0, 0.2]]).double()


def named(options):
    return ":".join(["scaffold", *(f"{name}={value}" for name, value in options.items())])


@pytest.mark.parametrize(("options", "work", "engine"), CASES)
def test_scaffold_is_algorithm_1_of_its_paper(options, work, engine):
    run = Reference(named(options), work, rounds=5, engine=engine)
    rate = run.work["learning_rate"]
    x, c, own = scaffold(*run.rows, models.gradient, run.start, learning_rate=rate, **options)
    close(run.server.params, x)
    close(run.server.control, c)
    for i, control in enumerate(own):
        close({name: value[i] for name, value in run.clients.control.items()}, control)


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_servers_control_is_the_mean_of_all_clients_controls(option):
    run = Reference(named({"option": option}), LocalWork(steps=2, sgd=Sgd(momentum=0.5)))
    for name, value in run.server.control.items():
        assert value.abs().max() > 1e-3
        close(value, run.clients.control[name].mean(0).numpy(), 1e-13)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_ends_at_the_optimum_where_fedavg_does_not(option):
    """T3: x* = (sum A_i)^-1 sum A_i a_i, c = 0 and c_i = grad f_i(x*)."""
    work = LocalWork(steps=3, batch_size=None, learning_rate=0.3)
    options = {
        "work": work,
        "rounds": 60,
        "cohort": 3,
        "data": quadratic(TARGETS, CURVATURES),
        "task": QuadraticTask(w=torch.zeros(2).double()),
    }
    run = Reference(named({"option": option}), **options)
    wanted = (CURVATURES * TARGETS).sum(0) / CURVATURES.sum(0)
    close(run.server.params["w"], wanted.numpy(), 1e-6)
    close(run.server.control["w"], torch.zeros(2).numpy(), 1e-6)
    close(run.clients.control["w"], (CURVATURES * (wanted - TARGETS)).numpy(), 1e-6)
    drifted = Reference("fedavg", **options).server.params["w"]
    shrink = 1 - (1 - 0.3 * CURVATURES) ** 3  # P_i of the sheet
    close(drifted, ((shrink * TARGETS).sum(0) / shrink.sum(0)).numpy(), 1e-6)
    assert (drifted - wanted).abs().max() > 0.05


def test_with_one_full_step_the_controls_have_no_say():
    """T1: K = 1, full batch, all clients: x+ = x - eta_g eta_l grad f(x)."""
    work = LocalWork(steps=1, batch_size=None, learning_rate=0.2)
    options = {
        "cohort": 3,
        "data": quadratic(TARGETS, CURVATURES),
        "task": QuadraticTask(w=torch.ones(2).double()),
    }
    run = Reference(named({"server_learning_rate": 0.5}), work, rounds=7, **options)
    x = torch.ones(2).double()
    for _ in range(7):
        x = x - 0.5 * 0.2 * (CURVATURES * (x - TARGETS)).mean(0)
    close(run.server.params["w"], x.numpy(), 1e-13)
