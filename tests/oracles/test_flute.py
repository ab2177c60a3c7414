import numpy as np
import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.methods.flute import collapse
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.numerics.partial import BOTH, PERSONAL, Split
from handspan.registry import parse
from handspan.testing.oracles import flute as oracle
from handspan.testing.oracles import models
from handspan.testing.references import Reference, arrays, close
from handspan.testing.toys import ToyTask

HEAD = ("head.weight", "head.bias")
LARGE = {"lambdas": (0.7, 0.3, 0.2), "server_learning_rate": 2.0}
LARGE_TEXT = "collapse_weight=0.7:head_weight=0.3:feature_weight=0.2:server_learning_rate=2"
CASES = (
    ("", {}, None),
    (f":{LARGE_TEXT}", LARGE, LocalWork(steps=6, batch_size=3, sgd=Sgd(momentum=0.5))),
    (
        f":{LARGE_TEXT}:weights=uniform:personal_epochs=2:shared_epochs=1",
        {**LARGE, "weights": "uniform"},
        LocalWork(batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True)),
    ),
    ("", {}, LocalWork(steps=3, batch_size=None, sgd=Sgd(weight_decay=0.1))),
)


@pytest.mark.parametrize(("text", "options", "work"), CASES)
def test_flute_equals_the_published_form_in_which_the_server_holds_all_heads(text, options, work):
    run = Reference(f"flute{text}", work)
    body, heads = oracle.flute(
        *run.rows,
        models.gradient,
        models.gradient_features_squared,
        run.start,
        "head.weight",
        HEAD,
        **run.work,
        **options,
    )
    close(run.server.shared, body)
    for i, head in enumerate(heads):
        close({name: value[i] for name, value in run.clients.personal.items()}, head)


def test_without_its_terms_flute_is_a_split_with_the_head_first():
    text = "collapse_weight=0:head_weight=0:feature_weight=0:server_learning_rate=0"
    run = Reference(f"flute:{text}", LocalWork(steps=6, batch_size=3))
    split = Split(setting=run.setting, personal=frozenset(HEAD))
    first, second = run.setting.work.split()
    plain = split.algorithm("plain", [(PERSONAL, first), (BOTH, second)], weights="examples")
    other = Reference(f"flute:{text}", LocalWork(steps=6, batch_size=3))
    other.algorithm = other.simulation.algorithm = plain
    close(run.server.shared, arrays(other.server.shared), 1e-12)
    close(run.clients.personal, arrays(other.clients.personal), 1e-12)


@pytest.mark.parametrize(("present", "size"), [(5, 10), (3, 4), (4, 4)])
def test_the_least_collapse_of_some_of_the_classes_has_a_closed_form(present, size):
    # H H^T proportional to the target is as close as a matrix of norm 1 comes to it.
    u = np.array([1.0] * present + [0.0] * (size - present))
    values, vectors = np.linalg.eigh(np.outer(u, u) * (np.eye(size) - 1 / size))
    best = 3 * vectors * np.sqrt(values.clip(min=0))
    share = present * (1 - 2 / size + present / size**2) / (size - 1)
    least = float(collapse(torch.tensor(best), torch.tensor(u)))
    assert least == pytest.approx(1 - share**0.5, abs=1e-8)
    rng = np.random.default_rng(0)
    for weight in (best + 0.1 * rng.normal(size=best.shape), rng.normal(size=(size, 2))):
        value = collapse(torch.tensor(weight), torch.tensor(u))
        close(value, oracle.collapse(weight, u), 1e-12)
        assert float(value) > least + 1e-4


def test_the_gradient_of_all_terms_reaches_the_body():
    moved = []
    for text in ("", "feature_weight=0:", "collapse_weight=0:"):
        work = LocalWork(steps=3, batch_size=None)
        run = Reference(f"flute:{text}personal_steps=1:shared_steps=2", work, rounds=1)
        moved.append(arrays(run.server.shared)["hidden.weight"])
    start = run.start["hidden.weight"]
    for body in moved:
        assert np.abs(body - start).max() > 1e-3
    assert np.abs(moved[0] - moved[1]).max() > 1e-6
    assert np.abs(moved[0] - moved[2]).max() > 1e-9


def test_a_new_client_fits_its_head_with_the_body_fixed():
    work = LocalWork(batch_size=None, adapt_steps=3, learning_rate=0.2)
    run = Reference("flute:feature_weight=5", work, rounds=0)
    i = int(run.data.num_train.argmax())
    run.simulation.adapt(run.server, torch.tensor([i]), 9)
    x, y = run.rows[0][i]
    u = np.array([float((y == c).any()) for c in range(3)])
    params = {k: v.copy() for k, v in run.start.items()}
    for _ in range(3):
        slope = models.gradient(params, x, y)
        weight = params["head.weight"]
        slope["head.weight"] += 0.25 * oracle.gradient_collapse(weight, u) + 0.005 * weight
        params.update({name: params[name] - 0.2 * slope[name] for name in HEAD})
    close({k: v[i] for k, v in run.clients.personal.items()}, {k: params[k] for k in HEAD})


class TwoLayers(ToyTask):
    head = ("head.weight", "head.bias", "hidden.bias")


class Numbers(ToyTask):
    kind = "regression"


@pytest.mark.parametrize(
    ("task", "message"), [(TwoLayers(), "one linear layer"), (Numbers(), "labels of two classes")]
)
def test_what_does_not_fit_is_refused_in_one_sentence(task, message):
    with pytest.raises(HandspanError, match=message):
        Reference("flute", task=task)


@pytest.mark.parametrize("setting", ["collapse_weight=-1", "shared_steps=0", "weights=all"])
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(HandspanError):
        parse(f"flute:{setting}")
