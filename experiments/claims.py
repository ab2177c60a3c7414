"""What a finished table says about our method: means, and paired tests against its rivals."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.tables import Table
from experiments.zero_shot import zero_shot
from handspan.comparison.outcome import Comparison, read
from handspan.evaluation import statistics


def claims(table: Table, folder: Path) -> list[str]:
    """Return one sentence for each claim."""
    if not (folder / "plan.json").exists():
        return []
    found = read(folder)
    if found.missing:
        return [f"{len(found.missing)} runs are missing"]
    return [
        _ours(found, table.ours),
        *(_against(found, table.ours, name) for name in table.rivals),
        *zero_shot(found, folder, table.ours, table.rivals),
    ]


def _scale(metric: str) -> int:
    """Errors are told in their own units, shares in per cent."""
    return 1 if metric in ("rmse", "loss") else 100


def _ours(found: Comparison, name: str) -> str:
    rows = [row for row in found if row["method"] == name]
    metric = rows[0]["metric"]
    scores = ", ".join(f"{_scale(metric) * row[f'personal_{metric}_mean']:.2f}" for row in rows)
    told = [f"{name}: {scores} {'%' if metric == 'accuracy' else metric}"]
    for field in ("rank", "num_groups", "ari"):
        values = [row.get(field) for row in rows]
        if None not in values:
            told.append(f"{field} {', '.join(f'{value:.4g}' for value in values)}")
    seconds = max(row["seconds"] for row in rows)
    return "; ".join([*told, f"at most {seconds:.0f} s a run"])


def _against(found: Comparison, name: str, rival: str) -> str:
    rows = [row for row in found if row["method"] == name]
    same = len({row["clients_hash"] for row in found}) == 1
    joined = {
        text: statistics.pair_up(
            [np.asarray(found.scores[text, row["seed"]]) for row in rows], same_clients=same
        )
        for text in (name, rival)
    }
    (test,) = statistics.against_best(joined, rival)
    if test.difference is None or test.low is None or test.high is None or test.p is None:
        return f"{name} against {rival}: undefined"
    scale = _scale(found[0]["metric"])
    low, high, unit = scale * test.low, scale * test.high, "points" if scale > 1 else "units"
    return (
        f"{name} - {rival}: {scale * test.difference:+.2f} {unit} [{low:+.2f}, {high:+.2f}], "
        f"p = {test.p:.2g} over {test.pairs} clients"
    )
