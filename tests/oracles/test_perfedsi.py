import dataclasses

import numpy as np
import pytest
import torch

from handspan.core import keys
from handspan.core.data import Batch
from handspan.core.errors import HandspanError
from handspan.core.federation import make_round
from handspan.models.convert import task_from_module
from handspan.models.side_info import join_side
from handspan.models.zoo import make_model
from handspan.numerics.averaging import Training
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import parse
from handspan.simulation.federation import Simulation
from handspan.simulation.reduction import Postprocessor
from handspan.testing.oracles import models
from handspan.testing.oracles.perfedsi import perfedsi
from handspan.testing.references import Reference, close
from handspan.testing.toys import labelled, problem


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("weights", "work"),
    [
        ("uniform", None),
        ("examples", None),
        ("uniform", LocalWork(epochs=1, batch_size=3, sgd=Sgd(momentum=0.5))),
    ],
)
def test_perfedsi_is_a_plain_mean_of_models_that_read_side_information(weights, work, engine):
    run = Reference(f"perfedsi:weights={weights}", work, engine=engine)
    clients, cohorts, batches = run.rows
    side = list(run.data.side.numpy())
    wanted = perfedsi(
        clients,
        side,
        cohorts,
        batches,
        models.gradient_side,
        run.start,
        weights=weights,
        **run.work,
    )
    close(run.server.params, wanted)


def test_personal_parameters_stay_and_move_in_the_same_sgd():
    """Remark 2.1, one round by hand: both parts take the step of one gradient at the old pair."""
    work = LocalWork(steps=1, batch_size=None, learning_rate=0.2)
    run = Reference("perfedsi:personal=head", work, rounds=1, cohort=11)
    bodies, own = [], run.clients.personal
    for i, (x, y) in enumerate(run.rows[0]):
        slope = models.gradient_side(run.start, x, run.data.side[i].numpy(), y)
        new = {name: value - 0.2 * slope[name] for name, value in run.start.items()}
        close({name: value[i] for name, value in own.items()}, {name: new[name] for name in own})
        bodies.append(new)
    mean = {name: np.mean([body[name] for body in bodies], axis=0) for name in run.server.shared}
    close(run.server.shared, mean)
    assert not any(name.startswith("head") for name in run.server.shared)


def uploads(text, *, work, width=6, task=None, clients=range(11), seed=0):
    """What single clients send in a round, and what they were sent."""
    data = dataclasses.replace(
        labelled(sizes=(8,) * 11, dtype=torch.float64),
        side=keys.normal(keys.key(seed, "z"), (11, width)),
    )
    factory = join_side(make_model("mlp", (4,), 3), width)
    task = task or task_from_module(factory, needs_side=True, dtype=torch.float64)
    run = Reference(text, work, rounds=0, cohort=11, data=data, task=task)
    seen = []
    simulation = Simulation(
        run.algorithm,
        data,
        postprocessors=[Postprocessor(upload=lambda u, *_: seen.append(u) or u)],
    )
    phase = run.algorithm.rounds[0]
    found = make_round(1, torch.tensor(list(clients)), simulation.population)
    simulation.exchange(phase, phase.broadcast(run.server, found), found)
    sent = {name: torch.cat([u.params[name] for u in seen]) for name in seen[0].params}
    return sent, run.server.params, data.side[list(clients)]


def cosine(change, z):
    """How near the leading right singular vector of a change comes to z."""
    direction = torch.linalg.svd(change).Vh[0]
    return float((direction @ z).abs() / z.norm())


WORK = LocalWork(steps=5, batch_size=4, learning_rate=0.1)


def test_one_upload_tells_the_direction_of_z():
    """The attack: by Eq. (12) each update of what reads z is a z^T, and so is their sum."""
    sent, before, side = uploads("perfedsi", work=WORK)
    for upload, z in zip(sent["encoder.weight"], side, strict=True):
        assert cosine(upload - before["encoder.weight"], z) > 1 - 1e-9


def test_a_step_tells_z_itself_where_a_bias_stands_beside_it():
    """Why the encoders have no bias: weights move by a z^T and the bias by a; here the head's."""
    work = LocalWork(steps=1, batch_size=None, learning_rate=0.1)
    sent, before, side = uploads("perfedsi", work=work)
    code = before["encoder.weight"]
    for i, z in enumerate(side):
        weight = (sent["base.head.joined.weight"][i] - before["base.head.joined.weight"])[:, 64:]
        bias = sent["base.head.joined.bias"][i] - before["base.head.joined.bias"]
        told = weight.T @ bias / bias.square().sum()
        torch.testing.assert_close(torch.linalg.lstsq(code, told).solution, z, rtol=1e-6, atol=1e-8)


def test_a_sum_over_clients_hides_the_directions_of_most():
    """The remedy that costs nothing; the sum still leans to whoever moved most, unnamed."""
    sent, before, side = uploads("perfedsi", work=WORK)
    total = (sent["encoder.weight"] - before["encoder.weight"]).sum(0)
    assert np.median([cosine(total, z) for z in side]) < 0.6
    single = torch.linalg.svdvals(sent["encoder.weight"][0] - before["encoder.weight"])
    assert single[1] < 1e-9 * single[0] and torch.linalg.svdvals(total)[1] > 0.1 * single[0]


def test_noise_hides_the_direction_and_touches_nothing_else():
    quiet, before, side = uploads("perfedsi", work=WORK)
    noisy, _, _ = uploads("perfedsi:side_noise=0.1", work=WORK)
    changes = noisy["encoder.weight"] - before["encoder.weight"]
    found = [cosine(change, z) for change, z in zip(changes, side, strict=True)]
    assert np.mean(found) < 0.7
    reads = {"encoder.weight", "base.head.joined.weight", "base.head.joined.bias"}
    noise = torch.cat([(noisy[name] - quiet[name]).flatten() for name in sorted(reads)])
    assert abs(float(noise.std()) - 0.1) < 0.01 and abs(float(noise.mean())) < 0.01
    for name in quiet.keys() - reads:
        assert torch.equal(noisy[name], quiet[name]), name
    every, _, _ = uploads("perfedsi:side_noise=0.1:noise_on=all", work=WORK)
    assert not any(torch.equal(every[name], quiet[name]) for name in quiet)


def test_a_mask_of_z_itself_takes_noise_on_all_parameters():
    text = "form=mask:side_encoder=none:side_noise=1:noise_on=all"
    assert parse(f"perfedsi:{text}").config.noise_on == "all"


@pytest.mark.parametrize("text", ["perfedsi", "perfedsi:personal=head", "perfedsi:side_noise=1"])
def test_every_form_declares_that_z_can_be_inferred(text):
    spec = parse(text)
    phases = spec.build(problem(spec.method).setting).rounds
    assert all("z, or its direction" in phase.infers for phase in phases)


def test_noise_is_drawn_anew_for_each_client_round_and_parameter():
    task = problem(parse("perfedsi").method).setting.task
    spec = parse("perfedsi:side_noise=1")
    made = problem(spec.method)
    stage = spec.build(made.setting).rounds[0].stages[-1]
    params, buffers = task.init(keys.key(0))

    def noise(key):
        x = torch.zeros(1, 4, dtype=torch.float64)
        batch = Batch(x=x, y=None, weight=x[:, 0], key=keys.key(key), rows=torch.tensor([0]))
        k = stage.step(None, Training(params=params, buffers=buffers, velocity={}), batch)
        return k.params["encoder.bias"] - params["encoder.bias"]

    assert not torch.equal(noise(1), noise(2)) and torch.equal(noise(1), noise(1))
    assert stage.forward_only and stage.models == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("side=none", "side must be given, clients, groups, mean or random"),
        ("form=add", "form must be concatenate or mask"),
        ("side_encoder=conv", "side_encoder must be linear, two_layers or none"),
        ("gate=true:personal=head", "drop personal, or gate"),
        ("noise_on=all", "noise_on belongs to side_noise"),
        ("form=mask:side_width=3", "side_width belongs to form=concatenate"),
        ("form=mask:side_encoder=none:side_noise=1", "hides nothing.*add noise_on=all"),
        ("side_noise=-1", "side_noise must be at least 0"),
        ("personal=*", "all parameters"),
        ("side_noise=1:noise_on=nowhere", "matches no parameter"),
        ("side_noise=1:noise_on=head:personal=head", "means nothing that is sent"),
        ("gate=true", "a model that can ignore its side information"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text, words):
    with pytest.raises(HandspanError, match=words):
        spec = parse(f"perfedsi:{text}")
        made = problem(spec.method)
        algorithm = spec.build(made.setting)
        algorithm.init_server(keys.key(0), Simulation(algorithm, made.data).population)
