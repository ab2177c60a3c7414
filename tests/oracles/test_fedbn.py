import numpy as np
import pytest
import torch
from torch import nn

from handspan.core.errors import HandspanError
from handspan.methods.fedbn import norm_layers
from handspan.models.convert import task_from_module
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.fedbn import fedbn
from handspan.testing.references import Reference, arrays, close
from handspan.testing.toys import ToyTask, labelled, problem

NORM = ("norm.weight", "norm.bias")
CASES = (
    ("", {}, None, "loop"),
    (":weights=examples", {"weights": "examples"}, None, "stacked"),
    (
        "",
        {},
        LocalWork(epochs=2, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True, weight_decay=0.1)),
        "loop",
    ),
)


@pytest.mark.parametrize(("text", "options", "work", "engine"), CASES)
def test_fedbn_shares_all_but_its_norms(text, options, work, engine):
    run = Reference(f"fedbn{text}", work, engine=engine)
    theta, scales, running = fedbn(
        *run.rows,
        models.gradient_norm,
        models.statistics_norm,
        run.start,
        arrays(run.setting.model.init(run.key)[1]),
        NORM,
        **run.work,
        **options,
    )
    close(run.server.shared, theta)
    assert not run.server.buffers
    for i in range(11):
        close({name: value[i] for name, value in run.clients.personal.items()}, scales[i])
        close({name: value[i] for name, value in run.clients.buffers.items()}, running[i])
    x = run.data.x[-1:].numpy()  # a test row of the last client
    close(run.served[-1:], models.predict_norm({**theta, **scales[-1]}, running[-1], x))


def test_the_oracles_gradient_is_that_of_its_loss():
    task, data = ToyTask(has_norm=True), labelled()
    params = arrays(task.init(torch.tensor(5))[0])
    x, y = data.x[:7].numpy(), data.y[:7].numpy()

    def loss(changed):
        logits = models.predict_norm(changed, models.statistics_norm(changed, x), x)
        return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(7), y])

    for name, slope in models.gradient_norm(params, x, y).items():
        for place in np.ndindex(slope.shape):
            moved = {k: v.copy() for k, v in params.items()}
            moved[name][place] += 1e-6
            assert abs((loss(moved) - loss(params)) / 1e-6 - slope[place]) < 1e-5


def test_norms_are_found_by_what_they_are_and_not_by_name():
    net = nn.Sequential()
    net.add_module("first", nn.Linear(4, 4))
    net.add_module("downsample", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)))
    net.add_module("bn", nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    net.add_module("last", nn.BatchNorm1d(4))
    net.add_module("head", nn.Linear(4, 3))
    assert norm_layers(task_from_module(net)) == {"downsample.1", "last"}


def test_a_model_without_batch_normalisation_is_refused():
    spec = parse("fedbn")
    made = problem(parse("fedavg").method)
    with pytest.raises(HandspanError, match="this model has none"):
        spec.build(made.setting)


def test_a_shift_and_scale_of_a_clients_features_changes_nothing_but_its_statistics():
    """T2: normalisation right at the input forgets s_i x + t_i."""

    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.BatchNorm1d(4, eps=0.0), nn.Linear(4, 3))

    data = labelled(sizes=(4, 5, 6, 7))
    owner = torch.repeat_interleave(torch.arange(4), data.offsets.diff())
    scale = torch.tensor([1.0, 3.0, 0.2, 7.0]).double()[owner].unsqueeze(1)
    shift = torch.linspace(-2, 2, 16).double().reshape(4, 4)[owner]
    moved = type(data)(**{**vars(data), "x": scale * data.x + shift})
    task = task_from_module(Net, dtype=torch.float64)
    work = LocalWork(steps=3, batch_size=None, learning_rate=0.2)
    runs = [Reference("fedbn", work, cohort=3, data=rows, task=task) for rows in (data, moved)]
    close(runs[1].server.shared, arrays(runs[0].server.shared), 1e-10)
    close(runs[1].clients.personal, arrays(runs[0].clients.personal), 1e-10)
    means = [run.clients.buffers["0.running_mean"] for run in runs]
    assert (means[0] - means[1]).abs().max() > 0.1
