"""FedRep: a shared representation, learned together, and a private head for each client.

Objective (Eq. 3)
    min over phi of  1/n sum_i  min over h_i of  f_i(h_i o phi)

Map
    Alg. 1, client, head loop             Split.step     tau_h steps on the head, body fixed
    Alg. 1, client, representation loop   Split.step     tau_phi steps on the body, NEW head fixed
    Alg. 1, server                        Split.combine  unweighted mean over the cohort

Deviations
    Steps as well as epochs. By default N local steps are split 2:1 between head and body, so that
    all methods of a table take as many gradients. Buffers (running statistics) go with the body.

References
----------
    [1] Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized
        Federated Learning. ICML 2021. arXiv:2102.07078v3.
"""

from __future__ import annotations

from dataclasses import dataclass

from handspan.core.algorithm import WEIGHTS, Algorithm
from handspan.core.method import Method, MethodConfig, Setting
from handspan.numerics.local_work import LocalWork
from handspan.numerics.partial import PERSONAL, SHARED, Split, split_names


@dataclass(frozen=True, kw_only=True)
class FedRepConfig(MethodConfig):
    """Settings of FedRep."""

    personal_steps: int | None = None
    """Head steps tau_h of a round; two thirds of the local steps by default."""
    shared_steps: int | None = None
    """Representation steps tau_phi of a round; one third of the local steps by default."""
    personal_epochs: int | None = None
    """Head epochs of a round, instead of steps (the paper's tables: 10)."""
    shared_epochs: int | None = None
    """Representation epochs of a round, instead of steps (the paper's tables: 1 or 5)."""
    head_learning_rate: float | None = None
    """Step size of the head; that of the run by default."""
    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (the paper's 1/(rn)) or ``examples``."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        self.one_of("weights", WEIGHTS)
        for name in ("personal_steps", "shared_steps", "personal_epochs", "shared_epochs"):
            self.at_least(name, 1)
        self.at_least("head_learning_rate", 0)


def build(setting: Setting, config: FedRepConfig) -> Algorithm:
    """Compose the algorithm; the head is the last layer, weights and bias."""
    return assemble(setting, config, split_names(setting.model, "head", "head"))


def assemble(setting: Setting, config: FedRepConfig, head: frozenset[str]) -> Algorithm:
    """Compose the algorithm for given names of the head; none, or all, is for tests."""
    work: LocalWork = setting.work
    personal, shared = work.split(
        config.personal_steps,
        config.shared_steps,
        personal_epochs=config.personal_epochs,
        shared_epochs=config.shared_epochs,
    )
    split = Split(setting=setting, personal=head, personal_rate=config.head_learning_rate)
    schedule = [(PERSONAL, personal), (SHARED, shared)]  # the body with the NEW head
    return split.algorithm("fedrep", schedule, weights=config.weights)


METHOD = Method(
    name="fedrep",
    title="FedRep",
    paper="Collins et al. 2021",
    config=FedRepConfig,
    build=build,
    uploads="the body of the model",
    private="the head",
    inferable="rows, by gradient inversion of the body's difference",
    numbers={"train": "b"},
)
