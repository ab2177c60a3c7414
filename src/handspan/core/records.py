"""Records: frozen, named groups of tensors, the only thing that methods keep and send.

A record is a frozen dataclass whose fields are tensors, parameters (``dict[str, Tensor]``), other
records, or None. It is a torch pytree, so that ``vmap`` sees through it. What a method's ``Upload``
record holds is all that leaves a client: the class is the privacy statement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, dataclass_transform

import torch
import torch.utils._pytree as pytree  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

Params = dict[str, Tensor]
R = TypeVar("R", bound="Record")
_registered: set[type] = set()


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
class Record:
    """Base of all states and messages; subclasses are frozen keyword-only dataclasses.

    Examples
    --------
    >>> class Point(Record):
    ...     position: Tensor
    >>> take(Point(position=torch.arange(3)), torch.tensor([2])).position
    tensor([2])
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Turn every subclass into a frozen dataclass."""
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)

    def __new__(cls, *args: Any, **fields: Any) -> Record:
        """Register the class as a tree of tensors when it is first used."""
        # Lazily, so that a record defined in __main__ works in a spawned worker as well.
        _register(cls)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuse what is no tensor and bring parameters into canonical (sorted) order."""
        for name in field_names(type(self)):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                items = cast("Mapping[str, Any]", value)
                bad = [key for key, entry in items.items() if not isinstance(entry, Tensor)]
                if bad:
                    raise TypeError(f"{type(self).__name__}.{name}[{bad[0]!r}] is not a tensor")
                object.__setattr__(self, name, {key: items[key] for key in sorted(items)})
            elif not isinstance(value, Tensor | Record | None):
                raise TypeError(
                    f"{type(self).__name__}.{name} must be a tensor, parameters, a record or "
                    f"None, not {type(value).__name__}"
                )


class Empty(Record):
    """The record of those who keep or send nothing."""


def field_names(cls: type[Record]) -> list[str]:
    """Names of the fields of a record class, in order of definition."""
    return list(cls.__dataclass_fields__) if cls is not Record else []  # type: ignore[attr-defined]


def _register(cls: type[Record]) -> None:
    if cls in _registered:
        return
    _registered.add(cls)
    names = field_names(cls)

    def flatten(record: Record) -> tuple[list[Any], tuple[str, ...]]:
        # A None field is part of the structure, not a leaf: vmap would trip over it.
        present = tuple(name for name in names if getattr(record, name) is not None)
        return [getattr(record, name) for name in present], present

    def flatten_with_keys(record: Record) -> tuple[list[Any], tuple[str, ...]]:
        values, present = flatten(record)
        keyed = zip(present, values, strict=True)
        return [(pytree.GetAttrKey(name), value) for name, value in keyed], present

    def unflatten(values: Any, present: tuple[str, ...]) -> Record:
        # Not through __init__: while trees are mapped the leaves may be anything (axes, sizes).
        record = object.__new__(cls)
        given = dict(zip(present, values, strict=True))
        for name in names:
            object.__setattr__(record, name, given.get(name))
        return record

    pytree.register_pytree_node(  # pyright: ignore[reportUnknownMemberType]
        cls,
        flatten,
        cast("Any", unflatten),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}.{id(cls)}",
        flatten_with_keys_fn=cast("Any", flatten_with_keys),
    )


def map_tensors(function: Callable[..., Any], *records: Any) -> Any:
    """Apply a function to corresponding tensors of records of one structure."""
    return pytree.tree_map(function, *records)  # pyright: ignore[reportUnknownMemberType]


def tensors(record: Any) -> list[Tensor]:
    """Return all tensors of a record (or parameters), in canonical order."""
    return cast("list[Tensor]", pytree.tree_leaves(record))  # pyright: ignore[reportUnknownMemberType]


def take(record: R, index: Tensor | slice) -> R:
    """Rows ``index`` of every tensor (the client axis comes first)."""
    return map_tensors(lambda tensor: tensor[index], record)


def put_(store: Record, index: Tensor, rows: Record) -> None:
    """Write rows into a store in place. For engines: methods never change their arguments."""
    for target, source in zip(tensors(store), tensors(rows), strict=True):
        target.index_copy_(0, index, source.to(target))


def stack(records: list[R]) -> R:
    """Join single-client records along a new leading client axis."""
    return map_tensors(lambda *parts: torch.stack(parts), *records)


def concatenate(records: list[R]) -> R:
    """Join blocks of clients along the client axis."""
    if len(records) == 1:
        return records[0]
    return map_tensors(lambda *parts: torch.cat(parts), *records)


def num_bytes(record: Any) -> int:
    """Bytes that the tensors of a record take on the wire."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(record))


def to_named(record: Record, prefix: str = "") -> Params:
    """Flatten to the wire format: ``field``, ``field:param.name`` or ``field/inner``."""
    named: Params = {}
    for name in field_names(type(record)):
        value = getattr(record, name)
        if isinstance(value, Tensor):
            named[prefix + name] = value
        elif isinstance(value, Record):
            named.update(to_named(value, f"{prefix}{name}/"))
        elif value is not None:
            named.update({f"{prefix}{name}:{key}": entry for key, entry in value.items()})
    return named


def from_named(like: R, named: Mapping[str, Tensor], prefix: str = "") -> R:
    """Rebuild a record of the same structure as ``like`` from the wire format."""
    values: dict[str, Any] = {}
    for name in field_names(type(like)):
        value = getattr(like, name)
        if isinstance(value, Tensor):
            values[name] = named[prefix + name]
        elif isinstance(value, Record):
            values[name] = from_named(value, named, f"{prefix}{name}/")
        elif value is None:
            values[name] = None
        else:
            values[name] = {key: named[f"{prefix}{name}:{key}"] for key in value}
    return type(like)(**values)
