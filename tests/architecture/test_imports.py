"""Who may import whom, how long modules may be, and what ``import handspan`` costs."""

import ast
import functools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from handspan.registry import methods

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "handspan"
MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
LONGEST = 400  # lines

# What a package may import of handspan; anything below a name is included.
ALLOWED = {
    "core": {"core"},
    "numerics": {"core", "numerics"},
    "methods": {"core", "numerics"},
    "models": {"core", "models"},
    "data": {"core", "data"},
    "simulation": {"core", "simulation"},
    "evaluation": {"core", "simulation", "evaluation"},
    "report": {"core", "registry", "report"},
    "testing": {"core", "numerics", "simulation", "registry", "testing"},
    "testing/oracles": {"testing.oracles"},
}
LEDGER = frozenset({"ledger_uploads", "ledger_costs", "ledger_explained"})
# (module, what it imports, the functions that may), each with its reason.
LAZY_EXCEPTIONS = {
    # The public constructors stand on the class that they make.
    ("core/data.py", "data", frozenset({"from_clients", "from_arrays"})),
    # A new client with fewer rows is told by these alone, in the terms of the data.
    ("evaluation/newcomers.py", "data.side", frozenset({"first_rows"})),
    # The pages' ledger counts what methods really send, on the default model.
    ("report/pages.py", "ledger", LEDGER),
    # The journal is written as checkpoints are.
    ("simulation/store.py", "disk", frozenset({"flush"})),
}
FOREIGN = {  # third-party libraries of the inner packages
    "core": {"torch", "numpy"},
    "numerics": {"torch", "numpy", "scipy"},
    "methods": {"torch", "numpy"},
    "testing/oracles": {"numpy"},
}
DECLARED = {"torch", "numpy", "scipy", "sklearn", "pyarrow", "safetensors", "cloudpickle"}
DECLARED |= {"typer", "rich"}


@functools.cache
def imports(module):
    """All imports of a module: (what, the functions around it)."""
    found = []

    def walk(node, functions):
        if isinstance(node, ast.Import):
            found.extend((alias.name, functions) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import"
            if node.module in ("handspan", *[f"handspan.{package}" for package in ALLOWED]):
                found.extend((f"{node.module}.{alias.name}", functions) for alias in node.names)
            else:
                found.append((node.module, functions))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            functions = (*functions, getattr(node, "name", "lambda"))
        for child in ast.iter_child_nodes(node):
            walk(child, functions)

    walk(ast.parse((SOURCE / module).read_text()), ())
    return found


def package_of(module):
    folders = module.split("/")[:-1]
    while folders and "/".join(folders) not in ALLOWED:
        folders.pop()
    return "/".join(folders)


def own(module):
    """Imports of handspan: (name without ``handspan.``, the functions around it)."""
    names = [(n, where) for n, where in imports(module) if n.split(".")[0] == "handspan"]
    return [(name.partition(".")[2], where) for name, where in names]


def is_below(name, allowed):
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


def is_excepted(module, name, functions):
    return any(
        module == place and is_below(name, {what}) and set(functions) & among
        for place, what, among in LAZY_EXCEPTIONS
    )


def foreign(module):
    """Imports of other people's libraries: (library, the functions around it)."""
    tops = [(name.split(".")[0], functions) for name, functions in imports(module)]
    standard = {*sys.stdlib_module_names, "handspan"}
    return [(name, functions) for name, functions in tops if name not in standard]


@pytest.mark.parametrize("module", [m for m in MODULES if package_of(m)])
def test_packages_import_only_what_lies_below_them(module):
    package = package_of(module)
    wrong = [
        name
        for name, functions in own(module)
        if not is_below(name, ALLOWED[package]) and not is_excepted(module, name, functions)
    ]
    assert not wrong, f"{module} imports handspan.{wrong[0]}, which {package} may not"


@pytest.mark.parametrize("module", [m for m in MODULES if package_of(m) in FOREIGN])
def test_inner_packages_import_few_libraries(module):
    package = package_of(module)
    wrong = {name for name, _ in foreign(module)} - FOREIGN[package]
    assert not wrong, f"{module} imports {sorted(wrong)}, and {package} may not"


@pytest.mark.parametrize("module", MODULES)
def test_optional_libraries_are_imported_inside_functions(module):
    wrong = {name for name, functions in foreign(module) if not functions} - DECLARED
    assert not wrong, f"{module} needs {sorted(wrong)} at import time"


def test_declared_libraries_are_those_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {text.split(">")[0].strip() for text in project["dependencies"]}
    assert {name.replace("scikit-learn", "sklearn") for name in names} == DECLARED


def test_every_exception_is_still_needed():
    for module, what, functions in LAZY_EXCEPTIONS:
        used = [
            where
            for name, where in own(module)
            if is_below(name, {what}) and set(where) & functions
        ]
        assert used, f"{module} no longer imports handspan.{what}: remove the exception"


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short(module):
    count = len((SOURCE / module).read_text().splitlines())
    assert count <= LONGEST, f"{module} has {count} lines"


@pytest.mark.parametrize("name", sorted(methods()))
def test_a_registered_method_has_a_page_and_an_entry_point(name):
    method = methods()[name]
    if not method.build.__module__.startswith("handspan."):
        pytest.skip("a method of another package")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["handspan.methods"][name] == method.build.__module__
    assert (ROOT / "docs" / "methods" / f"{name}.md").exists()


@functools.cache
def loaded_by(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(done.stdout.split())


def test_importing_handspan_imports_nothing_heavy():
    heavy = {*DECLARED, "handspan.core", "handspan.fitting"}
    found = heavy & loaded_by("import handspan")
    assert not found, f"import handspan brings {sorted(found)}"


def test_the_core_brings_neither_the_command_line_nor_the_tables():
    code = "import handspan.core.federation, handspan.core.method, handspan.core.task"
    found = {"typer", "rich", "sklearn", "pyarrow", "scipy"} & loaded_by(code)
    assert not found, f"the core brings {sorted(found)}"
