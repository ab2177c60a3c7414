"""Where private records live while a run lasts: one tensor per field, a row per client.

A record that was never written does not exist yet: it is what ``init_client`` makes of the
client's key, so a million clients cost nothing until they take part. Changes are staged and become
visible to others only when the round is committed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handspan.core.errors import HandspanError
from handspan.core.records import Params, Record, from_named, num_bytes, take, to_named

Init = Callable[[Tensor], Any]
_SHARE_OF_FREE_MEMORY = 0.4  # of a GPU may be taken by private records
_UNLIMITED = 1 << 62


class ClientStore:
    """Private records of all clients, staged and committed round by round.

    Parameters
    ----------
    init
        ids -> records of clients that have not been written yet.
    num_rows
        (n,) data rows of each client, for fields with one entry per data row.
    per_row
        Names of such fields.
    folder
        Where to keep the tensors in files mapped into memory; None keeps them in memory.
    reopen
        Whether to go on with the files that are there; they begin anew otherwise.
    room
        Bytes of a GPU that records may take; if they need more they live in the machine's memory
        and travel. By default a good part of what is free.
    """

    def __init__(
        self,
        init: Init,
        num_rows: Tensor,
        per_row: frozenset[str] = frozenset(),
        folder: Path | None = None,
        reopen: bool = False,
        room: int | None = None,
    ) -> None:
        self._init = init
        self._num = num_rows
        self._start = num_rows.cumsum(0) - num_rows
        self._per_row = per_row
        self.template = take(init(torch.tensor([0])), 0)
        self._folder = folder
        self._reopen = reopen
        self._staged: list[tuple[Tensor, Params]] = []
        # Of each client: which staged part holds its record, and in which place.
        self._staged_at = torch.full((len(num_rows),), -1)
        self._staged_place = torch.zeros_like(self._staged_at)
        self._committed = 0
        self._version = torch.zeros_like(self._staged_at)
        self._latest = 0
        named = to_named(self.template)
        self._devices = {name: value.device for name, value in named.items()}
        needed = sum(self._shape(k, v).numel() * v.element_size() for k, v in named.items())
        self._travels = needed > _room(set(self._devices.values()), room)
        self.written = self._allocate("written", torch.zeros((), dtype=torch.bool))
        self._fields = {name: self._allocate(name, value) for name, value in named.items()}

    @property
    def is_on_disk(self) -> bool:
        """Whether the records live in files mapped into memory."""
        return self._folder is not None

    def versions(self, ids: Tensor) -> Tensor:
        """Numbers that change whenever the records of these clients do."""
        return self._version[ids]

    def _changed(self, ids: Any) -> None:
        self._latest += 1
        self._version[ids] = self._latest

    def _is_per_row(self, name: str) -> bool:
        return name.split(":")[0].split("/")[0] in self._per_row

    def _shape(self, name: str, like: Tensor) -> torch.Size:
        """Shape of a field of all clients."""
        if self._is_per_row(name):
            return torch.Size((int(self._num.sum()), *like.shape[1:]))
        return torch.Size((len(self._num), *like.shape))

    def _allocate(self, name: str, like: Tensor) -> Tensor:
        shape = self._shape(name, like)
        if self._folder is None:  # zeros are not touched until written: memory comes page by page
            home = "cpu" if self._travels else like.device
            return torch.zeros(shape, dtype=like.dtype, device=home)
        size = max(1, shape.numel())
        path = self._path(name)
        (_see_whole if self._reopen else _make_zeros)(path, size * like.element_size())
        tensor = torch.from_file(str(path), shared=True, size=size, dtype=like.dtype)
        return tensor[: shape.numel()].view(shape)

    def _path(self, name: str) -> Path:
        """File of a field."""
        assert self._folder is not None
        return self._folder / (name.replace("/", "%2F").replace(":", "%3A") + ".bin")

    def read(self, ids: Tensor) -> Any:
        """Records of the given clients, staged changes included; per-row fields padded."""
        if not self._fields:
            return self.template
        named = self._gather(ids)
        return from_named(self.template, self._map_per_row(named, ids, self._pad))

    def read_flat(self, ids: Tensor) -> Any:
        """Records of the given clients with their per-row fields joined, client after client."""
        return from_named(self.template, self._gather(ids))

    def stage(self, ids: Tensor, records: Record) -> None:
        """Note new records of the given clients; ``commit`` makes them the stored ones."""
        self._stage(ids, self._map_per_row(to_named(records), ids, self._unpad))

    def stage_flat(self, ids: Tensor, records: Record) -> None:
        """Note new records whose per-row fields are joined, client after client."""
        self._stage(ids, to_named(records))

    def _stage(self, ids: Tensor, named: Params) -> None:
        if named:
            self._changed(ids)
            self._staged_at[ids] = len(self._staged)
            self._staged_place[ids] = torch.arange(len(ids))
            self._staged.append((ids, named))

    def _gather(self, ids: Tensor) -> Params:
        """Wire form of the given clients' records, per-row fields flat."""
        named = {
            name: _brought(field, self._index(name, ids), self._devices[name])
            for name, field in self._fields.items()
        }
        origin = self._staged_at[ids]
        fresh = (~self.written[ids] & (origin < 0)).nonzero()[:, 0]
        if len(fresh):
            initial = to_named(self._init(ids[fresh]))
            initial = self._map_per_row(initial, ids[fresh], self._unpad)
            self._put(named, ids, fresh, initial)
        for part in origin[origin >= 0].unique().tolist():
            where = (origin == part).nonzero()[:, 0]
            known, values = self._staged[part]
            source = self._staged_place[ids[where]]
            chosen = {
                name: value[_there(self._within(name, known, source), value.device)]
                for name, value in values.items()
            }
            self._put(named, ids, where, chosen)
        return named

    def _put(self, named: Params, ids: Tensor, where: Tensor, values: Params) -> None:
        for name, value in values.items():
            index = _there(self._within(name, ids, where), named[name].device)
            named[name].index_copy_(0, index, value.to(named[name]))

    def _index(self, name: str, ids: Tensor) -> Tensor:
        """Rows of a field's tensor that belong to the given clients."""
        rows = _ranges(self._start[ids], self._num[ids]) if self._is_per_row(name) else ids
        return _there(rows, self._fields[name].device)

    def _within(self, name: str, ids: Tensor, where: Tensor) -> Tensor:
        """Rows, in a gathered field of ``ids``, that belong to the clients at ``where``."""
        if not self._is_per_row(name):
            return where
        num = self._num[ids]
        return _ranges((num.cumsum(0) - num)[where], num[where])

    def _map_per_row(
        self, named: Params, ids: Tensor, change: Callable[[Tensor, Tensor], Tensor]
    ) -> Params:
        return {
            name: change(value, self._num[ids]) if self._is_per_row(name) else value
            for name, value in named.items()
        }

    @staticmethod
    def _pad(flat: Tensor, num: Tensor) -> Tensor:
        padded = flat.new_zeros(len(num), int(num.max()), *flat.shape[1:])
        padded[_real(num, padded.shape[1]).to(flat.device)] = flat
        return padded

    @staticmethod
    def _unpad(padded: Tensor, num: Tensor) -> Tensor:
        return padded[_real(num, padded.shape[1]).to(padded.device)]

    def commit(self) -> None:
        """Make what was staged the stored records.

        On disk they wait in memory for the next checkpoint, so that the files never run ahead
        of the server's record.
        """
        self._committed = len(self._staged)
        if not self.is_on_disk:
            self._write_staged()

    def discard(self) -> None:
        """Forget what was staged since the last commit."""
        for ids, _ in self._staged:
            self._staged_at[ids] = -1
        for ids, _ in self._staged[self._committed :]:
            self._changed(ids)
        self._staged = self._staged[: self._committed]
        for part, (ids, _) in enumerate(self._staged):
            self._staged_at[ids], self._staged_place[ids] = part, torch.arange(len(ids))

    def _write_staged(self) -> None:
        for ids, named in self._staged:
            self.write(ids, named)
            self._staged_at[ids] = -1
        self._staged, self._committed = [], 0

    def flush(self, journal: Path, server: Params, progress: dict[str, Any]) -> None:
        """Bring committed records to disk: one rename of the journal commits, then it is applied.

        A journal that is found at the next start is applied again, which changes nothing.
        """
        from handspan.disk import pack, write

        named = dict(server)
        for part, (ids, values) in enumerate(self._staged):
            named[f"journal/{part:06d}/ids"] = ids
            named.update({f"journal/{part:06d}/row/{k}": v for k, v in values.items()})
        write(journal, pack(named, progress), mode=0o600)
        self._write_staged()
        self._sync()

    def apply(self, named: Params) -> None:
        """Write the records of a journal."""
        self._changed(slice(None))
        for name in sorted(name for name in named if name.endswith("/ids")):
            prefix = name.removesuffix("ids") + "row/"
            rows = {k.removeprefix(prefix): v for k, v in named.items() if k.startswith(prefix)}
            self.write(named[name], rows)
        self._sync()

    def _sync(self) -> None:
        """Wait until the mapped files have reached the disk."""
        assert self._folder is not None
        for path in self._folder.iterdir():
            descriptor = os.open(path, os.O_RDWR)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def write(self, ids: Tensor, named: Params) -> None:
        """Write records in their flat wire form; repeating it changes nothing."""
        for name, value in named.items():
            self._write_rows(name, self._fields[name], self._index(name, ids), value)
        self._write_rows("written", self.written, ids, torch.ones_like(ids, dtype=torch.bool))

    def _write_rows(self, name: str, field: Tensor, rows: Tensor, values: Tensor) -> None:
        values = values.to(field)
        if not self.is_on_disk:
            field.index_copy_(0, rows, values)
        elif values.numel():
            _write_at(self._path(name), rows, values.reshape(len(rows), -1).contiguous())

    def to_named(self) -> Params:
        """All tensors, for a checkpoint."""
        return {**self._fields, "written": self.written}

    def load_named(self, named: Params) -> None:
        """Take over the tensors of a checkpoint."""
        self._changed(slice(None))
        for name, field in self._fields.items():
            field.copy_(named[name])
        self.written.copy_(named["written"])

    def waiting_bytes(self) -> int:
        """Bytes of records that are to be written to disk."""
        return sum(num_bytes(list(named.values())) for _, named in self._staged)

    def num_bytes(self) -> int:
        """Bytes of all private records."""
        return sum(field.numel() * field.element_size() for field in self._fields.values())


def _ranges(start: Tensor, length: Tensor) -> Tensor:
    """Join the ranges [start, start + length) of all clients."""
    shift = torch.repeat_interleave(start - (length.cumsum(0) - length), length)
    return shift + torch.arange(len(shift))


def _room(devices: set[torch.device], given: int | None) -> int:
    """Bytes that records may take where they are computed with."""
    if given is not None:
        return given
    free = [torch.cuda.mem_get_info(device)[0] for device in devices if device.type == "cuda"]
    return int(_SHARE_OF_FREE_MEMORY * min(free, default=_UNLIMITED))


def _there(index: Tensor, device: torch.device) -> Tensor:
    """Bring an index to a device, without waiting for it."""
    return index.to(device, non_blocking=True)


def _brought(field: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Rows of a field, on the device that computes with them."""
    if field.device == device:
        return field[rows]
    # Through memory that the GPU can fetch by itself, while this process goes on.
    waiting = torch.empty((len(rows), *field.shape[1:]), dtype=field.dtype, pin_memory=True)
    return torch.index_select(field, 0, rows, out=waiting).to(device, non_blocking=True)


def _make_zeros(path: Path, size: int) -> None:
    """Make a file of zeros, which take no room before they are written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        os.truncate(path, size)
    except OSError as error:
        raise HandspanError(f"cannot create {path}: {error.strerror}; make room for it") from None


def _see_whole(path: Path, size: int) -> None:
    if not path.is_file() or path.stat().st_size != size:
        raise HandspanError(
            f"{path} is missing or damaged: restore it, or remove the run folder to start again"
        )


def _write_at(path: Path, rows: Tensor, values: Tensor) -> None:
    """Write rows of a file; rows that follow each other go at once.

    Written, not mapped: on a full disk that is an error, and not the end of the process.
    """
    content = values.view(torch.uint8).numpy()
    cuts = (rows.diff() != 1).nonzero()[:, 0] + 1
    try:
        with path.open("r+b") as file:
            for first, last in pairwise([0, *cuts.tolist(), len(rows)]):
                file.seek(int(rows[first]) * content.shape[1])
                file.write(content[first:last].data)
    except OSError as error:
        raise HandspanError(
            f"cannot write {path}: {error.strerror}; make room and go on with --resume"
        ) from None


def _real(num: Tensor, width: int) -> Tensor:
    return torch.arange(width) < num.unsqueeze(1)
