"""FedEM: every client's rows are a mixture of the same few distributions, each with a model.

Model
    D_i = sum_m pi_im D~_m, and p_m(y | x) = exp(-l(h_theta_m(x), y)) up to a constant.

Objective
    min over theta_1, ..., theta_M, pi_i on the simplex of
    -(1/N) sum_i sum_(s in D_i)  log sum_m pi_im p_m(y_s | x_s)

Map
    E step            responsibilities   q_s(m) ~ pi_im exp(-l(h_theta_m(x_s), y_s)), OLD theta, pi
    M step, mixture   fit_mixture        pi_im <- mean_s q_s(m)
    M step, models    step               SGD on each theta_m, rows weighted by q_s(m)
    server            combine            mean of each theta_m, weighted by rows
    test              predict            sum_m pi_im softmax(h_theta_m(x)): probabilities are mixed

Deviations
    Responsibilities are computed again where a batch needs them: they follow from the broadcast
    models and the stored mixture, so that no client keeps a number for each of its rows. Clients
    that are not drawn take no part in the mean, as in FedAvg; public code averages their OLD
    models as well, which damps the step. Before a client is served it takes ``refresh`` passes of
    E and mixture step with the final models (public code: 1). Layers that normalise over a batch
    see the responsibilities as weights of its rows. With numbers for labels p_m is a Gaussian of
    variance 1 and the served value is the mean of the mixture.

References
----------
    [1] Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of
        Distributions. NeurIPS 2021. arXiv:2108.10252.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Reduced, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Params, Record, map_tensors, stack
from handspan.core.task import value_and_grad
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class FedemConfig(MethodConfig):
    """Settings of FedEM."""

    num_components: int = 3
    """Number of models M (the paper's 3)."""
    refresh: int = 1
    """Passes over a client's rows that fit its mixture to the final models before it is served."""
    weights: str = "examples"
    """Weights of the server's means: ``examples`` (p_i, the paper's) or ``uniform``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.one_of("weights", WEIGHTS)
        self.at_least("num_components", 1)
        self.at_least("refresh", 0)


class FedemServer(Record):
    """M models, on a leading axis."""

    models: Model


class FedemBroadcast(Record):
    """All models, and the step size."""

    models: Model
    learning_rate: Tensor


class FedemClient(Record):
    """Shares pi_i of the components in the client's rows."""

    mixture: Tensor  # (M,)


class FedemWorking(Record):
    """The OLD mixture, the NEW one, and the models in training."""

    old: Tensor  # (M,)
    mixture: Tensor  # (M,)
    models: Model
    velocity: Params


class FedemUpload(Record):
    """M locally trained models."""

    models: Model


def build(setting: Setting, config: FedemConfig) -> Algorithm:
    """Compose the algorithm."""
    if config.num_components > setting.num_clients:
        raise HandspanError(
            f"num_components {config.num_components} exceeds the {setting.num_clients} clients: "
            "lower it"
        )
    method = _Fedem(setting, config)
    size = config.num_components
    unbatched = frozenset({"models"})

    def mixture_stage(passes: int) -> Stage:
        step = method.fit_mixture(passes)
        return Stage(step=step, steps=1, batch_size=None, forward_only=True, models=size)

    def private(name: str, passes: int) -> Phase:
        return Phase(
            name=name,
            broadcast=method.broadcast,
            begin=method.begin,
            stages=(mixture_stage(passes),),
            end=lambda b, k, data: (FedemClient(mixture=k.mixture), None),
            unbatched=unbatched,
        )

    return Algorithm(
        name="fedem",
        init_server=method.init_server,
        init_client=method.init_client,
        rounds=(
            Phase(
                name="train",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(
                    mixture_stage(1),
                    Stage(step=method.step, models=size, **setting.work.whole()),
                ),
                end=method.end,
                combine=method.combine,
                unbatched=unbatched,
                weight=WEIGHTS[config.weights],
                infers="shares of the components, by how far each model moved; gradients",
            ),
        ),
        adapt=private("adapt", setting.work.adapt_steps),
        personal=(private("refresh", config.refresh),) if config.refresh else (),
        model=None,
        predict=method.predict,
    )


class _Fedem:
    """The functions of the algorithm, bound to one problem."""

    def __init__(self, setting: Setting, config: FedemConfig) -> None:
        self.setting, self.task, self.size = setting, setting.model, config.num_components
        self.work: LocalWork = setting.work

    def init_server(self, key: Tensor, population: Population) -> FedemServer:
        """M different models: equal ones would stay equal for ever."""
        starts = [self.task.init(keys.fold(key, "component", j)) for j in range(self.size)]
        starts[0] = self.task.init(key)  # M = 1 is FedAvg, from the same start
        return FedemServer(models=stack([Model(params=p, buffers=b) for p, b in starts]))

    def init_client(self, key: Tensor, data: ClientData) -> FedemClient:
        """Equal shares."""
        shares = torch.full((len(data.num), self.size), 1 / self.size, dtype=torch.float64)
        return FedemClient(mixture=shares.to(self.setting.scalar))

    def broadcast(self, server: FedemServer, round: Round) -> FedemBroadcast:
        """Send all models."""
        rate = self.work.rate(round, self.setting.rounds, self.setting.scalar)
        return FedemBroadcast(models=server.models, learning_rate=rate)

    def begin(self, b: FedemBroadcast, client: FedemClient, data: ClientData) -> FedemWorking:
        """Start from the broadcast models and the stored mixture."""
        return FedemWorking(
            old=client.mixture,
            mixture=client.mixture,
            models=b.models,
            velocity=self.work.sgd.start(b.models.params),
        )

    def outputs(self, models: Model, x: Any, side: Tensor | None) -> Tensor:
        """Outputs of all models, (M, rows, ...)."""
        each = [map_tensors(lambda tensor, j=j: tensor[j], models) for j in range(self.size)]
        return torch.stack([self.task.predict(m.params, m.buffers, x, side) for m in each])

    def losses(self, models: Model, batch: Batch) -> Tensor:
        """Losses of all models on each row, (M, rows)."""
        assert batch.y is not None
        outputs = self.outputs(models, batch.x, batch.side)
        return torch.stack([self.task.row_loss(outputs[j], batch.y) for j in range(self.size)])

    def fit_mixture(self, passes: int) -> Any:
        """Return the step that alternates E and mixture step, on all rows at once."""

        def step(b: FedemBroadcast, k: FedemWorking, batch: Batch) -> FedemWorking:
            losses, mixture = self.losses(b.models, batch), k.mixture
            for _ in range(passes):
                q = responsibilities(losses, mixture)
                mixture = (q * batch.weight).sum(1) / batch.weight.sum()
            return dataclasses.replace(k, mixture=mixture)

        return step

    def step(self, b: FedemBroadcast, k: FedemWorking, batch: Batch) -> FedemWorking:
        """One step on every model, each on 1/B sum_s q_s(m) l(h_theta_m(x_s), y_s)."""
        shares = responsibilities(self.losses(b.models, batch), k.old) * batch.weight
        buffers = k.models.buffers

        def objective(params: Params) -> tuple[Tensor, Params]:
            total, new = torch.zeros_like(b.learning_rate), list[Params]()
            for j in range(self.size):
                model = map_tensors(lambda t, j=j: t[j], Model(params=params, buffers=buffers))
                weighted = dataclasses.replace(batch, weight=shares[j])
                loss, moved = self.task.loss(model.params, model.buffers, weighted)
                # The task takes a mean over shares; the paper divides by the rows of the batch.
                total = total + loss * shares[j].sum() / batch.weight.sum()
                new.append(moved)
            return total, {name: torch.stack([n[name] for n in new]) for name in buffers}

        _, new_buffers, gradient = value_and_grad(objective, k.models.params)
        params, velocity = self.work.sgd.step(
            k.models.params, gradient, k.velocity, b.learning_rate
        )
        models = Model(params=params, buffers=new_buffers)
        return dataclasses.replace(k, models=models, velocity=velocity)

    def end(
        self, b: FedemBroadcast, k: FedemWorking, data: ClientData
    ) -> tuple[FedemClient, FedemUpload]:
        """Keep the mixture; upload the models."""
        return FedemClient(mixture=k.mixture), FedemUpload(models=k.models)

    def combine(self, server: FedemServer, reduction: Reduced, round: Round) -> FedemServer:
        """Weighted mean of each model."""
        return FedemServer(models=reduction.mean(like=FedemUpload(models=server.models)).models)

    def predict(self, b: FedemBroadcast, client: FedemClient, x: Any, side: Any) -> Tensor:
        """Logarithms of the mixed probabilities; for numbers the mixed values."""
        outputs = self.outputs(b.models, x, side)
        if self.task.kind == "regression":
            return torch.tensordot(client.mixture, outputs, dims=1)
        shares = client.mixture.log().view(-1, *[1] * (outputs.ndim - 1))
        return torch.logsumexp(shares + outputs.log_softmax(-1), 0)


def responsibilities(losses: Tensor, mixture: Tensor) -> Tensor:
    """q_s(m) from losses (M, rows) and shares (M,)."""
    return torch.softmax(mixture.log().unsqueeze(1) - losses, 0)


METHOD = Method(
    name="fedem",
    title="FedEM",
    paper="Marfoq et al. 2021",
    config=FedemConfig,
    build=build,
    uploads="M models",
    private="the shares of the components in its rows",
    inferable="its shares, from how far each model moved; rows, by gradient inversion",
    numbers={"train": "num_components * d"},
)
