"""What the commands of the command line do, once their options have been read."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from handspan import fitting
from handspan.core.errors import HandspanError, nearest
from handspan.disk import write
from handspan.options import DataOptions, TrainingOptions, from_values
from handspan.registry import parse
from handspan.report.newcomers import newcomer_tables
from handspan.report.tables import (
    comparison_table,
    lead,
    method_table,
    profile_table,
    text_table,
    told_score,
)
from handspan.result import Result
from handspan.runs import RunFolder
from handspan.simulation.profile import Profile

# Not a terminal: as wide as a table needs to be, so that files and logs keep whole words.
console = Console() if sys.stdout.isatty() else Console(width=150)


def training_values(training: TrainingOptions) -> dict[str, Any]:
    """Options by name, as ``fit`` takes them."""
    return {name: getattr(training, name) for name in training.__dataclass_fields__}


class _TimeLeft(TimeRemainingColumn):
    """Estimated time, or what a task says of itself (``seconds_left``)."""

    def render(self, task: Task) -> Text:
        """Hours, minutes and seconds."""
        left = task.fields.get("seconds_left")
        if left is None:
            return super().render(task)
        minutes, seconds = divmod(round(left), 60)
        return Text(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}", "progress.remaining")


def bars() -> Progress:
    """Progress on a terminal; silence elsewhere."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        _TimeLeft(),
        console=console,
        transient=True,
        disable=not sys.stderr.isatty() or not sys.stdout.isatty(),
    )


def follow(progress: Progress, description: str) -> Callable[[int, int, dict[str, Any]], None]:
    """Show how far a run is: rounds, their speed, and the leading score."""
    task = progress.add_task(description, total=None, status="")
    begin: list[tuple[float, int]] = []

    def tell(done: int, total: int, latest: dict[str, Any]) -> None:
        if not begin:
            begin.append((time.perf_counter(), done))
        elapsed = time.perf_counter() - begin[0][0]
        rate = (done - begin[0][1]) / elapsed if elapsed > 0 else 0.0
        score = latest.get(lead(latest)) if latest else None
        text = f"round {done}/{total}, {rate:.1f} rounds/s"
        if score is not None:
            name = lead(latest)
            text += f", {name.removesuffix('_mean').replace('_', ' ')} {told_score(score, name)}"
        progress.update(task, completed=done, total=total, status=text)
        if done >= total:
            progress.remove_task(task)

    return tell


def run_method(
    method: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    *,
    out: str | None,
    resume: bool,
    verbose: bool,
    is_profiled: bool = False,
) -> None:
    """``handspan run``."""
    data_options, training = from_values(options)
    spec = parse(method, settings)
    if resume and out is None:
        raise HandspanError("--resume needs --out: which run should go on?")
    if out is not None and not resume:
        RunFolder(out).refuse_existing()
    data, held_out = fitting.open_data(data_options, training.seed, spec.method.problem)
    tell_remarks(data)
    profile = Profile()
    with bars() as progress, profile.measure() if is_profiled else nullcontext():
        result = fitting.fit(
            method,
            data,
            held_out=held_out,
            out=out,
            resume=resume,
            settings=settings,
            data_options=data_options,
            progress=follow(progress, method),
            **training_values(training),
        )
    if verbose:
        _tell_choice(result)
    if is_profiled:
        console.print(profile_table(profile.table(result.state.round)))
    console.print(comparison_table([result.summary], _title(data_options, result.summary)))
    for table in newcomer_tables([result.summary]):
        console.print(table)
    warn_divergence([result.summary])
    if out is not None:
        console.print(f"results in {out}")


def tell_remarks(data: Any) -> None:
    """Tell what was done to the data on the way."""
    for remark in data.info.get("remarks", []):
        console.print(f"note: {remark}")


def warn_divergence(rows: Iterable[dict[str, Any]]) -> None:
    """Name the methods whose loss is no number."""
    for method in sorted({row["method"] for row in rows if _diverged(row)}):
        console.print(f"note: {method} diverged: its loss is not finite; try a smaller --lr")


def _diverged(summary: dict[str, Any]) -> bool:
    """Whether the loss was asked for and is no number."""
    return "personal_loss_mean" in summary and summary["personal_loss_mean"] is None


def _tell_choice(result: Result) -> None:
    for name, milliseconds in result.choice.milliseconds:
        console.print(f"  {name}: {milliseconds:.2f} ms a client and round")
    console.print(f"engine: {result.choice}")


def _title(options: DataOptions, summary: dict[str, Any]) -> str:
    scored = ", scored on validation rows" if options.validate else ""
    return (
        f"{options.data}, {options.partition}, {summary['num_clients']} clients, "
        f"{summary['rounds']} rounds{scored} (partition {summary['partition_hash']}, "
        f"data {summary['fingerprint']})"
    )


def make_partition(options: dict[str, Any], *, out: str | None) -> None:
    """``handspan partition``."""
    from handspan.data.partition_report import report_partition

    chosen, training = from_values(options)
    what = (chosen.data, chosen.partition, chosen.clients, training.seed)
    lines, content = report_partition(*what, task=chosen.task, pack=out is not None)
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    if out is not None and content is not None:
        write(Path(out), content)
        console.print(f"partition in {out}: use it as --partition file:{out}", soft_wrap=True)


def draw_pictures(folder: str, *, out: str | None, formats: str) -> None:
    """``handspan plot``."""
    from handspan.plotting import plot

    drawn = plot(folder, out, formats=[form.strip() for form in formats.split(",")])
    for path in drawn.files:
        console.print(str(path), highlight=False, markup=False, soft_wrap=True)
    for name, reason in drawn.skipped.items():
        line = f"skipped {name}: {reason}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def list_all(detail: bool) -> None:
    """``handspan list``."""
    if not detail:
        console.print(method_table())
        return
    from handspan import ledger

    console.print(text_table("What is sent", ledger.UPLOADS, ledger.uploads()))
    console.print(text_table("What it takes", ledger.COSTS, ledger.costs()))
    console.print(ledger.explained())


def _arrays(path: str, *names: str) -> dict[str, np.ndarray]:
    """Arrays of an npz file that must have some."""
    from handspan.data.npz import read_arrays

    found = read_arrays(Path(path))
    for name in names:
        if name not in found:
            raise HandspanError(f"{path} has no array {name!r}{nearest(name, list(found))}")
    return found


def _open(folder: str) -> Result:
    RunFolder(folder).refuse_unfinished()
    return fitting.load(folder)


def adapt_clients(folder: str, data: str, *, steps: int | None, out: str | None) -> None:
    """``handspan adapt``."""
    arrays = _arrays(data, "x", "y")
    result = _open(folder)
    scores = new_clients(result, arrays, steps)
    name = result.problem.metrics[0].name
    values = [value for value in scores[name] if value is not None]
    for column in range(len(scores["client"])):
        score = scores[name][column]
        told = "no rows to score" if score is None else f"{name} {told_score(score, name)}"
        console.print(
            f"client {scores['client'][column]}: {scores['num_train'][column]} rows, {told}"
        )
    if values:
        mean = told_score(sum(values) / len(values), name)
        console.print(f"mean {name} {mean} over {len(values)} new clients")
    if out is not None:
        _write_table(out, scores)


def new_clients(
    result: Result, arrays: dict[str, np.ndarray], steps: int | None
) -> dict[str, list[Any]]:
    """Adapt to each client of a file; every fourth row is kept aside to score it."""
    from handspan.data import inputs

    if not result.problem.metrics:
        raise HandspanError(f"{result.problem.spec.method.name} serves no new clients")
    x = inputs.as_rows(arrays["x"])
    inputs.check_finite(x, "x")
    y = result.labels(arrays["y"], len(x)).cpu()
    client = arrays.get("client", np.zeros(len(x), dtype=np.int64))
    ids = inputs.encode_ids(client, len(x))
    side = inputs.as_side(arrays["side"], ids, "float64") if "side" in arrays else None
    metric = result.problem.metrics[0]
    table: dict[str, list[Any]] = {"client": [], "num_train": [], metric.name: []}
    for position in range(ids.num_clients):
        rows = np.flatnonzero(ids.codes == position)
        test = rows[3::4]
        train = np.setdiff1d(rows, test)
        mine = None if side is None else side[position]
        adapted = result.adapt(x[train], y[train], side=mine, steps=steps)
        table["client"].append(client[rows[0]].item())
        table["num_train"].append(len(train))
        table[metric.name].append(
            metric.pooled(adapted.predict(x[test]).cpu(), y[test]) if len(test) else None
        )
    return table


def predict_rows(folder: str, client: int, data: str, out: str) -> None:
    """``handspan predict``."""
    arrays = _arrays(data, "x")
    result = _open(folder)
    outputs = result.predict(client, arrays["x"]).cpu()
    columns: dict[str, Any] = {}
    if result.problem.data.num_classes:
        columns["label"] = outputs.argmax(1).numpy()
        for label, share in enumerate(outputs.softmax(1).T):
            columns[f"probability_{label}"] = share.numpy()
    else:
        for index, values in enumerate(outputs.reshape(len(outputs), -1).T):
            columns[f"value_{index}"] = values.numpy()
    _write_table(out, columns)
    console.print(f"{len(outputs)} predictions in {out}")


def export_model(folder: str, client: int, to: str) -> None:
    """``handspan export``."""
    from safetensors.torch import save

    model = _open(folder).personal_model(client)
    tensors = {
        k: v.detach().cpu().contiguous() for k, v in {**model.params, **model.buffers}.items()
    }
    write(Path(to), save(tensors), mode=0o600)
    console.print(f"model of client {client} in {to}: {', '.join(tensors)}")


def _write_table(path: str, columns: dict[str, Any]) -> None:
    import io

    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    write(Path(path), sink.getvalue())
