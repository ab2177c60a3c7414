"""FedBABU: the body is trained under one random head that never moves; models get personal later.

Objective
    min over body of  sum_i p_i f_i(body, head_0); head_0 is random and common to all clients

Map
    Alg. 1, client            Split.step         SGD on the body; the head is in the forward pass
    Alg. 1, server            combine            mean of the bodies
    Alg. 1, personalisation   with_fine_tuning   SGD from (body, head_0) on the client's rows

Deviations
    The mean is weighted by rows, as the objective's p_i ask; public code takes the plain mean. The
    head goes down with the body in every round, where once would do. Fine-tuning takes the run's
    first step size unless told otherwise; public code takes the last, decayed one.

References
----------
    [1] Oh, Kim, Yun: FedBABU: Towards Enhanced Representation for Federated Image Classification.
        ICLR 2022. arXiv:2106.06042v2.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from handspan.core.algorithm import WEIGHTS, Algorithm, Reduced, Stage
from handspan.core.data import ClientData, Round
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Empty
from handspan.numerics.averaging import (
    ModelBroadcast,
    ModelState,
    Training,
    chosen_names,
    shared_algorithm,
)
from handspan.numerics.fine_tuning import with_fine_tuning
from handspan.numerics.local_work import LocalWork
from handspan.numerics.partial import SHARED, SharedPart, Split, split_names


@dataclass(frozen=True, kw_only=True)
class FedBABUConfig(MethodConfig):
    """Settings of FedBABU."""

    frozen: str = "head"
    """Parameters head_0 that stay random in training: ``head``, or patterns joined by ``+``."""
    tune_steps: int = 20
    """Steps of fine-tuning before a client is served; the paper takes a few epochs."""
    tune_learning_rate: float | None = None
    """Step size of fine-tuning; the run's first one by default."""
    tune_names: str = "all"
    """What is fine-tuned: ``all`` (the paper), ``head``, or patterns joined by ``+``."""
    weights: str = "examples"
    """Weights of the server's mean: ``examples`` (p_i) or ``uniform`` (public code)."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.at_least("tune_steps", 0)
        self.at_least("tune_learning_rate", 0)
        tunes = "tune_steps above 0"
        self.only_with(self.tune_steps > 0, tunes, "tune_learning_rate", "tune_names")
        self.one_of("weights", WEIGHTS)


def build(setting: Setting, config: FedBABUConfig) -> Algorithm:
    """Compose the algorithm."""
    return assemble(setting, config, split_names(setting.model, config.frozen, "frozen"))


def assemble(setting: Setting, config: FedBABUConfig, head: frozenset[str]) -> Algorithm:
    """Compose the algorithm for given names of the head; none is for tests."""
    work: LocalWork = setting.work
    split = Split(setting=setting, personal=head)
    plain = shared_algorithm(
        "fedbabu",
        setting,
        (Stage(step=split.step(*SHARED), **work.whole()),),
        weights=config.weights,
    )

    def end(b: ModelBroadcast, k: Training, data: ClientData) -> tuple[Empty, SharedPart]:
        return Empty(), split.divided(k.params, k.buffers)[1]  # the head is left out

    def combine(server: ModelState, reduction: Reduced, round: Round) -> ModelState:
        first, body = split.divided(server.params, server.buffers)
        mean = reduction.mean(like=body)
        return ModelState(
            params={**first.personal, **mean.shared}, buffers={**first.buffers, **mean.buffers}
        )

    (phase,) = plain.rounds
    infers = "gradients of the body under a known head: inversion attacks apply"
    phase = dataclasses.replace(phase, end=end, combine=combine, infers=infers)
    tuned = with_fine_tuning(
        dataclasses.replace(plain, rounds=(phase,)),
        setting,
        steps=config.tune_steps,
        learning_rate=config.tune_learning_rate,
        names="+".join(chosen_names(setting.model, config.tune_names, "tune_names")),
    )
    return dataclasses.replace(tuned, name="fedbabu")


METHOD = Method(
    name="fedbabu",
    title="FedBABU",
    paper="Oh, Kim, Yun 2022",
    config=FedBABUConfig,
    build=build,
    uploads="the body of the model",
    private="nothing; the fine-tuned model is never sent",
    inferable="rows, by gradient inversion of the body's difference: the head is known",
    numbers={"train": "b"},
)
