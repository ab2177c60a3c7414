"""Messages between processes whose tensors travel through shared memory.

What is packed is pickled but for its tensors: they are copied into memory that both sides map, and
the reader's tensors are views of it. The memory has no name anywhere: it is gone with the last
process that maps it, however that process ends. Only processes of one run speak to each other so;
nothing of this is ever written to a file or read from one.
"""

from __future__ import annotations

import functools
import io
import itertools
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64  # as torch allocates: kernels may take other paths elsewhere
_SPARE = 1.5  # of memory that was too small
_LET_GO = -1
_serial = itertools.count()


class Memory:
    """Bytes that several processes map; mapped again from its descriptor by others."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = _unnamed_file()
            os.ftruncate(descriptor, size)
        self.name = f"{os.getpid()}-{next(_serial)}"
        self.size, self.descriptor = size, descriptor
        self._map = mmap.mmap(descriptor, size)

    def view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor that lives here."""
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("handspan")
    with tempfile.TemporaryFile() as file:  # has no name from the start
        return os.dup(file.fileno())


@dataclass(frozen=True)
class Packed:
    """A message: what is pickled, and where its tensors lie."""

    content: bytes
    memory: Memory | None


def pack(
    message: Any, memory: Memory | None = None, refer: Callable[[Any], Any] = lambda value: None
) -> Packed:
    """Pack a message, its tensors into the given memory where it suffices, else into new memory.

    ``refer`` returns the name under which the reader knows a value already, or None; what a name
    means is the reader's ``look_up``.
    """
    content = io.BytesIO()
    pickler = _pickler()(content)
    pickler.begin(refer)
    pickler.dump(message)
    needed = pickler.end
    if needed and (memory is None or memory.size < needed):
        memory = Memory(needed if memory is None else int(_SPARE * needed))
    for offset, tensor in pickler.tensors.values():
        if tensor.numel():
            assert memory is not None
            memory.view(offset, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
    return Packed(content.getvalue(), memory if needed else None)


@functools.cache
def _pickler() -> Any:
    import cloudpickle  # slow to import, and needed by this engine alone

    class Pickler(cloudpickle.Pickler):
        """Pickles all but tensors, which it only gives places."""

        def begin(self, refer: Callable[[Any], Any]) -> None:
            self.refer, self.end = refer, 0
            self.tensors: dict[int, tuple[int, Tensor]] = {}

        def persistent_id(self, value: Any) -> Any:
            if _travels_apart(value):
                return "tensor", self.place(value), value.dtype, tuple(value.shape)
            name = self.refer(value)
            return None if name is None else ("known", name)

        def place(self, tensor: Tensor) -> int:
            if id(tensor) not in self.tensors:
                self.tensors[id(tensor)] = self.end, tensor
                size = tensor.numel() * tensor.element_size()
                self.end += -(-size // _ALIGNMENT) * _ALIGNMENT
            return self.tensors[id(tensor)][0]

    return Pickler


def _travels_apart(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
    )


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, content: bytes, memory: Memory | None, look_up: Callable[[Any], Any]
    ) -> None:
        super().__init__(io.BytesIO(content))
        self._memory, self._look_up = memory, look_up

    def persistent_load(self, pid: Any) -> Any:
        """Return a view of the memory, or what is known already."""
        if pid[0] == "known":
            return self._look_up(pid[1])
        _, offset, dtype, shape = pid
        if self._memory is None:  # no number at all
            return torch.empty(shape, dtype=dtype)
        return self._memory.view(offset, dtype, shape)


class Line:
    """One end of a connection between two processes.

    Messages of a slot lie in one memory: the next one overwrites what the last one brought.
    ``let_go`` is called when the other end has no more use for a memory.
    """

    def __init__(self, descriptor: int, let_go: Callable[[], Any] = lambda: None) -> None:
        self.connection = Connection(descriptor)
        self._let_go = let_go
        self._slots: dict[int, Memory] = {}
        self._told: set[str] = set()  # names of our memories that the other end maps
        self._known: dict[str, Memory] = {}  # those of the other end

    def post(
        self, message: Any, slot: int, refer: Callable[[Any], Any] = lambda value: None
    ) -> None:
        """Pack a message into a slot and send it."""
        before = self._slots.get(slot)
        packed = pack(message, before, refer)
        if packed.memory is not None and packed.memory is not before:
            if before is not None:
                self.forget(before)
            self._slots[slot] = packed.memory
        self.send(packed)

    def send(self, packed: Packed) -> None:
        """Send a message; memory that is new to the other end comes along."""
        memory = packed.memory
        if memory is None:
            self.connection.send((None, 0, packed.content))
            return
        is_new = memory.name not in self._told
        self.connection.send((memory.name, memory.size if is_new else 0, packed.content))
        if is_new:
            reduction.send_handle(self.connection, memory.descriptor, 0)
            self._told.add(memory.name)

    def forget(self, memory: Memory) -> None:
        """Tell the other end to let go of a memory."""
        if memory.name in self._told:
            self._told.remove(memory.name)
            self.connection.send((memory.name, _LET_GO, b""))

    def receive(self, look_up: Callable[[Any], Any] = lambda name: None) -> Any:
        """Wait for a message; its tensors are views of memory that the sender may use again."""
        name, size, content = self.connection.recv()
        while size == _LET_GO:
            self._known.pop(name, None)
            self._let_go()
            name, size, content = self.connection.recv()
        if size:
            self._known[name] = Memory(size, reduction.recv_handle(self.connection))
        memory = None if name is None else self._known[name]
        return _Unpickler(content, memory, look_up).load()

    def close(self) -> None:
        """Hang up."""
        self.connection.close()
