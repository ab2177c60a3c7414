"""A comparison as a LaTeX table, with the rules of ``booktabs``."""

from __future__ import annotations

from collections.abc import Sequence

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "≈": r"$\approx$", "<": r"$<$", ">": r"$>$", "*": r"$^{*}$",
}  # fmt: skip


def escape(text: str) -> str:
    r"""Write a text so that LaTeX prints it as it stands.

    Examples
    --------
    >>> print(escape("a_b & 50 %"))
    a\_b \& 50 \%
    """
    return "".join(_SPECIAL.get(character, character) for character in text)


def number(text: str) -> str:
    """Escape a cell of numbers; a minus is a minus and no hyphen."""
    return escape(text).replace("-", "$-$") if text != "-" else "--"


def tabular(headings: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Write the lines of a ``tabular``; each line has a mark (best, tie or nothing) and cells."""
    out = [r"\begin{tabular}{l" + "r" * (len(headings) - 1) + "}", r"\toprule"]
    out += [" & ".join(escape(heading) for heading in headings) + r" \\", r"\midrule"]
    for mark, (name, *cells) in lines:
        first, numbers = escape(name), [number(cell) for cell in cells]
        if mark == "best":
            first, numbers[0] = rf"\textbf{{{first}}}", rf"\textbf{{{numbers[0]}}}"
        if mark == "tie":
            first += r" $\approx$"
        out.append(" & ".join([first, *numbers]) + r" \\")
    return [*out, r"\bottomrule", r"\end{tabular}"]


def table(tabulars: Sequence[Sequence[str]], caption: str, notes: Sequence[str]) -> str:
    r"""Put tables under one caption; the preamble needs ``\usepackage{booktabs}``."""
    out = ["% needs \\usepackage{booktabs}", r"\begin{table}", r"\centering", r"\small"]
    for lines in tabulars:
        out += [*lines, ""]
    told = " ".join([caption + ".", *notes])
    out += [rf"\caption{{{escape(told)}}}", r"\end{table}"]
    return "\n".join(out) + "\n"
