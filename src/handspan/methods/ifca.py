"""IFCA: k models; every client trains the one that fits it best, and says which.

Objective
    min over theta_1, ..., theta_k of  1/n sum_i  min_j f_i(theta_j)

Map
    Alg. 1, cluster estimate   measure, choose   j(i) = argmin_j f_i(theta_j) on training rows
    Alg. 1, Option II          step              local SGD from theta_j(i)
    Alg. 1, server             combine           mean inside each cluster; an empty one stays

Deviations
    The cluster estimate uses all training rows of the client, no fresh sample. Losses are rounded
    to 1e-9 and ties go to the lowest index, so that all engines choose alike. Option I (gradient
    averaging) is the case of one step and is not offered apart.

References
----------
    [1] Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning.
        NeurIPS 2020. arXiv:2006.04088v3.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Params, Record, map_tensors, stack
from handspan.core.task import Task
from handspan.numerics.averaging import no_client, sgd_step
from handspan.numerics.clusters import ClusterReduction, mean_by_cluster, sum_by_cluster
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class IfcaConfig(MethodConfig):
    """Settings of IFCA."""

    k: int = 10
    """Number of models k."""
    weights: str = "uniform"
    """Weights inside a cluster: ``uniform`` (the paper) or ``examples``."""
    upload: str = "one_hot"
    """``one_hot``: the cluster and one model, d + k numbers; ``sum``: k models, sum-only."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        if self.k < 1:
            raise HandspanError(f"k must be at least 1, not {self.k}")
        if self.weights not in WEIGHTS:
            raise HandspanError(f"weights must be uniform or examples, not {self.weights!r}")
        if self.upload not in ("one_hot", "sum"):
            raise HandspanError(f"upload must be one_hot or sum, not {self.upload!r}")


class IfcaServer(Record):
    """k models, on a leading axis."""

    models: Model


class IfcaBroadcast(Record):
    """All models, and the step size."""

    models: Model
    learning_rate: Tensor


class IfcaWorking(Record):
    """Losses of the k models, the choice, and the chosen model in training."""

    losses: Tensor  # (k,)
    choice: Tensor  # (k,) one-hot
    params: Params
    buffers: Params
    velocity: Params


class IfcaUpload(Record):
    """Which cluster, and the trained model."""

    choice: Tensor  # (k,) one-hot
    model: Model


class IfcaSumUpload(Record):
    """On the wire, ``upload=sum``: zeros but in the own cluster, and its count, to be summed."""

    choice: Tensor  # (k,) one-hot
    models: Model  # leading axis: clusters


class IfcaChoice(Record):
    """The estimated cluster of a client that is served; never stored."""

    choice: Tensor


def build(setting: Setting, config: IfcaConfig) -> Algorithm:
    """Compose the algorithm."""
    task: Task = setting.model
    work: LocalWork = setting.work
    if config.k > setting.num_clients:
        raise HandspanError(f"k {config.k} exceeds the {setting.num_clients} clients: lower k")
    train_step = sgd_step(task, work.sgd)

    def init_server(key: Tensor, population: Population) -> IfcaServer:
        starts = [task.init(keys.fold(key, "cluster", j)) for j in range(config.k)]
        starts[0] = task.init(key)  # k = 1 is FedAvg, from the same start
        return IfcaServer(models=stack([Model(params=p, buffers=b) for p, b in starts]))

    def broadcast(server: IfcaServer, round: Round) -> IfcaBroadcast:
        return IfcaBroadcast(
            models=server.models,
            learning_rate=work.rate(round, setting.rounds, setting.scalar),
        )

    def begin(b: IfcaBroadcast, client: Any, data: ClientData) -> IfcaWorking:
        first = map_tensors(lambda models: models[0], b.models)
        losses = torch.zeros(config.k, dtype=setting.dtype, device=setting.device)
        return IfcaWorking(
            losses=losses,
            choice=torch.zeros_like(losses),
            params=first.params,
            buffers=first.buffers,
            velocity=work.sgd.start(first.params),
        )

    def measure(b: IfcaBroadcast, k: IfcaWorking, batch: Batch) -> IfcaWorking:
        losses: list[Tensor] = []
        for j in range(config.k):
            model: Model = map_tensors(lambda models, j=j: models[j], b.models)
            outputs = task.predict(model.params, model.buffers, batch.x, batch.side)
            assert batch.y is not None
            row_losses = task.row_loss(outputs, batch.y)
            losses.append((row_losses * batch.weight).sum() / batch.weight.sum())
        return dataclasses.replace(k, losses=torch.stack(losses))

    def choose(b: IfcaBroadcast, k: IfcaWorking) -> IfcaWorking:
        rounded = torch.round(k.losses.to(torch.float64) * 1e9)
        best = torch.argmin(rounded)  # the first of equals
        choice = (torch.arange(config.k, device=best.device) == best).to(k.losses)
        chosen: Model = map_tensors(
            lambda models: models.index_select(0, best.unsqueeze(0)).squeeze(0), b.models
        )
        return dataclasses.replace(k, choice=choice, params=chosen.params, buffers=chosen.buffers)

    def end(b: IfcaBroadcast, k: IfcaWorking, data: ClientData) -> tuple[Any, IfcaUpload]:
        model = Model(params=k.params, buffers=k.buffers)
        return no_client(b.learning_rate, data), IfcaUpload(choice=k.choice, model=model)

    def step(b: IfcaBroadcast, k: IfcaWorking, batch: Batch) -> IfcaWorking:
        new = train_step(b, k, batch)  # type: ignore[arg-type]
        return dataclasses.replace(k, params=new.params, buffers=new.buffers, velocity=new.velocity)

    def wire(upload: IfcaUpload) -> Record:
        if config.upload == "one_hot":
            return upload
        models: Model = map_tensors(
            lambda tensor: torch.tensordot(upload.choice, tensor, dims=0), upload.model
        )
        return IfcaSumUpload(choice=upload.choice, models=models)

    def combine(server: IfcaServer, reduction: ClusterReduction, round: Round) -> IfcaServer:
        return IfcaServer(models=mean_by_cluster(server.models, reduction))

    def model(b: IfcaBroadcast, client: IfcaChoice) -> Model:
        return map_tensors(lambda models: torch.tensordot(client.choice, models, dims=1), b.models)

    choice_stage = Stage(step=measure, steps=1, finish=choose, forward_only=True, models=config.k)
    unbatched = frozenset({"models"})
    return Algorithm(
        name="ifca",
        init_server=init_server,
        init_client=no_client,
        rounds=(
            Phase(
                name="train",
                broadcast=broadcast,
                begin=begin,
                stages=(choice_stage, Stage(step=step, **work.whole())),
                end=end,
                combine=combine,
                unbatched=unbatched,
                reduce=lambda uploads, weights: sum_by_cluster(
                    uploads.choice, uploads.model, weights
                ),
                wire=wire,
                weight=WEIGHTS[config.weights],
                infers="the client's cluster; gradients",
            ),
        ),
        personal=(
            Phase(
                name="choose",
                broadcast=broadcast,
                begin=begin,
                stages=(choice_stage,),
                end=lambda b, k, data: (IfcaChoice(choice=k.choice), None),
                unbatched=unbatched,
            ),
        ),
        model=model,
        cluster=lambda client: client.choice.argmax(),
    )


METHOD = Method(
    name="ifca",
    title="IFCA",
    paper="Ghosh et al. 2020",
    config=IfcaConfig,
    build=build,
    uploads="the number of its cluster and one model (k models with upload=sum)",
    private="nothing",
    inferable="the client's cluster; rows, by gradient inversion",
    numbers={"train": "d + k"},
)
