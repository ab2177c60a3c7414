"""LG-FedAvg: personal encoders below, shared top layers above, both trained in one SGD.

Objective
    min over theta^g, theta_1^l, ..., theta_n^l of  sum_i p_i f_i(theta_i^l, theta^g)

Map
    client, local steps   Split.step     one step on (theta_i^l, theta_i^g) at the OLD pair
    client, upload        Split.end      theta_i^g alone; theta_i^l stays
    server                Split.combine  mean of the theta_i^g

Deviations
    Training starts at random, not from a FedAvg model. The mean is weighted by rows, as the
    objective's p_i ask; public code takes the plain mean. The auxiliary losses on the
    representation are not here. New clients fit theta^l with theta^g fixed; averaging the outputs
    of all clients' models, as in the paper, would need all encoders in one place.

References
----------
    [1] Liang et al.: Think Locally, Act Globally: Federated Learning with Local and Global
        Representations. NeurIPS 2019 workshop on federated learning. arXiv:2001.01523v3.
"""

from __future__ import annotations

from dataclasses import dataclass

from handspan.core.algorithm import WEIGHTS, Algorithm
from handspan.core.method import Method, MethodConfig, Setting
from handspan.numerics.local_work import LocalWork
from handspan.numerics.partial import BOTH, Split, split_names


@dataclass(frozen=True, kw_only=True)
class LgFedAvgConfig(MethodConfig):
    """Settings of LG-FedAvg."""

    shared: str = "head"
    """Shared top layers theta^g: ``head``, or patterns joined by ``+``."""
    weights: str = "examples"
    """Weights of the server's mean: ``examples`` (p_i) or ``uniform`` (public code)."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        self.one_of("weights", WEIGHTS)


def build(setting: Setting, config: LgFedAvgConfig) -> Algorithm:
    """Compose the algorithm."""
    return assemble(setting, config, split_names(setting.model, config.shared, "shared"))


def assemble(setting: Setting, config: LgFedAvgConfig, shared: frozenset[str]) -> Algorithm:
    """Compose the algorithm for given shared names; none, or all, is for tests."""
    work: LocalWork = setting.work
    split = Split(setting=setting, personal=frozenset(setting.model.names) - shared)
    return split.algorithm("lgfedavg", [(BOTH, work.whole())], weights=config.weights)


METHOD = Method(
    name="lgfedavg",
    title="LG-FedAvg",
    paper="Liang et al. 2019",
    config=LgFedAvgConfig,
    build=build,
    uploads="the top layers of the model",
    private="the encoder below them",
    inferable="features of rows, by gradient inversion of the top layers' difference; their labels",
    numbers={"train": "h"},
)
