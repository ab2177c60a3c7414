"""``handspan.fit``: train one method on one federation; ``handspan.load``: open a finished run."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from handspan.core import keys
from handspan.core.algorithm import Algorithm
from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.core.federation import RunState, cohort_size, run, start
from handspan.core.method import Setting
from handspan.core.task import Task
from handspan.evaluation.metrics import Metric, metric_by_name, metric_from_function
from handspan.evaluation.protocol import Evaluation, evaluate
from handspan.options import EXECUTION, DataOptions, TrainingOptions, from_values
from handspan.registry import MethodSpec, parse
from handspan.result import Result
from handspan.runs import RunFolder
from handspan.simulation.engine import EngineChoice, choose_engine, num_threads
from handspan.simulation.federation import Simulation
from handspan.simulation.store import ClientStore

Progress = Callable[[int, int, dict[str, Any]], None]


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
        named = tuple(m if isinstance(m, str) else m.__name__ for m in metrics)
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
        return model or default, None
    kind = (
        type(model).__name__
        if isinstance(model, nn.Module)
        else getattr(model, "__name__", "factory")
    )
    return f"given:{kind}", model


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
        algorithm=spec.build(setting),
        metrics=[] if task is None else make_metrics(options.metrics, functions, task),
    )


def _check_labels(spec: MethodSpec, data: FederatedData) -> None:
    if data.y is None:
        raise HandspanError(f"{spec.method.name} needs labels y, and the data have none")
    if spec.method.needs_side and data.side is None:
        raise HandspanError(
            f"{spec.method.name} needs side information: give a side row for each client"
        )


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
    from handspan.models.zoo import make_model

    assert data.y is not None
    num_outputs = data.num_classes
    if num_outputs is None:
        num_outputs = 1 if data.y.ndim == 1 else data.y.shape[1]
    factory = module or make_model(options.model or "mlp", data.row_shape, num_outputs)
    if spec.method.needs_side:
        from handspan.models.side_info import concatenate_side

        assert data.side is not None
        width = getattr(spec.config, "side_width", 16)
        base = (lambda: copy.deepcopy(factory)) if isinstance(factory, nn.Module) else factory
        factory = concatenate_side(base, data.side.shape[1], width=width)
    return task_from_module(
        factory,
        kind=data.task,
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
    return [
        metric_from_function(given[name]) if name in given else metric_by_name(name, task.row_loss)
        for name in names or default
    ]


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


def execute(
    problem: Problem,
    config: dict[str, Any],
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    hooks: Sequence[Callable[[RunState], bool | None]] = (),
) -> Result:
    """Run a prepared problem, from the start or from its folder's last checkpoint."""
    begin = time.perf_counter()
    folder, stored = None, None
    if out is not None:
        folder = RunFolder(out)
        if resume and folder.config_path.exists():
            stored = folder.check(config)
            folder.clean()
    elif problem.options.store == "disk":
        raise HandspanError("store=disk keeps private records in the run folder: give --out")
    choice = _choice(problem, stored)
    with num_threads(choice.threads):
        if folder is not None and stored is None:
            folder.create(
                {
                    **config,
                    "engine": {
                        "engine": choice.engine,
                        "block_size": choice.block_size,
                        "threads": choice.threads,
                        "device": problem.setting.device.type,
                        "torch": torch.__version__,
                    },
                }
            )
            folder.append_timing({"calibration_ms": dict(choice.milliseconds)})
        simulation = make_simulation(problem, choice, folder)
        state = None
        if folder is not None and stored is not None:
            like = start(problem.algorithm, simulation, problem.options.seed).server
            state = folder.load(like, simulation.store)
            if state is not None:
                state = dataclasses.replace(state, server=_to(state.server, like))
        session = _Session(problem, simulation, choice, folder, progress, begin)
        return session.run(state, hooks, config)


def _to(server: Any, like: Any) -> Any:
    from handspan.core.records import map_tensors

    return map_tensors(lambda value, old: value.to(old), server, like)


def _choice(problem: Problem, stored: dict[str, Any] | None) -> EngineChoice:
    options = problem.options
    if stored is not None:  # the same engine gives the same bits
        told = stored["engine"]
        return EngineChoice(
            engine=told["engine"], block_size=told["block_size"], threads=told["threads"]
        )
    return choose_engine(
        problem.algorithm,
        problem.data,
        engine=options.engine,
        block_size=options.block_size,
        threads=options.threads,
        cohort=options.cohort,
        seed=options.seed,
        name=f"{problem.spec.text} {options.model} {options.dtype}",
    )


def make_simulation(
    problem: Problem, choice: EngineChoice, folder: RunFolder | None = None
) -> Simulation:
    """Put the clients into this process."""
    simulation = Simulation(
        problem.algorithm,
        problem.data,
        seed=problem.options.seed,
        engine=choice.engine,
        block_size=choice.block_size,
    )
    if folder is not None and problem.options.store == "disk":
        simulation.store = ClientStore(
            simulation.initial,
            problem.data.num_train,
            problem.algorithm.per_row,
            folder=folder.path / "clients",
        )
    return simulation


@dataclass
class _Session:
    """One sitting of a run: evaluates, saves and reports between the rounds."""

    problem: Problem
    simulation: Simulation
    choice: EngineChoice
    folder: RunFolder | None
    progress: Progress | None
    begin: float
    aside: float = 0.0  # seconds spent on anything but rounds
    saved: float = 0.0
    saving: float = 0.0

    def run(
        self,
        state: RunState | None,
        hooks: Sequence[Callable[[RunState], bool | None]],
        config: dict[str, Any],
    ) -> Result:
        options = self.problem.options
        self.before = (0.0, 0.0) if self.folder is None else self.folder.seconds()
        self.aside = time.perf_counter() - self.begin
        self.saved = time.perf_counter()
        state = run(
            self.problem.algorithm,
            self.simulation,
            rounds=options.rounds,
            cohort=options.cohort,
            seed=options.seed,
            state=state,
            hooks=(*hooks, self.after_round),
        )
        if not state.history or state.history[-1]["round"] != state.round:
            self.evaluate(state)
        self.save(state)
        result = self.result(state, config)
        if self.folder is not None:
            self.folder.write_clients(result.clients)
            self.folder.write_summary(result.summary)
        return result

    def after_round(self, state: RunState) -> None:
        """Evaluate every so often, save when it is time, and tell how far the run is."""
        options = self.problem.options
        if options.eval_every and state.round % options.eval_every == 0:
            self.evaluate(state)
        now = time.perf_counter()
        # A checkpoint may cost a twentieth of the time at most.
        if self.folder is not None and now - self.saved > max(
            options.checkpoint_seconds, 20 * self.saving
        ):
            self.save(state)
        if self.progress is not None:
            self.progress(state.round, options.rounds, state.history[-1] if state.history else {})

    def evaluate(self, state: RunState) -> Evaluation:
        begin = time.perf_counter()
        scores = evaluate(
            self.simulation, state.server, state.round, self.problem.task, self.problem.metrics
        )
        state.history.append(
            {"round": state.round, **scores.summary, **dataclasses.asdict(state.costs)}
        )
        self.latest = (state.round, scores)
        self.aside += time.perf_counter() - begin
        return scores

    def seconds(self) -> tuple[float, float]:
        """Seconds in rounds, and in all, earlier sittings included."""
        total = time.perf_counter() - self.begin
        return self.before[0] + total - self.aside, self.before[1] + total

    def save(self, state: RunState) -> None:
        if self.folder is None:
            return
        begin = time.perf_counter()
        self.folder.save(state, self.simulation.store)
        self.saved = time.perf_counter()
        self.saving = self.saved - begin
        self.aside += self.saving
        rounds, total = self.seconds()
        self.folder.append_timing({"round": state.round, "seconds": rounds, "seconds_total": total})

    def result(self, state: RunState, config: dict[str, Any]) -> Result:
        problem, simulation = self.problem, self.simulation
        rounds_seconds, _ = self.seconds()
        latest = getattr(self, "latest", None)
        scores = (
            latest[1]
            if latest and latest[0] == state.round
            else evaluate(simulation, state.server, state.round, problem.task, problem.metrics)
        )
        ids = torch.arange(problem.data.num_clients)
        costs = state.costs + simulation.personal_costs(ids)
        summary: dict[str, Any] = {
            "method": problem.spec.text,
            "rounds": state.round,
            "seed": problem.options.seed,
            **empty_scores(problem.metrics),
            **scores.summary,
            **dataclasses.asdict(costs),
            "empty_rounds": state.empty_rounds,
            "abandoned_rounds": state.abandoned_rounds,
            "engine": str(self.choice),
            "num_clients": problem.data.num_clients,
            "fingerprint": config["fingerprint"],
        }
        if problem.held_out is not None and problem.metrics:
            summary.update(self.serve_held_out(state))
        summary["seconds"] = rounds_seconds
        summary["seconds_total"] = self.seconds()[1]
        columns: dict[str, Any] = {
            "client": ids,
            "num_train": problem.data.num_train,
            "num_test": problem.data.num_test,
            **scores.clients,
        }
        if problem.data.names:
            columns["name"] = list(problem.data.names)
        if problem.data.groups is not None:
            columns["group"] = problem.data.groups
        return Result(
            summary=summary,
            history=state.history,
            clients=columns,
            state=state,
            simulation=simulation,
            problem=problem,
            choice=self.choice,
            config=config,
        )

    def serve_held_out(self, state: RunState) -> dict[str, float | None]:
        """Score clients that took no part: they fit their private part, if there is one."""
        problem = self.problem
        assert problem.held_out is not None
        guests = Simulation(
            problem.algorithm,
            problem.held_out,
            seed=keys.seed_of(keys.key(problem.options.seed, "held out")),
            engine=self.choice.engine,
            block_size=self.choice.block_size,
        )
        everyone = torch.arange(problem.held_out.num_clients)
        guests.adapt(state.server, everyone, state.round)
        scores = evaluate(guests, state.server, state.round, problem.task, problem.metrics)
        name = problem.metrics[0].name
        return {f"heldout_{name}_mean": scores.summary[f"personal_{name}_mean"]}


def empty_scores(metrics: list[Metric]) -> dict[str, None]:
    """Names that every summary has; what does not apply stays null."""
    name = metrics[0].name if metrics else "accuracy"
    return dict.fromkeys(
        (
            f"personal_{name}_mean",
            f"personal_{name}_pooled",
            f"global_{name}_pooled",
            "worst_decile",
            f"heldout_{name}_mean",
        )
    )


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
    if data is None:
        if stored["data"] is None:
            raise HandspanError(f"{folder} was trained on given data: pass them as data=")
        data, held_out = open_data(
            DataOptions(**stored["data"]),
            stored["training"]["seed"],
            parse(stored["method"]).method.problem,
        )
    training = dict(stored["training"])
    if (training["model"] or "").startswith("given:") and model is None:
        raise HandspanError(f"{folder} was trained with a given model: pass it as model=")
    training["metrics"] = tuple(training["metrics"])
    options = TrainingOptions(**training)
    problem = prepare(parse(stored["method"], stored["settings"]), options, data, held_out, model)
    return reopen(problem, folder)


def reopen(problem: Problem, path: str | Path) -> Result:
    """Read a run folder without changing it."""
    folder = RunFolder(path)
    stored = folder.config()
    if problem.data.fingerprint() != stored["fingerprint"]:
        raise HandspanError(
            f"{path} was trained on other data: {stored['fingerprint']}, not "
            f"{problem.data.fingerprint()}"
        )
    choice = _choice(problem, stored)
    simulation = make_simulation(problem, choice, folder)
    like = start(problem.algorithm, simulation, problem.options.seed).server
    state = folder.load(like, simulation.store)
    if state is None:
        raise HandspanError(f"{path} holds no state yet: go on with handspan run --resume")
    state = dataclasses.replace(state, server=_to(state.server, like))
    return Result(
        summary=folder.summary(),
        history=state.history,
        clients=folder.clients(),
        state=state,
        simulation=simulation,
        problem=problem,
        choice=choice,
        config={key: value for key, value in stored.items() if key not in ("format", "engine")},
    )


def open_data(
    options: DataOptions, seed: int, problem: str = "labels"
) -> tuple[FederatedData, FederatedData | None]:
    """Read, partition and split the data of a run; and its held-out clients."""
    from handspan.data import load_data, split_holdout

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
    if not options.holdout_clients:
        return data, None
    return split_holdout(data, options.holdout_clients, seed)
