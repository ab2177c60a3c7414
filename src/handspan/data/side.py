"""Where side information comes from: columns of a table, ids, groups, or the clients' own rows.

Numbers are standardised over the clients that train, categories are one-hot, and what is missing is
told by zeros: for numbers the average client, beside a column that says so; for categories none of
those known, as for one that no training client has. ``info["side"]`` of the data keeps the recipe,
so that a new client can be told in the same terms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError, nearest
from handspan.data.inputs import ClientIds

_RANDOM_WIDTH = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class SideColumn:
    """A column that describes clients, row by row.

    Parameters
    ----------
    name
        Of the column.
    values
        (rows,) numbers, or positions among the categories; NaN where nothing is known.
    categories
        The texts, or empty for numbers.
    """

    name: str
    values: np.ndarray
    categories: tuple[str, ...] = ()


def side_of_clients(
    columns: Sequence[SideColumn], ids: ClientIds, held_out: np.ndarray | None
) -> tuple[np.ndarray, dict[str, Any], list[str]]:
    """Bring columns to one row of numbers for each client.

    Parameters
    ----------
    columns
        Constant within a client, where they are known.
    ids
        Of the rows.
    held_out
        (n,) clients from which nothing may be learned, or None.

    Returns
    -------
    tuple
        (n, s) side information, the recipe, and remarks for the user.
    """
    trains = np.ones(ids.num_clients, dtype=bool) if held_out is None else ~held_out
    values = {column.name: _by_client(column, ids) for column in columns}
    parts = [_fit(column, values[column.name][trains]) for column in columns]
    remarks = [
        f"side column {column.name!r} is the same for all clients: it says nothing and is left out"
        for column, part in zip(columns, parts, strict=True)
        if part is None
    ]
    recipe = [part for part in parts if part is not None]
    if not recipe:
        raise HandspanError(
            f"side columns {', '.join(values)} are the same for all clients: they say nothing; "
            "name others by --side-columns"
        )
    silent = np.all([np.isnan(column) for column in values.values()], axis=0)
    if silent.any():
        first = ids.name(int(np.argmax(silent)))
        remarks.append(
            f"{int(silent.sum())} clients without side information ({first}, ...) are taken for "
            "average ones"
        )
    rows = [_encode(part, values[part["name"]]) for part in recipe]
    return np.concatenate(rows, axis=1), {"columns": recipe}, remarks


def _by_client(column: SideColumn, ids: ClientIds) -> np.ndarray:
    """Value of each client, NaN where it is unknown; refuse a column that changes."""
    known = np.flatnonzero(~np.isnan(column.values))
    found = np.full(ids.num_clients, np.nan)
    found[ids.codes[known[::-1]]] = column.values[known[::-1]]  # the first row has the last word
    changed = known[found[ids.codes[known]] != column.values[known]]
    if len(changed):
        raise HandspanError(
            f"side column {column.name!r} changes within client "
            f"{ids.name(int(ids.codes[changed[0]]))} at row {int(changed[0])} (counted from 0); it "
            "must be constant within a client"
        )
    return found


def _fit(column: SideColumn, values: np.ndarray) -> dict[str, Any] | None:
    """Recipe of a column, from the clients that train; None where it says nothing."""
    known = values[~np.isnan(values)]
    has_gaps = len(known) < len(values)
    if len(np.unique(known)) < 2 and not (has_gaps and len(known)):
        return None
    if column.categories:
        seen = [column.categories[code] for code in np.unique(known).astype(int)]
        return {"name": column.name, "known": list(column.categories), "categories": seen}
    spread = float(known.std())
    return {
        "name": column.name,
        "mean": float(known.mean()),
        "spread": spread if spread > 0 else 1.0,
        "has_gaps": has_gaps,
    }


def _encode(part: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    """Numbers of a column for each client, by its recipe."""
    if "categories" in part:
        chosen = [part["known"].index(text) for text in part["categories"]]
        return (values[:, None] == np.array(chosen)[None]).astype(float)
    is_gap = np.isnan(values)
    scaled = np.where(is_gap, 0.0, (np.where(is_gap, 0.0, values) - part["mean"]) / part["spread"])
    return np.stack([scaled, is_gap], axis=1) if part["has_gaps"] else scaled[:, None]


# -- side information that is made ---------------------------------------------------------------


def with_side(
    kind: str, data: FederatedData, held_out: FederatedData | None, seed: int
) -> tuple[FederatedData, FederatedData | None]:
    """Give clients the side information that a method asks for.

    Parameters
    ----------
    kind
        ``given`` leaves all as it is; ``clients`` and ``groups`` are one-hot (a held-out client is
        none of the clients: zeros); ``mean`` is the mean of a client's training rows, standardised
        over the clients that train (one without rows is the average client: zeros); ``random`` says
        nothing.
    data, held_out
        Clients that train, and those that do not.
    seed
        Of ``random``.
    """
    both = [data] if held_out is None else [data, held_out]
    if kind == "given":
        return data, held_out
    if kind == "clients":
        n = data.num_clients
        made = [torch.eye(n), *(torch.zeros(each.num_clients, n) for each in both[1:])]
    elif kind == "groups":
        made = _one_hot_groups(both)
    elif kind == "mean":
        return _given(both, *_standardised(kind, both))
    else:
        source = keys.key(seed, "random side")
        made = [
            keys.normal(keys.fold(source, place), (each.num_clients, _RANDOM_WIDTH))
            for place, each in enumerate(both)
        ]
    return _given(both, made, {"kind": kind})


def mean_embedding(
    data: FederatedData,
    encoder: Callable[[Tensor], Tensor],
    held_out: FederatedData | None = None,
) -> tuple[FederatedData, FederatedData | None]:
    """Make the mean embedding of each client's training rows its side information.

    Parameters
    ----------
    data, held_out
        Clients that train, and those that do not; the embeddings are standardised by the former.
    encoder
        (rows, ...) -> (rows, s), with rows as the data hold them.
    """
    both = [data] if held_out is None else [data, held_out]
    return _given(both, *_standardised("embedding", both, encoder))


def restated(data: FederatedData) -> FederatedData:
    """Make side information that is the mean of rows again, of the rows that are left.

    Parameters
    ----------
    data
        Clients some of whose rows were taken away; other side information stays as it is.
    """
    recipe: Mapping[str, Any] = data.info.get("side", {})
    if recipe.get("kind") != "mean":
        return data
    return dataclasses.replace(data, side=_told(data, _means(data), recipe).to(data.side))


def _given(
    both: list[FederatedData], made: Sequence[Tensor], recipe: dict[str, Any]
) -> tuple[FederatedData, FederatedData | None]:
    """Attach side information, and the recipe by which it was made."""
    given = [
        dataclasses.replace(each, side=side, info={**each.info, "side": recipe})
        for each, side in zip(both, made, strict=True)
    ]
    return given[0], given[1] if len(given) > 1 else None


def _one_hot_groups(both: list[FederatedData]) -> list[Tensor]:
    groups = [each.groups for each in both if each.groups is not None]
    if len(groups) < len(both):
        raise HandspanError(
            "side=groups needs groups of clients, and this partition plants none: take "
            "side=clients, or a partition such as groups:5 or affine:4"
        )
    count = 1 + max(int(group.max()) for group in groups)
    return [torch.nn.functional.one_hot(group.cpu(), count).double() for group in groups]


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


def _means(data: FederatedData, encoder: Callable[[Tensor], Tensor] = _as_they_are) -> Tensor:
    """Mean of each client's training rows; zeros for a client without any."""
    if not isinstance(data.x, Tensor) or not data.x.is_floating_point():
        raise HandspanError("side=mean needs dense rows of numbers: give side information instead")
    found: list[Tensor] = []
    with torch.no_grad():
        for start, count in zip(data.offsets.tolist(), data.num_train.tolist(), strict=False):
            rows = encoder(data.x[start : start + max(count, 1)]).flatten(1).double()
            found.append(rows.mean(0) * float(count > 0))
    return torch.stack(found)


def _standardised(
    kind: str, both: list[FederatedData], encoder: Callable[[Tensor], Tensor] = _as_they_are
) -> tuple[list[Tensor], dict[str, Any]]:
    means = [_means(each, encoder) for each in both]
    known = means[0][(both[0].num_train > 0).to(means[0].device)]
    centre, spread = known.mean(0), known.std(0, correction=0)
    scale = torch.where(spread > 1e-9, 1 / spread.clamp_min(1e-9), 0.0)
    recipe = {"kind": kind, "mean": centre.tolist(), "scale": scale.tolist()}
    return [_told(each, mean, recipe) for each, mean in zip(both, means, strict=True)], recipe


def _told(data: FederatedData, means: Tensor, recipe: Mapping[str, Any]) -> Tensor:
    """Standardised means; a client without training rows is the average one."""
    centre, scale = (means.new_tensor(recipe[name]) for name in ("mean", "scale"))
    has_rows = (data.num_train > 0).to(means.device).unsqueeze(1)
    return torch.where(has_rows, (means - centre) * scale, 0.0)


# -- a new client --------------------------------------------------------------------------------


def new_side(info: Mapping[str, Any], given: Any, rows: Tensor, width: int) -> Any:
    """Side information of a new client, in the terms of the run.

    Parameters
    ----------
    info
        Of the data.
    given
        Numbers as the run has them, a mapping from side columns to values, or None.
    rows
        The client's rows, scaled as the run's.
    width
        How many numbers there are.
    """
    recipe: Mapping[str, Any] = info.get("side", {})
    if isinstance(given, Mapping):
        return _from_columns(recipe.get("columns", ()), given)
    kind = recipe.get("kind")
    if given is not None or kind not in ("clients", "random", "mean"):
        return given
    if kind != "mean" or not len(rows):
        return np.zeros(width)
    mean = rows.flatten(1).double().cpu().mean(0).numpy()
    return (mean - np.array(recipe["mean"])) * np.array(recipe["scale"])


def _from_columns(columns: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> np.ndarray:
    names = [part["name"] for part in columns]
    if not names:
        raise HandspanError("the run has no side columns: give its side information as numbers")
    for name in given:
        if name not in names:
            raise HandspanError(
                f"the run has no side column {name!r}{nearest(name, names)}; it reads "
                f"{', '.join(names)}"
            )
    return np.concatenate(
        [_encode(part, _value(part, given.get(part["name"])))[0] for part in columns]
    )


def _value(part: Mapping[str, Any], value: Any) -> np.ndarray:
    """One value as the column holds it; what is unknown or was never seen is NaN."""
    if "categories" in part:
        known = part["known"]
        return np.array([known.index(str(value)) if str(value) in known else np.nan])
    try:
        number = np.nan if value is None else float(value)
    except (TypeError, ValueError):
        raise HandspanError(f"side column {part['name']!r} takes a number, not {value!r}") from None
    return np.array([number])
