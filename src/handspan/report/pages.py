"""The parts of the documentation that are made from the code, so that they cannot go stale.

A page marks such a part by two comments, ``<!-- made: KIND NAME -->`` and ``<!-- end -->``. Kinds:
``settings`` and ``deviations`` and ``boundary`` of a method, ``methods`` for the table of all, and
``uploads``, ``costs`` and ``counted`` for the ledger.
``python -m handspan.report.pages`` writes them anew; ``--check`` only tells which are stale.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig
from handspan.registry import EXTRAS, methods

_PART = re.compile(
    r"(?P<open><!-- made: (?P<kind>\w+) ?(?P<name>\w*) -->\n)(?P<body>.*?)(?P<close><!-- end -->)",
    re.DOTALL,
)
_SECTION = re.compile(r"^(?P<title>[A-Z]\w+)\n(?:-{3,}\n)?(?=    \S)", re.MULTILINE)


def update(root: Path, *, check: bool = False) -> list[Path]:
    """Renew the made parts of all pages under a project's root.

    Parameters
    ----------
    root
        Folder that holds ``README.md`` and ``docs``.
    check
        Write nothing.

    Returns
    -------
    list
        Pages whose parts were stale.
    """
    stale: list[Path] = []
    for page in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        fresh = renew(text)
        if fresh != text:
            stale.append(page)
            if not check:
                page.write_text(fresh, encoding="utf-8")
    return stale


def renew(text: str) -> str:
    """Return a page with its made parts written anew."""

    def fill(part: re.Match[str]) -> str:
        body = PARTS[part["kind"]](part["name"])
        return f"{part['open']}{body.rstrip()}\n{part['close']}"

    return _PART.sub(fill, text)


def settings(name: str) -> str:
    """Return the table of a method's settings, from its configuration class."""
    config = _config(name)
    meanings = field_docs(config)
    rows = [
        (f"`{field.name}`", f"`{_value(field.default)}`", meanings[field.name])
        for field in dataclasses.fields(config)
    ]
    if not rows:
        return "None of its own.\n"
    return _table(("setting", "default", "meaning"), rows)


def deviations(name: str) -> str:
    """Return the section ``Deviations`` of a method's module, word for word."""
    module = sys.modules[_method(name).build.__module__]
    return section(module.__doc__ or "", "Deviations")


def boundary(name: str) -> str:
    """Return what leaves a client, what one upload reveals, what stays."""
    method = _method(name)
    rows = [
        ("leaves the client", method.uploads),
        ("can be inferred from one upload", method.inferable),
        ("is kept by the client", method.private),
    ]
    return _table(("", ""), rows)


def all_methods(name: str = "") -> str:
    """Return the table of all methods that handspan brings."""
    own = [m for m in methods().values() if m.build.__module__.startswith("handspan.")]
    rows = [
        (
            f"[`{method.name}`](docs/methods/{method.name}.md)",
            method.paper,
            method.uploads,
            method.inferable,
        )
        for method in own
    ]
    return _table(("method", "paper", "leaves the client", "can be inferred from it"), rows)


def ledger_uploads(name: str = "") -> str:
    """Return the table of what all methods send."""
    from handspan import ledger

    return _table(ledger.UPLOADS, _linked(ledger.uploads()))


def ledger_costs(name: str = "") -> str:
    """Return the table of what all methods take."""
    from handspan import ledger

    return _table(ledger.COSTS, _linked(ledger.costs()))


def ledger_explained(name: str = "") -> str:
    """Return how the ledger was counted."""
    from handspan import ledger

    return "\n".join(textwrap.wrap(ledger.explained(), 99)) + "\n"


def _linked(lines: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Let the names lead to the pages beside this one."""
    return [(f"[`{name}`]({name}.md)", *rest) for name, *rest in lines]


PARTS: dict[str, Callable[[str], str]] = {
    "settings": settings,
    "deviations": deviations,
    "boundary": boundary,
    "methods": all_methods,
    "uploads": ledger_uploads,
    "costs": ledger_costs,
    "counted": ledger_explained,
}


def field_docs(config: type[MethodConfig]) -> dict[str, str]:
    """Return the string that stands below each field of a configuration class."""
    found: dict[str, str] = {}
    for part in reversed([cls for cls in config.__mro__ if issubclass(cls, MethodConfig)]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, below in itertools.pairwise(body):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[field.target.id] = " ".join(str(below.value.value).split())
    missing = [field.name for field in dataclasses.fields(config) if field.name not in found]
    if missing:
        raise HandspanError(f"{config.__name__}.{missing[0]} has no string that explains it")
    return found


def section(docstring: str, title: str) -> str:
    """Return the text of one section of a module's docstring."""
    found = list(_SECTION.finditer(docstring))
    for position, head in enumerate(found):
        if head["title"] == title:
            end = found[position + 1].start() if position + 1 < len(found) else len(docstring)
            return _markdown(textwrap.dedent(docstring[head.end() : end]).strip()) + "\n"
    raise HandspanError(f"a method's docstring has no section {title}")


def _method(name: str) -> Method:
    if name not in methods():
        raise HandspanError(f"a page speaks of the method {name!r}, and there is none")
    return methods()[name]


def _config(name: str) -> type[MethodConfig]:
    return EXTRAS[name][0] if name in EXTRAS else _method(name).config


def _value(value: object) -> str:
    """Write a default as the command line takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    cells = [[_markdown(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def main(arguments: list[str]) -> int:
    """Renew the pages below the current folder, or check them."""
    check = "--check" in arguments
    stale = update(Path.cwd(), check=check)
    for page in stale:
        print(f"{'stale' if check else 'written'}: {page}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
