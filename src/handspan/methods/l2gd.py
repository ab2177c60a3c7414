"""L2GD: every client has its own model; a common coin says whether all train or all move together.

Objective
    min over x_1, ..., x_n of  1/n sum_i f_i(x_i) + lambda/(2n) sum_i |x_i - xbar|^2

Map
    Alg. 1, coin      is_pull          xi = 1 with probability p: ONE coin for all clients
    Alg. 1, xi = 0    local            x_i <- x_i - eta g_i(x_i),  eta = alpha / (n (1 - p))
    Alg. 1, xi = 1    receive, again   x_i <- (1 - c) x_i + c xbar,  c = alpha lambda / (n p)
    Sec. 4            average          xbar of ALL x_i, sent only when local steps came before

Deviations
    A round is one iteration, and all n clients work in it, as in Algorithm 1: the cohort is not
    used. The step size eta that is set is that of the clients, so that c = eta lambda (1 - p) / p;
    alpha = eta n (1 - p) grows with n. c above 1 would overshoot and is cut to 1, full averaging. A
    local iteration takes the run's local steps, as others do, and the pull stays that of one: with
    tau steps lambda acts like lambda/tau. Clients keep the last xbar, so that a pull after a pull
    sends nothing; the global model is the xbar of the last contact. For a new client, of which the
    paper says nothing: min over x of f(x) + lambda/2 |x - xbar|^2, from xbar. Running statistics
    are averaged and pulled with the weights.

References
----------
    [1] Hanzely, Richtarik: Federated Learning of a Mixture of Global and Local Models.
        arXiv:2002.05516v3, 2020.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from handspan.core.algorithm import Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Empty, Record, map_tensors
from handspan.numerics.averaging import (
    ModelBroadcast,
    ModelState,
    Training,
    averaged,
    begin_training,
    copies,
    sgd_step,
)
from handspan.numerics.local_work import LocalWork

_CURRENT, _TRAINED, _AVERAGED = 0.0, 1.0, 2.0
"""What clients hold of xbar: all of it; local steps have moved on; the new one was not sent yet."""


@dataclass(frozen=True, kw_only=True)
class L2gdConfig(MethodConfig):
    """Settings of L2GD."""

    regularization: float = 1.0
    """Weight lambda of the distance to the mean; 0 is Local."""
    pull_probability: float = 0.5
    """Probability p of a pull towards the mean; the other rounds train."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.at_least("regularization", 0)
        if not 0 < self.pull_probability < 1:
            raise HandspanError(
                f"pull_probability must lie between 0 and 1, not {self.pull_probability}"
            )


class L2gdServer(Record):
    """The mean xbar of the last contact, and what has happened since."""

    mean: ModelState
    contact: Tensor  # ()


class L2gdClient(Record):
    """The client's model x_i, and the last mean it was sent."""

    own: ModelState
    mean: ModelState


class RateBroadcast(Record):
    """The step size of a local iteration."""

    learning_rate: Tensor


class PullBroadcast(Record):
    """How far to move, and a new mean if there is one."""

    mean: ModelState | None
    pull: Tensor  # () c


class L2gdWorking(Record):
    """The client's model in local training, and the mean it keeps."""

    training: Training
    mean: ModelState


def build(setting: Setting, config: L2gdConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    work: LocalWork = setting.work
    p, strength = config.pull_probability, config.regularization
    local_step = sgd_step(task, work.sgd)

    def rate(round: Round) -> Tensor:
        return work.rate(round, setting.rounds, setting.scalar)

    def is_pull(round: Round) -> bool:
        return bool(round.draws[0] < p)

    def init_server(key: Tensor, population: Population) -> L2gdServer:
        params, buffers = task.init(key)
        mean = ModelState(params=params, buffers=buffers)
        return L2gdServer(mean=mean, contact=setting.scalar + _CURRENT)

    def init_client(key: Tensor, data: ClientData) -> L2gdClient:
        (params, buffers), count = task.init(key), len(data.num)
        own = ModelState(params=copies(params, count), buffers=copies(buffers, count))
        return L2gdClient(own=own, mean=own)

    # xi = 0: local steps, nothing is sent.

    def begin_local(b: RateBroadcast, client: L2gdClient, data: ClientData) -> L2gdWorking:
        return L2gdWorking(
            training=begin_training(work.sgd)(client.own, client, data), mean=client.mean
        )

    def step(b: RateBroadcast, k: L2gdWorking, batch: Batch) -> L2gdWorking:
        return dataclasses.replace(k, training=local_step(b, k.training, batch))

    def end_local(b: RateBroadcast, k: L2gdWorking, data: ClientData) -> tuple[L2gdClient, Empty]:
        own = ModelState(params=k.training.params, buffers=k.training.buffers)
        return L2gdClient(own=own, mean=k.mean), Empty()

    # xi = 1 after local steps: all models come up, their mean goes down.

    def renew(server: L2gdServer, reduction: Reduced, round: Round) -> L2gdServer:
        mean = averaged(server.mean, reduction, round)
        return L2gdServer(mean=mean, contact=setting.scalar + _AVERAGED)

    # xi = 1: towards the mean.

    def pulling(server: L2gdServer, round: Round, mean: ModelState | None) -> PullBroadcast:
        pull = (rate(round) * strength * (1 - p) / p).clamp(max=1)
        return PullBroadcast(mean=mean, pull=pull)

    def end_pull(
        b: PullBroadcast, client: L2gdClient, data: ClientData
    ) -> tuple[L2gdClient, Empty]:
        mean = client.mean if b.mean is None else b.mean
        own: ModelState = map_tensors(lambda x, m: (1 - b.pull) * x + b.pull * m, client.own, mean)
        return L2gdClient(own=own, mean=mean), Empty()

    def after(state: float) -> Any:
        """Return the server's step that only notes what has happened."""
        contact = setting.scalar + state
        return lambda server, reduction, round: dataclasses.replace(server, contact=contact)

    def keep(b: Any, client: L2gdClient, data: ClientData) -> L2gdClient:
        return client

    def phase(name: str, begin: Any = keep, **parts: Any) -> Phase:
        return Phase(name=name, begin=begin, computes="all", uploads="all", **parts)

    again = phase(
        "again",
        when=lambda server, round: is_pull(round) and server.contact == _CURRENT,
        broadcast=lambda server, round: pulling(server, round, None),
        end=end_pull,
        combine=after(_CURRENT),
        infers="nothing: nothing is sent",
    )
    local = phase(
        "local",
        when=lambda server, round: not is_pull(round),
        broadcast=lambda server, round: RateBroadcast(learning_rate=rate(round)),
        begin=begin_local,
        stages=(Stage(step=step, **work.whole()),),
        end=end_local,
        combine=after(_TRAINED),
        infers="nothing: nothing is sent",
    )
    average = phase(
        "average",
        when=lambda server, round: is_pull(round) and server.contact == _TRAINED,
        broadcast=lambda server, round: Empty(),
        end=lambda b, client, data: (client, client.own),
        combine=renew,
        infers="the whole personal model, and gradients: inversion attacks apply",
    )
    receive = phase(
        "receive",
        when=lambda server, round: is_pull(round) and server.contact == _AVERAGED,
        broadcast=lambda server, round: pulling(server, round, server.mean),
        end=end_pull,
        combine=after(_CURRENT),
        infers="nothing: nothing is sent",
    )

    # A new client: min over x of f(x) + lambda/2 |x - xbar|^2, from xbar.

    def to_new(server: L2gdServer, round: Round) -> ModelBroadcast:
        mean = server.mean
        return ModelBroadcast(params=mean.params, buffers=mean.buffers, learning_rate=rate(round))

    def end_new(b: ModelBroadcast, k: Training, data: ClientData) -> tuple[L2gdClient, None]:
        own = ModelState(params=k.params, buffers=k.buffers)
        mean = ModelState(params=b.params, buffers=b.buffers)
        return L2gdClient(own=own, mean=mean), None

    return Algorithm(
        name="l2gd",
        init_server=init_server,
        init_client=init_client,
        rounds=(again, local, average, receive),  # what one notes, only later ones may see
        adapt=Phase(
            name="adapt",
            broadcast=to_new,
            begin=begin_training(work.sgd),
            stages=(Stage(step=sgd_step(task, work.sgd, strength), **work.adapting()),),
            end=end_new,
        ),
        model=lambda b, client: Model(params=client.own.params, buffers=client.own.buffers),
        deploy=lambda server, round: Empty(),
        shared_model=lambda server: Model(params=server.mean.params, buffers=server.mean.buffers),
    )


METHOD = Method(
    name="l2gd",
    title="L2GD",
    paper="Hanzely, Richtarik 2020",
    config=L2gdConfig,
    build=build,
    uploads="its whole personal model, when a pull follows local steps",
    private="its model, and the last mean",
    inferable="the personal model is told; rows, by gradient inversion",
    numbers={"average": "d"},
)
