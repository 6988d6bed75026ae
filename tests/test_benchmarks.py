"""Benchmarks run where CI does not: at least every name that they import from the project exists."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


def imported(path: Path) -> list[tuple[str, str]]:
    """(module, name) of each `from module import name` of the project's packages, at any depth of the file."""
    return [
        (node.module, name.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.split(".")[0] in {"k3train", "k3kernels", "k3data"}
        for name in node.names
    ]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_a_benchmark_imports_from_the_project_exists(path: Path) -> None:
    for module, name in imported(path):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in {"k3train", "k3kernels", "k3data"}:
                raise
            continue  # an optional package of that benchmark's machine
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
