"""The command line: ``handspan run``, ``compare``, ``partition``, ``list``, ``adapt``, ..."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from handspan import __version__
from handspan.cli_factoring import add_factoring
from handspan.cli_options import (
    AdaptSteps,
    BatchSize,
    BlockSize,
    Checkpoint,
    ClientColumn,
    Clients,
    Cohort,
    Config,
    Data,
    Decay,
    Device,
    Dtype,
    Engine,
    Epochs,
    Equal,
    EvalEvery,
    Grid,
    Holdout,
    KeepTest,
    LabelColumn,
    Lr,
    Metrics,
    Model,
    Momentum,
    Nesterov,
    Out,
    Partition,
    Precision,
    Profiled,
    Resume,
    Rounds,
    Schedule,
    Seed,
    Settings,
    Shard,
    SideColumns,
    Stage,
    Steps,
    Store,
    Task,
    Threads,
    Tune,
    Validate,
    Verbose,
    WeightDecay,
    Workers,
    collect,
    option,
)
from handspan.core.errors import HandspanError

_INTERRUPTED = 130  # what typer makes of Ctrl-C
_OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory")  # how torch tells it
_UsageError: Any = typer.BadParameter.__base__  # typer names its children alone

app = typer.Typer(
    name="handspan",
    help="Personalised federated learning: personal models from a shared span.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def run(
    method: Annotated[str, typer.Argument(help="name[+ft][:key=value...], such as ifca:k=20")],
    data: Data = None,
    partition: Partition = None,
    clients: Clients = None,
    client_column: ClientColumn = None,
    label_column: LabelColumn = None,
    side_columns: SideColumns = None,
    rounds: Rounds = None,
    cohort: Cohort = None,
    model: Model = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
    settings: Settings = None,
    config: Config = None,
    steps: Steps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    momentum: Momentum = None,
    nesterov: Nesterov = None,
    weight_decay: WeightDecay = None,
    schedule: Schedule = None,
    decay: Decay = None,
    metrics: Metrics = None,
    task: Task = None,
    keep_test: KeepTest = None,
    holdout_clients: Holdout = None,
    eval_every: EvalEvery = None,
    engine: Engine = None,
    block_size: BlockSize = None,
    device: Device = None,
    dtype: Dtype = None,
    precision: Precision = None,
    threads: Threads = None,
    workers: Workers = None,
    store: Store = None,
    checkpoint_seconds: Checkpoint = None,
    validate: Validate = None,
    adapt_steps: AdaptSteps = None,
    verbose: Verbose = False,
    profile: Profiled = False,
) -> None:
    """Train one method and evaluate it."""
    options = collect(locals(), "method", "out", "resume", "verbose", "profile")
    from handspan.commands import run_method

    run_method(method, *options, out=out, resume=resume, verbose=verbose, is_profiled=profile)


class _Compare(TyperCommand):
    """``--tune`` without a number takes four step sizes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place in [place for place, word in enumerate(args) if word == "--tune"][::-1]:
            if not args[place + 1 : place + 2] or args[place + 1].startswith("--"):
                args.insert(place + 1, "4")
        return super().parse_args(ctx, args)


@app.command(cls=_Compare)
def compare(
    methods: Annotated[str, typer.Argument(help="methods, by commas")],
    seeds: Annotated[int, option("seeds: seed, seed+1, ... (default 3)")] = 3,
    tune: Tune = None,
    grid: Grid = None,
    equal: Equal = "rounds",
    shard: Shard = None,
    stage: Stage = "all",
    data: Data = None,
    partition: Partition = None,
    clients: Clients = None,
    client_column: ClientColumn = None,
    label_column: LabelColumn = None,
    side_columns: SideColumns = None,
    rounds: Rounds = None,
    cohort: Cohort = None,
    model: Model = None,
    seed: Seed = None,
    out: Out = None,
    settings: Settings = None,
    config: Config = None,
    steps: Steps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    momentum: Momentum = None,
    nesterov: Nesterov = None,
    weight_decay: WeightDecay = None,
    schedule: Schedule = None,
    decay: Decay = None,
    metrics: Metrics = None,
    task: Task = None,
    keep_test: KeepTest = None,
    holdout_clients: Holdout = None,
    eval_every: EvalEvery = None,
    engine: Engine = None,
    block_size: BlockSize = None,
    device: Device = None,
    dtype: Dtype = None,
    precision: Precision = None,
    threads: Threads = None,
    workers: Workers = None,
    adapt_steps: AdaptSteps = None,
) -> None:
    """Compare methods over several seeds, in one table.

    All runs are on the same terms: same rows, rounds, local work and network.
    """
    own = ("own", "methods", "seeds", "tune", "grid", "equal", "shard", "stage", "out")
    options = collect(locals(), *own)
    from handspan.comparing import compare_methods

    compare_methods(
        methods.split(","),
        *options,
        seeds=seeds,
        tune=tune,
        grid=grid or [],
        equal=equal,
        shard=shard,
        stage=stage,
        out=out,
    )


add_factoring(app)


@app.command()
def merge(
    folders: Annotated[list[str], typer.Argument(metavar="OUT...", help="folders of the shards")],
    out: Annotated[str, typer.Option(help="folder for the whole comparison")],
) -> None:
    """Join the shards of a comparison into the whole table."""
    from handspan.comparing import merge_folders

    merge_folders(folders, out=out)


@app.command()
def partition(
    data: Data = None,
    partition: Partition = None,
    clients: Clients = None,
    client_column: ClientColumn = None,
    label_column: LabelColumn = None,
    side_columns: SideColumns = None,
    seed: Seed = None,
    task: Task = None,
    out: Annotated[str | None, option("P.npz for the partition; use it as file:P.npz")] = None,
) -> None:
    """Divide a source among clients, and store who has which row."""
    values = {k: v for k, v in locals().items() if k != "out" and v is not None}
    from handspan.commands import make_partition

    make_partition(values, out=out)


@app.command("plot")
def plot(
    folder: Annotated[
        str, typer.Argument(metavar="RUN|COMPARISON", help="folder of a finished run or comparison")
    ],
    out: Annotated[
        str | None, option("folder for the pictures (default: pictures, inside the other)")
    ] = None,
    format: Annotated[str, option("png, svg, pdf, by commas (default png,svg)")] = "png,svg",
) -> None:
    """Draw the pictures of a run or of a comparison.

    Scores against costs, their spread, gains, the partition, coordinates and spectrum.
    """
    from handspan.commands import draw_pictures

    draw_pictures(folder, out=out, formats=format)


@app.command("list")
def list_methods(
    detail: Annotated[
        bool, typer.Option("--detail", help="count numbers, bytes and rows on the default model")
    ] = False,
) -> None:
    """List all methods, and what leaves a client."""
    from handspan.commands import list_all

    list_all(detail)


@app.command()
def adapt(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="folder of a finished run")],
    data: Annotated[str, typer.Option(help="FILE.npz with x, y of the new clients")],
    steps: Annotated[int | None, option("steps of the fit")] = None,
    out: Annotated[str | None, option("write the table of new clients as parquet")] = None,
) -> None:
    """Serve new clients: fit their private part, and score it.

    Every fourth row of a client is kept aside to score it.
    """
    from handspan.commands import adapt_clients

    adapt_clients(folder, data, steps=steps, out=out)


@app.command()
def predict(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="folder of a finished run")],
    client: Annotated[int, typer.Option(help="number of the client")],
    data: Annotated[str, typer.Option(help="FILE.npz with rows x")],
    out: Annotated[str, typer.Option(help="predictions, as parquet")],
) -> None:
    """Predict rows with the model of one client."""
    from handspan.commands import predict_rows

    predict_rows(folder, client, data, out)


@app.command()
def export(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="folder of a finished run")],
    client: Annotated[int, typer.Option(help="number of the client")],
    to: Annotated[str, typer.Option(help="FILE.safetensors for the model")],
) -> None:
    """Write the model of one client as safetensors."""
    from handspan.commands import export_model

    export_model(folder, client, to)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"handspan {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: a mistake is told in one sentence, with exit code 2."""
    try:
        if app(sys.argv[1:] or ["--help"], standalone_mode=False) == _INTERRUPTED:
            raise KeyboardInterrupt
    except HandspanError as error:
        _tell(str(error))
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "handspan"
        _tell(f"{error.format_message().rstrip('.')}; see {command} --help")
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; run goes on with --resume, compare by itself", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        _tell("not enough memory: lower --clients, --block-size or use --store disk")
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        _tell(f"cannot read or write{where}: {error.strerror or error}")


def _tell(message: str) -> None:
    print(f"handspan: {' '.join(message.split())}", file=sys.stderr)  # one line, whoever said it
    sys.exit(2)


if __name__ == "__main__":
    main()
