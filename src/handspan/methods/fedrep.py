"""FedRep: a shared representation, learned together, and a private head for each client.

Objective (Eq. 3)
    min over phi of  1/n sum_i  min over h_i of  f_i(h_i o phi)

Map
    Alg. 1, client, head loop             head_step   tau_h steps on the head, body fixed
    Alg. 1, client, representation loop   body_step   tau_phi steps on the body, NEW head fixed
    Alg. 1, server                        combine     unweighted mean over the cohort

Deviations
    Steps as well as epochs. By default N local steps are split 2:1 between head and body, so that
    all methods of a table take as many gradients. Buffers (running statistics) go with the body.

References
----------
    [1] Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized
        Federated Learning. ICML 2021. arXiv:2102.07078v3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Params, Record
from handspan.core.task import value_and_grad
from handspan.numerics.averaging import copies, parts
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class FedRepConfig(MethodConfig):
    """Settings of FedRep."""

    personal_steps: int | None = None
    """Head steps tau_h of a round; two thirds of the local steps by default."""
    shared_steps: int | None = None
    """Representation steps tau_phi of a round; one third of the local steps by default."""
    head_learning_rate: float | None = None
    """Step size of the head; that of the run by default."""
    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (the paper's 1/(rn)) or ``examples``."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        if self.weights not in WEIGHTS:
            raise HandspanError(f"weights must be uniform or examples, not {self.weights!r}")
        self.at_least("personal_steps", 1)
        self.at_least("shared_steps", 1)
        self.at_least("head_learning_rate", 0)


class FedRepServer(Record):
    """The shared representation phi."""

    shared: Params
    buffers: Params


class FedRepBroadcast(Record):
    """The representation and the round's step sizes."""

    shared: Params
    buffers: Params
    learning_rate: Tensor
    head_learning_rate: Tensor


class FedRepClient(Record):
    """The client's head h_i."""

    head: Params


class FedRepWorking(Record):
    """Head and body in local training, with the momentum of the block that moves."""

    head: Params
    shared: Params
    buffers: Params
    head_velocity: Params
    shared_velocity: Params


class FedRepUpload(Record):
    """The locally trained representation."""

    shared: Params
    buffers: Params


def build(setting: Setting, config: FedRepConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    work: LocalWork = setting.work
    sgd = work.sgd
    personal, shared = work.split(config.personal_steps, config.shared_steps)

    def init_server(key: Tensor, population: Population) -> FedRepServer:
        params, buffers = task.init(key)
        return FedRepServer(shared=parts(params, task.head)[1], buffers=buffers)

    def init_client(key: Tensor, data: ClientData) -> FedRepClient:
        head = parts(task.init(key)[0], task.head)[0]
        return FedRepClient(head=copies(head, len(data.num)))

    def broadcast(server: FedRepServer, round: Round) -> FedRepBroadcast:
        return FedRepBroadcast(
            shared=server.shared,
            buffers=server.buffers,
            learning_rate=work.rate(round, setting.rounds, setting.scalar),
            head_learning_rate=work.rate(
                round, setting.rounds, setting.scalar, config.head_learning_rate
            ),
        )

    def begin(b: FedRepBroadcast, client: FedRepClient, data: ClientData) -> FedRepWorking:
        return FedRepWorking(
            head=client.head,
            shared=b.shared,
            buffers=b.buffers,
            head_velocity=sgd.start(client.head),
            shared_velocity=sgd.start(b.shared),
        )

    def head_step(b: FedRepBroadcast, k: FedRepWorking, batch: Batch) -> FedRepWorking:
        _, _, gradient = value_and_grad(
            lambda head: task.loss({**k.shared, **head}, k.buffers, batch), k.head
        )
        head, velocity = sgd.step(k.head, gradient, k.head_velocity, b.head_learning_rate)
        return FedRepWorking(
            head=head,
            shared=k.shared,
            buffers=k.buffers,
            head_velocity=velocity,
            shared_velocity=k.shared_velocity,
        )

    def body_step(b: FedRepBroadcast, k: FedRepWorking, batch: Batch) -> FedRepWorking:
        _, buffers, gradient = value_and_grad(
            lambda body: task.loss({**body, **k.head}, k.buffers, batch), k.shared
        )
        body, velocity = sgd.step(k.shared, gradient, k.shared_velocity, b.learning_rate)
        return FedRepWorking(
            head=k.head,
            shared=body,
            buffers=buffers,
            head_velocity=k.head_velocity,
            shared_velocity=velocity,
        )

    def end(
        b: FedRepBroadcast, k: FedRepWorking, data: ClientData
    ) -> tuple[FedRepClient, FedRepUpload]:
        return FedRepClient(head=k.head), FedRepUpload(shared=k.shared, buffers=k.buffers)

    def end_adapt(
        b: FedRepBroadcast, k: FedRepWorking, data: ClientData
    ) -> tuple[FedRepClient, Any]:
        return FedRepClient(head=k.head), None

    def combine(server: FedRepServer, reduction: Reduced, round: Round) -> FedRepServer:
        mean = reduction.mean(like=FedRepUpload(shared=server.shared, buffers=server.buffers))
        return FedRepServer(shared=mean.shared, buffers=mean.buffers)

    def model(b: FedRepBroadcast, client: FedRepClient) -> Model:
        return Model(params={**b.shared, **client.head}, buffers=b.buffers)

    stages = [Stage(step=head_step, **personal), Stage(step=body_step, **shared)]
    if not task.head:  # nothing personal: FedAvg with uniform weights
        stages = stages[1:]
    elif set(task.head) == set(task.names):  # nothing shared: Local
        stages = stages[:1]
    return Algorithm(
        name="fedrep",
        init_server=init_server,
        init_client=init_client,
        rounds=(
            Phase(
                name="train",
                broadcast=broadcast,
                begin=begin,
                stages=tuple(stages),
                end=end,
                combine=combine,
                weight=WEIGHTS[config.weights],
                infers="gradients of the body: inversion attacks apply, the head is not shown",
            ),
        ),
        adapt=Phase(
            name="adapt",
            broadcast=broadcast,
            begin=begin,
            stages=(Stage(step=head_step, **work.adapting()),),
            end=end_adapt,
        ),
        model=model,
    )


METHOD = Method(
    name="fedrep",
    title="FedRep",
    paper="Collins et al. 2021",
    config=FedRepConfig,
    build=build,
    uploads="the body of the model",
    private="the head",
    inferable="rows, by gradient inversion of the body's difference",
)
