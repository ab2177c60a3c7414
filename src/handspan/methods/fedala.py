"""FedALA: clients start from an element-wise mixture of their own and the shared model.

Objective
    min over theta_1, ..., theta_n of  sum_i p_i f_i(theta_i); the shared model only initialises

Map
    ALA, lower layers   mix          lower layers := theta
    ALA, top layers     weigh        W <- clip(W - eta grad L(Theta) (theta - theta_i), 0, 1)
                        mix          Theta = theta_i + (theta - theta_i) W
    local training      train_step   SGD on all parameters, from Theta with the NEW W
    server              combine      mean of the local models, weighted by rows

Deviations
    The first time a client learns W, the authors' code repeats its pass until the losses settle (at
    least 11 passes). Here all clients of a round take one pass, as later rounds do in the paper;
    new clients take ``start_epochs``. The s % of the rows are drawn row by row; a batch that would
    lose all its rows keeps them. ``names`` says which layers are mixed: ``head`` is p = 1. The
    client is served Theta, for which every client, drawn or not, passes over its rows once more
    with the latest theta; a client that was never trained is served theta. For a new client, of
    which the paper says nothing, theta_i is trained from theta first. Running statistics are
    theta's. The pass for W comes on top of the run's local steps.

References
----------
    [1] Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized
        Federated Learning. AAAI 2023. arXiv:2212.01197v3.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Stage
from handspan.core.data import Batch, ClientData, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Empty, Params, Record
from handspan.core.task import value_and_grad
from handspan.numerics.averaging import (
    ModelState,
    Training,
    chosen_names,
    copies,
    parts,
    sgd_step,
    shared_algorithm,
)
from handspan.numerics.carrying import on_field
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class FedALAConfig(MethodConfig):
    """Settings of FedALA."""

    names: str = "head"
    """What is mixed element by element: ``head`` (p = 1), ``all`` or a pattern of names."""
    weight_learning_rate: float = 1.0
    """Step size eta of the weights W; 0 keeps them at 1, which is FedAvg."""
    sample: float = 0.8
    """Share s of the rows that W is learned on, drawn anew in each round."""
    start_epochs: int = 10
    """Passes in which a new client learns its W."""
    weights: str = "examples"
    """Weights of the server's mean: ``examples`` (the paper) or ``uniform``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.at_least("weight_learning_rate", 0)
        self.at_least("start_epochs", 1)
        self.one_of("weights", WEIGHTS)
        if not 0 < self.sample <= 1:
            raise HandspanError(f"sample must lie in (0, 1], not {self.sample}")


class FedALABroadcast(Record):
    """The shared model theta, and what a round draws and steps with."""

    params: Params
    buffers: Params
    learning_rate: Tensor
    round: Tensor  # () int64


class FedALAClient(Record):
    """The mixed layers of the client's last local model theta_i, and their weights W_i."""

    local: Params
    weights: Params
    is_trained: Tensor  # () 1 after the first training


class FedALAWorking(Record):
    """Weights and model in training."""

    local: Params
    weights: Params
    training: Training
    key: Tensor  # () int64: draws the rows that W is learned on


def build(setting: Setting, config: FedALAConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    work: LocalWork = setting.work
    names = chosen_names(task, config.names, "names")

    def init_client(key: Tensor, data: ClientData) -> FedALAClient:
        chosen, count = parts(task.init(key)[0], names)[0], len(data.num)
        return FedALAClient(
            local=copies(chosen, count),
            weights={k: torch.ones_like(v) for k, v in copies(chosen, count).items()},
            is_trained=setting.scalar.repeat(count),
        )

    def broadcast(server: ModelState, round: Round) -> FedALABroadcast:
        return FedALABroadcast(
            params=server.params,
            buffers=server.buffers,
            learning_rate=work.rate(round, setting.rounds, setting.scalar),
            round=round.index,
        )

    def begin(b: FedALABroadcast, client: FedALAClient, data: ClientData) -> FedALAWorking:
        is_trained = client.is_trained > 0
        local = {k: torch.where(is_trained, v, b.params[k]) for k, v in client.local.items()}
        training = Training(params=b.params, buffers=b.buffers, velocity=work.sgd.start(b.params))
        key = keys.fold(data.key, "ala", b.round)
        return FedALAWorking(local=local, weights=client.weights, training=training, key=key)

    def mixture(b: FedALABroadcast, k: FedALAWorking) -> Params:
        return {
            name: old + (b.params[name] - old) * k.weights[name] for name, old in k.local.items()
        }

    def weigh(b: FedALABroadcast, k: FedALAWorking, batch: Batch) -> FedALAWorking:
        rows = sampled(batch, k.key, config.sample)
        _, _, slope = value_and_grad(
            lambda mixed: task.loss({**b.params, **mixed}, b.buffers, rows), mixture(b, k)
        )
        eta = config.weight_learning_rate
        weights = {
            name: (w - eta * slope[name] * (b.params[name] - k.local[name])).clamp(0, 1)
            for name, w in k.weights.items()
        }
        return dataclasses.replace(k, weights=weights)

    def mix(b: FedALABroadcast, k: FedALAWorking) -> FedALAWorking:
        params = {**b.params, **mixture(b, k)}
        return dataclasses.replace(k, training=dataclasses.replace(k.training, params=params))

    def end(
        b: FedALABroadcast, k: FedALAWorking, data: ClientData
    ) -> tuple[FedALAClient, ModelState]:
        upload = ModelState(params=k.training.params, buffers=k.training.buffers)
        return remembered(keep(b, k)), upload

    def remembered(k: FedALAWorking) -> FedALAClient:
        is_trained = torch.ones_like(setting.scalar)
        return FedALAClient(local=k.local, weights=k.weights, is_trained=is_trained)

    # A new client trains from theta first: what it gets is its theta_i.

    def begin_new(b: FedALABroadcast, client: FedALAClient, data: ClientData) -> FedALAWorking:
        return begin(b, dataclasses.replace(client, is_trained=0 * client.is_trained), data)

    def keep(b: FedALABroadcast, k: FedALAWorking) -> FedALAWorking:
        return dataclasses.replace(k, local=parts(k.training.params, names)[0])

    def serve(b: FedALABroadcast, k: FedALAWorking, data: ClientData) -> tuple[Model, None]:
        return Model(params=k.training.params, buffers=b.buffers), None

    step = sgd_step(task, work.sgd)
    ala = Stage(step=weigh, finish=mix, epochs=1, batch_size=work.batch_size)
    train = on_field(Stage(step=step, **work.whole()), "training")
    train_new = on_field(Stage(step=step, **work.adapting()), "training")
    base = shared_algorithm("fedala", setting, (ala, train), weights=config.weights)
    (phase,) = base.rounds
    return dataclasses.replace(
        base,
        init_client=init_client,
        rounds=(dataclasses.replace(phase, broadcast=broadcast, begin=begin, end=end),),
        adapt=Phase(
            name="adapt",
            broadcast=broadcast,
            begin=begin_new,
            stages=(
                dataclasses.replace(train_new, finish=keep),
                Stage(step=weigh, epochs=config.start_epochs, batch_size=work.batch_size),
            ),
            end=lambda b, k, data: (remembered(k), None),
        ),
        personal=(
            Phase(name="initialise", broadcast=broadcast, begin=begin, stages=(ala,), end=serve),
        ),
        model=lambda b, client: client,
        deploy=lambda server, round: Empty(),
        deploy_unbatched=frozenset(),
    )


def sampled(batch: Batch, key: Tensor, share: float) -> Batch:
    """Return the batch with only the rows that a round draws; all of them, if it draws none."""
    is_drawn = keys.uniform(keys.fold(key, batch.rows)) < share
    weight = batch.weight * is_drawn.to(batch.weight)
    return dataclasses.replace(batch, weight=torch.where(weight.sum() > 0, weight, batch.weight))


METHOD = Method(
    name="fedala",
    title="FedALA",
    paper="Zhang et al. 2023",
    config=FedALAConfig,
    build=build,
    uploads="the whole model",
    private="the mixed layers of its own model, and a weight for each of their entries",
    inferable="rows, by gradient inversion",
    numbers={"train": "d"},
)
