"""``handspan.plot``: pictures of a finished run or comparison, from its folder alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handspan.comparison.plan import slug
from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError, nearest
from handspan.disk import make
from handspan.plot_reading import read_material
from handspan.report.plots import (
    coordinates,
    curves,
    gain,
    newcomers,
    partition,
    spectrum,
    spread,
    style,
)
from handspan.report.plots.material import Material
from handspan.runs import write


class Pictures(NamedTuple):
    """What was drawn.

    Attributes
    ----------
    files
        Paths of the pictures.
    skipped
        Why a picture was not drawn, by its name.
    """

    files: list[Path]
    skipped: dict[str, str]


def plot(
    folder: str | Path,
    out: str | Path | None = None,
    *,
    formats: Sequence[str] = ("png", "svg"),
    data: FederatedData | None = None,
) -> Pictures:
    """Draw all that a folder can show.

    Parameters
    ----------
    folder
        What a finished run or comparison has left.
    out
        Folder for the pictures; ``pictures`` inside the other by default.
    formats
        Any of ``png``, ``svg`` and ``pdf``.
    data
        The federation, where it was given from Python (of a comparison that of the first seed).

    Returns
    -------
    Pictures
        The files, and why others were skipped.
    """
    formats = read_formats(formats)
    style.require_matplotlib()
    material = read_material(Path(folder), data)
    target = Path(folder) / "pictures" if out is None else Path(out)
    make(target)
    files: list[Path] = []
    skipped = dict(material.omitted)
    with style.drawing():
        for name, draw in kinds(material):
            try:
                figure = draw()
            except style.NotShown as reason:
                skipped[name] = str(reason)
                continue
            for form in formats:
                path = target / f"{name}.{form}"
                write(path, style.render(figure, form))
                files.append(path)
    return Pictures(files, skipped)


def read_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Check the formats asked for, each once."""
    for form in formats:
        if form not in style.FORMATS:
            known = ", ".join(style.FORMATS)
            raise HandspanError(
                f"unknown format {form!r}{nearest(form, list(style.FORMATS))}: choose of {known}"
            )
    if not formats:
        raise HandspanError(f"name a format: {', '.join(style.FORMATS)}")
    return tuple(dict.fromkeys(formats))


def kinds(material: Material) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of all pictures, and the functions that draw them."""
    for against in curves.AXES:
        yield f"{material.metric}-against-{against}", lambda a=against: curves.draw(material, a)
    yield "spread", lambda: spread.draw(material)
    yield "gain", lambda: gain.draw(material)
    yield "newcomers", lambda: newcomers.draw(material)
    yield "partition", lambda: partition.draw(material)
    yield from _of_coordinates(material)


def _of_coordinates(material: Material) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Pictures of methods that keep coordinates, each method's apart."""
    known = [] if isinstance(material.coordinates, str) else material.coordinates
    by_method = {mine.method: mine for mine in known}
    reason = "no method here keeps coordinates"
    if isinstance(material.coordinates, str):
        reason = material.coordinates
    for method in material.methods:
        mine = by_method.get(method)
        if mine is not None:
            yield (
                _named("coordinates", method, material),
                lambda m=mine: coordinates.draw(material, m),
            )
        if mine is not None or spectrum.has_spectrum(material.runs_of(method)[0]):
            yield (
                _named("spectrum", method, material),
                lambda m=method, c=mine: spectrum.draw(material, m, c),
            )
    if not known:
        yield "coordinates", lambda: _skip(reason)
    if not known and not any(map(spectrum.has_spectrum, material.runs)):
        yield "spectrum", lambda: _skip(reason)


def _named(kind: str, method: str, material: Material) -> str:
    return f"{kind}-{slug(method)}" if material.is_comparison else kind


def _skip(reason: str) -> Any:
    raise style.NotShown(reason)
