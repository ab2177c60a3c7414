"""Verdicts from sums are those of a table of all clients' losses."""

import numpy as np
import pytest
import torch

from handspan.core.algorithm import Reduced
from handspan.core.data import Batch
from handspan.core.records import map_tensors
from handspan.numerics.trials import Verdict, bounded_loss, measuring, trial, uploaded, verdict
from handspan.testing.toys import ToyTask

LIKE = torch.zeros((), dtype=torch.float64)
CPU = torch.device("cpu")


def reduced(table):
    """Sum what clients say whose mean losses are the rows; None has no validation rows."""
    total, count = None, len(table)
    for losses in table:
        k = trial(None, 3, CPU)
        if losses is not None:
            k = type(k)(
                inner=None,
                losses=4 * torch.tensor(losses, dtype=torch.float64),
                weight=k.weight + 4,
            )
        one = uploaded(k, LIKE)
        total = one if total is None else map_tensors(torch.add, total, one)
    return Reduced(total=total, weight=torch.tensor(count), count=torch.tensor(count))


def test_gain_and_standard_error_are_those_of_the_differences():
    rng = np.random.default_rng(0)
    table = rng.random((9, 3)) + rng.random((9, 1))
    found = verdict(reduced([*table.tolist(), None, None]))
    np.testing.assert_allclose(found.losses, table.mean(0), rtol=1e-12)
    for better in range(3):
        for worse in range(3):
            difference = table[:, worse] - table[:, better]
            gain, error = found.gain(better, worse)
            np.testing.assert_allclose(gain, difference.mean(), atol=1e-12)
            np.testing.assert_allclose(error, difference.std() / 3, atol=1e-7)


def test_a_candidate_gains_nothing_over_itself():
    found = verdict(reduced([[0.3, 0.1, 0.2], [0.4, 0.9, 0.3]]))
    assert found.gain(1, 1) == (0.0, 0.0)
    rounding = Verdict(losses=torch.ones(2), covariance=torch.tensor([[1.0, 1.1], [1.1, 1.0]]))
    assert rounding.gain(0, 1)[1] == 0.0, "a variance is never negative"


@pytest.mark.parametrize("table", [[None], [None, None, None]])
def test_without_any_validation_row_there_is_no_verdict(table):
    assert verdict(reduced(table)) is None


def batch(count, seed=0, padding=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count + padding, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (count + padding,), generator=generator)
    weight = torch.cat([torch.ones(count), torch.zeros(padding)]).double()
    zero = torch.tensor(0)
    return Batch(x=x, y=y, weight=weight, key=zero, rows=torch.arange(count + padding))


def test_a_row_counts_for_no_more_than_the_loss_of_knowing_nothing():
    outputs = torch.tensor([[9.0, 0, 0], [-9.0, 0, 0], [float("nan")] * 3, [float("inf"), 0, 0]])
    losses = bounded_loss(ToyTask(), outputs, torch.zeros(4, dtype=torch.int64))
    assert float(losses[0]) < 1e-3
    np.testing.assert_allclose(losses[1:], np.log(3), rtol=1e-6)


def test_losses_are_added_up_over_batches_without_padding():
    task = ToyTask()
    both = [batch(5), batch(3, seed=1, padding=4)]

    def outputs(b, inner, rows):
        return [rows.x[:, :3], 2 * rows.x[:, 1:]]

    stage = measuring(task, outputs, 2)
    assert (stage.rows, stage.forward_only, stage.models) == ("validation", True, 2)
    k = trial(None, 2, CPU)
    for part in both:
        k = stage.step(None, k, part)
    assert float(k.weight) == 8
    wanted = np.zeros(2)
    for part, real in zip(both, (5, 3), strict=True):
        for q, logits in enumerate(outputs(None, None, part)):
            for row, label in zip(logits[:real].numpy(), part.y[:real].numpy(), strict=True):
                wanted[q] += min(np.log(np.exp(row).sum()) - row[label], np.log(3))
    np.testing.assert_allclose(k.losses, wanted, rtol=1e-12)
    np.testing.assert_allclose(uploaded(k, LIKE).losses, wanted / 8, rtol=1e-12)
