"""PerFedSI: a fully shared model f(x, z) that reads the client's side information z.

Objective (Eq. 2)
    min over theta of  sum_m (n_m / N) L_m(f_theta(., z_m))

Map
    Models 1, 2   the task: H([G(x), W(z)]) or H(G(x) * W(z)), wrapped when the run is set up
    Algorithm     step       local SGD on all parameters
    Algorithm     combine    uniform mean over the cohort, 1/|B_t|
    Remark 2.1    Split      some parameters stay with their client and move in the same SGD
    Remark C.2    _noise     noise on what reads z, before it is sent

Deviations
    Starts are neutral: the first model is the base model (Remark 2.2 notes that W may learn to
    ignore z; it names no start), save in Model 2 with side_encoder=none or an encoder of one's
    own. What reads z first in our encoders W has no bias. New clients are served without training
    (ours): z is all they need. gate=true is ours: it decides once, for all, whether z helps. Noise
    is drawn from the run's keys, as everything in a simulation.

References
----------
    [1] PerFedSI: A Framework for Personalized Federated Learning with Side Information.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import WEIGHTS, Algorithm, Stage
from handspan.core.data import Batch
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.task import Task
from handspan.numerics.averaging import Training, chosen_names, sgd_step, shared_algorithm
from handspan.numerics.local_work import LocalWork
from handspan.numerics.partial import BOTH, Split, split_names
from handspan.numerics.side_race import race

_READS_SIDE = ("encoder.*", "*.joined.*")  # as models with side information call them
_INFERS = "z, or its direction, from what reads it (Eq. 12: a z^T); gradients of the model"


@dataclass(frozen=True, kw_only=True)
class PerFedSIConfig(MethodConfig):
    """Settings of PerFedSI."""

    side: str = "given"
    """Where z comes from: ``given`` (an array ``side``, or side columns), ``clients`` or ``groups``
    (one-hot), ``mean`` (of the client's training rows), ``random`` (a control: says nothing)."""
    form: str = "concatenate"
    """``concatenate`` (Model 1: H reads [G(x), W(z)]), or ``mask`` (Model 2: G(x) * W(z))."""
    join: str = "head"
    """Layer whose input is joined by W(z): ``head`` (the last linear layer), or its name."""
    side_encoder: str = "linear"
    """W: ``linear``; ``two_layers`` (Omniglot's); ``none`` (z itself; in a mask each entry is a
    group of channels); or ``FILE.py:function``, called with ``num_side`` and ``side_width``."""
    side_width: int = 16
    """Width of W(z) in Model 1."""
    weights: str = "uniform"
    """Weights of the server's mean: ``uniform`` (1/|B_t|, the paper's) or ``examples``."""
    personal: str = "none"
    """Parameters that stay with their client (Remark 2.1): ``none``, ``head``, or patterns."""
    gate: bool = False
    """Race against the same model without z; validation rows decide halfway which one goes on."""
    side_noise: float = 0.0
    """Deviation of the normal noise on uploaded numbers that tell z (Remark C.2)."""
    noise_on: str = "side"
    """Where the noise goes: ``side`` (encoder, and layer at the join), ``all``, or patterns."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        self.one_of("side", ("given", "clients", "groups", "mean", "random"))
        self.one_of("form", ("concatenate", "mask"))
        self.one_of("weights", WEIGHTS)
        self.at_least("side_width", 1)
        self.at_least("side_noise", 0)
        self.only_with(self.side_noise > 0, "side_noise", "noise_on")
        self.only_with(self.form == "concatenate", "form=concatenate", "side_width")
        if ".py" not in self.side_encoder:
            self.one_of("side_encoder", ("linear", "two_layers", "none"))
        told_before_join = self.form == "mask" and self.side_encoder == "none"
        if self.side_noise > 0 and told_before_join and self.noise_on != "all":
            raise HandspanError(
                "side_noise on a part hides nothing with form=mask:side_encoder=none, where layers "
                "before the join tell z too: add noise_on=all, or take side_encoder=linear"
            )
        if self.gate and self.personal != "none":
            raise HandspanError(
                "gate=true decides between models that all clients share: drop personal, or gate"
            )


def build(setting: Setting, config: PerFedSIConfig) -> Algorithm:
    """Compose the algorithm; the task reads side information."""
    task = setting.model
    if not task.needs_side:
        raise HandspanError("perfedsi needs a model that reads side information")
    algorithm = _without_noise(setting, config)
    return algorithm if config.side_noise == 0 else _noisy(algorithm, setting, config)


def _without_noise(setting: Setting, config: PerFedSIConfig) -> Algorithm:
    task, work = setting.model, setting.work
    assert isinstance(work, LocalWork)
    if config.gate:
        return race(setting, config.weights, _INFERS)
    if config.personal == "none":
        return shared_algorithm(
            "perfedsi",
            setting,
            (Stage(step=sgd_step(task, work.sgd), **work.whole()),),
            weights=config.weights,
            infers=_INFERS,
        )
    names = split_names(task, config.personal, "personal")
    split = Split(setting=setting, personal=names)
    made = split.algorithm("perfedsi", [(BOTH, work.whole())], weights=config.weights)
    rounds = tuple(dataclasses.replace(phase, infers=_INFERS) for phase in made.rounds)
    return dataclasses.replace(made, rounds=rounds)


def _noisy(algorithm: Algorithm, setting: Setting, config: PerFedSIConfig) -> Algorithm:
    """Let clients add noise to what they are about to send, in every phase of training."""
    kept = config.personal
    own = set() if kept == "none" else set(chosen_names(setting.model, kept, "personal"))
    names = frozenset(_noise_names(setting.model, config.noise_on)) - own
    if not names:
        raise HandspanError(f"noise_on={config.noise_on!r} means nothing that is sent")
    noise = _noise(names, config.side_noise)
    rounds = tuple(
        phase
        if phase.name == "judge"
        else dataclasses.replace(
            phase, stages=(*phase.stages, dataclasses.replace(noise, rows=phase.stages[-1].rows))
        )
        for phase in algorithm.rounds
    )
    return dataclasses.replace(algorithm, rounds=rounds)


def _noise_names(task: Task, which: str) -> tuple[str, ...]:
    """Names of what gets noise; by default of what reads z."""
    if which != "side":
        return chosen_names(task, which, "noise_on")
    return tuple(n for n in task.names if any(fnmatch(n, pattern) for pattern in _READS_SIDE))


def _noise(names: frozenset[str], deviation: float) -> Stage:
    """One last step that takes no gradient: theta_{t,m,tau} plus noise (Remark C.2)."""

    def step(b: Any, k: Training, batch: Batch) -> Training:
        def noisy(name: str, value: Tensor) -> Tensor:
            draw = keys.normal(keys.fold(batch.key, name), tuple(value.shape), value.dtype)
            return value + deviation * draw

        params = {n: noisy(n, p) if n in names else p for n, p in k.params.items()}
        return dataclasses.replace(k, params=params)

    return Stage(step=step, steps=1, batch_size=1, forward_only=True, models=0)


METHOD = Method(
    name="perfedsi",
    title="PerFedSI",
    paper="PerFedSI: Personalized Federated Learning with Side Information",
    config=PerFedSIConfig,
    build=build,
    uploads="the whole model",
    private="the side information z",
    inferable="z itself or its direction, from one upload; rows, by gradient inversion",
    numbers={"train": "d"},
    needs_side=True,
    chooses=lambda config: config.gate,
)
