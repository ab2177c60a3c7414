"""All methods by name, and the text that names one: ``name[+extra...][:key=value...]``.

Methods of handspan are the modules of ``handspan.methods``; those of other packages are announced
by the entry-point group ``handspan.methods``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pkgutil
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from handspan.core.algorithm import Algorithm
from handspan.core.errors import HandspanError, nearest
from handspan.core.method import Method, MethodConfig, Setting


@dataclass(frozen=True, kw_only=True)
class FineTuning(MethodConfig):
    """Settings of +ft."""

    ft_steps: int = 20
    """Steps after the last aggregation."""
    ft_learning_rate: float | None = None
    """Step size, whatever the run's schedule; the run's first one by default."""
    ft_names: str = "all"
    """What is tuned: ``all``, ``head`` or a pattern of names."""
    ft_stop: bool = False
    """Keep the step of least validation loss, 0 included; these rows are not trained on."""
    ft_check: int = 5
    """Steps between two looks at the validation rows."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant; 0 steps leave the method as it is."""
        self.at_least("ft_steps", 0)
        self.at_least("ft_check", 1)
        self.at_least("ft_learning_rate", 0)


@dataclass(frozen=True, kw_only=True)
class LabelPrior(MethodConfig):
    """Settings of +prior."""

    prior_strength: float = 1.0
    """Rows of each class that every client is granted beside its own (Dirichlet strength)."""
    prior_temperature: float = 1.0
    """Factor of the logarithms; 0 leaves the method as it is."""
    prior_reference: str = "uniform"
    """What the shared model is held to expect: ``uniform`` or ``pooled`` label frequencies."""
    prior_training: str = "plain"
    """``balanced`` puts the prior inside the training loss as well (balanced softmax)."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not 0 < self.prior_strength < float("inf"):
            raise HandspanError(f"prior_strength must be above 0, not {self.prior_strength}")
        self.at_least("prior_temperature", 0)
        self.one_of("prior_reference", ("uniform", "pooled"))
        self.one_of("prior_training", ("plain", "balanced"))
        if self.prior_reference == "pooled" and self.prior_training == "balanced":
            raise HandspanError(
                "prior_reference=pooled belongs to prior_training=plain: balanced training makes "
                "the shared model expect uniform labels"
            )


@dataclass(frozen=True, kw_only=True)
class Gate(MethodConfig):
    """Settings of +gate."""

    gate_evidence: float = 20.0
    """How many times likelier than under Local the validation rows must be; 1: the likeliest."""

    def __post_init__(self) -> None:
        """Refuse what would favour a rival."""
        self.at_least("gate_evidence", 1)


def _fine_tune(algorithm: Algorithm, setting: Setting, config: FineTuning) -> Algorithm:
    from handspan.numerics.fine_tuning import with_fine_tuning

    return with_fine_tuning(
        algorithm,
        setting,
        steps=config.ft_steps,
        learning_rate=config.ft_learning_rate,
        names=config.ft_names,
        stop=config.ft_stop,
        check=config.ft_check,
    )


def _prepare_prior(setting: Setting, config: LabelPrior) -> Setting:
    from handspan.numerics.label_prior import with_prior_in_task

    return with_prior_in_task(setting) if config.prior_training == "balanced" else setting


def _add_prior(algorithm: Algorithm, setting: Setting, config: LabelPrior) -> Algorithm:
    from handspan.numerics.label_prior import with_prior

    return with_prior(
        algorithm,
        setting,
        strength=config.prior_strength,
        temperature=config.prior_temperature,
        reference=config.prior_reference,
        training=config.prior_training,
    )


def _add_gate(algorithm: Algorithm, setting: Setting, config: Gate) -> Algorithm:
    from handspan.numerics.gate import with_gate

    local = methods()["local"]
    alone = local.build(setting, local.config())
    return with_gate(algorithm, alone, setting, evidence=config.gate_evidence)


class Extra(NamedTuple):
    """What may follow a method's name: ``+ft``.

    Attributes
    ----------
    config
        Its settings; their names begin with the extra's.
    wrap
        (Algorithm, Setting, config) -> the method with the extra.
    prepare
        (Setting, config) -> the setting for which the method is built.
    chooses
        config -> whether it chooses by validation rows.
    """

    config: type[MethodConfig]
    wrap: Callable[[Algorithm, Setting, Any], Algorithm]
    prepare: Callable[[Setting, Any], Setting] = lambda setting, config: setting
    chooses: Callable[[Any], bool] = lambda config: False


EXTRAS: dict[str, Extra] = {
    "prior": Extra(LabelPrior, _add_prior, prepare=_prepare_prior),
    "ft": Extra(FineTuning, _fine_tune, chooses=lambda config: config.ft_stop),
    "gate": Extra(Gate, _add_gate, chooses=lambda config: True),
}
"""Extras by name, in the order in which they are written."""


@functools.cache
def methods() -> dict[str, Method]:
    """All methods by registry name."""
    import handspan.methods

    found: dict[str, Method] = {}
    for module in pkgutil.iter_modules(handspan.methods.__path__):
        method = importlib.import_module(f"handspan.methods.{module.name}").METHOD
        found[method.name] = method
    for point in entry_points(group="handspan.methods"):
        try:
            loaded = point.load()
        except Exception as error:
            raise HandspanError(
                f"the plug-in {point.value!r} cannot be loaded ({type(error).__name__}: {error}): "
                "repair or uninstall it"
            ) from error
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
        if any(EXTRAS[name].chooses(config) for name, config in self.extras):
            setting = dataclasses.replace(setting, keeps_validation=True)
        for name, config in self.extras:
            setting = EXTRAS[name].prepare(setting, config)
        algorithm = self.method.build(setting, self.config)
        for name, config in self.extras:
            algorithm = EXTRAS[name].wrap(algorithm, setting, config)
        return algorithm

    @property
    def chooses(self) -> bool:
        """Whether anything is chosen by validation rows, which then are no training rows."""
        return self.method.chooses(self.config) or any(
            EXTRAS[name].chooses(config) for name, config in self.extras
        )

    @property
    def fields(self) -> set[str]:
        """Names of all settings that this method knows."""
        configs = [self.config, *(config for _, config in self.extras)]
        return {field.name for config in configs for field in dataclasses.fields(config)}


def parse(text: str, settings: Mapping[str, Any] | None = None) -> MethodSpec:
    """Read ``name[+extra...][:key=value...]``; ``settings`` are given elsewhere (``--set``)."""
    head, *assignments = text.strip().split(":")
    name, *extra_names = head.split("+")
    name = name.strip().lower().replace("-", "")
    known = methods()
    if name not in known:
        raise HandspanError(f"unknown method {name!r}{nearest(name, list(known))}")
    for extra in extra_names:
        if extra not in EXTRAS:
            raise HandspanError(f"unknown extra +{extra}{nearest(extra, list(EXTRAS))}")
    _check_extras(known[name], extra_names)
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


def _check_extras(method: Method, names: list[str]) -> None:
    """Refuse extras that are there twice, make no sense in their order, or find no model."""
    for extra in names:
        if names.count(extra) > 1:
            raise HandspanError(f"+{extra} stands twice after {method.name}")
        if method.problem == "matrix":
            raise HandspanError(f"{method.name} trains no model on labels: it takes no +{extra}")
    wanted = [extra for extra in EXTRAS if extra in names]
    if names != wanted:
        raise HandspanError(
            f"write {method.name}+{'+'.join(wanted)}: fine-tuning goes on with the prior in the "
            "model, and the gate chooses last"
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
    read, wanted = _READERS[kinds[0]]
    try:
        return read(value)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise HandspanError(f"{key} takes {wanted}, not {value!r}") from None


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False, "1": True, "0": False}[value.lower()]


def _int(value: Any) -> int:
    """Whole numbers exactly, and floats that are whole (``1e3``)."""
    number = float(value)
    if isinstance(value, bool) or not number.is_integer():
        raise ValueError
    try:
        return int(value)
    except ValueError:  # a text such as 1e3
        return int(number)


def _float(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError
    return number


def _text(value: Any) -> str:
    if value is None or isinstance(value, Mapping | list | tuple):
        raise ValueError
    return str(value)


_READERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    bool: (_bool, "true or false"),
    int: (_int, "a whole number"),
    float: (_float, "a number"),
    str: (_text, "a text"),
}
