"""``handspan.fit``: train one method on one federation; ``handspan.load``: open a finished run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.core.federation import RunState
from handspan.options import EXECUTION, DataOptions, TrainingOptions, from_values
from handspan.preparing import Problem, open_data, prepare
from handspan.registry import parse
from handspan.result import Result
from handspan.runs import RunFolder
from handspan.session import Progress, execute, make_simulation, reopen

__all__ = [
    "Problem",
    "Progress",
    "Result",
    "execute",
    "fit",
    "load",
    "make_simulation",
    "open_data",
    "prepare",
    "reopen",
    "set_up",
]


def fit(
    method: str,
    data: FederatedData,
    *,
    model: str | nn.Module | Callable[[], nn.Module] | None = None,
    held_out: FederatedData | None = None,
    metrics: Sequence[str | Callable[..., float]] | None = None,
    loss: Callable[..., Tensor] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    hooks: Sequence[Callable[[RunState], bool | None]] = (),
    settings: Mapping[str, Any] | None = None,
    data_options: DataOptions | None = None,
    **options: Any,
) -> Result:
    """Train one method and evaluate it.

    Parameters
    ----------
    method
        ``name[+ft][:key=value...]``, as in ``fedrep`` or ``ifca+ft:k=20``.
    data
        The federation. Validation rows count as training rows where nothing is chosen by them.
    model
        Name of a network, ``FILE.py:function``, a module, or a factory of modules; ``mlp`` where
        nothing is given.
    held_out
        Clients that take no part in training and are served as new ones at the end.
    metrics
        Names of metrics, or functions of (outputs, y); the first one leads.
    loss
        Training loss of each row from (outputs, y), instead of cross-entropy or squared error.
    out, resume
        Folder of the run, and whether to go on with what is there.
    progress, hooks
        Called after every round; a hook that returns True ends the run.
    settings
        Settings of the method, as they stand after ``--set``.
    **options
        Any field of ``TrainingOptions`` (``rounds``, ``cohort``, ``learning_rate``, ...), or any
        setting of the method.

    Examples
    --------
    >>> from handspan.data import load_data
    >>> data = load_data("digits", partition="permuted:2", num_clients=10, seed=0)
    >>> result = fit("fedavg", data, rounds=2, cohort=0.5, learning_rate=0.1, engine="loop")
    >>> result.summary["rounds"], 0 <= result.summary["personal_accuracy_mean"] <= 1
    (2, True)
    """
    problem, config = set_up(
        method,
        data,
        model=model,
        held_out=held_out,
        metrics=metrics,
        loss=loss,
        settings=settings,
        data_options=data_options,
        **options,
    )
    return execute(problem, config, out=out, resume=resume, progress=progress, hooks=hooks)


def set_up(
    method: str,
    data: FederatedData,
    *,
    model: str | nn.Module | Callable[[], nn.Module] | None = None,
    held_out: FederatedData | None = None,
    metrics: Sequence[str | Callable[..., float]] | None = None,
    loss: Callable[..., Tensor] | None = None,
    settings: Mapping[str, Any] | None = None,
    data_options: DataOptions | None = None,
    **options: Any,
) -> tuple[Problem, dict[str, Any]]:
    """Validate everything that ``fit`` is given; returns the problem and its configuration."""
    chosen, mine = _separate(method, options, settings or {})
    name, module = _name_model(model, chosen.model)
    chosen = dataclasses.replace(chosen, model=name)
    if metrics is not None:
        named = tuple(m if isinstance(m, str) else _name_of(m) for m in metrics)
        chosen = dataclasses.replace(chosen, metrics=named)
    problem = prepare(
        parse(method, mine),
        chosen,
        data,
        held_out,
        module,
        loss,
        [m for m in metrics or () if not isinstance(m, str)],
    )
    return problem, describe(problem, mine, data_options)


def _name_of(metric: Any) -> str:
    name = getattr(metric, "__name__", None)
    if not callable(metric) or name is None:
        raise HandspanError(
            f"a metric is a name or a function (outputs, y) -> number, not {metric!r}"
        )
    return name


def _separate(
    method: str, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[TrainingOptions, dict[str, Any]]:
    """Tell options of the run from settings of the method."""
    known = parse(method).fields
    mine = {**settings, **{k: v for k, v in options.items() if k in known}}
    rest = {k: v for k, v in options.items() if k not in known}
    _, training = from_values(rest)
    return training, mine


def _name_model(
    model: str | nn.Module | Callable[[], nn.Module] | None, default: str | None
) -> tuple[str | None, nn.Module | Callable[[], nn.Module] | None]:
    if model is None or isinstance(model, str):
        return default if model is None else model, None
    kind = (
        type(model).__name__
        if isinstance(model, nn.Module)
        else getattr(model, "__name__", "factory")
    )
    return f"given:{kind}", model


def describe(
    problem: Problem, settings: Mapping[str, Any], data_options: DataOptions | None
) -> dict[str, Any]:
    """Return the configuration of a run, for its folder."""
    from handspan import __version__

    training = {
        field.name: getattr(problem.options, field.name)
        for field in dataclasses.fields(problem.options)
        if field.name not in EXECUTION
    }
    return {
        "handspan": __version__,
        "method": problem.spec.text,
        "settings": {key: str(value) for key, value in settings.items()},
        "training": training,
        "data": None if data_options is None else dataclasses.asdict(data_options),
        "data_info": dict(problem.data.info),
        "num_clients": problem.data.num_clients,
        "fingerprint": problem.data.fingerprint(),
    }


def load(
    folder: str | Path,
    *,
    data: FederatedData | None = None,
    held_out: FederatedData | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
) -> Result:
    """Open a run folder: the trained models, its scores, and new clients.

    ``data`` (and ``model``) are needed where the run was started from Python with its own.
    """
    stored = RunFolder(folder).config()
    try:
        spec = parse(stored["method"], stored["settings"])
        data_options, options = from_values({**(stored["data"] or {}), **stored["training"]})
    except HandspanError as error:
        raise HandspanError(f"{folder}/config.json cannot be used: {error}") from None
    if data is None:
        if stored["data"] is None:
            raise HandspanError(f"{folder} was trained on given data: pass them as data=")
        data, held_out = open_data(data_options, options.seed, spec.method.problem)
    if (options.model or "").startswith("given:") and model is None:
        raise HandspanError(f"{folder} was trained with a given model: pass it as model=")
    return reopen(prepare(spec, options, data, held_out, model), folder)
