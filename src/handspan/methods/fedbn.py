"""FedBN: all of a network is shared but its layers of batch normalisation.

Objective
    min over theta, phi_1, ..., phi_n of  1/n sum_i f_i(theta, phi_i); phi_i is all of those layers:
    scale, shift and running statistics

Map
    client, local epochs   Split.step     one step on (theta, phi_i), statistics of the batch
    client, upload         Split.end      theta_i alone; phi_i stays, statistics included
    server                 Split.combine  plain mean of the theta_i

Deviations
    A cohort takes part in a round; in the paper all clients do. New clients start at the first
    scales, shifts and statistics and fit them to their rows with theta fixed; the paper's authors
    suggest the mean of the clients' phi_i, which nobody has here. A model without such layers is
    refused: it would be FedAvg.

References
----------
    [1] Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch
        Normalization. ICLR 2021. arXiv:2102.07623v2.
"""

from __future__ import annotations

from dataclasses import dataclass

from handspan.core import keys
from handspan.core.algorithm import WEIGHTS, Algorithm
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.task import Task
from handspan.numerics.local_work import LocalWork
from handspan.numerics.partial import BOTH, Split, layer


@dataclass(frozen=True, kw_only=True)
class FedBNConfig(MethodConfig):
    """Settings of FedBN."""

    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (the paper's 1/n) or ``examples``."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        self.one_of("weights", WEIGHTS)


def build(setting: Setting, config: FedBNConfig) -> Algorithm:
    """Compose the algorithm."""
    layers = norm_layers(setting.model)
    if not layers:
        raise HandspanError(
            "fedbn keeps layers of batch normalisation, and this model has none: choose one that "
            "has, such as --model mlp_batchnorm, or run fedavg"
        )
    return assemble(setting, config, layers)


def assemble(setting: Setting, config: FedBNConfig, layers: frozenset[str]) -> Algorithm:
    """Compose the algorithm for given personal layers; none, or all, is for tests."""
    work: LocalWork = setting.work
    personal = frozenset(name for name in setting.model.names if layer(name) in layers)
    split = Split(setting=setting, personal=personal, layers=layers)
    return split.algorithm("fedbn", [(BOTH, work.whole())], weights=config.weights)


def norm_layers(task: Task) -> frozenset[str]:
    """Layers with running statistics, whatever their names."""
    _, buffers = task.init(keys.key(0))
    return frozenset(layer(name) for name in buffers if name.endswith("running_mean"))


METHOD = Method(
    name="fedbn",
    title="FedBN",
    paper="Li et al. 2021",
    config=FedBNConfig,
    build=build,
    uploads="all of the model but its layers of batch normalisation",
    private="scales, shifts and running statistics of batch normalisation",
    inferable="rows, by gradient inversion",
    numbers={"train": "d - v"},
    needs_norm=True,
)
