"""Limits on the code: lengths of files, functions and test names, first words of docstrings, import cycles."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("mlx_paged", "patches", "scripts")
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 700, 80


def python_files(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*.py") if path.is_file()]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_is_long(folder: str) -> None:
    files = python_files(folder)
    assert files
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {path: count for path, count in lines.items() if count > MOST_LINES_OF_A_FILE} == {}


@pytest.mark.parametrize("folder", (*FOLDERS, "tests"))
def test_no_function_is_long(folder: str) -> None:
    long = {}
    for path in python_files(folder):
        for function in functions_of(path):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                long[f"{path.relative_to(ROOT)}:{function.name}"] = lines
    assert long == {}


@pytest.mark.parametrize("folder", (*FOLDERS, "tests"))
def test_no_docstring_begins_with_of_as_for_where_or_the_same(folder: str) -> None:
    dangling = re.compile(r'^ *r?"""(?:(?:Of|As|For|Where) |The same).*', re.MULTILINE)
    found = {str(path.relative_to(ROOT)): dangling.findall(path.read_text()) for path in python_files(folder)}
    assert found and {path: lines for path, lines in found.items() if lines} == {}


def test_names_of_tests_have_at_most_70_characters() -> None:
    names = [name for path in python_files("tests") for name in re.findall(r"def (test_\w+)", path.read_text())]
    assert len(names) > 1000 and not [name for name in names if len(name) > 70]


def modules_of_the_product() -> dict[str, Path]:
    """Return files by module name; patches/ is mlx_paged.patches."""
    found = {}
    for folder, prefix in (("mlx_paged", "mlx_paged"), ("patches", "mlx_paged.patches")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[0] != "patches" or folder == "patches":
                found[".".join([prefix, *parts]).removesuffix(".__init__")] = path
    return found


def imports_of(name: str, path: Path, known: set[str]) -> set[str]:
    """Return the modules among ``known`` that a module imports at run time, inside functions too."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found, left = set(), list(tree_of(path).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names}
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            left += node.orelse
        else:
            left += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]
    return found & known - {name}


def test_no_import_cycles() -> None:
    modules = modules_of_the_product()
    graph = {name: imports_of(name, path, set(modules)) for name, path in modules.items()}
    assert len(graph) > 100 and "mlx_paged.kv.pool" in graph["mlx_paged.patches.cache.pools"]
    while leaves := {name for name, imported in graph.items() if not imported & graph.keys()}:
        graph = {name: imported for name, imported in graph.items() if name not in leaves}
    assert {name: sorted(imported & graph.keys()) for name, imported in graph.items()} == {}
