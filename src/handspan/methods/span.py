"""span: personal heads on a shared span, told neither groups nor rank nor kind of heterogeneity.

Objective (ours; it contains pFL-MF's Eq. 6 of [1] with one direction for each column of U)
    min over body, U, v_i of  mean_i f_i(body, U [1, v_i]) - log of a mixture prior of the v_i

Map (the parts are explained on the method's page)
    race      rounds are shared out between one model for all and personal heads; held-out rows
              decide which of the two goes on, and whether label frequencies are to be told
    cut       canonical coordinates, then the number of directions of least held-out loss; a second
              cut may take back directions that the first one dropped
    train     scaled steps: v <- v - eta (U^T U)^-1 U^T grad; body and head with the shrunk v;
              U <- U + mean(D [1, v]^T) (mean([1, v] [1, v]^T) + lambda I)^-1
    centres   Lloyd's algorithm by sums; v is shrunk to its centre, by a factor that held-out rows
              choose
    serve     the centre that fits the client's rows, the shrunk v, the label prior

Deviations
    None: it is our own.

References
----------
    [1] Dadras, Stich, Yurtsever: Personalized Federated Learning via Low-Rank Matrix Optimization.
        Transactions on Machine Learning Research (final version).
"""

from __future__ import annotations

from dataclasses import dataclass

from handspan.core.algorithm import WEIGHTS, Algorithm
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.numerics.averaging import chosen_names
from handspan.numerics.label_prior import output_bias
from handspan.numerics.spanning.phases import Parts, compose_phases
from handspan.numerics.spanning.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class SpanConfig(MethodConfig):
    """Settings of span; the defaults are meant to stay."""

    width: int | None = None
    """Directions at the start, and most at any time; min(30, max(2, clients / 5)) by default."""
    groups: int | None = None
    """Most centres at any time; min(30, max(2, clients / 4)) by default."""
    factor: str = "head"
    """What is personal: ``head``, ``all``, or a pattern of names (``2.*``)."""
    weights: str = "examples"
    """Weights of the means: ``examples`` or ``uniform``."""
    race: bool = True
    """Let one model for all compete at the start; otherwise heads are personal throughout."""
    cut: bool = True
    """Find the number of directions; otherwise it stays at ``width``."""
    shrink: bool = True
    """Find centres and shrink coordinates to them."""
    prior: bool = True
    """Tell the models the client's label frequencies, where held-out rows approve."""
    scaled: bool = True
    """Precondition both kinds of steps by the inverse Gram matrices."""
    offset: bool = True
    """Let all heads share a common part beside the directions."""
    average: float = 0.0
    """Share of the last rounds over which one model for all is averaged; 0 serves the last one."""
    damping: float = 1e-3
    """Ridge added to the coordinates' moments (lambda)."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.at_least("width", 1)
        self.at_least("groups", 1)
        self.one_of("weights", WEIGHTS)
        if not 0 < self.damping < float("inf"):
            raise HandspanError(f"damping must be above 0, not {self.damping}")
        if not 0 <= self.average <= 1:
            raise HandspanError(f"average is a share of the rounds, not {self.average}")


def build(setting: Setting, config: SpanConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    if setting.work.sgd.weight_decay:
        raise HandspanError("span takes no weight_decay: it would make the local heads full rank")
    n = setting.num_clients
    return compose_phases(
        setting,
        Parts(
            task=task,
            names=chosen_names(task, config.factor, "factor"),
            bias=_output_bias(setting) if config.prior else None,
            width=config.width or min(30, max(2, n // 5)),
            groups=(config.groups or min(30, max(2, n // 4))) if config.shrink else 1,
            weight=WEIGHTS[config.weights],
            scaled=config.scaled,
            offset=config.offset,
            damping=config.damping,
            average=config.average,
        ),
        Schedule.of(setting.rounds, race=config.race, cut=config.cut, shrink=config.shrink),
    )


def _output_bias(setting: Setting) -> str | None:
    """Name of the bias that takes the label prior; None where a model or a problem has none."""
    try:
        return output_bias(setting)
    except HandspanError:
        return None


METHOD = Method(
    name="span",
    title="span",
    paper="ours",
    config=SpanConfig,
    build=build,
    uploads="sums: body, rank-one change of the basis, nearest centre, losses of candidates",
    private="the coordinates v_i, the label frequencies",
    inferable="v_i and its group, from one upload seen alone; rows, by gradient inversion",
    numbers={"race": "d", "common": "d"},
    chooses=lambda config: True,
)
