"""FedAS: the shared body is aligned with the client's last one, and trusted by its Fisher trace.

Objective
    min over theta, omega_1, ..., omega_n of  sum_i f_i(theta, omega_i), omega_i the private head

Map
    alignment, Eq. (4)         align   theta <- theta - eta_a grad |theta(x) - theta_i_old(x)|^2
    local training             train   SGD on body and head together
    Fisher trace               trace   alpha_i = mean over rows of |grad log p(y|x)|^2, NEW model
    synchronisation, Eq. (5)   end     uploads alpha_i theta_i and alpha_i
                               combine theta = sum_i alpha_i theta_i / sum_i alpha_i

Deviations
    Features are aligned row by row, as the paper's figure shows (the authors' code aligns them to
    class means), by plain SGD. The trace is taken over single rows and does not depend on a batch
    size, and is the mean over rows: the Fisher matrix is an expectation. Traces below 1e-12 count
    as 1e-12, so that traces that are all zero make a plain mean; ``trace_power`` below 1 keeps one
    client from taking all the weight. A client that has not trained yet has no old body and is not
    aligned, nor is a new client, which trains the shared body with a fresh head. The client is
    served body and head as its last training left them. Running statistics go with the body. The
    passes for alignment and trace come on top of the run's local steps.

References
----------
    [1] Yang, Huang, Ye: FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR
        2024, 11986-11995.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Empty, Params, Record, map_tensors
from handspan.core.task import Task, value_and_grad
from handspan.numerics.averaging import Training, copies
from handspan.numerics.carrying import on_field
from handspan.numerics.local_work import LocalWork
from handspan.numerics.partial import BOTH, PartialBroadcast, PersonalPart, SharedPart, Split

_LEAST_TRACE = 1e-12
_ROWS_AT_ONCE = 8  # each needs a gradient of its own at the same time


@dataclass(frozen=True, kw_only=True)
class FedASConfig(MethodConfig):
    """Settings of FedAS."""

    align_epochs: int = 1
    """Passes of the alignment; 0 leaves it out. One in the authors' code."""
    align_learning_rate: float = 0.01
    """Step size of the alignment; that of the authors' code."""
    trace_power: float = 1.0
    """Power of alpha_i in the mean: 1 is the paper, 0 a plain mean."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("align_epochs", "align_learning_rate", "trace_power"):
            self.at_least(name, 0)


class FedASClient(Record):
    """Head omega_i and body theta_i, as the last training left them."""

    own: PersonalPart
    body: SharedPart
    is_trained: Tensor  # () 1 after the first training


class FedASWorking(Record):
    """A model in training, the body it is aligned with, and the trace so far."""

    training: Training
    old: SharedPart
    trace: Tensor  # () sum over rows
    rows: Tensor  # ()


class FedASUpload(Record):
    """The body times its weight alpha_i, and the weight: all that the server needs are sums."""

    body: SharedPart
    trace: Tensor  # ()


def row_traces(task: Task, params: Params, buffers: Params, batch: Batch) -> Tensor:
    """Square norm of the gradient of log p(y|x), for each row alone."""
    assert batch.y is not None

    def trace(x: Tensor, y: Tensor) -> Tensor:
        def loss(params: Params) -> tuple[Tensor, Any]:
            outputs = task.predict(params, buffers, x.unsqueeze(0), batch.side)
            return task.row_loss(outputs, y.unsqueeze(0))[0], {}

        _, _, slope = value_and_grad(loss, params)
        return torch.stack([g.square().sum() for g in slope.values()]).sum()

    return torch.vmap(trace, randomness="error")(batch.x, batch.y)


def build(setting: Setting, config: FedASConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    work: LocalWork = setting.work
    if not task.head or set(task.head) == set(task.names):
        raise HandspanError("fedas needs a model with a last layer and layers below: name its head")
    split = Split(setting=setting, personal=frozenset(task.head))

    def init_client(key: Tensor, data: ClientData) -> FedASClient:
        (params, buffers), count = task.init(key), len(data.num)
        own, body = split.divided(copies(params, count), copies(buffers, count))
        return FedASClient(own=own, body=body, is_trained=setting.scalar.repeat(count))

    def begin(b: PartialBroadcast, client: FedASClient, data: ClientData) -> FedASWorking:
        sent = SharedPart(shared=b.shared, buffers=b.buffers)
        return FedASWorking(
            training=split.begin(b, client.own, data),
            old=map_tensors(
                lambda own, new: torch.where(client.is_trained > 0, own, new), client.body, sent
            ),
            trace=torch.zeros_like(setting.scalar),
            rows=torch.zeros_like(setting.scalar),
        )

    def align(b: PartialBroadcast, k: FedASWorking, batch: Batch) -> FedASWorking:
        own, body = split.divided(k.training.params, k.training.buffers)

        def features(body: Any) -> Tensor:
            model = split.model(body, own)
            return task.features(model.params, model.buffers, batch.x, batch.side)

        target = features(k.old)

        def distance(shared: Params) -> tuple[Tensor, Any]:
            moved = features(SharedPart(shared=shared, buffers=body.buffers))
            of_row = (moved - target).square().flatten(1).mean(1)
            return (of_row * batch.weight).sum() / batch.weight.sum(), {}

        _, _, slope = value_and_grad(distance, body.shared)  # Eq. (4)
        rate = config.align_learning_rate
        moved = {name: value - rate * slope[name] for name, value in body.shared.items()}
        training = dataclasses.replace(k.training, params={**moved, **own.personal})
        return dataclasses.replace(k, training=training)

    def trace(b: PartialBroadcast, k: FedASWorking, batch: Batch) -> FedASWorking:
        of_row = row_traces(task, k.training.params, k.training.buffers, batch)
        total = k.trace + (of_row * batch.weight).sum()
        return dataclasses.replace(k, trace=total, rows=k.rows + batch.weight.sum())

    def trained(b: PartialBroadcast, k: FedASWorking, data: ClientData) -> FedASClient:
        own, body = split.end(b, k.training, data)
        return FedASClient(own=own, body=body, is_trained=torch.ones_like(setting.scalar))

    def end(
        b: PartialBroadcast, k: FedASWorking, data: ClientData
    ) -> tuple[FedASClient, FedASUpload]:
        client = trained(b, k, data)
        alpha = (k.trace / k.rows).clamp(min=_LEAST_TRACE) ** config.trace_power
        weighted: SharedPart = map_tensors(lambda t: alpha * t, client.body)
        return client, FedASUpload(body=weighted, trace=alpha)

    def combine(server: SharedPart, reduction: Reduced, round: Round) -> SharedPart:
        total: FedASUpload = reduction.total
        return map_tensors(
            lambda t, like: (t / total.trace).to(like), total.body, server
        )  # Eq. (5)

    def model(b: Empty, client: FedASClient) -> Model:
        body: Any = client.body
        return split.model(body, client.own)

    step = split.step(*BOTH)
    stages = (
        Stage(step=align, epochs=config.align_epochs, batch_size=work.batch_size),
        on_field(Stage(step=step, **work.whole()), "training"),
        Stage(step=trace, epochs=1, batch_size=_ROWS_AT_ONCE),
    )
    return Algorithm(
        name="fedas",
        init_server=split.init_server,
        init_client=init_client,
        rounds=(
            Phase(
                name="train",
                broadcast=split.broadcast,
                begin=begin,
                stages=stages if config.align_epochs else stages[1:],
                end=end,
                combine=combine,
                infers="how well the client is fitted; gradients of the body: inversion attacks",
            ),
        ),
        adapt=Phase(
            name="adapt",
            broadcast=split.broadcast,
            begin=begin,
            stages=(on_field(Stage(step=step, **work.adapting()), "training"),),
            end=lambda b, k, data: (trained(b, k, data), None),
        ),
        model=model,
        deploy=lambda server, round: Empty(),
    )


METHOD = Method(
    name="fedas",
    title="FedAS",
    paper="Yang et al. 2024",
    config=FedASConfig,
    build=build,
    uploads="the body of the model times its Fisher trace, and the trace",
    private="the head, and the body of its last training",
    inferable="how well the client is fitted; rows, by gradient inversion of the body's difference",
    numbers={"train": "b + 1"},
)
