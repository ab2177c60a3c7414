"""What a user may choose, validated in one place for Python, the command line and TOML files."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handspan.core.errors import HandspanError, nearest
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import convert


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which rows, and how they are spread over clients."""

    data: str = "digits"
    """Source: digits, mnist, fashion_mnist, cifar10, cifar100 (or NAME:FOLDER), folder:PATH, or
    the path of a ``.npz``, ``.csv`` or ``.parquet`` file."""
    partition: str = "iid"
    """How rows are spread: iid, dirichlet:ALPHA[:MIN], shards:S[:exact], groups:G, quantity:SIGMA,
    natural[:FIELD], file:P.npz; permuted:G, rotated:G, affine:G, also as A+B behind a former."""
    clients: int = 100
    """Number of clients (``natural`` and ``file`` partitions bring their own)."""
    client_column: str | None = None
    """Column of a table with the client of each row, if it is not called ``client``."""
    label_column: str | None = None
    """Column of a table with the labels, if it is not called ``label`` or ``y``."""
    side_columns: str | None = None
    """Columns of a table that describe its clients, by commas."""
    keep_test: bool = False
    """Keep the source's own test rows instead of splitting each client's rows 75/25."""
    holdout_clients: int = 0
    """Clients that take no part in training and are served as new ones at the end."""
    task: str = "auto"
    """``auto`` (integer labels: classification), ``classification``, ``regression`` or ``matrix``
    (no labels)."""
    validate: bool = False
    """Leave the test rows out and score validation rows, as the trials of ``compare`` do."""

    def __post_init__(self) -> None:
        """Write the columns of a table behind its path: ``data`` alone names the source."""
        columns = (self.client_column, self.label_column, self.side_columns)
        if any(columns):
            from handspan.data.table_text import with_columns

            client, label, side = columns
            text = with_columns(self.data, client=client, label=label, side=(side or "").split(","))
            object.__setattr__(self, "data", text)
            for name in ("client_column", "label_column", "side_columns"):
                object.__setattr__(self, name, None)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a run trains, evaluates and executes."""

    rounds: int = 100
    """Communication rounds."""
    cohort: float | int = 0.2
    """Clients of a round: a fraction with a decimal point, a count without."""
    seed: int = 0
    """Seed of everything: partition, start, cohorts, batches."""
    steps: int | None = None
    """Gradient steps of a client and round; blocks of a method share them 2:1. Default 15."""
    epochs: int | None = None
    """Passes over a client's rows instead of steps; each block of a method gets them all."""
    batch_size: int | None = 32
    """Rows of a batch; ``all`` takes all rows of the client."""
    learning_rate: float = 0.1
    """Local step size."""
    schedule: str = "constant"
    """Step size over the rounds: constant, exponential, cosine."""
    decay: float = 0.99
    """Factor a round of the exponential schedule."""
    momentum: float = 0.0
    """Momentum of the local SGD, fresh in every stage."""
    nesterov: bool = False
    """Nesterov momentum."""
    weight_decay: float = 0.0
    """Weight decay of the local SGD."""
    adapt_steps: int = 50
    """Steps with which a new client fits its private part."""
    model: str | None = None
    """Network: mlp (the default), linear, cnn, ... or ``FILE.py:function``."""
    metrics: tuple[str, ...] = ()
    """Metrics; the first one leads. Default: accuracy and loss, or rmse and loss."""
    eval_every: int = 10
    """Rounds between evaluations; the last round is always evaluated, 0 evaluates it alone."""
    engine: str = "auto"
    """auto (by the clock), steady (auto without a clock, for numbers that come again: the default
    of ``compare``), loop, stacked, workers or ray."""
    block_size: int | None = None
    """Clients per block of the stacked engine; inside workers it is the loop that runs without."""
    workers: int | None = None
    """Processes of the workers engine, or actors of ray, one thread each; by default as many as
    this machine has cores."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "float32"
    """float32 or float64."""
    precision: str = "float32"
    """Products of float32 numbers: float32; tf32 (on a GPU: 10 bits instead of 23, faster) or bf16
    (factors of 7 bits in local steps, faster still)."""
    threads: int | None = None
    """Threads of the tensor operations; auto chooses."""
    store: str = "memory"
    """Where private records live: memory, or disk (files mapped into memory, in the run folder)."""
    checkpoint_seconds: float = 2.0
    """Seconds between checkpoints of a run with a folder."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        _at_least("rounds", self.rounds, 1)
        _at_least("eval_every", self.eval_every, 0)
        _at_least("adapt_steps", self.adapt_steps, 1)
        for name in ("block_size", "threads", "workers"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if not 0 <= self.seed < 2**63:
            raise HandspanError(f"seed must lie between 0 and 2**63 - 1, not {self.seed}")
        for name in ("threads", "workers"):
            value = getattr(self, name)
            if value is not None and value > MOST_THREADS:
                raise HandspanError(f"{name} must be at most {MOST_THREADS}, not {value}")
        if self.engine not in ("auto", "steady", "loop", "stacked", "workers", "ray", "wire"):
            raise HandspanError(
                f"unknown engine {self.engine!r}: choose auto, steady, loop, stacked, workers or "
                "ray (wire is for tests)"
            )
        if self.workers is not None and self.engine not in ("auto", "workers", "ray"):
            raise HandspanError(f"engine {self.engine} has no workers: add --engine workers")
        choices = {
            "dtype": ("float32", "float64"),
            "store": ("memory", "disk"),
            "precision": ("float32", "tf32", "bf16"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise HandspanError(f"unknown {name} {value!r}{nearest(value, list(allowed))}")
        if (self.precision, self.dtype) == ("bf16", "float64"):
            raise HandspanError(
                "precision bf16 is for float32 numbers: drop it, or --dtype float64"
            )
        if self.nesterov and not self.momentum:
            raise HandspanError("nesterov needs momentum above 0")
        if not 0 <= self.momentum < 1:
            raise HandspanError(f"momentum must lie in [0, 1), not {self.momentum}")
        if self.decay != type(self).decay and self.schedule != "exponential":
            raise HandspanError(
                f"decay belongs to the exponential schedule, and this one is {self.schedule}: drop "
                "it, or say --schedule exponential"
            )
        for name in ("weight_decay", "checkpoint_seconds"):
            _at_least(name, getattr(self, name), 0)
        self.work()  # checks steps, epochs, batch size, step size and schedule

    def work(self) -> LocalWork:
        """Return the local work of a client."""
        return LocalWork(
            steps=self.steps,
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            decay=self.decay,
            sgd=Sgd(momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay),
            adapt_steps=self.adapt_steps,
        )


SHORT = {"lr": "learning_rate"}
MOST_THREADS = 1024  # with very many the operating system ends the process
# What changes the clock and not the algorithm: a run may be resumed with other values.
EXECUTION = ("engine", "block_size", "device", "threads", "workers", "checkpoint_seconds")


def _at_least(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise HandspanError(f"{name} must be at least {least}, not {value}")


def from_values(values: Mapping[str, Any]) -> tuple[DataOptions, TrainingOptions]:
    """Build both groups of options from texts and numbers by name."""
    groups = (DataOptions, TrainingOptions)
    known = {f.name for cls in groups for f in dataclasses.fields(cls)}
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = SHORT.get(key, key).replace("-", "_")
        if name not in known:
            raise HandspanError(f"unknown option {key!r}{nearest(name, sorted(known))}")
        named[name] = value
    built = [
        cls(
            **{
                name: _convert(name, value, hint)
                for name, hint in typing.get_type_hints(cls).items()
                if name in named
                for value in [named[name]]
            }
        )
        for cls in groups
    ]
    return typing.cast("tuple[DataOptions, TrainingOptions]", tuple(built))


def _convert(name: str, value: Any, hint: Any) -> Any:
    if name == "cohort":
        return _cohort(value)
    if name == "batch_size" and value == "all":
        return None
    if name == "metrics":
        return _metrics(value)
    if isinstance(hint, types.UnionType) and value is None:
        return None
    return convert(name, value, hint)


def _metrics(value: Any) -> tuple[str, ...]:
    """Names, by commas or in a list, each once."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise HandspanError(f"metrics takes names such as accuracy,loss, not {value!r}")
    for name in names:
        if names.count(name) > 1:
            raise HandspanError(f"the metric {name!r} stands twice")
    return tuple(name.strip() for name in names)


def _cohort(value: Any) -> int | float:
    """With a decimal point (or an exponent) a fraction, without one a count."""
    try:
        if isinstance(value, str):
            return float(value) if any(mark in value for mark in ".e") else int(value)
        if isinstance(value, bool):
            raise ValueError
        return value if isinstance(value, int | float) else int(value)
    except (ValueError, TypeError):
        raise HandspanError(
            f"cohort takes a fraction such as 0.2 or a count such as 20, not {value!r}"
        ) from None


def read_toml(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read options by their full names, and the table ``[set]`` of method settings."""
    import tomllib

    try:
        with Path(path).open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise HandspanError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HandspanError(f"{path} is no TOML file: {error}") from None
    settings = values.pop("set", {})
    if not isinstance(settings, dict):
        raise HandspanError(f"{path}: [set] must be a table of method settings")
    options: dict[str, Any] = {}
    for key, value in values.items():
        name = SHORT.get(key, key).replace("-", "_")
        if name in options:
            raise HandspanError(f"{path} gives {name} twice, under two names: drop one")
        options[name] = value
    return options, settings
