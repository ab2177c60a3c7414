import numpy as np
import pytest
import torch

from handspan.core.records import take
from handspan.evaluation.protocol import found_groups
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.finetune import finetune, finetune_stopping
from handspan.testing.playing import step_rows
from handspan.testing.references import Reference, arrays, close, oracle_clients

HEAD = ("head.weight", "head.bias")


@pytest.mark.parametrize(
    ("text", "names", "rate", "work"),
    [
        ("fedavg+ft:ft_steps=3", None, 0.2, None),
        ("fedrep+ft:ft_steps=4:ft_names=head", HEAD, 0.2, None),
        ("ifca+ft:k=2:ft_steps=2:ft_learning_rate=0.05", None, 0.05, None),
        ("pflmf+ft:rank=2:ft_steps=2:ft_names=*.bias", ("head.bias", "hidden.bias"), 0.2, None),
        ("local+ft:ft_steps=3", None, 0.1, LocalWork(steps=2, batch_size=2, sgd=Sgd(momentum=0.5))),
    ],
)
def test_fine_tuning_starts_at_the_served_model_and_moves_the_chosen_names(text, names, rate, work):
    run = Reference(text, work)
    base = Reference(text.replace("+ft", "").split(":ft")[0], work)
    index, ids = run.state.round, torch.arange(11)
    phase = run.algorithm.personal[-1]
    sgd = run.setting.work.sgd
    given = oracle_clients(run.data, "all")  # nothing more is chosen: validation rows train
    (_, broadcast, served), *_ = base.simulation.serve(base.server, ids, index)
    (_, _, tuned), *_ = run.simulation.serve(run.server, ids, index)
    for i in range(11):
        start = arrays(base.algorithm.model(broadcast, take(served, i)).params)
        rows, _ = step_rows(run.data, phase, 0, i, round=index, seed=run.seed)
        x, y = given[i]
        wanted = finetune(
            x,
            y,
            start,
            models.gradient,
            [part.numpy() for part in rows],
            learning_rate=rate,
            names=names,
            momentum=sgd.momentum,
        )
        close({name: value[i] for name, value in tuned.model.params.items()}, wanted)


def test_fine_tuning_sends_and_stores_nothing():
    run, base = Reference("fedrep+ft:ft_steps=2"), Reference("fedrep")
    list(run.simulation.serve(run.server, torch.arange(11), 4))
    close(run.server.shared, arrays(base.server.shared), 0)
    close(run.clients.personal, arrays(base.clients.personal), 0)
    assert run.state.costs == base.state.costs


@pytest.mark.parametrize("check", [1, 2, 5])
@pytest.mark.parametrize("rate", [0.05, 3.0])  # with the large one losses rise and fall
def test_early_stopping_keeps_the_first_of_the_best_models_on_validation_rows(check, rate):
    run = Reference(
        f"fedrep+ft:ft_steps=5:ft_stop=true:ft_check={check}:ft_learning_rate={rate}",
        LocalWork(steps=3, batch_size=2, sgd=Sgd(momentum=0.5)),
    )
    base = Reference("fedrep", run.setting.work)
    everyone, index = torch.arange(11), run.state.round
    phase = run.algorithm.personal[-1]
    (_, broadcast, mine), *_ = base.simulation.serve(base.server, everyone, index)
    (_, _, tuned), *_ = run.simulation.serve(run.server, everyone, index)
    train, seen = oracle_clients(run.data), oracle_clients(run.data, "validation")
    moved = 0
    for i in range(11):
        start = arrays(base.algorithm.model(broadcast, take(mine, i)).params)
        chunks = [
            [p.numpy() for p in step_rows(run.data, phase, s, i, round=index, seed=run.seed)[0]]
            for s in range(1, len(phase.stages), 2)
        ]
        assert sum(map(len, chunks)) == 5
        x, y = seen[i]
        wanted = finetune_stopping(
            *train[i],
            start,
            models.gradient,
            chunks,
            (lambda model, x=x, y=y: models.loss(model, x, y)) if len(y) else None,
            learning_rate=rate,
            momentum=0.5,
        )
        close({name: value[i] for name, value in tuned.model.params.items()}, wanted)
        moved += not np.array_equal(wanted["head.bias"], start["head.bias"])
    assert 3 <= moved < 11, "some clients stop at the start, and some do not"


def test_a_method_that_stops_early_trains_on_no_validation_row():
    stopped, plain = Reference("fedavg+ft:ft_stop=true"), Reference("fedavg")
    close(stopped.server.params, arrays(plain.server.params), 0)
    (stage,) = {s.rows for s in stopped.algorithm.personal[-1].stages if not s.forward_only}
    assert stage == "train"


def test_fine_tuning_keeps_the_groups_that_were_found():
    tuned, plain = Reference("ifca+ft:k=2"), Reference("ifca:k=2")
    found = [found_groups(r.simulation, r.server, r.state.round) for r in (tuned, plain)]
    assert torch.equal(*found) and len(found[0].unique()) == 2
