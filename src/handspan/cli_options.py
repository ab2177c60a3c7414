"""Options of the command line that several commands have, and how they are collected."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from handspan.core.errors import HandspanError


def option(help: str, *names: str) -> Any:
    """Describe an option whose default is told in words."""
    return typer.Option(*names, help=help, show_default=False)


Data = Annotated[
    str | None,
    option(
        "digits, mnist, fashion_mnist, cifar10 or cifar100 (or NAME:FOLDER), folder:PATH with "
        "images, or a FILE.npz, .csv or .parquet (default digits)"
    ),
]
Partition = Annotated[
    str | None,
    option(
        "iid, dirichlet:ALPHA[:MIN], shards:S[:exact], groups:G, quantity:SIGMA, natural[:FIELD], "
        "file:P.npz; permuted:G, rotated:G, affine:G, also behind one of the former, as in "
        "quantity:1.5+permuted:3 (default iid)"
    ),
]
ClientColumn = Annotated[str | None, option("a table's column of clients (default client)")]
LabelColumn = Annotated[str | None, option("a table's column of labels (default label, or y)")]
SideColumns = Annotated[str | None, option("a table's columns about its clients, by commas")]
Clients = Annotated[str | None, option("number of clients (default 100)")]
Rounds = Annotated[str | None, option("communication rounds (default 100)")]
Cohort = Annotated[str | None, option("clients a round: 0.2 a share, 20 a count (default 0.2)")]
Model = Annotated[str | None, option("mlp, cnn, linear, ... or FILE.py:function (default mlp)")]
Seed = Annotated[str | None, option("seed of everything (default 0)")]
Steps = Annotated[str | None, option("gradient steps a client and round (default 15)")]
Epochs = Annotated[str | None, option("passes over the rows instead of steps")]
BatchSize = Annotated[str | None, option("rows of a batch, or all (default 32)")]
Lr = Annotated[str | None, option("local step size (default 0.1)", "--lr")]
Momentum = Annotated[str | None, option("momentum of the local SGD")]
WeightDecay = Annotated[str | None, option("weight decay of the local SGD")]
Nesterov = Annotated[bool | None, option("Nesterov momentum", "--nesterov")]
Schedule = Annotated[str | None, option("constant, exponential or cosine")]
Decay = Annotated[str | None, option("factor a round of the exponential schedule")]
Metrics = Annotated[str | None, option("metrics, by commas; the first one leads")]
Task = Annotated[str | None, option("auto, classification, regression or matrix (no labels)")]
KeepTest = Annotated[bool | None, option("keep the source's own test rows", "--keep-test")]
Validate = Annotated[
    bool | None, option("leave test rows out, score validation rows", "--validate")
]
AdaptSteps = Annotated[str | None, option("steps with which a new client fits (default 50)")]
Holdout = Annotated[str | None, option("clients served as new ones at the end")]
EvalEvery = Annotated[str | None, option("rounds between evaluations (default 10)")]
Engine = Annotated[
    str | None,
    option(
        "auto (timed), steady (not timed: numbers come again), loop, stacked, workers or ray "
        "(default auto)"
    ),
]
BlockSize = Annotated[str | None, option("clients per block of the stacked engine")]
Workers = Annotated[str | None, option("processes of workers, actors of ray (default: cores)")]
Device = Annotated[str | None, option("auto, cpu or cuda (default auto)")]
Dtype = Annotated[str | None, option("float32 or float64")]
Precision = Annotated[str | None, option("products in float32, tf32 or bf16")]
Threads = Annotated[str | None, option("threads of the tensor operations")]
Store = Annotated[str | None, option("where private records live: memory or disk")]
Checkpoint = Annotated[str | None, option("seconds between checkpoints (default 2)")]
Settings = Annotated[list[str] | None, option("setting of the method, key=value", "--set")]
Config = Annotated[str | None, option("options from a TOML file; those given here go first")]
Tune = Annotated[
    int | None,
    option("tune on validation rows: so many trials each (4 if none is given: lr 0.03,0.1,0.3,1)"),
]
Grid = Annotated[list[str] | None, option("METHOD:field=a,b,c to try; METHOD may be all")]
Equal = Annotated[str, option("what every run may spend: rounds, rows:N or bytes:N")]
Shard = Annotated[str | None, option("run the i-th of n parts, as in 1/4; see merge")]
Stage = Annotated[str, option("all, or only the trials (tune), or only the final runs (final)")]
Out = Annotated[str | None, option("folder for the results")]
Resume = Annotated[bool, option("go on with what is in --out", "--resume")]
Profiled = Annotated[bool, option("tell where the time goes; slower on a GPU", "--profile")]
Verbose = Annotated[bool, option("tell which engine was chosen, and why", "--verbose")]


def collect(values: dict[str, Any], *own: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and method settings: those of the TOML file, overruled by the command line."""
    from handspan.options import read_toml

    values = {name: value for name, value in values.items() if name not in own}
    config = values.pop("config", None)
    given: dict[str, Any] = {}
    for text in values.pop("settings", None) or []:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise HandspanError(f"--set {text!r} is no setting: write --set key=value")
        given[key.strip()] = value.strip()
    options, settings = read_toml(config) if config else ({}, {})
    told = {("learning_rate" if k == "lr" else k): v for k, v in values.items() if v is not None}
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in told:
            options.pop(other, None)
    return {**options, **told}, {**settings, **given}
