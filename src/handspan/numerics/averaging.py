"""FedAvg's phase and what else trains a whole model: the plainest building blocks.

Shared by FedAvg, by its relatives with another local step or another personal model, by PerFedSI
and by the oracle of true groups.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Setting
from handspan.core.records import Empty, Params, Record
from handspan.core.task import Task, value_and_grad
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd, pulled

_CACHED = 1 << 20  # numbers


class ModelState(Record):
    """A whole model."""

    params: Params
    buffers: Params


class ModelBroadcast(Record):
    """A whole model and the learning rate of the round."""

    params: Params
    buffers: Params
    learning_rate: Tensor


class Training(Record):
    """A model in local training."""

    params: Params
    buffers: Params
    velocity: Params


def sgd_step(
    task: Task, sgd: Sgd, prox_weight: float = 0.0
) -> Callable[[Any, Training, Batch], Training]:
    """One step of SGD on all parameters of a model; B has ``learning_rate``.

    With a ``prox_weight`` the objective is f + prox_weight/2 |params - centre|^2, the centre being
    the broadcast model ``params`` as it came.
    """

    def step(broadcast: Any, working: Training, batch: Batch) -> Training:
        _, buffers, gradient = value_and_grad(
            lambda params: task.loss(params, working.buffers, batch), working.params
        )
        if prox_weight:
            gradient = pulled(gradient, working.params, broadcast.params, prox_weight)
        params, velocity = sgd.step(
            working.params, gradient, working.velocity, broadcast.learning_rate
        )
        return Training(params=params, buffers=buffers, velocity=velocity)

    return step


def begin_training(sgd: Sgd) -> Callable[[Any, Any, Any], Training]:
    """Start from the broadcast model."""

    def begin(broadcast: Any, client: Any, data: Any) -> Training:
        return Training(
            params=broadcast.params,
            buffers=broadcast.buffers,
            velocity=sgd.start(broadcast.params),
        )

    return begin


def end_training(broadcast: Any, working: Training, data: Any) -> tuple[Any, ModelState]:
    """Upload the whole model, keep nothing."""
    return Empty(), ModelState(params=working.params, buffers=working.buffers)


def averaged(server: Any, reduction: Reduced, round: Any) -> ModelState:
    """Weighted mean of the uploaded models."""
    mean = reduction.mean(like=ModelState(params=server.params, buffers=server.buffers))
    return ModelState(params=mean.params, buffers=mean.buffers)


def shared_algorithm(
    name: str,
    setting: Setting,
    stages: tuple[Stage, ...],
    *,
    weights: str,
    infers: str = "gradients of the whole model: inversion attacks apply",
) -> Algorithm:
    """Compose a method whose state is one shared model, averaged as in FedAvg.

    Parameters
    ----------
    name, setting
        Of the method, and of the run.
    stages
        Local work on a ``Training`` that starts from the broadcast model.
    weights
        Of the mean: ``examples`` or ``uniform``.
    infers
        As in ``Phase``.
    """
    task, work = setting.model, setting.work
    assert isinstance(work, LocalWork)

    def init_server(key: Tensor, population: Population) -> ModelState:
        params, buffers = task.init(key)
        return ModelState(params=params, buffers=buffers)

    def broadcast(server: ModelState, round: Round) -> ModelBroadcast:
        return ModelBroadcast(
            params=server.params,
            buffers=server.buffers,
            learning_rate=work.rate(round, setting.rounds, setting.scalar),
        )

    return Algorithm(
        name=name,
        init_server=init_server,
        init_client=no_client,
        rounds=(
            Phase(
                name="train",
                broadcast=broadcast,
                begin=begin_training(work.sgd),
                stages=stages,
                end=end_training,
                combine=averaged,
                weight=WEIGHTS[weights],
                infers=infers,
            ),
        ),
        model=lambda b, client: Model(params=b.params, buffers=b.buffers),
        deploy=broadcast,
        deploy_unbatched=frozenset({"params", "buffers"}),
        shared_model=lambda server: Model(params=server.params, buffers=server.buffers),
    )


def no_client(key: Tensor, data: Any) -> Empty:
    """Private records of methods that keep nothing."""
    return Empty()


def copies(params: Params, count: int) -> Params:
    """Give the same parameters to each of ``count`` clients."""
    return {k: p.unsqueeze(0).expand(count, *p.shape).clone() for k, p in params.items()}


def parts(params: Params, names: tuple[str, ...] | frozenset[str]) -> tuple[Params, Params]:
    """Split parameters into the named ones and the rest."""
    chosen = {k: p for k, p in params.items() if k in names}
    return chosen, {k: p for k, p in params.items() if k not in names}


def chosen_names(task: Task, which: str, setting: str) -> tuple[str, ...]:
    """Names of the parameters that a setting means: ``all``, ``head``, patterns joined by ``+``."""
    found: set[str] = set()
    for pattern in which.split("+"):
        names = {n for n in task.names if pattern == "all" or fnmatch(n, pattern)}
        names = set(task.head) if pattern == "head" else names
        if not names and pattern != "head":
            raise HandspanError(
                f"{setting}={which!r} matches no parameter; there are {', '.join(task.names)}"
            )
        found |= names
    return tuple(name for name in task.names if name in found)


def as_float(value: float, like: Params) -> Tensor:
    """Return a number as a scalar in the type of the parameters."""
    return torch.tensor(value).to(next(iter(like.values())))


def moved_by_mean(params: Params, total: Params, weight: Tensor) -> Params:
    """Return ``params + total / weight``, a few rows at a time: those stay in the cache."""
    result: Params = {}
    for name, rows in params.items():
        new, some = torch.empty_like(rows), max(1, _CACHED // rows[0].numel())
        pieces = zip(new.split(some), rows.split(some), total[name].split(some), strict=True)
        for target, old, step in pieces:
            torch.add(old, (step / weight).to(old), out=target)
        result[name] = new
    return result
