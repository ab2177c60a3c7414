"""PerFedSI: a fully shared model f(x, z) that reads the client's side information z.

Objective (Eq. 2)
    min over theta of  sum_m (n_m / N) L_m(f_theta(., z_m))

Map
    Model 1    the task: H([G(x), W(z)]), the model is wrapped when the run is set up
    Alg. 1     step      local SGD on all parameters
    Alg. 1     combine   uniform mean over the cohort, 1/|B_t|

Deviations
    Starts neutral, as Remark 2.2 allows: the head's columns for W(z) are zero, so that the first
    model is the base model. New clients are served without training (ours): z is all they need.

References
----------
    [1] PerFedSI: A Framework for Personalized Federated Learning with Side Information.
"""

from __future__ import annotations

from dataclasses import dataclass

from handspan.core.algorithm import WEIGHTS, Algorithm, Stage
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.numerics.averaging import sgd_step, shared_algorithm
from handspan.numerics.local_work import LocalWork


@dataclass(frozen=True, kw_only=True)
class PerFedSIConfig(MethodConfig):
    """Settings of PerFedSI."""

    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (1/|B_t|, the paper's) or ``examples``."""
    side_width: int = 16
    """Width of the side encoder W(z)."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        if self.weights not in WEIGHTS:
            raise HandspanError(f"weights must be uniform or examples, not {self.weights!r}")
        if self.side_width < 1:
            raise HandspanError(f"side_width must be at least 1, not {self.side_width}")


def build(setting: Setting, config: PerFedSIConfig) -> Algorithm:
    """Compose the algorithm; the task reads side information."""
    task = setting.model
    work: LocalWork = setting.work
    if not task.needs_side:
        raise HandspanError("perfedsi needs a model that reads side information")

    return shared_algorithm(
        "perfedsi",
        setting,
        (Stage(step=sgd_step(task, work.sgd), **work.whole()),),
        weights=config.weights,
        infers="the direction of z, from the encoder's gradient a z^T (Eq. 12)",
    )


METHOD = Method(
    name="perfedsi",
    title="PerFedSI",
    paper="PerFedSI: Personalized Federated Learning with Side Information",
    config=PerFedSIConfig,
    build=build,
    uploads="the whole model",
    private="the side information z",
    inferable="the direction of z, from one upload; rows, by gradient inversion",
    numbers={"train": "d"},
    needs_side=True,
)
