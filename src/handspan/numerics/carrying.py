"""What extras share: phases whose clients carry more than the method knows, and served models.

The method's own functions never see what is carried: it is taken off before ``begin``, travels
beside the working record, and is put back after ``end``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from handspan.core.algorithm import Algorithm, Model, Phase, Stage
from handspan.core.data import Batch, ClientData
from handspan.core.records import Record

Inside = Callable[[Any], AbstractContextManager[Any]]


class Carrying(Record):
    """The method's working record, and what is carried along."""

    inner: Any
    kept: Any


class Served(Record):
    """What a method would serve, and the client's group where it finds groups; never stored."""

    model: Model
    group: Tensor | None  # () int64


def serve(algorithm: Algorithm, broadcast: Any, client: Any) -> Served:
    """Make the model that a method serves, after its personal phases."""
    assert algorithm.model is not None
    cluster = algorithm.cluster
    return Served(
        model=algorithm.model(broadcast, client),
        group=None if cluster is None else cluster(client),
    )


def on_field(stage: Stage, name: str, received: Callable[[Any], Any] = lambda b: b) -> Stage:
    """Return the stage for working records that hold the stage's own in a field.

    ``received`` finds the stage's own part of the broadcast.
    """

    def step(b: Any, k: Any, batch: Batch) -> Any:
        return dataclasses.replace(k, **{name: stage.step(received(b), getattr(k, name), batch)})

    def finish(b: Any, k: Any) -> Any:
        assert stage.finish is not None
        return dataclasses.replace(k, **{name: stage.finish(received(b), getattr(k, name))})

    return dataclasses.replace(stage, step=step, finish=finish if stage.finish else None)


def carrying(
    phase: Phase,
    enter: Callable[[Any, ClientData], tuple[Any, Any]],
    leave: Callable[[Any, Any], Any],
    inside: Inside = lambda kept: nullcontext(),
) -> Phase:
    """Return the phase for private records that hold more than the method's own.

    Parameters
    ----------
    phase
        As the method wrote it.
    enter
        (C, ClientData) -> the method's own private record, and what is carried.
    leave
        (the method's new private record, what is carried) -> C.
    inside
        What is carried -> a context in which all of the method's functions run.
    """

    def begin(b: Any, client: Any, data: ClientData) -> Carrying:
        own, kept = enter(client, data)
        with inside(kept):
            return Carrying(inner=phase.begin(b, own, data), kept=kept)

    def end(b: Any, k: Carrying, data: ClientData) -> tuple[Any, Any]:
        with inside(k.kept):
            own, upload = phase.end(b, k.inner, data)
        return leave(own, k.kept), upload

    stages = tuple(_within(on_field(stage, "inner"), inside) for stage in phase.stages)
    return dataclasses.replace(phase, begin=begin, stages=stages, end=end, cohort_update=None)


def _within(stage: Stage, inside: Inside) -> Stage:
    def step(b: Any, k: Carrying, batch: Batch) -> Any:
        with inside(k.kept):
            return stage.step(b, k, batch)

    def finish(b: Any, k: Carrying) -> Any:
        assert stage.finish is not None
        with inside(k.kept):
            return stage.finish(b, k)

    return dataclasses.replace(stage, step=step, finish=finish if stage.finish else None)


def rounded(loss: Tensor) -> Tensor:
    """Return losses in a form in which all engines agree on the smallest; no number is infinite."""
    infinity = float("inf")
    return (loss.double() * 1e9).round().nan_to_num(nan=infinity, posinf=infinity)
