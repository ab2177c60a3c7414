"""``handspan cluster``, ``factorize`` and ``complete``: a run, its factors, and their pictures."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from handspan import fitting
from handspan.commands import console, run_method
from handspan.core.errors import HandspanError
from handspan.disk import make, write
from handspan.registry import parse
from handspan.report.plots import style
from handspan.result import Result

# What a command runs unless told otherwise, and with which settings.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "cluster": ("fedmgs", {}),
    "factorize": (
        "fedmgs",
        {
            "orthogonality": 0,
            "shrinkage": 0,
            "penalty_growth": 1,
            "basis_set": "non_negative",
        },
    ),
    "complete": ("fedcomplete", {}),
}
_MOST_ROWS = 5000  # drawn in the picture of the rows
_TERMS = 12  # columns named in the picture of the components


def factorise(
    kind: str,
    components: int,
    method: str | None,
    options: dict[str, Any],
    settings: dict[str, Any],
    *,
    out: str | None,
    resume: bool,
) -> None:
    """Run a factorisation; with a folder, leave its factors and pictures there."""
    usual, given = KINDS[kind]
    known = ("fedcomplete",) if kind == "complete" else ("fedmgs", "fedmavg", "fedpalm")
    if method is not None and parse(method).method.name not in known:
        raise HandspanError(f"{kind} takes --method {', '.join(known)}, not {method!r}")
    settings = {"num_components": components, **given, **settings}
    options = {"rounds": 200, "cohort": "1.0", **options}
    run_method(method or usual, options, settings, out=out, resume=resume, verbose=False)
    if out is None:
        return
    result = fitting.load(out)
    tell_small_clients(result, result.problem.spec.config.num_components)
    found = factors(result)
    sink = io.BytesIO()
    np.savez_compressed(sink, **found)
    write(Path(out) / "factors.npz", sink.getvalue())
    folder = Path(out) / "pictures"
    make(folder)
    with style.drawing():
        for name, figure in pictures(result, found).items():
            write(folder / f"{name}.png", style.render(figure, "png"))
    console.print(f"factors in {out}/factors.npz, pictures in {folder}")


def tell_small_clients(result: Result, components: int) -> None:
    """Say what leaks where a client has no more rows than components."""
    num = result.problem.data.num_train
    if small := int((num <= components).sum()):
        console.print(
            f"note: {small} of {len(num)} clients have no more rows than components: without "
            "secure aggregation a single upload shows their rows"
        )


def factors(result: Result) -> dict[str, np.ndarray]:
    """Components, and for every row, client after client, its owner, its h and its cluster."""
    simulation, state = result.simulation, result.state
    everyone = torch.arange(result.problem.data.num_clients)
    basis: Tensor = getattr(state.server, "basis", None)
    found = {
        "rows": simulation.store.read_flat(everyone).rows.cpu().numpy(),
        "client": np.repeat(everyone.numpy(), result.problem.data.num_train.numpy()),
    }
    if basis is not None:
        found["components"] = basis.T.cpu().numpy()
    else:  # items and their biases
        items = state.server.items.cpu().numpy()
        found |= {"components": items[:, :-1].T, "item_bias": items[:, -1]}
        found["mean"] = np.asarray(float(state.server.mean))
    if result.problem.algorithm.labels is not None:
        labels = simulation.row_labels(state.server, everyone, state.round)
        found["cluster"] = labels.cpu().numpy()
    return found


def pictures(result: Result, found: dict[str, np.ndarray]) -> dict[str, Any]:
    """Figures by name: components, rows, and the objective where it was followed."""
    drawn: dict[str, Callable[[], Any]] = {
        "components": lambda: draw_components(found["components"]),
        "rows": lambda: draw_rows(found["rows"], found.get("cluster")),
    }
    followed = [entry for entry in result.history if entry.get("objective") is not None]
    if len(followed) > 1:
        drawn["objective"] = lambda: draw_objective(followed)
    return {name: draw() for name, draw in drawn.items()}


def draw_components(components: np.ndarray) -> Any:
    """Draw each component over all columns; its largest columns are numbered below."""
    count = len(components)
    figure, axes = style.panels(6.0, 0.55, count, 1, gap=(0, 0.28), sharex=True)
    for k, axis in enumerate(axes[:, 0]):
        axis.fill_between(range(components.shape[1]), components[k], step="mid", color="C0")
        best = np.argsort(-np.abs(components[k]), kind="stable")[:_TERMS]
        axis.set_title(f"{k}: columns {', '.join(map(str, best))}", size=7, loc="left", pad=2)
        axis.set_yticks([])
    axes[-1, 0].set_xlabel("column")
    return figure


def draw_rows(rows: np.ndarray, cluster: np.ndarray | None) -> Any:
    """Draw rows of H in the plane of their first two principal components."""
    step = -(-len(rows) // _MOST_ROWS)
    rows, cluster = rows[::step], None if cluster is None else cluster[::step]
    centred = rows - rows.mean(axis=0)
    _, values, right = np.linalg.svd(centred, full_matrices=False)
    plane = centred @ right[:2].T
    plane = np.pad(plane, ((0, 0), (0, 2 - plane.shape[1])))
    share = values[:2] ** 2 / max(float((values**2).sum()), 1e-300)
    figure, axes = style.panels(3.6, 3.6)
    look = {} if cluster is None else {"c": cluster, "cmap": "tab20"}
    axes[0, 0].scatter(*plane.T, s=4, linewidths=0, **look)
    axes[0, 0].set_xlabel(f"first direction of the rows of H ({100 * share[0]:.0f} %)")
    axes[0, 0].set_ylabel(f"second ({100 * share[1:2].sum():.0f} %)")
    return figure


def draw_objective(followed: list[dict[str, Any]]) -> Any:
    """Draw the objective against rounds and against what was sent."""
    figure, axes = style.panels(2.9, 2.4, 1, 2, gap=(0.6, 0))
    values = [entry["objective"] for entry in followed]
    axes[0, 0].plot([entry["round"] for entry in followed], values)
    axes[0, 1].plot([entry["bytes_up"] / 1e6 for entry in followed], values)
    axes[0, 0].set_ylabel("objective")
    axes[0, 0].set_xlabel("rounds")
    axes[0, 1].set_xlabel("megabytes sent by all clients")
    return figure
