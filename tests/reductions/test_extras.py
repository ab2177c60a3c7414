"""Extras at settings where they change nothing, and on methods that serve in every way there is."""

import dataclasses

import pytest
import torch

from handspan.core.algorithm import Model
from handspan.core.errors import HandspanError
from handspan.core.federation import run
from handspan.core.records import Params, Record
from handspan.numerics.fine_tuning import with_fine_tuning
from handspan.numerics.gate import with_gate
from handspan.numerics.label_prior import with_prior
from handspan.registry import parse
from handspan.simulation.federation import Simulation
from handspan.testing.case import compare, numbers
from handspan.testing.playing import Unrecorded
from handspan.testing.toys import problem


def outputs(algorithm, made, engine="loop"):
    simulation = Simulation(algorithm, made.data, seed=2, engine=engine)
    simulation.executor.recorder = Unrecorded()
    state = run(algorithm, simulation, rounds=3, cohort=5, seed=2)
    return {"outputs": numbers(state, simulation, made.setting.task)["outputs"]}


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("extra", ["+ft:ft_steps=0", "+prior:prior_temperature=0"])
@pytest.mark.parametrize("name", ["fedavg", "ifca", "pflmf"])
def test_at_nothing_an_extra_leaves_the_method_as_it_is(name, extra, engine):
    made = problem(parse(name).method)
    with_extra = outputs(parse(name + extra).build(made.setting), made, engine)
    # One product serves a block, or a client: sums may round otherwise.
    compare(with_extra, outputs(parse(name).build(made.setting), made, engine), 1e-12, extra)


class OneEach(Record):
    """A message with a model for each client."""

    params: Params


def serving_each(algorithm):
    """FedAvg that sends every client a copy of its own: a field with a client axis."""

    def deploy(server, round):
        count = len(round.ids)
        return OneEach(params={k: p.expand(count, *p.shape) for k, p in server.params.items()})

    return dataclasses.replace(
        algorithm,
        deploy=deploy,
        deploy_unbatched=frozenset(),
        deploy_per_client=frozenset({"params"}),
        model=lambda b, c: Model(params=b.params, buffers={}),
    )


def serving_a_mixture(algorithm, task):
    """FedAvg whose outputs are those of two models, which happen to be the same one."""

    def predict(b, c, x, side):
        logits = task.predict(b.params, b.buffers, x, side)
        return 0.5 * logits + 0.5 * logits

    return dataclasses.replace(algorithm, model=None, predict=predict)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_extras_compose_with_methods_that_send_each_client_a_message_of_its_own(engine):
    made = problem(parse("fedavg").method)
    setting = dataclasses.replace(made.setting, keeps_validation=True)
    plain = parse("fedavg").build(setting)
    local = parse("local").build(setting)

    def extended(algorithm):
        algorithm = with_fine_tuning(with_prior(algorithm, setting), setting, steps=3)
        return outputs(with_gate(algorithm, local, setting, evidence=1.2), made, engine)

    compare(extended(serving_each(plain)), extended(plain), 0, "per client")


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_prior_and_gate_compose_with_methods_that_mix_models(engine):
    made = problem(parse("fedavg").method)
    setting = dataclasses.replace(made.setting, keeps_validation=True)
    plain = parse("fedavg").build(setting)
    local = parse("local").build(setting)

    def extended(algorithm):
        algorithm = with_prior(algorithm, setting)
        return outputs(with_gate(algorithm, local, setting, evidence=1.2), made, engine)

    mixed = extended(serving_a_mixture(plain, setting.task))
    compare(mixed, extended(plain), 1e-12, "mixture")
    assert torch.isfinite(mixed["outputs"]).all()


def test_a_mixture_is_not_tuned_and_told_so():
    made = problem(parse("fedavg").method)
    mixture = serving_a_mixture(parse("fedavg").build(made.setting), made.setting.task)
    with pytest.raises(HandspanError, match="serves no single model that \\+ft could tune"):
        with_fine_tuning(mixture, made.setting)
