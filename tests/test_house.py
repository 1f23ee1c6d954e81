"""The shape of the house: which way imports point, what is light, what gets installed."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("cli", "engine", "kernels", "profiles")
MAY_IMPORT = {
    "cli": {"engine", "kernels", "profiles"},
    "engine": {"kernels", "profiles"},
    "kernels": set(),
    "profiles": set(),
}
NO_TORCH = ("engine/scheduler/", "engine/kv/pool.py", "engine/kv/prefix_tree.py", "engine/kv/manager.py")
HEAVY = ("torch", "transformers", "numba", "triton")
FACES = {"typer", "click", "rich", "fastapi", "starlette", "uvicorn"}
#: Rooms of the CLI that every command can use, whichever way it is shown.
NO_TERMINAL = ("cli/load/", "cli/targets/", "cli/figures/")


def modules() -> list[Path]:
    return sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[str]:
    """Name every module that a file imports, inside functions and under TYPE_CHECKING too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (name for alias in node.names if (name := f"{node.module}.{alias.name}") in MODULES)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("llmsched", *parts[: -1 if parts[-1] == "__init__" else None]))


MODULES = {module_name(path): path for path in modules()}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_one_way(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    part = name.split("/")[0]
    for target in imports(path):
        top, _, rest = target.partition(".")
        if top == "llmsched":
            other = rest.split(".")[0]
            assert other == part or other in MAY_IMPORT.get(part, ()), f"{name} imports {target}"
        assert top not in PARTS, f"{name} imports {target}: say llmsched.{target}"
        assert part != "engine" or top not in FACES, f"{name} imports {target}"
        assert not name.startswith(NO_TERMINAL) or top not in {"typer", "rich"}, f"{name} imports {target}"
        assert not name.startswith(NO_TORCH) or top not in {"torch", "transformers"}, f"{name} imports {target}"


def test_imports_form_no_cycle() -> None:
    arrows = {
        name: {target for target in imports(path) if target in MODULES} - {name} for name, path in MODULES.items()
    }
    TopologicalSorter(arrows).prepare()  # raises CycleError, which shows the cycle


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines; of a Typer command, only those of the body, because its signature is its flags."""
    end = function.end_lineno
    assert end is not None
    if not any("typer." in ast.unparse(argument) for argument in function.args.args):
        return end - function.lineno + 1
    body = function.body[1 if ast.get_docstring(function) else 0 :]
    return end - body[0].lineno + 1 if body else 0


def test_functions_and_classes_are_small() -> None:
    """A function has at most 60 lines, a class at most 20 methods."""
    large = []
    for name, path in MODULES.items():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and num_lines(node) > 60:
                large.append(f"{name}.{node.name}: {num_lines(node)} lines")
            elif isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                if methods > 20:
                    large.append(f"{name}.{node.name}: {methods} methods")
    assert large == []


@pytest.mark.parametrize("module", ["llmsched.engine", "llmsched.kernels", "llmsched.profiles", "llmsched.cli.main"])
def test_faces_are_light(module: str) -> None:
    code = f"import sys, {module}; sys.exit([name for name in {HEAVY} if name in sys.modules] or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_rooms_for_every_command_reach_no_terminal() -> None:
    """cli/load, cli/targets and cli/figures import neither typer nor rich through other modules either."""
    arrows = {name: set(imports(path)) for name, path in MODULES.items()}
    reached = {name for name, path in MODULES.items() if path.relative_to(ROOT).as_posix().startswith(NO_TERMINAL)}
    todo = list(reached)
    while todo:
        new = {target for target in arrows[todo.pop()] if target in MODULES} - reached
        reached |= new
        todo += new
    assert not [(name, target) for name in reached for target in arrows[name] if target.split(".")[0] in FACES]


def test_every_package_is_installed_and_nothing_else() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [path.parent.relative_to(ROOT) for path in modules() if path.name == "__init__.py"]
    assert set(settings["packages"]) == {".".join(("llmsched", *folder.parts)) for folder in folders}
    assert set(settings["package-dir"]) == {f"llmsched.{part}" for part in PARTS}
