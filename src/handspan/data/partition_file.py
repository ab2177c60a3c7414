"""Stored partitions: ``.npz`` files that say whose row is whose, for one source only."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from handspan.core.errors import HandspanError
from handspan.data.inputs import chunks, is_sparse
from handspan.data.partition_types import Partition
from handspan.data.source import Source

FORMAT = "handspan-partition"
VERSION = 1
_ARRAYS = ("client", "groups", "relabel", "turn", "side")


def content_hash(source: Source) -> str:
    """Hash of a source's rows and labels, whatever it is called."""
    digest = hashlib.sha256(str((source.x.shape, source.x.dtype.str)).encode())
    if is_sparse(source.x):
        for part in (source.x.indptr, source.x.indices):
            digest.update(np.asarray(part, dtype="<i8").tobytes())
        digest.update(source.x.data.tobytes())
    else:
        for start, stop in chunks(source.x):
            digest.update(np.ascontiguousarray(source.x[start:stop]).tobytes())
    if source.y is not None:
        digest.update(np.asarray(source.y, dtype="<f8").tobytes())
    return digest.hexdigest()[:16]


def pack_partition(source: Source, part: Partition, spec: str, seed: int) -> bytes:
    """Return the content of a partition's file; the same partition gives the same bytes."""
    known = part.relabel is not None or part.y is None, part.turn is not None or part.x is None
    if not all(known):
        raise HandspanError(
            f"the partition {spec} replaces rows in a way of its own, which cannot be stored"
        )
    about = {
        "format": FORMAT,
        "version": VERSION,
        "source": source.name,
        "num_rows": source.num_rows,
        "content": content_hash(source),
        "partition": spec,
        "seed": seed,
        "is_natural": part.is_natural,
        "hash": part.fingerprint(),
    }
    arrays = {name: getattr(part, name) for name in _ARRAYS if getattr(part, name) is not None}
    sink = io.BytesIO()
    np.savez_compressed(sink, about=np.array(json.dumps(about, sort_keys=True)), **arrays)
    return sink.getvalue()


def stored(source: Source, num_clients: int, rng: np.random.Generator, path: str) -> Partition:
    """Read a partition that belongs to this source."""
    arrays, about = _read(Path(path))
    if about["num_rows"] != source.num_rows:
        raise HandspanError(
            f"{path} divides {about['num_rows']} rows of {about['source']}, but {source.name} has "
            f"{source.num_rows}: make a partition for it with handspan partition"
        )
    if about["content"] != content_hash(source):
        raise HandspanError(
            f"{path} was made for {about['source']}, and the rows of {source.name} are others: "
            "make a partition for it with handspan partition"
        )
    part = Partition(
        **{name: arrays.get(name) for name in _ARRAYS},  # type: ignore[arg-type]
        is_natural=about["is_natural"],
        remarks=(f"partition {about['partition']} with seed {about['seed']} from {path}",),
    )
    try:
        intact = len(part.client) == source.num_rows and part.fingerprint() == about["hash"]
    except (ValueError, TypeError, IndexError, HandspanError):
        intact = False
    if not intact:
        raise HandspanError(f"{path} is damaged: its hash is no longer {about['hash']}")
    return part


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    if not path.is_file():
        raise HandspanError(f"there is no file {path}: write it with handspan partition --out")
    wrong = HandspanError(
        f"{path} is damaged or no stored partition: write it with handspan partition --out"
    )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        about = json.loads(str(arrays["about"]))
    except PermissionError:
        raise HandspanError(f"{path} cannot be read: you lack the permission") from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        NotImplementedError,
    ):
        raise wrong from None
    if not isinstance(about, dict) or about.get("format") != FORMAT or "client" not in arrays:
        raise wrong
    if about.get("version") != VERSION:
        raise HandspanError(
            f"{path} has format version {about.get('version')}, but this handspan reads version "
            f"{VERSION}: write it again"
        )
    if not {"num_rows", "content", "source", "partition", "seed", "is_natural", "hash"} <= {*about}:
        raise wrong
    return arrays, about
