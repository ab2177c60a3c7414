"""+FT: after the last aggregation every client tunes the model it is given, on its own rows.

It composes with every method: the tuned model is what is scored and served, nothing is uploaded
and no state changes. With early stopping a client keeps the step at which its validation loss was
least, the start included.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Model, Phase, Stage
from handspan.core.data import Batch, ClientData
from handspan.core.errors import HandspanError
from handspan.core.method import Setting
from handspan.core.records import Empty, Params, Record, map_tensors
from handspan.core.task import Task, value_and_grad
from handspan.numerics.averaging import chosen_names, parts
from handspan.numerics.carrying import Served, on_field, rounded, serve
from handspan.numerics.local_work import LocalWork

_VALIDATION_BATCH = 512


class Tuning(Record):
    """A model in fine-tuning: the part that moves, and the rest."""

    moving: Params
    fixed: Params
    buffers: Params
    velocity: Params
    learning_rate: Tensor
    group: Tensor | None


class StoppedTuning(Record):
    """A model in fine-tuning, and the best one so far by the loss on validation rows."""

    tuning: Tuning
    best: Tuning
    least: Tensor  # () float64, loss of the best
    total: Tensor  # () float64, loss of the rows seen in this check
    weight: Tensor  # () float64, those rows


def with_fine_tuning(
    algorithm: Algorithm,
    setting: Setting,
    *,
    steps: int = 20,
    learning_rate: float | None = None,
    names: str = "all",
    stop: bool = False,
    check: int = 5,
) -> Algorithm:
    """Return the method with fine-tuned personal models.

    Parameters
    ----------
    steps
        SGD steps on the client's training rows, with the run's batch size and momentum.
    learning_rate
        Step size, whatever the run's schedule; the run's first one by default.
    names
        What is tuned: ``all``, ``head``, or a pattern of parameter names.
    stop, check
        Whether to keep the best step by the validation loss, and how many steps to take between
        two looks at it. Clients without validation rows take all steps.
    """
    if algorithm.model is None or algorithm.predict is not None:
        raise HandspanError(f"{algorithm.name} serves no single model that +ft could tune")
    task = setting.model
    work: LocalWork = setting.work
    sgd = work.sgd
    chosen = chosen_names(task, names, "ft_names")
    rate = setting.scalar + (work.learning_rate if learning_rate is None else learning_rate)
    deploy, unbatched, per_client = algorithm.serving

    def begin(b: Any, client: Any, data: ClientData) -> Tuning:
        served = serve(algorithm, b, client)
        moving, fixed = parts(served.model.params, chosen)
        return Tuning(
            moving=moving,
            fixed=fixed,
            buffers=served.model.buffers,
            velocity=sgd.start(moving),
            learning_rate=rate,
            group=served.group,
        )

    def step(b: Any, k: Tuning, batch: Batch) -> Tuning:
        _, buffers, gradient = value_and_grad(
            lambda moving: task.loss({**k.fixed, **moving}, k.buffers, batch), k.moving
        )
        moving, velocity = sgd.step(k.moving, gradient, k.velocity, k.learning_rate)
        return dataclasses.replace(k, moving=moving, buffers=buffers, velocity=velocity)

    def end(b: Any, k: Tuning, data: ClientData) -> tuple[Served, None]:
        model = Model(params={**k.moving, **k.fixed}, buffers=k.buffers)
        return Served(model=model, group=k.group), None

    stage = Stage(step=step, steps=steps, batch_size=work.batch_size, rows=setting.final_rows)
    tuning = Phase(
        name="fine_tune",
        broadcast=deploy,
        begin=begin,
        stages=(stage,),
        end=end,
        unbatched=unbatched,
        per_client=per_client,
    )
    if stop:
        tuning = _stopped(tuning, task, setting, check)
    return dataclasses.replace(
        algorithm,
        name=f"{algorithm.name}+ft",
        personal=(*algorithm.personal, tuning),
        model=lambda b, client: client.model,
        cluster=None if algorithm.cluster is None else lambda client: client.group,
        deploy=lambda server, round: Empty(),
        deploy_unbatched=frozenset(),
        deploy_per_client=frozenset(),
    )


def _stopped(phase: Phase, task: Task, setting: Setting, check: int) -> Phase:
    """Return the phase with a look at the validation rows every few steps."""
    (stage,) = phase.stages
    assert stage.steps is not None

    def begin(b: Any, client: Any, data: ClientData) -> StoppedTuning:
        start = phase.begin(b, client, data)
        zero = torch.zeros((), dtype=torch.float64, device=setting.device)
        infinity = torch.full_like(zero, float("inf"))
        return StoppedTuning(tuning=start, best=start, least=infinity, total=zero, weight=zero)

    def measure(b: Any, k: StoppedTuning, batch: Batch) -> StoppedTuning:
        assert batch.y is not None
        params = {**k.tuning.moving, **k.tuning.fixed}
        outputs = task.predict(params, k.tuning.buffers, batch.x, batch.side)
        losses = (task.row_loss(outputs, batch.y) * batch.weight).double()
        return dataclasses.replace(
            k, total=k.total + losses.sum(), weight=k.weight + batch.weight.double().sum()
        )

    def compare(b: Any, k: StoppedTuning) -> StoppedTuning:
        loss = rounded(k.total / k.weight.clamp_min(1))
        is_better = (loss < k.least) | (k.weight == 0)  # where nothing is known, go on
        zero = torch.zeros_like(k.total)
        return StoppedTuning(
            tuning=k.tuning,
            best=map_tensors(lambda new, old: torch.where(is_better, new, old), k.tuning, k.best),
            least=torch.where(loss < k.least, loss, k.least),
            total=zero,
            weight=zero,
        )

    look = Stage(
        step=measure,
        finish=compare,
        rows="validation",
        batch_size=_VALIDATION_BATCH,
        epochs=1,
        forward_only=True,
    )
    stages = [look]
    train = on_field(stage, "tuning")
    for done in range(0, stage.steps, check):
        stages += [dataclasses.replace(train, steps=min(check, stage.steps - done)), look]
    return dataclasses.replace(
        phase,
        begin=begin,
        stages=tuple(stages),
        end=lambda b, k, data: phase.end(b, k.best, data),
    )
