import pytest
import torch

from handspan.core.records import take
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.oracles import models
from handspan.testing.oracles.finetune import finetune
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
        close({name: value[i] for name, value in tuned.params.items()}, wanted)


def test_fine_tuning_sends_and_stores_nothing():
    run, base = Reference("fedrep+ft:ft_steps=2"), Reference("fedrep")
    list(run.simulation.serve(run.server, torch.arange(11), 4))
    close(run.server.shared, arrays(base.server.shared), 0)
    close(run.clients.personal, arrays(base.clients.personal), 0)
    assert run.state.costs == base.state.costs
