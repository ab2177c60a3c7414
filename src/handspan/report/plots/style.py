"""How all pictures look: colours, lines, titles; and how they become files.

Colours are those of Okabe and Ito, which the colour-blind tell apart. Every colour comes with a
marker and a dash of its own, so that a grey print loses nothing. Nothing here touches matplotlib's
global state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from handspan.core.errors import HandspanError

FORMATS = ("png", "svg", "pdf")
BLACK, GREY, PALE = "#000000", "#6E6E6E", "#D0D0D0"
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY = "#E69F00", "#56B4E9"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (3, 1)))
_SETTINGS = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": BLACK,
    "ytick.labelcolor": BLACK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "handspan",  # the same picture gives the same bytes
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}


class NotShown(Exception):
    """Why a folder cannot show a picture, in half a sentence."""


def require_matplotlib() -> None:
    """Say what to install where it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise HandspanError("pictures need matplotlib: pip install 'handspan[plots]'") from None


def drawing() -> AbstractContextManager[None]:
    """Settings under which figures are made and written; those of the caller come back."""
    import matplotlib

    return matplotlib.rc_context({**matplotlib.rcParamsDefault, **_SETTINGS})


def render(figure: Any, form: str) -> bytes:
    """Return a figure as the bytes of a file, the same bytes each time."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # names of methods have no ligatures
        if hasattr(text, "set_fontfeatures"):
            text.set_fontfeatures(("-liga",))
    sink = io.BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(
        sink, format=form, metadata=dates.get(form), bbox_inches="tight", pad_inches=0.08
    )
    return sink.getvalue()


def canvas(width: float, height: float) -> Any:
    """Return an empty figure, sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def panels(
    width: float,
    height: float,
    num_rows: int = 1,
    num_columns: int = 1,
    *,
    gap: tuple[float, float] = (0.35, 0.45),
    **options: Any,
) -> tuple[Any, Any]:
    """Return a figure and a matrix of axes, each of the given size in inches.

    ``gap`` are inches between columns and between rows; labels and titles lie outside.
    """
    across, down = gap
    figure = canvas(
        num_columns * width + (num_columns - 1) * across,
        num_rows * height + (num_rows - 1) * down,
    )
    place = {
        "left": 0, "right": 1, "bottom": 0, "top": 1,
        "wspace": across / width, "hspace": down / height,
    }  # fmt: skip
    return figure, figure.subplots(
        num_rows, num_columns, squeeze=False, gridspec_kw=place, **options
    )


def headline(figure: Any, title: str, subtitle: str, *, clear: float = 0.14) -> None:
    """Put a title and, below it, what the picture is about above the axes.

    ``clear`` inches stay free between the axes and the lines.
    """
    height = figure.get_figheight()
    for text, inches, weight in ((subtitle, clear, "normal"), (title, clear + 0.17, "bold")):
        figure.text(
            0, 1 + inches / height, text, weight=weight, size=9 if weight == "bold" else 8,
            va="bottom", color=BLACK if weight == "bold" else GREY,
        )  # fmt: skip


def footnote(figure: Any, text: str, *, clear: float = 0.48) -> None:
    """Put what has to be known to read a picture below it; ``clear`` inches stay for labels."""
    figure.text(0, -clear / figure.get_figheight(), text, va="top", color=GREY, linespacing=1.4)


def ink(colour: str) -> str:
    """A darker shade of a colour, in which text is easy to read."""
    channels = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(0.72 * channel):02x}" for channel in channels)


def line_look(place: int, *, is_baseline: bool = False) -> dict[str, Any]:
    """Colour, dash and marker of the line at a place; a baseline is black and dotted."""
    if is_baseline:
        return {"color": BLACK, "linestyle": ":", "marker": "x", "markersize": 4}
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": DASHES[place % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 3.5,
    }


def looks(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Give each method its look, the same in all pictures of a folder."""
    found: dict[str, dict[str, Any]] = {}
    for method in methods:
        is_baseline = is_local(method)
        place = sum(not is_local(other) for other in found)
        found[method] = line_look(place, is_baseline=is_baseline)
    return found


def is_local(method: str) -> bool:
    """Whether a method is the baseline with which each client compares: training alone."""
    return method.split(":")[0].strip().lower() == "local"
