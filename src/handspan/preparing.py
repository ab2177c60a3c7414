"""Bringing method, data, model and metrics together; what does not fit is refused here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from handspan.core.algorithm import Algorithm
from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.core.federation import cohort_size
from handspan.core.method import Setting
from handspan.core.task import Task
from handspan.evaluation.metrics import Metric, metric_by_name, metric_from_function
from handspan.options import DataOptions, TrainingOptions
from handspan.registry import MethodSpec
from handspan.simulation.precision import with_products


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A method, ready to run on a federation."""

    spec: MethodSpec
    options: TrainingOptions
    data: FederatedData
    held_out: FederatedData | None
    task: Task | None
    setting: Setting
    algorithm: Algorithm
    metrics: list[Metric]


def prepare(
    spec: MethodSpec,
    options: TrainingOptions,
    data: FederatedData,
    held_out: FederatedData | None = None,
    module: nn.Module | Callable[[], nn.Module] | None = None,
    loss: Callable[..., Tensor] | None = None,
    functions: Sequence[Callable[..., float]] = (),
) -> Problem:
    """Bring method, data and model together; refuse what does not fit."""
    device, dtype = resolve_device(options.device), getattr(torch, options.dtype)
    is_matrix = spec.method.problem == "matrix"
    if is_matrix:
        if options.model is not None:
            raise HandspanError(f"{spec.method.name} factorises the rows: it takes no model")
        data, held_out = flat_rows(data.without_test()), None
    else:
        _check_labels(spec, data)
        if not spec.chooses:  # validation rows are for those who choose by them
            data = data.pooled()
            held_out = None if held_out is None else held_out.pooled()
        if spec.method.needs_side:
            data, held_out = _with_side(spec, options, data, held_out)
    cohort = cohort_size(options.cohort, data.num_clients)
    data = data.to(device, dtype)
    task = None if is_matrix else make_task(spec, options, data, module, loss, device, dtype)
    setting = Setting(
        task=task,
        work=options.work(),
        num_clients=data.num_clients,
        cohort=cohort,
        rounds=options.rounds,
        num_groups=0 if data.groups is None else int(data.groups.max()) + 1,
        row_shape=data.row_shape,
        dtype=dtype,
        device=device,
    )
    return Problem(
        spec=spec,
        options=options,
        data=data,
        held_out=None if held_out is None else held_out.to(device, dtype),
        task=task,
        setting=setting,
        algorithm=with_products(spec.build(setting), options.precision),
        metrics=[] if task is None else make_metrics(options.metrics, functions, task),
    )


def _check_labels(spec: MethodSpec, data: FederatedData) -> None:
    if data.y is None:
        raise HandspanError(f"{spec.method.name} needs labels y, and the data have none")
    if spec.method.problem == "regression" and data.num_classes is not None:
        raise HandspanError(
            f"{spec.method.name} is a regression: its labels are numbers, not classes; where whole "
            "numbers are meant as numbers, say --task regression"
        )


def _with_side(
    spec: MethodSpec,
    options: TrainingOptions,
    data: FederatedData,
    held_out: FederatedData | None,
) -> tuple[FederatedData, FederatedData | None]:
    """Give clients the side information that the method asks for."""
    from handspan.data.side import with_side

    data, held_out = with_side(getattr(spec.config, "side", "given"), data, held_out, options.seed)
    if data.side is None:
        raise HandspanError(
            f"{spec.method.name} needs side information: give a side row for each client, name "
            "--side-columns of a table, or let it be made by --set side=clients, groups or mean"
        )
    return data, held_out


def resolve_device(name: str) -> torch.device:
    """``auto`` takes the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise HandspanError(f"unknown device {name!r}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise HandspanError("this machine offers no CUDA device: use --device cpu")
    return torch.device(name)


def flat_rows(data: FederatedData) -> FederatedData:
    """Rows as vectors, for matrix problems."""
    if data.is_sparse or len(data.row_shape) == 1:
        return data
    assert isinstance(data.x, Tensor)
    return dataclasses.replace(data, x=data.x.flatten(1))


def make_task(
    spec: MethodSpec,
    options: TrainingOptions,
    data: FederatedData,
    module: nn.Module | Callable[[], nn.Module] | None,
    loss: Callable[..., Tensor] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Task:
    """Make the prediction problem of a network."""
    from handspan.models.convert import task_from_module
    from handspan.models.side_info import SIDE, join_side, reads_side
    from handspan.models.source import fresh_copy
    from handspan.models.zoo import make_model

    assert data.y is not None
    num_outputs = data.num_classes
    if num_outputs is None:
        num_outputs = 1 if data.y.ndim == 1 else data.y.shape[1]
    given = module
    num_side = data.side.shape[1] if spec.method.needs_side and data.side is not None else None
    if given is None:
        usual = "linear" if spec.method.problem == "regression" else "mlp"
        name = usual if options.model is None else options.model
        given = make_model(name, data.row_shape, num_outputs, num_side if ".py" in name else None)
    if num_side is not None and not reads_side(given):
        base = partial(fresh_copy, given) if isinstance(given, nn.Module) else given
        chosen = {name: getattr(spec.config, name) for name in SIDE if hasattr(spec.config, name)}
        given = join_side(base, num_side, rows=_sample(data, False), **chosen)
    return task_from_module(
        given,
        kind="regression" if data.num_classes is None else "classification",
        loss=loss,
        needs_side=spec.method.needs_side,
        num_outputs=num_outputs,
        sample=_sample(data, spec.method.needs_side),
        dtype=dtype,
        device=device,
    )


def _sample(data: FederatedData, needs_side: bool) -> Any:
    """A few rows (and a side row), to try the model on before anything starts."""
    rows = torch.arange(min(4, data.num_rows))
    x = data.x[rows] if isinstance(data.x, Tensor) else data.x.select(rows).to_dense()
    if not needs_side:
        return x
    assert data.side is not None
    return x, data.side[0]


def make_metrics(
    names: Sequence[str], functions: Sequence[Callable[..., float]], task: Task
) -> list[Metric]:
    """Metrics by name, the leading one first; accuracy (or rmse) and loss by default."""
    given = {function.__name__: function for function in functions}
    default = ("accuracy", "loss") if task.kind == "classification" else ("rmse", "loss")
    metrics = [
        metric_from_function(given[name]) if name in given else metric_by_name(name, task.row_loss)
        for name in names or default
    ]
    for metric in metrics:
        if metric.task not in (None, task.kind):
            raise HandspanError(
                f"{metric.name} scores {metric.task}, and this is {task.kind}: take "
                f"{' or '.join(default)}, or say --task {metric.task}"
            )
    return metrics


def open_data(
    options: DataOptions, seed: int, problem: str = "labels"
) -> tuple[FederatedData, FederatedData | None]:
    """Read, partition and split the data of a run; and its held-out clients."""
    from handspan.data import load_data, split_holdout
    from handspan.data.selection import selection_data

    if options.validate and problem == "matrix":
        raise HandspanError("a matrix problem scores its own fit: it has no validation rows")
    data = load_data(
        options.data,
        partition=options.partition,
        num_clients=options.clients,
        seed=seed,
        keep_test=options.keep_test,
        holdout_clients=options.holdout_clients,
        task=options.task,
        standardize=False if problem == "matrix" else "auto",
    )
    data, held_out = split_holdout(data, options.holdout_clients, seed)
    return (selection_data(data), None) if options.validate else (data, held_out)
