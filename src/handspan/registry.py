"""All methods by name, and the text that names one: ``name[+ft][:key=value...]``.

Methods of handspan are the modules of ``handspan.methods``; those of other packages are announced
by the entry-point group ``handspan.methods``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from handspan.core.algorithm import Algorithm
from handspan.core.errors import HandspanError, nearest
from handspan.core.method import Method, MethodConfig, Setting


@dataclass(frozen=True, kw_only=True)
class FineTuning(MethodConfig):
    """Settings of +ft."""

    ft_steps: int = 20
    """Steps after the last aggregation."""
    ft_learning_rate: float | None = None
    """Step size; the run's by default."""
    ft_names: str = "all"
    """What is tuned: ``all``, ``head`` or a pattern of names."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant; 0 steps leave the method as it is."""
        if self.ft_steps < 0:
            raise HandspanError(f"ft_steps must be at least 0, not {self.ft_steps}")


def _fine_tune(algorithm: Algorithm, setting: Setting, config: FineTuning) -> Algorithm:
    from handspan.numerics.fine_tuning import with_fine_tuning

    return with_fine_tuning(
        algorithm,
        setting,
        steps=config.ft_steps,
        learning_rate=config.ft_learning_rate,
        names=config.ft_names,
    )


EXTRAS = {"ft": (FineTuning, _fine_tune)}


@functools.cache
def methods() -> dict[str, Method]:
    """All methods by registry name."""
    import handspan.methods

    found: dict[str, Method] = {}
    for module in pkgutil.iter_modules(handspan.methods.__path__):
        method = importlib.import_module(f"handspan.methods.{module.name}").METHOD
        found[method.name] = method
    for point in entry_points(group="handspan.methods"):
        loaded = point.load()
        method = getattr(loaded, "METHOD", loaded)
        if not isinstance(method, Method):
            raise HandspanError(f"the plug-in {point.value!r} offers no handspan Method")
        found.setdefault(method.name, method)
    return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """A method as a user names it: with its extras and all its settings.

    Attributes
    ----------
    text
        As written; it is ``method`` in all files, so that one method can stand twice in a table.
    """

    text: str
    method: Method
    config: MethodConfig
    extras: tuple[tuple[str, MethodConfig], ...] = ()

    def build(self, setting: Setting) -> Algorithm:
        """Compose the algorithm for a problem."""
        algorithm = self.method.build(setting, self.config)
        for name, config in self.extras:
            algorithm = EXTRAS[name][1](algorithm, setting, config)  # type: ignore[arg-type]
        return algorithm

    @property
    def fields(self) -> set[str]:
        """Names of all settings that this method knows."""
        configs = [self.config, *(config for _, config in self.extras)]
        return {field.name for config in configs for field in dataclasses.fields(config)}


def parse(text: str, settings: Mapping[str, Any] | None = None) -> MethodSpec:
    """Read ``name[+ft][:key=value...]``; ``settings`` are those given elsewhere (``--set``)."""
    head, *assignments = text.strip().split(":")
    name, *extra_names = head.split("+")
    name = name.strip().lower().replace("-", "")
    known = methods()
    if name not in known:
        raise HandspanError(f"unknown method {name!r}{nearest(name, list(known))}")
    for extra in extra_names:
        if extra not in EXTRAS:
            raise HandspanError(f"unknown extra +{extra}{nearest(extra, list(EXTRAS))}")
    values: dict[str, Any] = dict(settings or {})
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise HandspanError(f"{assignment!r} in {text!r} is no setting: write key=value")
        values[key.strip()] = value.strip()
    classes = [known[name].config, *(EXTRAS[extra][0] for extra in extra_names)]
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise HandspanError(f"{name} has no setting {key!r}{nearest(key, sorted(fields))}")
    configs = [_configure(cls, values) for cls in classes]
    return MethodSpec(
        text=text.strip(),
        method=known[name],
        config=configs[0],
        extras=tuple(zip(extra_names, configs[1:], strict=True)),
    )


def _configure(cls: type[MethodConfig], values: Mapping[str, Any]) -> MethodConfig:
    hints = typing.get_type_hints(cls)
    mine = {field.name for field in dataclasses.fields(cls)}
    return cls(
        **{key: convert(key, value, hints[key]) for key, value in values.items() if key in mine}
    )


def convert(key: str, value: Any, hint: Any) -> Any:
    """Convert a text from the command line to the type of a setting."""
    kinds = [kind for kind in (typing.get_args(hint) or (hint,)) if kind is not type(None)]
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if type(None) in typing.get_args(hint):
            return None
    kind = kinds[0]
    try:
        if kind is bool:
            if isinstance(value, str):
                return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
            if isinstance(value, bool):
                return value
            raise ValueError
        if kind is int and (isinstance(value, bool) or float(value) != int(float(value))):
            raise ValueError
        return kind(float(value)) if kind is int else kind(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}
        raise HandspanError(
            f"{key} takes {wanted.get(kind.__name__, kind.__name__)}, not {value!r}"
        ) from None
