import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.core.records import take
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.perfedavg import perfedavg
from handspan.testing.quadratics import QuadraticTask, quadratic
from handspan.testing.references import Reference, arrays, close

CASES = (
    ("variant=HF", {"variant": "HF"}, None, "loop"),
    ("variant=FO:inner_learning_rate=0.5", {"variant": "FO"}, None, "stacked"),
    (
        "variant=HF:inner_learning_rate=0.5:delta=0.01:batches=same:weights=examples",
        {"variant": "HF", "delta": 0.01, "is_split": False, "weights": "examples"},
        LocalWork(steps=12, batch_size=4, sgd=Sgd(momentum=0.5)),
        "stacked",
    ),
    (
        "variant=FO:batches=same",
        {"variant": "FO", "is_split": False},
        LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True, weight_decay=0.1)),
        "loop",
    ),
)
TARGETS = torch.tensor([[1.0, -2.0], [0.3, 0.8], [-1.0, 0.5]]).double()
CURVATURES = torch.tensor([[1.0, 2.0], [0.5, 1.0], [3.0, 0.2]]).double()


@pytest.mark.parametrize(("text", "options", "work", "engine"), CASES)
def test_perfedavg_is_algorithm_1_of_its_paper(text, options, work, engine):
    run = Reference(f"perfedavg:{text}", work, engine=engine)
    alpha = run.spec.config.inner_learning_rate or run.work["learning_rate"]
    wanted = perfedavg(
        *run.rows, models.gradient, run.start, inner_learning_rate=alpha, **options, **run.work
    )
    close(run.server.params, wanted)


def test_a_client_is_served_the_model_after_one_step_on_its_training_rows():
    for text, steps in (("", 1), (":personal_steps=3", 3), (":personal_steps=0", 0)):
        run = Reference(f"perfedavg:inner_learning_rate=0.4{text}", rounds=2)
        (_, _, served), *_ = run.simulation.serve(run.server, torch.arange(11), 2)
        for i in (0, 3, 7):
            model = arrays(run.server.params)
            for _ in range(steps):
                slope = models.gradient(model, *run.rows[0][i])
                model = {n: model[n] - 0.4 * slope[n] for n in model}
            close(take(served, i).params, model)


@pytest.mark.parametrize(
    "setting", ["variant=SO", "batches=two", "variant=HF:delta=0", "delta=0.1", "personal_steps=-1"]
)
def test_settings_that_make_no_sense_are_refused(setting):
    with pytest.raises(HandspanError):
        parse(f"perfedavg:{setting}")


def one_step(variant, alpha, **options):
    """Direction d of one step from w = 0 on each quadratic."""
    run = Reference(
        f"perfedavg:variant={variant}:inner_learning_rate={alpha}",
        LocalWork(steps=1, batch_size=None, learning_rate=0.1),
        rounds=1,
        cohort=1,
        task=QuadraticTask(w=torch.zeros(2).double()),
        **options,
    )
    return -run.server.params["w"] / 0.1


@pytest.mark.parametrize("i", range(3))
def test_the_difference_of_gradients_is_exact_on_quadratics(i):
    """T2 (Q): HF: (I - aA) A (I - aA) (w - a_i); FO: A (I - aA) (w - a_i)."""
    a, curvature = TARGETS[i], CURVATURES[i]
    data = quadratic(a.unsqueeze(0), curvature.unsqueeze(0))
    shrink = 1 - 0.3 * curvature
    close(one_step("FO", 0.3, data=data), (curvature * shrink * -a).numpy(), 1e-12)
    close(one_step("HF", 0.3, data=data), (shrink * curvature * shrink * -a).numpy(), 1e-9)


def test_where_one_step_reaches_the_optimum_nothing_is_left_to_learn():
    """T2: A = h I, alpha = 1/h: d = 0."""
    data = quadratic(TARGETS[:1], torch.full((1, 2), 4.0).double())
    for variant in ("FO", "HF"):
        close(one_step(variant, 0.25, data=data), torch.zeros(2).numpy(), 1e-12)


def test_the_two_variants_end_apart():
    """T2: with one local step the fixed points solve sum_i d_i = 0."""
    for variant, power in (("FO", 1), ("HF", 2)):
        run = Reference(
            f"perfedavg:variant={variant}:inner_learning_rate=0.2",
            LocalWork(steps=1, batch_size=None, learning_rate=0.5),
            rounds=60,
            cohort=3,
            data=quadratic(TARGETS, CURVATURES),
            task=QuadraticTask(w=torch.zeros(2).double()),
        )
        factor = CURVATURES * (1 - 0.2 * CURVATURES) ** power
        wanted = (factor * TARGETS).sum(0) / factor.sum(0)
        close(run.server.params["w"], wanted.numpy(), 1e-6)
