"""Networks from a user's Python file: ``path.py:function``."""

from __future__ import annotations

import inspect
import sys
import traceback
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from handspan.core import keys
from handspan.core.errors import HandspanError, nearest
from handspan.models.source import reproducible


def load_model_file(spec: str, **options: Any) -> Callable[[], nn.Module]:
    """Load ``path.py:function`` (``make_model`` by default) and return a factory.

    The function is called with those of the options (``row_shape``, ``num_outputs``,
    ``num_side``) that its signature accepts, once here, to fail early, and at every start.
    """
    path_text, colon, name = spec.rpartition(":")
    if not colon or name.endswith(".py"):
        path_text, name = spec, "make_model"
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise HandspanError(f"there is no model file {path_text!r}: write FILE.py:function")
    function = _function(path, name)
    factory = partial(_call, function, str(path), name, _accepted(function, options, path, name))
    with reproducible(keys.key(0, "trial")):
        factory()
    return factory


def _function(path: Path, name: str) -> Callable[..., Any]:
    module = types.ModuleType(f"handspan_model_{path.stem}")
    module.__file__ = str(path)
    folder = str(path.resolve().parent)
    # Known by name only while it runs (dataclasses ask for that): afterwards it must travel to
    # workers by value, because nobody else can import it.
    sys.modules[module.__name__] = module
    sys.path.insert(0, folder)
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise HandspanError(f"model file {_told(path, error)}") from error
    finally:
        sys.path.remove(folder)
        del sys.modules[module.__name__]
    function = module.__dict__.get(name)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        hint = nearest(name, known) if known else ""
        raise HandspanError(f"model file {str(path)!r} has no function {name!r}{hint}")
    return function


def _accepted(
    function: Callable[..., Any], options: dict[str, Any], path: Path, name: str
) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return options
    by_name = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in options
    ]
    if missing:
        raise HandspanError(
            f"{name} in {str(path)!r} asks for {missing[0]!r}; it can be given "
            f"{', '.join(sorted(options))}"
        )
    return {key: value for key, value in options.items() if key in by_name}


def _call(function: Callable[..., Any], path: str, name: str, options: dict[str, Any]) -> nn.Module:
    try:
        module = function(**options)
    except HandspanError:
        raise
    except (Exception, SystemExit) as error:
        raise HandspanError(f"{name} in {_told(Path(path), error)}") from error
    if not isinstance(module, nn.Module):
        raise HandspanError(
            f"{name} in {path!r} returned {type(module).__name__}, not a torch module"
        )
    return module


def _told(path: Path, error: BaseException) -> str:
    """Where in the file it went wrong, and how."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f", line {lines[-1]}" if lines and lines[-1] else ""
    return f"{str(path)!r} failed{where}: {type(error).__name__}: {error}"
