"""Files of public data sets: from the cache folder, or fetched into it and checked.

Nothing here is needed where the files lie in a folder of the user's (``mnist:FOLDER``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from handspan.core.errors import HandspanError


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file on the net: its name, where it is, and the checksum it must have."""

    file: str
    url: str
    checksum: str


def cache_folder(source: str) -> Path:
    """Where the files of a source are kept: ``$HANDSPAN_CACHE``, or the user's cache folder."""
    given = os.environ.get("HANDSPAN_CACHE")
    if given:
        return Path(given) / source
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "handspan" / source


def locate(
    source: str, given: str | None, remotes: Sequence[Remote], has_all: Callable[[Path], bool]
) -> Path:
    """Return a folder with the files of a source, downloading them where that is possible.

    Parameters
    ----------
    source
        Name of the source, for messages and for the cache.
    given
        The user's own folder, or None for the cache.
    remotes
        What to download where the cache lacks it.
    has_all
        Whether a folder holds all that is needed, in any of its forms.
    """
    if given is not None:
        return _own(source, Path(given).expanduser(), remotes, has_all)
    folder = cache_folder(source)
    if not has_all(folder):
        _download(source, folder, remotes)
    return folder


def _own(
    source: str, path: Path, remotes: Sequence[Remote], has_all: Callable[[Path], bool]
) -> Path:
    if not str(path) or not path.exists():
        raise HandspanError(
            f"there is no folder {str(path)!r}: write {source}:FOLDER with {_files(remotes)}"
        )
    if not has_all(path):
        raise HandspanError(f"{path} lacks files of {source}: put {_files(remotes)} there")
    return path


def _files(remotes: Sequence[Remote]) -> str:
    names = [remote.file for remote in remotes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _download(source: str, folder: Path, remotes: Sequence[Remote]) -> None:
    by_hand = (
        f"put {_files(remotes)} into {folder}, or into a folder of your own and write "
        f"{source}:FOLDER"
    )
    try:
        import pooch
    except ImportError:
        raise HandspanError(
            f"{source} is not on this machine: {by_hand}; or install handspan[download] to have "
            "it downloaded"
        ) from None
    for remote in remotes:
        if (folder / remote.file).exists():
            continue
        try:
            pooch.retrieve(
                remote.url, known_hash=remote.checksum, fname=remote.file, path=str(folder)
            )
        except ValueError:  # pooch has removed the file
            raise HandspanError(
                f"{remote.url} has another checksum than {source} should have, so it was not "
                f"kept: {by_hand}"
            ) from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise HandspanError(f"cannot download {remote.url} ({reason}): {by_hand}") from None
