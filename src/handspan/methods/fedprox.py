"""FedProx: FedAvg whose clients are held back near the model they were sent.

Objective
    min over w of  sum_i p_i f_i(w),  p_i = N_i / sum_j N_j; in round t client i works on
    h_i(w; w^t) = f_i(w) + mu/2 |w - w^t|^2

Map
    Alg. 2, l. 6   sgd_step   w <- w - eta (g_i(w) + mu (w - w^t)), w^t as it was broadcast
    Alg. 2, l. 8   averaged   mean of the local models

Deviations
    Clients are drawn uniformly and the mean is weighted by rows, as in the paper's experiments;
    Algorithm 2 draws by rows and takes the plain mean. All clients take the same local work: the
    partial work of stragglers (gamma_i) is not simulated, and mu stays as it is set.

References
----------
    [1] Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous
        Networks. MLSys 2020. arXiv:1812.06127v5.
"""

from __future__ import annotations

from dataclasses import dataclass

from handspan.core.algorithm import WEIGHTS, Algorithm, Stage
from handspan.core.method import Method, MethodConfig, Setting
from handspan.numerics.averaging import sgd_step, shared_algorithm
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class FedProxConfig(MethodConfig):
    """Settings of FedProx."""

    prox_weight: float = 0.1
    """Weight mu of the pull to the broadcast model; the paper tunes it from 0.001 to 1."""
    weights: str = "examples"
    """Weights of the mean: ``examples`` (the paper's experiments) or ``uniform``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.at_least("prox_weight", 0)
        self.one_of("weights", WEIGHTS)


def build(setting: Setting, config: FedProxConfig) -> Algorithm:
    """Compose the algorithm."""
    work: LocalWork = setting.work
    step = sgd_step(setting.model, work.sgd, config.prox_weight)
    return shared_algorithm(
        "fedprox", setting, (Stage(step=step, **work.whole()),), weights=config.weights
    )


METHOD = Method(
    name="fedprox",
    title="FedProx",
    paper="Li et al. 2020",
    config=FedProxConfig,
    build=build,
    uploads="the whole model",
    private="nothing",
    inferable="rows, by gradient inversion",
    numbers={"train": "d"},
)
