"""FedSim: partly personal models, both parts moving at once.

Objective
    min over u, v_1, ..., v_n of  1/n sum_i f_i(u, v_i)

Map
    Alg. 3, local loop   Split.step     v <- v - gamma_v grad_v, u <- u - gamma_u grad_u, both
                                        gradients at the same OLD (u, v) and batch
    Alg. 1, server       Split.combine  plain mean of the u_i
    experiments          last_pass      steps on v_i at the last u, before a client is served

Deviations
    Training starts at random, not from a FedAvg model. The mean is plain (Algorithm 1); public code
    weighs by batches. The server takes the mean as it is: no server optimiser.

References
----------
    [1] Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao: Federated Learning with Partial Model
        Personalization. ICML 2022. arXiv:2204.03809v2.
"""

from __future__ import annotations

from dataclasses import dataclass

from handspan.core.algorithm import WEIGHTS, Algorithm
from handspan.core.method import Method, MethodConfig, Setting
from handspan.numerics.local_work import LocalWork
from handspan.numerics.partial import BOTH, Split, split_names


@dataclass(frozen=True, kw_only=True)
class FedSimConfig(MethodConfig):
    """Settings of FedSim."""

    personal: str = "head"
    """Personal parameters v: ``head``, or patterns joined by ``+``; any part of the model."""
    personal_learning_rate: float | None = None
    """Step size gamma_v; the run's (gamma_u) by default."""
    last_steps: int | None = None
    """Steps on v at the last u before a client is served; as in a round by default, 0 for none."""
    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (alpha_i = 1/n) or ``examples``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.at_least("personal_learning_rate", 0)
        self.at_least("last_steps", 0)
        self.one_of("weights", WEIGHTS)


def build(setting: Setting, config: FedSimConfig) -> Algorithm:
    """Compose the algorithm."""
    return assemble(setting, config, split_names(setting.model, config.personal, "personal"))


def assemble(setting: Setting, config: FedSimConfig, personal: frozenset[str]) -> Algorithm:
    """Compose the algorithm for given personal names; none, or all, is for tests."""
    work: LocalWork = setting.work
    split = Split(setting=setting, personal=personal, personal_rate=config.personal_learning_rate)
    return split.algorithm(
        "fedsim",
        [(BOTH, work.whole())],
        weights=config.weights,
        last_pass=work.told(work.whole(), config.last_steps),
    )


METHOD = Method(
    name="fedsim",
    title="FedSim",
    paper="Pillutla et al. 2022",
    config=FedSimConfig,
    build=build,
    uploads="the shared part of the model",
    private="the personal part",
    inferable="rows, by gradient inversion of the shared part's difference",
    numbers={"train": "b"},
)
