"""PR-SH: personal representations and a shared head, PerFedSI's rival without side information.

Objective
    min over H, w_1, ..., w_M of  sum_m (n_m / N) L_m(w_m, H)

Map
    local epoch   Split.step      one SGD step on (w_m, H) from one gradient at the OLD pair
    server        Split.combine   uniform mean over the cohort, 1/|B_t|
    appendix D    lower_layers    the first two convolutional layers are personal

Deviations
    The paper names the split and cites LG-FedAvg; one
    joint SGD and the uniform mean are those of its own algorithm. Models without convolutions keep
    all layers but the head. New clients (not in the paper) fit w with H fixed.

References
----------
    [1] PerFedSI: A Framework for Personalized Federated Learning with Side Information,
        section 4 and appendix D.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from handspan.core.algorithm import WEIGHTS, Algorithm
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.task import Task
from handspan.numerics.partial import BOTH, Split, split_names

_LOWER = re.compile(r"(.*\.)?(conv|norm)[12]\.[^.]+")


@dataclass(frozen=True, kw_only=True)
class PrshConfig(MethodConfig):
    """Settings of PR-SH."""

    personal: str = "lower"
    """Personal parameters: ``lower`` (``conv1``, ``conv2`` and their norms, the paper's; in a model
    without them all but the head), or patterns joined by ``+``."""
    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (1/|B_t|, the paper's) or ``examples``."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        self.one_of("weights", WEIGHTS)


def lower_layers(task: Task) -> str:
    """Names of the lower layers, joined by ``+``."""
    found = [name for name in task.names if _LOWER.fullmatch(name)]
    return "+".join(found or [name for name in task.names if name not in task.head])


def build(setting: Setting, config: PrshConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    which = lower_layers(task) if config.personal == "lower" else config.personal
    split = Split(setting=setting, personal=split_names(task, which, "personal"))
    return split.algorithm("prsh", [(BOTH, setting.work.whole())], weights=config.weights)


METHOD = Method(
    name="prsh",
    title="PR-SH",
    paper="PerFedSI: Personalized Federated Learning with Side Information",
    config=PrshConfig,
    build=build,
    uploads="the upper layers of the model",
    private="the lower layers",
    inferable="features of rows, by gradient inversion of the upper layers' difference",
    numbers={"train": "h"},
)
