"""Pickles that hold arrays, texts, numbers, lists and dicts, and can do nothing else.

A pickle is a program. This reader gives that program no function and no class of Python's or
NumPy's: the few names that a pickled array needs stand for the objects below, which note the type,
shape and bytes of an array and build it from them. Every other name is refused before it is called.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any, NoReturn

import numpy as np

from handspan.core.errors import HandspanError

_TYPES = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)} | {"f4", "f8", "b1"}


class _RefusedError(Exception):
    """The pickle wants what it may not have."""


class _ArrayType:
    """Stands for ``numpy.ndarray``, which is only ever named."""

    __slots__ = ()


class _Type:
    """What a pickle says of a type: code and byte order."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        self.order = str(state[1])

    def dtype(self) -> np.dtype[Any]:
        """Return NumPy's type, if it is one of plain numbers."""
        if self.code not in _TYPES or self.order not in ("<", ">", "=", "|"):
            raise _RefusedError(f"an array of type {self.code!r}")
        return np.dtype(self.code).newbyteorder(self.order)


class _Array:
    """An array to be, filled by its state."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        self.value = _build(content, kind, shape, "F" if is_fortran else "C")


def _build(content: Any, kind: Any, shape: Any, order: str) -> np.ndarray:
    if isinstance(content, str):  # bytes of Python 2
        content = content.encode("latin1")
    if not isinstance(kind, _Type) or not isinstance(content, bytes | bytearray):
        raise _RefusedError("an array of Python objects")
    dtype = kind.dtype()
    shape = tuple(int(size) for size in shape)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(content):
        raise _RefusedError(f"{len(content)} bytes for an array of shape {shape}")
    return np.frombuffer(bytes(content), dtype=dtype).reshape(shape, order=order)  # type: ignore[call-overload]


class _Function:
    """Stands for one of the functions that rebuild arrays."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "name", name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise _RefusedError("changes to a function")

    def __call__(self, *arguments: Any) -> Any:
        if self.name == "_reconstruct":
            return _Array()
        if self.name == "dtype":
            return _Type(arguments[0])
        if self.name == "_frombuffer":
            content, kind, shape, order = arguments
            return _build(content, kind, shape, "F" if order == "F" else "C")
        text, encoding = arguments  # _codecs.encode: how Python 3 writes bytes for Python 2
        if not isinstance(text, str) or encoding != "latin1":
            raise _RefusedError("an encoding")
        return text.encode("latin1")


_ALLOWED = {
    ("_codecs", "encode"): "encode",
    ("numpy", "dtype"): "dtype",
    **{
        (f"numpy.{core}.{module}", name): name
        for core in ("core", "_core")
        for module, name in (("multiarray", "_reconstruct"), ("numeric", "_frombuffer"))
    },
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Give the stand-in for a name, or refuse."""
        if (module, name) == ("numpy", "ndarray"):
            return _ArrayType()
        if (module, name) not in _ALLOWED:
            raise _RefusedError(f"{module}.{name}")
        return _Function(_ALLOWED[module, name])

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse references to things outside."""
        raise _RefusedError("a reference to something outside")


def load_plain(content: bytes, where: str) -> dict[Any, Any]:
    """Read a pickled dict of plain data; nothing in it is ever run.

    Parameters
    ----------
    content
        The pickle.
    where
        What to call it in messages.
    """
    try:
        value = _Reader(io.BytesIO(content), encoding="latin1").load()
    except _RefusedError as error:
        raise HandspanError(
            f"{where} is refused: besides arrays of numbers, texts, numbers, lists and dicts it "
            f"asks for {error}, and loading that could run code"
        ) from None
    except MemoryError:
        raise
    except Exception:  # a damaged pickle can raise anything
        raise HandspanError(f"{where} is damaged, cut off or no pickle: fetch it again") from None
    if not isinstance(value, dict):
        raise HandspanError(f"{where} must hold a dict, not a {type(value).__name__.strip('_')}")
    return {
        key: entry.value if isinstance(entry, _Array) else entry for key, entry in value.items()
    }
