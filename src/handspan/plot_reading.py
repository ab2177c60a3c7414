"""What pictures are made from, read from the folder of a run or a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from handspan import comparison, fitting
from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.core.records import Params, to_named
from handspan.data.partition_report import label_table
from handspan.evaluation.protocol import found_groups
from handspan.numerics.low_rank import gram
from handspan.options import DataOptions
from handspan.registry import parse
from handspan.report import tables
from handspan.report.comparison import equal
from handspan.report.plots.material import Coordinates, Labels, Material, Run
from handspan.result import Result
from handspan.runs import RunFolder

_GIVEN = "the data were given from Python: call handspan.plot with data="


def read_material(place: Path, data: FederatedData | None) -> Material:
    """Read the folder of a finished run or comparison."""
    if not place.is_dir():
        raise HandspanError(f"there is no folder {place}")
    if (place / "plan.json").exists():
        return _of_comparison(place, data)
    if (place / "config.json").exists():
        return _of_run(place, data)
    raise HandspanError(
        f"{place} is neither a run nor a comparison: it has no config.json and no plan.json"
    )


def _of_run(place: Path, data: FederatedData | None) -> Material:
    folder = RunFolder(place)
    folder.refuse_unfinished()
    config, summary = folder.config(), folder.summary()
    metrics = config["training"]["metrics"]
    score = f"personal_{metrics[0]}_mean" if metrics else tables.lead(summary)
    seed = summary["seed"]
    rounds = f"{summary['rounds']:,} rounds"
    return Material(
        title=_title(config, summary["num_clients"], rounds, f"seed {seed}"),
        score=score,
        higher_is_better=tables.higher_is_better(score),
        is_comparison=False,
        runs=[_run(folder, summary)],
        labels=_labels(config, seed, data),
        coordinates=_coordinates({summary["method"]: folder}, seed, data),
    )


def _of_comparison(place: Path, data: FederatedData | None) -> Material:
    table = comparison.read(place)
    if table.missing:
        raise HandspanError(
            f"{len(table.missing)} runs of {place} are missing ({table.missing[0]}): finish it by "
            "the same handspan compare, or merge its shards"
        )
    # Matrix problems are ranked by scores of their own: they are drawn where nothing else is.
    rows = [row for row in table if row["metric"] is not None] or list(table)
    omitted = {row["method"]: "it has no scores of clients" for row in table if row not in rows}
    first = rows[0]
    score = f"personal_{first['metric']}_mean" if first["metric"] else tables.lead(first)
    folders = {(row["method"], row["seed"]): RunFolder(place / row["cell"]) for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    firsts = {text: folder for (text, seed), folder in folders.items() if seed == seeds[0]}
    known = [folder for folder in firsts.values() if folder.config_path.exists()]
    config = known[0].config() if known else {"data": table.about["data"], "data_info": {}}
    rounds = equal(table)
    if table.about["equal"] == "rounds":
        rounds = rounds.removeprefix("equal rounds (").removesuffix(")") + " rounds"
    told = f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    runs = [_run(folders[row["method"], row["seed"]], row) for row in rows]
    for run in runs:  # saved from Python, a comparison has no folders of runs
        scores = table.scores[run.method, run.seed]
        if scores is not None:
            run.scores.setdefault(f"personal_{first['metric']}", scores)
    return Material(
        title=_title(config, first["num_clients"], rounds, told),
        score=score,
        higher_is_better=tables.higher_is_better(score)
        if first["higher_is_better"] is None
        else first["higher_is_better"],
        is_comparison=True,
        runs=runs,
        labels=_labels(config, seeds[0], data),
        coordinates=_coordinates(firsts, seeds[0], data),
        omitted=omitted,
    )


def _title(config: Mapping[str, Any], num_clients: int, rounds: str, seeds: str) -> str:
    """Data, partition, clients, rounds, seeds."""
    data, info = config["data"] or {}, config["data_info"]
    source = str(info.get("source", data.get("data", "given data")))
    parts = [Path(source).name, info.get("partition", data.get("partition"))]
    told = [part for part in parts if part]
    return ", ".join([*told, f"{num_clients:,} clients", rounds, seeds])


def _run(folder: RunFolder, summary: Mapping[str, Any]) -> Run:
    seconds = folder.seconds_of_rounds()
    scores = {
        name: column.double().numpy()
        for name, column in folder.clients().items()
        if name.startswith(("personal_", "global_"))
    }
    return Run(
        method=summary["method"],
        seed=summary["seed"],
        history=[{**row, "seconds": seconds.get(row["round"])} for row in folder.history()],
        scores=scores,
        newcomers=summary.get("newcomers") or [],
    )


def _labels(config: Mapping[str, Any], seed: int, data: FederatedData | None) -> Labels | str:
    """Who has which labels; or why that is not known."""
    if config["data"] is None:
        return _GIVEN if data is None else _labels_of(data, seed)
    options = DataOptions(**config["data"])
    try:
        table = label_table(
            options.data, options.partition, options.clients, seed, task=options.task
        )
    except HandspanError as error:
        return str(error)
    part = table.part
    if config["data_info"].get("partition_hash", part.fingerprint()) != part.fingerprint():
        return f"{options.data} has changed since the run: its partition is another"
    return Labels(
        counts=table.counts,
        original=table.original,
        groups=part.groups,
        relabel=part.relabel,
        turn=part.turn,
        names=table.classes,
        seed=seed,
    )


def _labels_of(data: FederatedData, seed: int) -> Labels | str:
    """Count the labels of a federation that was given."""
    if data.y is None or data.num_classes is None:
        return "the labels are no classes"
    return Labels(
        counts=data.without_test().label_counts.numpy(),
        groups=None if data.groups is None else data.groups.numpy(),
        seed=seed,
    )


def _coordinates(
    folders: Mapping[str, RunFolder], seed: int, data: FederatedData | None
) -> list[Coordinates] | str:
    """Coordinates of the methods that keep such; or why they are not known."""
    keeping = {
        method: folder
        for method, folder in folders.items()
        if any(_is_called(name, "coordinates") for name in folder.private_names())
    }
    found: list[Coordinates] = []
    for method, folder in keeping.items():
        config = folder.config()
        if data is None and config["data"] is None:
            return _GIVEN
        if data is None:
            problem = parse(method).method.problem
            data, _ = fitting.open_data(DataOptions(**config["data"]), seed, problem)
        try:
            result = fitting.load(folder.path, data=data)
        except HandspanError as error:
            return str(error)
        found.append(_coordinates_of(result, method, seed))
    return found


def _is_called(name: str, wanted: str) -> bool:
    """Whether a field of a record, perhaps inside another, has a name."""
    return name.split("/")[-1].split(":")[0] == wanted


def _coordinates_of(result: Result, method: str, seed: int) -> Coordinates:
    simulation, server = result.simulation, result.state.server
    record = to_named(simulation.store.read(torch.arange(result.problem.data.num_clients)))
    values = next(value for name, value in record.items() if _is_called(name, "coordinates"))
    took_part = simulation.store.written
    basis: Params = {
        name: rows for name, rows in to_named(server).items() if _is_called(name, "basis")
    }
    products, offset = None, None
    if basis:
        products = gram(basis).cpu().numpy()
        extra = len(products) - values.shape[1]
        offset = products if extra == 1 else None
        products = products[extra:, extra:] if extra in (0, 1) else None
    groups, found = result.problem.data.groups, found_groups(simulation, server, result.state.round)
    return Coordinates(
        method=method,
        seed=seed,
        values=values[took_part].double().cpu().numpy(),
        products=products,
        offset=offset,
        rank=result.summary.get("rank"),
        planted=None if groups is None else groups[took_part].numpy(),
        found=None if found is None else np.asarray(found[took_part]),
        num_absent=int((~took_part).sum()),
    )
