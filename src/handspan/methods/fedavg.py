"""FedAvg: one model for all, the mean of locally trained copies; and its server optimisers.

Objective
    min over theta of  sum_i p_i f_i(theta),  p_i = m_i / sum_j m_j

Map
    [1] Alg. 1             step      local SGD from the broadcast model
    [1] Alg. 1             combine   mean of the local models, weighted by rows
    [2] Alg. 2             combine   with server_optimizer adam or yogi: w += eta m/(sqrt(v) + tau)

Deviations
    The server's momentum and moments are those of [2] without bias correction; plain momentum
    (server_optimizer sgd) is buf = momentum * buf + delta, w += eta * buf. Buffers (running
    statistics of normalisation layers) are averaged with the weights.

References
----------
    [1] McMahan, Moore, Ramage, Hampson, Agueera y Arcas: Communication-Efficient Learning of Deep
        Networks from Decentralized Data. AISTATS 2017. arXiv:1602.05629v4.
    [2] Reddi et al.: Adaptive Federated Optimization. ICLR 2021. arXiv:2003.00295v5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Params, Record
from handspan.numerics.averaging import (
    ModelBroadcast,
    averaged,
    begin_training,
    end_training,
    no_client,
    sgd_step,
)
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class FedAvgConfig(MethodConfig):
    """Settings of FedAvg."""

    weights: str = "examples"
    """Weights of the mean: ``examples`` (p_i, the paper's) or ``uniform``."""
    server_optimizer: str = "sgd"
    """What the server does with the mean difference: ``sgd``, ``adam`` or ``yogi`` [2]."""
    server_learning_rate: float = 1.0
    """Step size eta of the server; 1 with ``sgd`` is plain FedAvg."""
    server_momentum: float = 0.0
    """Momentum of the server's ``sgd``."""
    beta1: float = 0.9
    """First-moment decay of adam and yogi (beta_1)."""
    beta2: float = 0.99
    """Second-moment decay of adam and yogi (beta_2)."""
    tau: float = 1e-3
    """Adaptivity of adam and yogi (tau); the second moment starts at tau squared."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        if self.weights not in WEIGHTS:
            raise HandspanError(f"weights must be examples or uniform, not {self.weights!r}")
        if self.server_optimizer not in ("sgd", "adam", "yogi"):
            raise HandspanError(
                f"server_optimizer must be sgd, adam or yogi, not {self.server_optimizer!r}"
            )
        self.at_least("server_learning_rate", 0)
        for name in ("server_momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise HandspanError(f"{name} must lie in [0, 1), not {getattr(self, name)}")
        if not self.tau > 0:
            raise HandspanError(f"tau must be above 0, not {self.tau}")
        if self.server_optimizer != "sgd" and self.server_momentum:
            raise HandspanError("server_momentum belongs to server_optimizer=sgd: use beta1")
        is_adaptive = self.server_optimizer != "sgd"
        self.only_with(is_adaptive, "server_optimizer=adam", "beta1", "beta2", "tau")


class FedAvgServer(Record):
    """The model, and the server optimiser's moments (empty where it has none)."""

    params: Params
    buffers: Params
    first: Params
    second: Params


def build(setting: Setting, config: FedAvgConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    work: LocalWork = setting.work
    is_adaptive = config.server_optimizer != "sgd"

    def init_server(key: Tensor, population: Population) -> FedAvgServer:
        params, buffers = task.init(key)
        keeps_first = is_adaptive or config.server_momentum > 0
        return FedAvgServer(
            params=params,
            buffers=buffers,
            first={k: torch.zeros_like(p) for k, p in params.items()} if keeps_first else {},
            second={k: torch.full_like(p, config.tau**2) for k, p in params.items()}
            if is_adaptive
            else {},
        )

    def broadcast(server: FedAvgServer, round: Round) -> ModelBroadcast:
        return ModelBroadcast(
            params=server.params,
            buffers=server.buffers,
            learning_rate=work.rate(round, setting.rounds, setting.scalar),
        )

    def combine(server: FedAvgServer, reduction: Reduced, round: Round) -> FedAvgServer:
        mean = averaged(server, reduction, round)
        if not is_adaptive and not config.server_momentum and config.server_learning_rate == 1:
            return FedAvgServer(params=mean.params, buffers=mean.buffers, first={}, second={})
        delta = {k: mean.params[k] - p for k, p in server.params.items()}
        params, first, second = server_step(config, server, delta)
        return FedAvgServer(params=params, buffers=mean.buffers, first=first, second=second)

    phase = Phase(
        name="train",
        broadcast=broadcast,
        begin=begin_training(work.sgd),
        stages=(Stage(step=sgd_step(task, work.sgd), **work.whole()),),
        end=end_training,
        combine=combine,
        weight=WEIGHTS[config.weights],
        infers="gradients of the whole model: inversion attacks apply",
    )
    return Algorithm(
        name="fedavg",
        init_server=init_server,
        init_client=no_client,
        rounds=(phase,),
        model=lambda b, client: Model(params=b.params, buffers=b.buffers),
        deploy_unbatched=frozenset({"params", "buffers"}),
        deploy=broadcast,
        shared_model=lambda server: Model(params=server.params, buffers=server.buffers),
    )


def server_step(
    config: FedAvgConfig, server: FedAvgServer, delta: Params
) -> tuple[Params, Params, Params]:
    """Return parameters and moments after the server's step along the mean difference."""
    eta, first, second = config.server_learning_rate, server.first, server.second
    if config.server_optimizer == "sgd":
        if config.server_momentum:
            first = {k: first[k] * config.server_momentum + d for k, d in delta.items()}
            delta = first
        return {k: p + eta * delta[k] for k, p in server.params.items()}, first, second
    first = {k: config.beta1 * first[k] + (1 - config.beta1) * d for k, d in delta.items()}
    square = {k: d * d for k, d in delta.items()}
    rest = 1 - config.beta2
    if config.server_optimizer == "adam":
        second = {k: config.beta2 * second[k] + rest * s for k, s in square.items()}
    else:
        second = {k: second[k] - rest * s * torch.sign(second[k] - s) for k, s in square.items()}
    params = {
        k: p + eta * first[k] / (second[k].sqrt() + config.tau) for k, p in server.params.items()
    }
    return params, first, second


METHOD = Method(
    name="fedavg",
    title="FedAvg",
    paper="McMahan et al. 2017; server optimisers Reddi et al. 2021",
    config=FedAvgConfig,
    build=build,
    uploads="the whole model",
    private="nothing",
    inferable="rows, by gradient inversion",
    numbers={"train": "d"},
)
