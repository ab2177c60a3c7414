"""Results serve clients whose method mixes outputs as well as those with a single model."""

import pytest
import torch
from sklearn.datasets import load_digits

import handspan
from handspan.core.errors import HandspanError
from handspan.data import load_data

ROWS, LABELS = load_digits(return_X_y=True)
ROWS = ROWS.reshape(-1, 8, 8)


def fitted(text):
    data = load_data("digits", num_clients=12, seed=0)
    return handspan.fit(text, data, rounds=1, engine="loop", steps=2, adapt_steps=2, threads=1)


def test_a_mixture_is_asked_for_predictions_and_has_no_single_model():
    result = fitted("fedem:num_components=2")
    outputs = result.predict(7, ROWS[:5])
    torch.testing.assert_close(outputs.exp().sum(1), torch.ones(5))
    newcomer = result.adapt(ROWS[:20], LABELS[:20])
    torch.testing.assert_close(newcomer.predict(ROWS[:5]).exp().sum(1), torch.ones(5))
    for served in (lambda: result.personal_model(7), lambda: newcomer.model):
        with pytest.raises(HandspanError, match="ask for predictions"):
            served()


def test_a_single_model_gives_the_predictions():
    result = fitted("fedrep")
    model, rows = result.personal_model(7), result.transform(ROWS[:5])
    wanted = result.problem.task.predict(model.params, model.buffers, rows, None)
    assert torch.equal(result.predict(7, ROWS[:5]), wanted)
    newcomer = result.adapt(ROWS[:20], LABELS[:20])
    wanted = result.problem.task.predict(newcomer.model.params, {}, rows, None)
    assert torch.equal(newcomer.predict(ROWS[:5]), wanted)
