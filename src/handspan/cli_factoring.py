"""The commands ``handspan cluster``, ``factorize`` and ``complete``: one signature, three ends."""

from __future__ import annotations

from typing import Annotated

import typer

from handspan.cli_options import (
    ClientColumn,
    Clients,
    Cohort,
    Config,
    Data,
    Dtype,
    Engine,
    EvalEvery,
    LabelColumn,
    Out,
    Partition,
    Resume,
    Rounds,
    Seed,
    Settings,
    Task,
    Threads,
    collect,
    option,
)

Components = Annotated[int, typer.Option(help="components, or clusters")]
Method = Annotated[str | None, option("fedmgs, fedmavg or fedpalm (complete: fedcomplete)")]
_FOLDER = "With --out the folder also holds factors.npz and pictures."
_HELP = {
    "cluster": "Cluster rows that stay with their clients, by orthogonal NMF.",
    "factorize": "Factorise non-negative rows that stay with their clients.",
    "complete": "Predict unknown entries of ratings that stay with their clients.",
}


def add_factoring(app: typer.Typer) -> None:
    """Add the three commands; they run 200 rounds of all clients unless told otherwise."""
    for kind, text in _HELP.items():
        _add(app, kind, f"{text}\n\n{_FOLDER}")


def _add(app: typer.Typer, kind: str, text: str) -> None:
    @app.command(kind, help=text)
    def command(
        components: Components = 10,
        method: Method = None,
        data: Data = None,
        partition: Partition = None,
        clients: Clients = None,
        client_column: ClientColumn = None,
        label_column: LabelColumn = None,
        rounds: Rounds = None,
        cohort: Cohort = None,
        seed: Seed = None,
        out: Out = None,
        resume: Resume = False,
        settings: Settings = None,
        config: Config = None,
        task: Task = None,
        eval_every: EvalEvery = None,
        engine: Engine = None,
        dtype: Dtype = None,
        threads: Threads = None,
    ) -> None:
        options = collect(locals(), "kind", "components", "method", "out", "resume")
        from handspan.factoring import factorise

        factorise(kind, components, method, *options, out=out, resume=resume)
