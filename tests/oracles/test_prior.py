"""+prior against its closed form, label by label, and balanced training against its gradient."""

import numpy as np
import pytest
import torch

from handspan.core.algorithm import Model
from handspan.core.errors import HandspanError
from handspan.core.records import take
from handspan.evaluation.protocol import found_groups
from handspan.registry import parse
from handspan.testing.oracles import models
from handspan.testing.oracles.fedavg import fedavg
from handspan.testing.oracles.label_prior import balanced, pooled_reference, prior_term
from handspan.testing.references import Reference, close, oracle_clients
from handspan.testing.toys import ToyTask

CLASSES = 3


def terms_of(run, **options):
    """The oracle's term of every client, from the labels of its training rows."""
    return [prior_term(y, CLASSES, **options) for _, y in oracle_clients(run.data)]


def logits_of(run, i, term=0.0):
    """What the shared model says of a client's test rows, and the term."""
    x, _ = oracle_clients(run.data, "test")[i]
    return models.predict({k: v.numpy() for k, v in run.server.params.items()}, x) + term


def served(run):
    everyone = torch.arange(run.data.num_clients)
    return [
        outputs
        for part, joined in run.simulation.predictions(
            run.server, everyone, run.state.round, run.setting.task
        )
        for outputs in joined.split(run.data.num_test[part].tolist())
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"strength": 0.25}, {"strength": 100.0}, {"temperature": 0.5, "strength": 2.0}],
    ids=str,
)
def test_what_is_served_is_the_shared_model_and_the_term_of_the_clients_own_labels(options):
    given = "".join(f":prior_{name}={value}" for name, value in options.items())
    run = Reference(f"fedavg+prior{given}")
    for i, term in enumerate(terms_of(run, **options)):
        close(served(run)[i], logits_of(run, i, term))


def test_training_is_that_of_the_method_and_nothing_is_sent():
    run, plain = Reference("fedavg+prior"), Reference("fedavg")
    close(run.server.params, {k: v.numpy() for k, v in plain.server.params.items()}, 0)
    assert run.state.costs == plain.state.costs


def test_the_reference_may_be_the_label_frequencies_of_all_clients():
    run = Reference("fedavg+prior:prior_reference=pooled")
    reference = pooled_reference([y for _, y in oracle_clients(run.data)], CLASSES)
    assert np.abs(reference - 1 / 3).max() > 0.02, "the toy's classes are not balanced"
    inner = {k: v.numpy() for k, v in run.server.inner.params.items()}
    for i, term in enumerate(terms_of(run, reference=reference)):
        x, _ = oracle_clients(run.data, "test")[i]
        close(served(run)[i], models.predict(inner, x) + term)
    (phase,) = run.algorithm.setup
    assert (phase.reduce, phase.uploads) == ("sum", "all"), "the server sees the sum alone"


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_balanced_training_has_the_term_inside_the_loss_of_every_step(engine):
    run = Reference("fedavg+prior:prior_training=balanced:prior_strength=0.5", engine=engine)
    terms = terms_of(run, strength=0.5)
    clients, cohorts, batches = run.rows
    told = [
        (np.hstack([x, np.tile(term, (len(x), 1))]), y)
        for (x, y), term in zip(clients, terms, strict=True)
    ]
    gradient = balanced(models.gradient, CLASSES)
    wanted = fedavg(told, cohorts, batches, gradient, run.start, **run.work)
    close(run.server.params, wanted)
    for i, term in enumerate(terms):
        close(served(run)[i], logits_of(run, i, term))


def test_a_client_of_one_class_leans_to_it_the_more_the_more_rows_it_has():
    leaning = [prior_term(np.zeros(n, int), CLASSES)[0] for n in (0, 1, 4, 16, 1000)]
    assert leaning[0] == 0, "without rows nothing is known"
    assert leaning == sorted(leaning) and leaning[-1] < np.log(3)
    shrunk = [prior_term(np.zeros(4, int), CLASSES, strength=s)[0] for s in (0.1, 1, 10, 1e6)]
    assert shrunk == sorted(shrunk, reverse=True) and shrunk[-1] < 1e-4


def test_equal_frequencies_change_no_model():
    labels = np.repeat(np.arange(CLASSES), 5)
    np.testing.assert_allclose(prior_term(labels, CLASSES), 0, atol=1e-12)


def test_at_temperature_0_the_method_stays_as_it_is():
    run, plain = Reference("fedrep+prior:prior_temperature=0"), Reference("fedrep")
    for mine, other in zip(served(run), served(plain), strict=True):
        assert torch.equal(mine, other)


def test_fine_tuning_starts_with_the_term_and_trains_with_it():
    run = Reference("fedavg+prior+ft:ft_steps=0")
    for i, term in enumerate(terms_of(run)):
        close(served(run)[i], logits_of(run, i, term))
    tuned = Reference("fedavg+prior+ft:ft_steps=1:ft_learning_rate=0.5:ft_names=head.bias")
    everyone = torch.arange(11)
    (_, _, mine), *_ = tuned.simulation.serve(tuned.server, everyone, tuned.state.round)
    shared = {k: v.numpy() for k, v in tuned.server.params.items()}
    all_rows = oracle_clients(tuned.data, "all")
    single = [i for i, (_, y) in enumerate(all_rows) if len(y) <= 3]  # one batch takes all rows
    assert single
    for i in single:
        told = {**shared, "head.bias": shared["head.bias"] + terms_of(tuned)[i]}
        slope = models.gradient(told, *all_rows[i])["head.bias"]
        close(take(mine, i).model.params["head.bias"], told["head.bias"] - 0.5 * slope)


def test_groups_that_a_method_finds_are_still_found():
    run, plain = Reference("ifca+prior:k=2"), Reference("ifca:k=2")
    found = [found_groups(r.simulation, r.server, r.state.round) for r in (run, plain)]
    assert torch.equal(*found)


class Mixing(ToyTask):
    """A toy whose outputs are mixed after the bias, so that no parameter is added to them."""

    def predict(self, params, buffers, x, side):
        return super().predict(params, buffers, x, side) @ torch.ones(3, 3).double().triu()


@pytest.mark.parametrize("task", [Mixing()])
def test_a_model_whose_bias_is_not_added_to_the_logits_is_refused(task):
    run = Reference("fedavg")
    setting = type(run.setting)(**{**vars(run.setting), "task": task})
    with pytest.raises(HandspanError, match="has none that is added to the logits as it is"):
        parse("fedavg+prior").build(setting)


def test_regression_is_refused():
    task = ToyTask()
    task.kind = "regression"
    run = Reference("fedavg")
    setting = type(run.setting)(**{**vars(run.setting), "task": task})
    with pytest.raises(HandspanError, match="regression has no label frequencies"):
        parse("fedavg+prior").build(setting)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fedavg+prior:prior_strength=0", "prior_strength must be above 0"),
        ("fedavg+prior:prior_strength=inf", "prior_strength takes a number"),
        ("fedavg+prior:prior_temperature=-1", "prior_temperature must be at least 0"),
        ("fedavg+prior:prior_reference=mine", "uniform or pooled"),
        ("fedavg+prior:prior_training=fair", "plain or balanced"),
        (
            "fedavg+prior:prior_reference=pooled:prior_training=balanced",
            "prior_reference=pooled belongs to prior_training=plain",
        ),
        ("fedavg+ft+prior", r"write fedavg\+prior\+ft"),
        ("fedavg+prior+prior", "stands twice"),
        ("fedmgs+prior", r"takes no \+prior"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence(text, told):
    with pytest.raises(HandspanError, match=told):
        parse(text)


def test_a_new_client_has_the_term_at_once():
    run = Reference("fedavg+prior")
    (_, broadcast, mine), *_ = run.simulation.serve(run.server, torch.arange(11), run.state.round)
    never = [i for i in range(11) if not bool(run.simulation.store.written[i])]
    assert never, "somebody has never taken part"
    for i in never:
        model = run.algorithm.model(broadcast, take(mine, i))
        assert isinstance(model, Model)
        term = terms_of(run)[i]
        close(model.params["head.bias"], run.server.params["head.bias"].numpy() + term)
