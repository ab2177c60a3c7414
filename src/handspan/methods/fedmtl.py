"""Fed-MTL: every client has a model of its own; the server knows all, and how they are related.

Objective (primal form of [1])
    min over W = [w_1 ... w_n], Omega of
    sum_i f_i(w_i) + lambda_1 tr(W Omega W^T) + lambda_2 |W|_F^2

Map
    client   step       w_i <- w_i - eta (g_i(w_i) + 2 lambda_1 sum_j Omega_ij w_j + 2 lambda_2 w_i)
    server   broadcast  to client i: Omega_ii and sum over j != i of Omega_ij w_j, both fixed
    server   combine    keeps the new w_i; nothing is averaged
    server   mean       Omega = I - 11^T/n: tr(W Omega W^T) = sum_i |w_i - wbar|^2
    server   learned    Omega^-1 = (W^T W)^(1/2) / tr (W^T W)^(1/2)

Deviations
    [1] solves convex problems in the dual (MOCHA), for linear models; this is SGD on the primal
    objective for any model, as in the baseline that later papers call Fed-MTL. That one takes the
    mean of the cohort's models, fetched first; here it is the mean over all clients, of the models
    they last sent, so that a round has one message each way. Losses are means over a client's rows.
    A learned Omega^-1 is mixed with I/n, ``relation_floor`` of it, since W^T W has no inverse at
    the common start; it is renewed every ``relation_every`` rounds, from I/n. For a new client, of
    which the paper says nothing: min over w of f(w) + lambda_1 |w - wbar|^2 + lambda_2 |w|^2, from
    wbar. Each client's running statistics are its own; a new client starts with their mean.

References
----------
    [1] Smith, Chiang, Sanjabi, Talwalkar: Federated Multi-Task Learning. NIPS 2017.
        arXiv:1705.10467v2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Model, Phase, Stacked, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Empty, Params, Record, map_tensors
from handspan.core.task import value_and_grad
from handspan.numerics.averaging import ModelBroadcast, ModelState, Training, begin_training, copies
from handspan.numerics.local_work import LocalWork
from handspan.numerics.low_rank import gram


@dataclass(frozen=True, kw_only=True)
class FedMTLConfig(MethodConfig):
    """Settings of Fed-MTL."""

    relation: str = "mean"
    """Omega: ``mean`` (models are held near their mean) or ``learned`` from the models."""
    relation_weight: float = 0.05
    """Weight lambda_1 of the relation; a learned one wants less, about 0.1/n."""
    shrinkage: float = 0.0
    """Weight lambda_2 of the square norm of all models."""
    relation_every: int = 10
    """Rounds from one learned Omega to the next."""
    relation_floor: float = 0.1
    """Share of I/n in a learned Omega^-1, above 0."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.one_of("relation", ("mean", "learned"))
        self.at_least("relation_weight", 0)
        self.at_least("shrinkage", 0)
        self.at_least("relation_every", 1)
        if not 0 < self.relation_floor <= 1:
            raise HandspanError(f"relation_floor must lie in (0, 1], not {self.relation_floor}")


class FedMTLServer(Record):
    """The model that each client last sent, and how they are related."""

    models: ModelState  # leading axis: clients
    relation: Tensor  # (n, n) float64, Omega


class FedMTLBroadcast(Record):
    """To client i: what the others' models add to its gradient, and the weight of its own."""

    others: Params  # sum over j != i of Omega_ij w_j
    own: Tensor  # () Omega_ii
    learning_rate: Tensor


def learned_relation(products: Tensor, floor: float) -> Tensor:
    """Omega from the Gram matrix W^T W (n, n), with a share of I/n in its inverse."""
    values, vectors = torch.linalg.eigh(products)
    roots = values.clamp(min=0).sqrt()
    count, total = len(roots), roots.sum()
    shares = torch.where(total > 0, roots / total, 1 / count)
    return (vectors / ((1 - floor) * shares + floor / count)) @ vectors.T


def build(setting: Setting, config: FedMTLConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    work: LocalWork = setting.work
    weight, shrinkage = config.relation_weight, config.shrinkage

    def rate(round: Round) -> Tensor:
        return work.rate(round, setting.rounds, setting.scalar)

    def init_server(key: Tensor, population: Population) -> FedMTLServer:
        (params, buffers), count = task.init(key), int(population.num_clients)
        eye = torch.eye(count, dtype=torch.float64, device=setting.device)
        return FedMTLServer(
            models=ModelState(params=copies(params, count), buffers=copies(buffers, count)),
            relation=eye - 1 / count if config.relation == "mean" else count * eye,
        )

    def init_client(key: Tensor, data: ClientData) -> ModelState:
        (params, buffers), count = task.init(key), len(data.num)
        return ModelState(params=copies(params, count), buffers=copies(buffers, count))

    def broadcast(server: FedMTLServer, round: Round) -> FedMTLBroadcast:
        ids = round.ids.to(server.relation.device)
        rows, place = server.relation[ids], ids.unsqueeze(1)
        own, cross = rows.gather(1, place).squeeze(1), rows.scatter(1, place, 0.0)
        return FedMTLBroadcast(
            others={
                name: torch.tensordot(cross.to(models), models, dims=1)
                for name, models in server.models.params.items()
            },
            own=own.to(setting.scalar),
            learning_rate=rate(round),
        )

    def begin(b: FedMTLBroadcast, client: ModelState, data: ClientData) -> Training:
        velocity = work.sgd.start(client.params)
        return Training(params=client.params, buffers=client.buffers, velocity=velocity)

    def step_near(related: Callable[[Any], tuple[Tensor, Params]]) -> Any:
        """Return the step for Omega_ii and the others' sum, found in the broadcast."""

        def step(b: Any, k: Training, batch: Batch) -> Training:
            _, buffers, slope = value_and_grad(
                lambda params: task.loss(params, k.buffers, batch), k.params
            )
            own, others = related(b)
            slope = {
                name: g
                + 2 * weight * (own * k.params[name] + others[name])
                + 2 * shrinkage * k.params[name]
                for name, g in slope.items()
            }
            params, velocity = work.sgd.step(k.params, slope, k.velocity, b.learning_rate)
            return Training(params=params, buffers=buffers, velocity=velocity)

        return step

    def end(b: FedMTLBroadcast, k: Training, data: ClientData) -> tuple[ModelState, ModelState]:
        own = ModelState(params=k.params, buffers=k.buffers)
        return own, own

    def combine(server: FedMTLServer, stacked: Stacked, round: Round) -> FedMTLServer:
        models: ModelState = map_tensors(
            lambda old, new: old.index_copy(0, stacked.ids.to(old.device), new),
            server.models,
            stacked.uploads,
        )
        relation, is_due = server.relation, (int(round.index) + 1) % config.relation_every == 0
        if config.relation == "learned" and is_due:
            relation = learned_relation(gram(models.params), config.relation_floor)
        return FedMTLServer(models=models, relation=relation)

    # A new client is held near the mean: as if Omega_ii were 1 and the others' sum -wbar.

    def to_new(server: FedMTLServer, round: Round) -> ModelBroadcast:
        mean: ModelState = map_tensors(lambda models: models.mean(0), server.models)
        return ModelBroadcast(params=mean.params, buffers=mean.buffers, learning_rate=rate(round))

    def mean_of(b: ModelBroadcast) -> tuple[Tensor, Params]:
        one = torch.ones_like(setting.scalar)
        return one, {name: -mean for name, mean in b.params.items()}

    train = step_near(lambda b: (b.own, b.others))
    return Algorithm(
        name="fedmtl",
        init_server=init_server,
        init_client=init_client,
        rounds=(
            Phase(
                name="train",
                broadcast=broadcast,
                begin=begin,
                stages=(Stage(step=train, **work.whole()),),
                end=end,
                combine=combine,
                per_client=frozenset({"others", "own"}),
                reduce="stack",
                infers="the whole personal model, and gradients: inversion attacks apply",
            ),
        ),
        adapt=Phase(
            name="adapt",
            broadcast=to_new,
            begin=begin_training(work.sgd),
            stages=(Stage(step=step_near(mean_of), **work.adapting()),),
            end=lambda b, k, data: (end(b, k, data)[0], None),
        ),
        model=lambda b, client: Model(params=client.params, buffers=client.buffers),
        deploy=lambda server, round: Empty(),
    )


METHOD = Method(
    name="fedmtl",
    title="Fed-MTL",
    paper="Smith et al. 2017",
    config=FedMTLConfig,
    build=build,
    uploads="its whole personal model",
    private="nothing that the server does not have",
    inferable="the personal model is told; rows, by gradient inversion",
    numbers={"train": "d"},
)
