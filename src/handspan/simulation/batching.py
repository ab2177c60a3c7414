"""Moving between records of single clients and blocks with a leading client axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from handspan.core.data import Csr, FederatedData
from handspan.core.records import field_names, map_tensors, take


def gather(data: FederatedData, index: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows of the store at ``index`` (c, width), dense."""
    flat = index.flatten()
    if isinstance(data.x, Csr):
        x = data.x.select(flat.to(data.x.indptr.device)).to_dense()
    else:
        x = data.x.index_select(0, flat.to(data.x.device))
    x = x.view(*index.shape, *x.shape[1:])
    if data.y is None:
        return x, None
    y = data.y.index_select(0, flat.to(data.y.device))
    return x, y.view(*index.shape, *y.shape[1:])


def expand(broadcast: Any, shared: frozenset[str], size: int) -> Any:
    """Copy the broadcast for each client of a block, large shared fields excepted."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).expand(size, *tensor.shape).contiguous()

    return _change(
        broadcast, lambda name, value: value if name in shared else map_tensors(copy, value)
    )


def select_axis(
    broadcast: Any, names: frozenset[str] | None, index: Any, without: frozenset[str] = frozenset()
) -> Any:
    """Rows ``index`` of the fields with a client axis (None: of all fields but ``without``)."""
    return _change(
        broadcast,
        lambda name, value: (
            take(value, index)
            if (names is None or name in names) and name not in without
            else value
        ),
    )


def _change(broadcast: Any, change: Callable[[str, Any], Any]) -> Any:
    values = {name: getattr(broadcast, name) for name in field_names(type(broadcast))}
    return type(broadcast)(
        **{name: None if value is None else change(name, value) for name, value in values.items()}
    )


def fit_rows(clients: Any, per_row: frozenset[str], longest: int) -> Any:
    """Give per-row fields the padded width that the plans of their block have."""

    def fit(rows: Tensor) -> Tensor:
        missing = longest - rows.shape[1]
        if missing <= 0:
            return rows[:, :longest]
        return torch.cat([rows, rows.new_zeros(len(rows), missing, *rows.shape[2:])], dim=1)

    named = per_row & set(field_names(type(clients)))
    if not named:
        return clients
    return _change(clients, lambda name, value: fit(value) if name in named else value)


def flatten(
    broadcast: Any, unbatched: frozenset[str], arguments: tuple[Any, ...]
) -> tuple[list[Any], tuple[int | None, ...], Any]:
    """Leaves of all arguments, their client axes (None where unbatched), and the structure."""
    marked = _change(
        broadcast,
        lambda name, value: map_tensors(
            lambda t: torch.empty(0 if name in unbatched else 1), value
        ),
    )
    leaves, spec = pytree.tree_flatten((broadcast, *arguments))
    flags = [len(leaf) == 1 for leaf in pytree.tree_leaves(marked)]
    dims = [0 if batched else None for batched in flags]
    dims += [0 if isinstance(leaf, Tensor) else None for leaf in leaves[len(flags) :]]
    return leaves, tuple(dims), spec


def in_order(parts: list[tuple[Tensor, Tensor]], count: Tensor) -> Tensor:
    """Put outputs of grouped clients back into the clients' order."""
    start = count.cumsum(0) - count
    index = torch.cat(
        [
            torch.arange(int(count[group].sum()))
            + torch.repeat_interleave(
                start[group] - (count[group].cumsum(0) - count[group]), count[group]
            )
            for group, _ in parts
        ]
    )
    outputs = torch.cat([values for _, values in parts])
    result = torch.empty_like(outputs)
    result[index.to(outputs.device)] = outputs
    return result
