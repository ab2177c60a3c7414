import dataclasses

import numpy as np
import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.testing import toys
from handspan.testing.case import numbers
from handspan.testing.oracles import models
from handspan.testing.oracles.fedem import fedem, fit_mixture, log_likelihood
from handspan.testing.references import Reference, arrays, close

CASES = (
    ("", {}, None),
    (":num_components=2:weights=uniform", {"weights": "uniform"}, None),
    (":num_components=2", {}, LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5))),
    ("", {}, LocalWork(steps=2, batch_size=None, sgd=Sgd(weight_decay=0.1))),
)


def unstacked(server):
    params = server.models.params
    count = len(next(iter(params.values())))
    return [arrays({name: value[j] for name, value in params.items()}) for j in range(count)]


@pytest.mark.parametrize(("text", "options", "work"), CASES)
def test_fedem_is_the_algorithm_of_its_paper(text, options, work):
    run = Reference(f"fedem{text}", work)
    starts = unstacked(run.first_server)
    wanted, mixtures = fedem(*run.rows, models.gradient, models.loss, starts, **run.work, **options)
    for got, model in zip(unstacked(run.server), wanted, strict=True):
        close(got, model)
    close(run.clients.mixture, np.stack(mixtures))
    assert np.ptp(np.stack(mixtures), axis=0).max() > 0.05, "the clients' mixtures differ"


def test_probabilities_are_mixed_with_a_refreshed_mixture():
    run = Reference("fedem")
    final = unstacked(run.server)
    got = numbers(run.state, run.simulation, run.setting.task)["outputs"]
    wanted, data = [], run.data
    for i, (x, y) in enumerate(run.rows[0]):
        pi = fit_mixture(final, run.clients.mixture[i].numpy(), models.loss, x, y, 1)
        start = int(data.offsets[i] + data.num_train[i] + data.num_validation[i])
        test = data.x[start : int(data.offsets[i + 1])].numpy()
        logits = np.stack([models.predict(model, test) for model in final])
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        wanted.append(np.log(np.einsum("m,mrc->rc", pi, shares)))
    close(got, np.concatenate(wanted))


def test_a_new_client_fits_its_mixture_without_a_gradient():
    run = Reference("fedem", LocalWork(adapt_steps=7))
    i = int(run.data.num_train.argmax())
    pi, (x, y) = run.first_clients.mixture[i].numpy(), run.rows[0][i]
    server = run.server
    fresh = Reference("fedem", LocalWork(adapt_steps=7), rounds=0)
    costs = fresh.simulation.adapt(server, torch.tensor([i]), 4)
    wanted = fit_mixture(unstacked(server), pi, models.loss, x, y, 7)
    close(fresh.simulation.store.read(torch.tensor([i])).mixture[0], wanted)
    assert costs.rows == 0 and costs.forward_rows == 3 * len(y)


def test_with_numbers_for_labels_the_values_are_mixed():
    data = toys.numbers()
    run = Reference("fedem:num_components=2", data=data, task=toys.LinearTask())
    params = run.server.models.params
    for _, broadcast, mine in run.simulation.serve(run.server, torch.tensor([7]), 4):
        pi = mine.mixture[0]
        alone = dataclasses.replace(mine, mixture=pi)
        got = run.algorithm.predict(broadcast, alone, data.x[:5], None)
    each = [data.x[:5] @ params["weight"][m].T + params["bias"][m] for m in range(2)]
    close(got, (pi[0] * each[0] + pi[1] * each[1]).numpy(), 1e-12)
    assert float(pi.min()) > 0


def with_equal_components(run):
    first = run.first_server
    equal = {k: v[:1].expand_as(v).clone() for k, v in first.models.params.items()}
    same = dataclasses.replace(first, models=dataclasses.replace(first.models, params=equal))
    return dataclasses.replace(run.algorithm, init_server=lambda key, population: same)


def test_equal_components_stay_equal_and_shares_stay_where_they_are():
    run = Reference("fedem")
    run.algorithm = run.simulation.algorithm = with_equal_components(run)
    for value in run.server.models.params.values():
        torch.testing.assert_close(value[1:], value[:1].expand_as(value[1:]), rtol=0, atol=1e-14)
    close(run.clients.mixture, np.full((11, 3), 1 / 3), 1e-14)


def test_with_small_full_steps_the_likelihood_never_decreases():
    work = LocalWork(steps=1, batch_size=None, learning_rate=0.1)
    likelihoods = []
    for rounds in range(0, 9, 2):
        run = Reference("fedem", work, rounds=rounds, cohort=11)
        final, rows = unstacked(run.server), run.rows[0]
        likelihoods.append(log_likelihood(final, run.clients.mixture.numpy(), models.loss, rows))
    assert (np.diff(likelihoods) > 0).all(), likelihoods


def test_one_component_is_fedavg():
    work = LocalWork(steps=4, batch_size=None, learning_rate=0.2, sgd=Sgd(momentum=0.5))
    one = Reference("fedem:num_components=1", work).server.models.params
    avg = Reference("fedavg", work).server.params
    close({k: v[0] for k, v in one.items()}, arrays(avg), 1e-14)


def test_more_components_than_clients_are_refused():
    with pytest.raises(HandspanError, match="exceeds the 11 clients"):
        Reference("fedem:num_components=12")


@pytest.mark.parametrize("setting", ["num_components=0", "refresh=-1", "weights=all"])
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(HandspanError):
        parse(f"fedem:{setting}")


def test_there_is_no_single_model_to_fine_tune():
    with pytest.raises(HandspanError, match="serves no single model"):
        Reference("fedem+ft")
