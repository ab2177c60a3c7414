"""+gate: Local inside it is Local to the last bit, and only what proves better is served."""

import dataclasses

import numpy as np
import pytest
import torch

import handspan
from handspan.core.algorithm import Model
from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.core.federation import make_round
from handspan.core.federation import run as play
from handspan.core.records import map_tensors, take, tensors
from handspan.evaluation.protocol import found_groups
from handspan.numerics.gate import with_gate
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.simulation.federation import Simulation
from handspan.testing.oracles import models
from handspan.testing.oracles.gate import choose
from handspan.testing.oracles.local import local
from handspan.testing.playing import Unrecorded
from handspan.testing.references import Reference, arrays, close, oracle_clients


def chosen(run):
    """What each client is served, as it stands after the last personal phase."""
    everyone = torch.arange(run.data.num_clients)
    (_, _, served), *_ = run.simulation.serve(run.server, everyone, run.state.round)
    return served


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("text", ["fedrep+gate", "ifca+gate:k=2", "fedavg+ft+gate"])
def test_local_inside_is_local_alone_to_the_last_bit(text, engine):
    run = Reference(text, engine=engine)
    method = Reference("local", engine=engine)
    alone = Simulation(method.algorithm, run.data.pooled(), seed=run.seed, engine=engine)
    alone.executor.recorder = Unrecorded()
    play(method.algorithm, alone, rounds=run.rounds, cohort=run.cohort, seed=run.seed)
    wanted = alone.store.read(torch.arange(11))
    for one, other in zip(tensors(run.clients.kept), tensors(wanted), strict=True):
        assert torch.equal(one, other)


def test_the_model_that_is_measured_is_local_on_the_training_rows():
    run = Reference("fedrep+gate", LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.9)))
    clients, cohorts, batches = run.rows
    rows = lambda t, phase, stage, i: batches(t, phase, 1, i)  # noqa: E731 - the second stage
    wanted = local(clients, cohorts, rows, models.gradient, run.start, **run.work)
    for i, model in enumerate(wanted):
        close({name: value[i] for name, value in run.clients.tried.params.items()}, model)


@pytest.mark.parametrize("text", ["fedrep", "ifca:k=2", "pflmf:rank=2", "fedavg"])
def test_the_method_inside_is_the_method_alone_to_the_last_bit(text):
    name, *settings = text.split(":")
    run, alone = Reference(":".join([f"{name}+gate", *settings])), Reference(text)
    for found, wanted in ((run.server, alone.server), (run.clients.own, alone.clients)):
        for one, other in zip(tensors(found), tensors(wanted), strict=True):
            assert torch.equal(one, other)
    assert run.state.costs.bytes_up == alone.state.costs.bytes_up, "local sends nothing"


def test_the_rows_of_both_local_models_are_counted():
    gated, plain = Reference("fedavg+gate"), Reference("fedavg")
    alone = Reference("local").state.costs.rows
    whole = Reference("local")
    whole.data = whole.data.pooled()
    whole.simulation = Simulation(whole.algorithm, whole.data, seed=whole.seed)
    assert gated.state.costs.rows == plain.state.costs.rows + alone + whole.state.costs.rows


@pytest.mark.parametrize("text", ["fedavg+gate", "fedrep+gate", "fedavg+prior+ft+gate:ft_steps=3"])
@pytest.mark.parametrize("evidence", [1.0, 1.5, 20.0])
def test_a_client_serves_what_its_validation_rows_prove(text, evidence):
    run = Reference(f"{text}:gate_evidence={evidence}", rounds=8)
    base = Reference(text.replace("+gate", ""), rounds=8)
    setting = dataclasses.replace(base.setting, keeps_validation=True)
    base.algorithm = base.spec.build(setting)  # as the gate has it tuned: on training rows
    base.simulation = Simulation(base.algorithm, base.data, seed=base.seed)
    everyone, index = torch.arange(11), run.state.round
    (_, broadcast, mine), *_ = base.simulation.serve(base.server, everyone, index)
    served, choices = chosen(run), []
    for i, (x, y) in enumerate(oracle_clients(run.data, "validation")):
        personal = arrays(base.algorithm.model(broadcast, take(mine, i)).params)
        candidates = [arrays(take(run.clients.tried.params, i))]
        if "ft" in text:  # fedavg keeps nothing, and its tuned model is another than the shared
            candidates.append(arrays(base.server.params))
        candidates.append(personal)
        choice = choose([models.predict(c, x) for c in candidates], y, evidence=evidence)
        wanted = [arrays(take(run.clients.kept.params, i)), *candidates[1:]][choice]
        assert int(served.choice[i]) == choice
        close({name: value[i] for name, value in served.model.params.items()}, wanted)
        choices.append(choice)
        if not len(y):
            assert choice == 0, "without validation rows a client keeps its own model"
    if evidence == 1:
        assert len(set(choices)) > 1, "some clients gain, and some do not"


def test_equal_models_are_a_tie_and_ties_go_to_local():
    work = LocalWork(steps=3, batch_size=None)  # no draw: the rival is the measured model itself
    run = Reference("local+gate:gate_evidence=1", work)
    assert chosen(run).choice.tolist() == [0] * 11


def rigged(*logits, evidence=1.0):
    """A gate over three constant models: local, shared and personal say the same of all rows."""
    base = Reference("fedrep")
    setting = dataclasses.replace(base.setting, keeps_validation=True)

    def of(values):
        params = map_tensors(torch.zeros_like, base.setting.model.init(base.key)[0])
        bias = torch.tensor(values, dtype=torch.float64)
        return Model(params={**params, "head.bias": bias}, buffers={})

    alone = dataclasses.replace(parse("local").build(setting), model=lambda b, c: of(logits[0]))
    inner = dataclasses.replace(
        base.algorithm,
        shared_model=lambda server: of(logits[1]),
        model=lambda b, c: of(logits[2]),
    )
    gated = with_gate(inner, alone, setting, evidence=evidence)
    simulation = Simulation(gated, base.data, seed=3)
    server = gated.init_server(base.key, simulation.population)
    (_, _, served), *_ = simulation.serve(server, torch.arange(11), 0)
    return served.choice.tolist(), base.data.num_validation


FLAT, ONE = (0.0, 0.0, 0.0), (9.0, 0.0, 0.0)


def test_ties_go_to_local_first_and_to_shared_before_personal():
    choice, _ = rigged(FLAT, FLAT, FLAT)
    assert set(choice) == {0}
    choice, num = rigged((-50.0, 0.0, 0.0), ONE, ONE)
    assert 2 not in choice, "shared and personal are equal: shared comes first"
    assert 1 in choice and all(c == 0 for c, n in zip(choice, num.tolist(), strict=True) if not n)


def test_certainty_that_fails_does_not_lose_to_knowing_nothing():
    run = Reference("fedrep")
    for i, (_, y) in enumerate(oracle_clients(run.data, "validation")):
        wrong = np.tile(np.array([9.0, 0.0, 0.0]), (len(y), 1))
        flat = np.zeros_like(wrong)
        if len(y):
            assert choose([wrong, flat, flat], y, evidence=1.0) == 0, i
    assert set(rigged(ONE, FLAT, FLAT)[0]) == {0}


def test_the_more_evidence_is_asked_for_the_fewer_gates_open():
    opened = [sum(c > 0 for c in rigged(FLAT, FLAT, ONE, evidence=e)[0]) for e in (1, 2, 5, 20)]
    assert opened == sorted(opened, reverse=True)
    assert opened[0] > opened[2] > opened[3] == 0, "two rows prove odds of 3 to the 2nd at most"


@pytest.mark.parametrize("evidence", [1, 20])
def test_targets_are_compared_at_the_variance_that_suits_each_candidate(evidence):
    rng = np.random.default_rng(0)
    clients = []
    for client in range(12):  # three of them turn the rule of the others round
        x = rng.normal(size=(24, 8))
        clients.append((x, (-1 if client > 8 else 1) * x.sum(1) + 3 * rng.normal(size=24)))
    data = FederatedData.from_clients(clients)
    found = handspan.fit(
        "fedavg+gate", data, model="linear", rounds=20, steps=3, learning_rate=0.1, cohort=1.0,
        gate_evidence=evidence, engine="loop", threads=1, dtype="float64",
    )  # fmt: skip
    data, server = found.problem.data, found.state.server
    (_, _, served), *_ = found.simulation.serve(server, torch.arange(12), found.state.round)
    tried = found.simulation.store.read(torch.arange(12)).tried.params
    predict = found.problem.task.predict
    for i, (x, y) in enumerate(oracle_clients(data, "validation")):
        models = [take(tried, i), server.params]
        outputs = [predict(model, {}, torch.from_numpy(x), None).numpy() for model in models]
        choice = choose(outputs, y.reshape(-1, 1), evidence=evidence, classes=False)
        assert int(served.choice[i]) == choice
    assert len(served.choice.unique()) == 2


def test_without_rows_the_personal_model_is_served():
    run = Reference("fedrep+gate")
    making, choosing = run.algorithm.personal[-2:]
    ids = torch.tensor([1])
    round = make_round(4, ids, run.simulation.population)
    about, mine = take(run.simulation.about(ids), 0), take(run.clients, 1)
    for data, wanted in ((dataclasses.replace(about, num=torch.tensor(0)), 1), (about, 0)):
        b = making.broadcast(run.server, round)
        made, _ = making.end(b, making.begin(b, mine, data), data)
        b = choosing.broadcast(run.server, round)
        served, _ = choosing.end(b, choosing.begin(b, made, data), data)
        assert int(served.choice) == wanted


def test_groups_that_a_method_finds_are_still_found():
    gated, plain = Reference("ifca+gate:k=2"), Reference("ifca:k=2")
    found = [found_groups(r.simulation, r.server, r.state.round) for r in (gated, plain)]
    assert torch.equal(*found)


def test_less_evidence_than_equal_odds_is_refused():
    with pytest.raises(HandspanError, match="gate_evidence must be at least 1"):
        parse("fedavg+gate:gate_evidence=0.5")
