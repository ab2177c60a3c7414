"""SCAFFOLD: FedAvg whose local steps are corrected by control variates, against drift.

Objective
    min over x of  1/n sum_i f_i(x), all clients alike

Map
    Alg. 1, l. 10      step      y <- y - eta_l (g_i(y) - c_i + c), c_i and c those of the broadcast
    Alg. 1, l. 12 I    measure   c_i+ = g_i(x), one more pass at the broadcast model
    Alg. 1, l. 12 II   end       c_i+ = c_i - c + (x - y) / (K eta_l)
    Alg. 1, l. 16-17   combine   x <- x + eta_g mean_S (y - x),  c <- c + 1/n sum_S (c_i+ - c_i)

Identity
    With plain SGD x - y = eta_l sum_k (g_i(y_k) - c_i + c), so option II is the mean of the
    gradients of the steps that were really taken: c_i+ = 1/K sum_k g_i(y_k). So it is computed.

Deviations
    The mean of gradients also stands where the quotient is none: with momentum (of the corrected
    gradient), weight decay, step sizes that change. Buffers (running statistics) are averaged and
    know no controls.

References
----------
    [1] Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging
        for Federated Learning. ICML 2020. arXiv:1910.06378v4.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Params, Record, map_tensors
from handspan.core.task import value_and_grad
from handspan.numerics.averaging import copies
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class ScaffoldConfig(MethodConfig):
    """Settings of SCAFFOLD."""

    server_learning_rate: float = 1.0
    """Step size eta_g of the server; 1 in the paper's experiments."""
    option: str = "II"
    """New control: ``II`` from the local steps (the experiments), ``I`` by a pass at x."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.at_least("server_learning_rate", 0)
        self.one_of("option", ("I", "II"))


class ScaffoldServer(Record):
    """The model x and the control c, the mean of all clients' c_i."""

    params: Params
    buffers: Params
    control: Params


class ScaffoldBroadcast(Record):
    """Model, control and step size."""

    params: Params
    buffers: Params
    control: Params
    learning_rate: Tensor


class ScaffoldClient(Record):
    """The client's control c_i."""

    control: Params


class ScaffoldWorking(Record):
    """The model y in training, the control, and the gradients of which the next one is the mean."""

    params: Params
    buffers: Params
    velocity: Params
    control: Params
    total: Params  # sum of gradients
    count: Tensor  # () how many


class ScaffoldUpload(Record):
    """What the client changed: twice the numbers of FedAvg."""

    params_delta: Params
    control_delta: Params
    buffers: Params


def build(setting: Setting, config: ScaffoldConfig) -> Algorithm:
    """Compose the algorithm."""
    task, work = setting.model, setting.work
    assert isinstance(work, LocalWork)
    uses_steps = config.option == "II"

    def init_server(key: Tensor, population: Population) -> ScaffoldServer:
        params, buffers = task.init(key)
        return ScaffoldServer(params=params, buffers=buffers, control=_zeros(params))

    def init_client(key: Tensor, data: ClientData) -> ScaffoldClient:
        return ScaffoldClient(control=copies(_zeros(task.init(key)[0]), len(data.num)))

    def broadcast(server: ScaffoldServer, round: Round) -> ScaffoldBroadcast:
        return ScaffoldBroadcast(
            params=server.params,
            buffers=server.buffers,
            control=server.control,
            learning_rate=work.rate(round, setting.rounds, setting.scalar),
        )

    def begin(b: ScaffoldBroadcast, client: ScaffoldClient, data: ClientData) -> ScaffoldWorking:
        return ScaffoldWorking(
            params=b.params,
            buffers=b.buffers,
            velocity=work.sgd.start(b.params),
            control=client.control,
            total=_zeros(b.params),
            count=torch.zeros_like(b.learning_rate),
        )

    def step(b: ScaffoldBroadcast, k: ScaffoldWorking, batch: Batch) -> ScaffoldWorking:
        _, buffers, gradient = value_and_grad(
            lambda params: task.loss(params, k.buffers, batch), k.params
        )
        corrected = {n: g - k.control[n] + b.control[n] for n, g in gradient.items()}
        params, velocity = work.sgd.step(k.params, corrected, k.velocity, b.learning_rate)
        k = dataclasses.replace(k, params=params, buffers=buffers, velocity=velocity)
        return _counted(k, gradient) if uses_steps else k

    def measure(b: ScaffoldBroadcast, k: ScaffoldWorking, batch: Batch) -> ScaffoldWorking:
        _, _, gradient = value_and_grad(lambda x: task.loss(x, b.buffers, batch), b.params)
        return _counted(k, gradient)

    def end(
        b: ScaffoldBroadcast, k: ScaffoldWorking, data: ClientData
    ) -> tuple[ScaffoldClient, ScaffoldUpload]:
        count = k.count.clamp(min=1)  # a client without rows keeps its control
        new = {n: torch.where(k.count > 0, s / count, k.control[n]) for n, s in k.total.items()}
        return ScaffoldClient(control=new), ScaffoldUpload(
            params_delta={n: p - b.params[n] for n, p in k.params.items()},
            control_delta={n: c - k.control[n] for n, c in new.items()},
            buffers=k.buffers,
        )

    def combine(server: ScaffoldServer, reduction: Reduced, round: Round) -> ScaffoldServer:
        mean, total = reduction.mean(), reduction.total
        rate, share = config.server_learning_rate, 1 / setting.num_clients
        return ScaffoldServer(
            params={n: p + (rate * mean.params_delta[n]).to(p) for n, p in server.params.items()},
            buffers=map_tensors(lambda old, new: new.to(old), server.buffers, mean.buffers),
            control={
                n: c + (share * total.control_delta[n]).to(c) for n, c in server.control.items()
            },
        )

    stages = [Stage(step=step, **work.whole())]
    if not uses_steps:
        stages.append(Stage(step=measure, steps=1))
    return Algorithm(
        name="scaffold",
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
                infers="gradients of the whole model, twice: inversion attacks apply; c_i",
            ),
        ),
        model=lambda b, client: Model(params=b.params, buffers=b.buffers),
        deploy=broadcast,
        deploy_unbatched=frozenset({"params", "buffers"}),
        shared_model=lambda server: Model(params=server.params, buffers=server.buffers),
    )


def _zeros(params: Params) -> Params:
    return {name: torch.zeros_like(value) for name, value in params.items()}


def _counted(k: ScaffoldWorking, gradient: Params) -> ScaffoldWorking:
    total = {name: s + gradient[name] for name, s in k.total.items()}
    return dataclasses.replace(k, total=total, count=k.count + 1)


METHOD = Method(
    name="scaffold",
    title="SCAFFOLD",
    paper="Karimireddy et al. 2020",
    config=ScaffoldConfig,
    build=build,
    uploads="changes of the model and of the client's control",
    private="the control c_i",
    inferable="rows, by gradient inversion; c_i, by adding up a client's uploads",
    numbers={"train": "2 * d"},
)
