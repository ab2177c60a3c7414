"""FedPer: shared base layers, personal last layers, both trained in one SGD.

Objective
    min over W_B, W_P,1, ..., W_P,n of  1/n sum_i f_i(W_B, W_P,i)

Map
    client, local epochs   Split.step     one step on (W_B, W_P,i) from one gradient at the OLD pair
    client, upload         Split.end      W_B,i alone; W_P,i stays
    server                 Split.combine  W_B = sum_i N_i/N W_B,i

Deviations
    A cohort takes part in a round; in the paper all clients do. New clients (not in the paper) fit
    W_P from its first value with W_B fixed. Buffers (running statistics) belong to whom the
    parameters of their layer belong to.

References
----------
    [1] Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers.
        2019. arXiv:1912.00818v1.
"""

from __future__ import annotations

from dataclasses import dataclass

from handspan.core.algorithm import WEIGHTS, Algorithm
from handspan.core.method import Method, MethodConfig, Setting
from handspan.numerics.local_work import LocalWork
from handspan.numerics.partial import BOTH, STARTS, Split, split_names


@dataclass(frozen=True, kw_only=True)
class FedPerConfig(MethodConfig):
    """Settings of FedPer."""

    personal: str = "head"
    """Personal parameters W_P: ``head`` (the paper's K_P = 1), or patterns joined by ``+``."""
    start: str = "independent"
    """First W_P,i: ``independent`` draws of the clients (the paper), or one ``common`` to all."""
    weights: str = "examples"
    """Weights of the server's mean: ``examples`` (N_i, the paper's) or ``uniform``."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        self.one_of("start", STARTS)
        self.one_of("weights", WEIGHTS)


def build(setting: Setting, config: FedPerConfig) -> Algorithm:
    """Compose the algorithm."""
    return assemble(setting, config, split_names(setting.model, config.personal, "personal"))


def assemble(setting: Setting, config: FedPerConfig, personal: frozenset[str]) -> Algorithm:
    """Compose the algorithm for given personal names; none, or all, is for tests."""
    work: LocalWork = setting.work
    split = Split(setting=setting, personal=personal, start=config.start)
    return split.algorithm("fedper", [(BOTH, work.whole())], weights=config.weights)


METHOD = Method(
    name="fedper",
    title="FedPer",
    paper="Arivazhagan et al. 2019",
    config=FedPerConfig,
    build=build,
    uploads="the base of the model",
    private="the personal layers",
    inferable="rows, by gradient inversion of the base's difference",
    numbers={"train": "b"},
)
