"""The command that repeats a cell of a table."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from handspan.options import EXECUTION, DataOptions, TrainingOptions
from handspan.report.settings import SHORT, plain


def run_command(
    text: str,
    training: Mapping[str, Any],
    data: DataOptions | None,
    settings: Mapping[str, Any],
    engine: Mapping[str, Any],
) -> str | None:
    """Write the ``handspan run`` of a cell; None where data or model were given from Python.

    The engine stands in it, since the last digits depend on it; where private records live does
    not, since nothing depends on that.
    """
    from handspan.evaluation.metrics import METRICS

    given = str(training["model"] or "").startswith("given:")
    if data is None or given or any(name not in METRICS for name in training["metrics"]):
        return None
    words = ["handspan", "run", text]
    words += ["--data", data.data, "--partition", data.partition]
    words += _options(dataclasses.asdict(data), DataOptions(), skip=("data", "partition"))
    words += ["--seed", str(training["seed"])]
    words += _options(training, TrainingOptions(), skip=("seed", "store", *EXECUTION))
    for key, value in settings.items():
        words += ["--set", f"{key}={plain(value)}"]
    words += ["--engine", engine["engine"]]
    if engine["engine"] in ("stacked", "workers", "ray"):
        words += ["--block-size", str(engine["block_size"])]
    if engine["engine"] in ("workers", "ray"):
        words += ["--workers", str(engine["workers"])]
    words += ["--threads", str(engine["threads"]), "--device", engine["device"]]
    return shlex.join(words)


def _options(values: Mapping[str, Any], default: Any, skip: tuple[str, ...]) -> list[str]:
    """Options that are not at their default."""
    words: list[str] = []
    for field in dataclasses.fields(default):
        value = values.get(field.name, getattr(default, field.name))
        if field.name in skip or value == getattr(default, field.name):
            continue
        option = "--" + SHORT.get(field.name, field.name).replace("_", "-")
        if value is True:
            words.append(option)
        elif field.name == "batch_size" and value is None:
            words += [option, "all"]
        elif isinstance(value, list | tuple):
            words += [option, ",".join(value)]
        elif isinstance(value, float):
            words += [option, repr(value)]
        else:
            words += [option, str(value)]
    return words
