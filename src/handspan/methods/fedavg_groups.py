"""FedAvg inside the planted groups: an oracle, told what the others must find out.

Objective
    min over theta_1, ..., theta_G of  sum_i p_i f_i(theta_g(i)), g(i) known

Map
    step      local SGD from the group's model
    combine   mean inside each group, weighted by rows; a group nobody of which came keeps its model

Deviations
    Not a method that anyone could deploy: the groups are those the partition planted. All group
    models go down to every client, so its bytes down are an upper bound.

References
----------
    McMahan et al. 2017 (FedAvg), run once for each group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Stage
from handspan.core.data import ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Record, map_tensors, stack
from handspan.numerics.averaging import Training, sgd_step
from handspan.numerics.clusters import ClusterReduction, mean_by_cluster, sum_by_cluster
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class FedAvgGroupsConfig(MethodConfig):
    """Settings of the oracle."""

    weights: str = "examples"
    """Weights inside a group: ``examples`` or ``uniform``."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        if self.weights not in WEIGHTS:
            raise HandspanError(f"weights must be examples or uniform, not {self.weights!r}")


class GroupsServer(Record):
    """One model for each group."""

    models: Model


class GroupsBroadcast(Record):
    """All models, and the step size."""

    models: Model
    learning_rate: Tensor


class GroupsClient(Record):
    """The client's true group, one-hot over the groups."""

    group: Tensor


class GroupsUpload(Record):
    """The group, and the trained model."""

    choice: Tensor
    model: Model


def build(setting: Setting, config: FedAvgGroupsConfig) -> Algorithm:
    """Compose the oracle."""
    task = setting.model
    work: LocalWork = setting.work
    num_groups = setting.num_groups
    if not num_groups:
        raise HandspanError(
            "fedavg_groups needs planted groups, and this partition has none: "
            "use a partition such as permuted:5"
        )

    def init_server(key: Tensor, population: Population) -> GroupsServer:
        starts = [task.init(keys.fold(key, "cluster", j)) for j in range(num_groups)]
        starts[0] = task.init(key)  # one group is FedAvg, from the same start
        return GroupsServer(models=stack([Model(params=p, buffers=b) for p, b in starts]))

    def init_client(key: Tensor, data: ClientData) -> GroupsClient:
        assert data.group is not None
        one_hot = data.group.unsqueeze(1) == torch.arange(num_groups)
        return GroupsClient(group=one_hot.to(setting.scalar))

    def broadcast(server: GroupsServer, round: Round) -> GroupsBroadcast:
        return GroupsBroadcast(
            models=server.models,
            learning_rate=work.rate(round, setting.rounds, setting.scalar),
        )

    def model(b: GroupsBroadcast, client: GroupsClient) -> Model:
        return map_tensors(lambda models: torch.tensordot(client.group, models, dims=1), b.models)

    def begin(b: GroupsBroadcast, client: GroupsClient, data: ClientData) -> GroupsWorking:
        own = model(b, client)
        return GroupsWorking(
            training=Training(
                params=own.params, buffers=own.buffers, velocity=work.sgd.start(own.params)
            ),
            group=client.group,
        )

    step_model = sgd_step(task, work.sgd)

    def step(b: GroupsBroadcast, k: GroupsWorking, batch: Any) -> GroupsWorking:
        return GroupsWorking(training=step_model(b, k.training, batch), group=k.group)

    def end(
        b: GroupsBroadcast, k: GroupsWorking, data: ClientData
    ) -> tuple[GroupsClient, GroupsUpload]:
        own = Model(params=k.training.params, buffers=k.training.buffers)
        return GroupsClient(group=k.group), GroupsUpload(choice=k.group, model=own)

    def combine(server: GroupsServer, reduction: ClusterReduction, round: Round) -> GroupsServer:
        return GroupsServer(models=mean_by_cluster(server.models, reduction))

    return Algorithm(
        name="fedavg_groups",
        init_server=init_server,
        init_client=init_client,
        rounds=(
            Phase(
                name="train",
                broadcast=broadcast,
                begin=begin,
                stages=(Stage(step=step, **work.whole()),),
                end=end,
                combine=combine,
                unbatched=frozenset({"models"}),
                reduce=lambda uploads, weights: sum_by_cluster(
                    uploads.choice, uploads.model, weights
                ),
                weight=WEIGHTS[config.weights],
                infers="the client's group; gradients",
            ),
        ),
        model=model,
    )


class GroupsWorking(Record):
    """The group's model in local training."""

    training: Training
    group: Tensor


METHOD = Method(
    name="fedavg_groups",
    title="FedAvg in true groups (oracle)",
    paper="an oracle: FedAvg run once for each planted group",
    config=FedAvgGroupsConfig,
    build=build,
    uploads="the group and one model",
    private="the group",
    inferable="the group is told; rows, by gradient inversion",
    numbers={"train": "d + groups"},
    needs_groups=True,
)
