import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.fedper import fedper
from handspan.testing.quadratics import QuadraticTask, quadratic
from handspan.testing.references import Reference, close
from handspan.testing.toys import problem

CASES = (
    ("", {}, None, "loop"),
    (":weights=uniform:start=common", {"weights": "uniform"}, None, "stacked"),
    (":personal=hidden.*", {}, LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5)), "loop"),
    (
        ":personal=head.bias+hidden.bias",
        {},
        LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.5, nesterov=True, weight_decay=0.1)),
        "loop",
    ),
)


@pytest.mark.parametrize(("text", "options", "work", "engine"), CASES)
def test_fedper_trains_both_parts_in_one_sgd_and_shares_the_base(text, options, work, engine):
    run = Reference(f"fedper{text}", work, engine=engine)
    first = run.first_clients.personal
    heads = [{name: value[i].numpy() for name, value in first.items()} for i in range(11)]
    base = {name: value for name, value in run.start.items() if name not in first}
    base, personal = fedper(*run.rows, models.gradient, base, heads, **run.work, **options)
    close(run.server.shared, base)
    for i, own in enumerate(personal):
        close({name: value[i] for name, value in run.clients.personal.items()}, own)


def test_first_heads_are_the_clients_own_or_common():
    own, common = (Reference(f"fedper:start={start}") for start in ("independent", "common"))
    name = "head.weight"
    assert len({tuple(h.flatten().tolist()) for h in own.first_clients.personal[name]}) == 11
    for head in common.first_clients.personal[name]:
        close(head, common.start[name])


def test_a_step_moves_both_parts_along_the_residual():
    """T2: f = 1/2 |u + v - a|^2, r = u + v - a: both move by -eta r, and r shrinks by 1 - 2 eta."""
    u, v, a = torch.tensor([[1.0, -2.0], [0.5, 0.5], [0.3, 0.8]]).double()
    run = Reference(
        "fedper:start=common",
        LocalWork(steps=1, batch_size=None, learning_rate=0.1),
        rounds=1,
        cohort=1,
        data=quadratic(a.unsqueeze(0)),
        task=QuadraticTask(u=u, v=v),
    )
    r = u + v - a
    new_u, new_v = run.server.shared["u"], run.clients.personal["v"][0]
    close(new_u, (u - 0.1 * r).numpy(), 1e-14)
    close(new_v, (v - 0.1 * r).numpy(), 1e-14)
    close(new_u + new_v - a, ((1 - 0.2) * r).numpy(), 1e-14)


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("fedper", "personal"),
        ("fedalt", "personal"),
        ("fedsim", "personal"),
        ("lgfedavg", "shared"),
    ],
)
def test_a_split_that_leaves_one_side_nothing_is_refused(method, setting):
    for which, told in (("*", "all parameters"), ("nowhere.*", "matches no parameter")):
        spec = parse(f"{method}:{setting}={which}")
        with pytest.raises(HandspanError, match=told):
            spec.build(problem(spec.method).setting)


def test_a_new_client_fits_its_part_with_the_base_fixed():
    work = LocalWork(steps=3, batch_size=None, adapt_steps=4, learning_rate=0.2)
    run = Reference("fedper", work, rounds=0)
    i = int(run.data.num_train.argmax())
    run.simulation.adapt(run.server, torch.tensor([i]), 9)
    x, y = run.rows[0][i]
    model = {k: v.numpy() for k, v in run.server.shared.items()}
    model |= {k: v[i].numpy() for k, v in run.first_clients.personal.items()}
    for _ in range(4):
        slope = models.gradient(model, x, y)
        model |= {n: model[n] - 0.2 * slope[n] for n in ("head.weight", "head.bias")}
    for name, value in run.clients.personal.items():
        close(value[i], model[name])
