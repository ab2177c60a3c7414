"""Metrics of all clients at once equal scikit-learn's, client by client."""

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from handspan.core.errors import HandspanError
from handspan.evaluation import metrics
from handspan.evaluation.metrics import metric_by_name, metric_from_function

SIZES = [12, 0, 7, 30, 1, 16]
OFFSETS = torch.tensor([0, *np.cumsum(SIZES)])


def rows(num_classes, ties=False):
    generator = torch.Generator().manual_seed(num_classes)
    total = int(OFFSETS[-1])
    outputs = torch.randn(total, num_classes, generator=generator, dtype=torch.float64)
    if ties:
        outputs = outputs.round()
    y = torch.randint(num_classes, (total,), generator=generator)
    y[12:19] = 1  # a client with a single class
    return outputs, y


def per_client(function, outputs, y):
    values = []
    for first, last in zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True):
        if first == last:
            values.append(float("nan"))
        else:
            values.append(float(function(outputs[first:last].numpy(), y[first:last].numpy())))
    return torch.tensor(values, dtype=torch.float64)


def check(name, function, outputs, y):
    metric = metric_by_name(name)
    expected = per_client(function, outputs, y)
    found = metric.per_client(outputs, y, OFFSETS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert metric.pooled(outputs, y) == pytest.approx(function(outputs.numpy(), y.numpy()))
    return found


@pytest.mark.parametrize("num_classes", [2, 5])
def test_accuracy_and_macro_f1(num_classes, monkeypatch):
    outputs, y = rows(num_classes)
    check("accuracy", lambda o, t: reference.accuracy_score(t, o.argmax(1)), outputs, y)

    def macro(o, t):
        return reference.f1_score(t, o.argmax(1), average="macro")

    check("macro_f1", macro, outputs, y)
    monkeypatch.setattr(metrics, "_TABLE_CELLS", 2 * num_classes)  # two clients at a time
    check("macro_f1", macro, outputs, y)


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_of_two_classes(ties):
    outputs, y = rows(2, ties)

    def area(o, t):
        single = len(np.unique(t)) < 2
        return float("nan") if single else reference.roc_auc_score(t, o[:, 1] - o[:, 0])

    found = check("auroc", area, outputs, y)
    assert found.isnan().tolist() == [False, True, True, False, True, False]
    score = outputs[:, 1:] - outputs[:, :1]
    again = metric_by_name("auroc").per_client(score, y, OFFSETS)
    torch.testing.assert_close(again, found, equal_nan=True)


def test_auroc_of_several_classes_averages_those_that_a_client_has():
    outputs, y = rows(4)

    def area(o, t):
        probability = np.exp(o) / np.exp(o).sum(1, keepdims=True)
        areas = [
            reference.roc_auc_score(t == c, probability[:, c])
            for c in np.unique(t)
            if len(np.unique(t)) > 1
        ]
        return np.mean(areas) if areas else float("nan")

    check("auroc", area, outputs, y)


def test_regression_metrics():
    outputs, y = rows(1)[0], rows(3)[0][:, 0]

    def rmse(o, t):
        return reference.mean_squared_error(t, o.reshape(-1)) ** 0.5

    check("rmse", rmse, outputs, y)
    check("mae", lambda o, t: reference.mean_absolute_error(t, o.reshape(-1)), outputs, y)


def test_the_loss_is_the_task_s():
    outputs, y = rows(3)
    function = torch.nn.functional.cross_entropy
    metric = metric_by_name("loss", lambda o, t: function(o, t, reduction="none"))
    assert metric.pooled(outputs, y) == pytest.approx(float(function(outputs, y)))
    assert not metric.higher_is_better
    assert metric.per_client(outputs, y, OFFSETS).isnan().sum() == 1


def test_positions_of_sequences_count_alike():
    outputs = torch.eye(3).repeat(2, 1, 1)
    y = torch.tensor([[0, 1, -100], [1, -100, -100]])
    metric = metric_by_name("accuracy")
    assert metric.per_client(outputs, y, torch.tensor([0, 2])).tolist() == [2 / 3]


def test_any_function_becomes_a_metric():
    def spread(outputs, y):
        return float(outputs.max() - y.max())

    outputs, y = rows(3)
    metric = metric_from_function(spread, higher_is_better=False)
    assert metric.name == "spread"
    expected = per_client(lambda o, t: o.max() - t.max(), outputs, y)
    found = metric.per_client(outputs, y, OFFSETS)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(HandspanError, match="did you mean 'accuracy'"):
        metric_by_name("acuracy")
    with pytest.raises(HandspanError, match="needs a task"):
        metric_by_name("loss")


def test_the_worst_tenth():
    values = torch.arange(30.0)
    assert metrics.worst_decile(values) == 1.0
    assert metrics.worst_decile(values, higher_is_better=False) == 28.0
    assert metrics.worst_decile(torch.tensor([3.0, float("nan"), 2.0])) == 2.0
    table = metrics.summarise(torch.tensor([1.0, float("nan"), 3.0]))
    assert (table["mean"], table["std"], table["num_clients"]) == (2.0, 1.0, 2.0)
    assert np.isnan(metrics.summarise(torch.tensor([float("nan")]))["worst_decile"])
    assert np.isnan(metrics.worst_decile(torch.tensor([])))


def test_a_hundred_thousand_clients_take_a_moment():
    offsets = torch.arange(0, 1_000_001, 10)
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(1_000_000, 3, generator=generator)
    y = torch.randint(3, (1_000_000,), generator=generator)
    for name in ("accuracy", "macro_f1", "auroc"):
        values = metric_by_name(name).per_client(outputs, y, offsets)
        assert values.dtype == torch.float64 and len(values) == 100_000
