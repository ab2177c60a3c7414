"""SR-PH: a shared representation and personal heads, PerFedSI's rival without side information.

Objective
    min over W, h_1, ..., h_M of  sum_m (n_m / N) L_m(W, h_m)

Map
    local epoch   Split.step      one SGD step on (W, h_m) from one gradient at the OLD pair
    server        Split.combine   uniform mean over the cohort, 1/|B_t|

Deviations
    The paper names the split and cites FedPer and FedRep; one joint SGD and the uniform mean are
    those of its own algorithm. New clients (not in the paper) fit a head with W fixed.

References
----------
    [1] PerFedSI: A Framework for Personalized Federated Learning with Side Information,
        section 4 and appendix D.
"""

from __future__ import annotations

from dataclasses import dataclass

from handspan.core.algorithm import WEIGHTS, Algorithm
from handspan.core.method import Method, MethodConfig, Setting
from handspan.numerics.partial import BOTH, Split, split_names


@dataclass(frozen=True, kw_only=True)
class SrphConfig(MethodConfig):
    """Settings of SR-PH."""

    personal: str = "head"
    """Personal parameters: ``head`` (the paper's linear layer), or patterns joined by ``+``."""
    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (1/|B_t|, the paper's) or ``examples``."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        self.one_of("weights", WEIGHTS)


def build(setting: Setting, config: SrphConfig) -> Algorithm:
    """Compose the algorithm."""
    names = split_names(setting.model, config.personal, "personal")
    split = Split(setting=setting, personal=names)
    return split.algorithm("srph", [(BOTH, setting.work.whole())], weights=config.weights)


METHOD = Method(
    name="srph",
    title="SR-PH",
    paper="PerFedSI: Personalized Federated Learning with Side Information",
    config=SrphConfig,
    build=build,
    uploads="the representation",
    private="the head",
    inferable="rows, by gradient inversion of the representation's difference",
    numbers={"train": "b"},
)
