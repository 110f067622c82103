# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Imports go one way, and only env.py reads the environment."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "mscclpp_dispatcher"

# What each module may import of ours, besides itself; modules that are not listed are checked by the other tests.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "env": set(),
    "config": {"errors"},
    "types": {"errors", "config"},
    "engine": {"errors", "config", "types"},
    "validation": {"errors", "config", "types"},
    "bootstrap": {"errors", "env"},
    "reference": {"config", "types"},
}
FOREIGN = {"integration", "sglang", "vllm"}


def sources() -> dict[str, pathlib.Path]:
    """Module names below the package (``engines.ll``; ``""`` for the package itself), and their files."""
    files = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


def imported(tree: ast.AST) -> set[str]:
    """Every module that the code names in an import, at any depth; relative ones raise."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def ours(tree: ast.AST, modules: set[str]) -> set[str]:
    """Our modules among the imports, without the package's name in front."""
    prefix = PACKAGE + "."
    names = {name.removeprefix(prefix) for name in imported(tree) if name.startswith(prefix)}
    return {name for name in names if name in modules or name == "_C"}


def parsed() -> dict[str, ast.AST]:
    return {name: ast.parse(path.read_text(), str(path)) for name, path in sources().items()}


def test_the_walk_finds_the_package():
    assert {"", "api", "engines", "engines.ll", *ALLOWED} <= sources().keys()


@pytest.mark.parametrize("module", ALLOWED)
def test_modules_import_only_what_lies_below(module: str):
    trees = parsed()
    extra = ours(trees[module], set(trees)) - ALLOWED[module]
    assert not extra, f"{module} imports {sorted(extra)}; allowed: {sorted(ALLOWED[module])}"
    if module in ("errors", "config", "types", "engine", "reference", "validation"):
        assert PACKAGE not in imported(trees[module]), f"{module} imports the package itself"


def test_no_cycle():
    trees = parsed()
    graph = {name: ours(tree, set(trees)) - {""} for name, tree in trees.items() if name}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join((*path, name))}"
        if name in done or name not in graph:
            return
        for target in sorted(graph[name]):
            visit(target, (*path, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_engines_do_not_import_the_api():
    trees = parsed()
    for name, tree in trees.items():
        if name.startswith("engines") or name in ALLOWED:
            assert "api" not in ours(tree, set(trees)), name


def test_only_the_engines_touch_the_extension():
    trees = parsed()
    users = {name for name, tree in trees.items() if "_C" in ours(tree, set(trees))}
    assert users
    assert all(name.startswith("engines.") for name in users), users


def test_nothing_imports_a_framework():
    for name, tree in parsed().items():
        roots = {each.split(".")[0] for each in imported(tree)}
        assert not roots & FOREIGN, f"{name} imports {sorted(roots & FOREIGN)}"


def _reads_environment(tree: ast.AST) -> bool:
    readers = {"environ", "environb", "getenv", "putenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in readers:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os" and {each.name for each in node.names} & readers:
            return True
    return False


def test_only_env_reads_the_environment():
    """The demo is a program of its own and sets its workers' variables."""
    readers = {name for name, tree in parsed().items() if _reads_environment(tree) and not name.startswith("demo")}
    assert readers == {"env"}


def test_import_needs_no_framework_and_no_device():
    code = (
        "import sys, mscclpp_dispatcher, torch\n"
        f"loaded = {FOREIGN!r} & {{name.split('.')[0] for name in sys.modules}}\n"
        "assert not loaded, loaded\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr


def test_public_names_exist():
    import mscclpp_dispatcher

    assert sorted(mscclpp_dispatcher.__all__) == list(dict.fromkeys(sorted(mscclpp_dispatcher.__all__)))
    for name in mscclpp_dispatcher.__all__:
        assert hasattr(mscclpp_dispatcher, name), name


def test_package_files_stay_readable():
    """Longer than 600 lines and a reader loses the thread."""
    for folder in (PACKAGE, "csrc", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".hpp", ".cu", ".cuh"):
                assert len(path.read_text().splitlines()) <= 600, f"{path.relative_to(ROOT)}: more than 600 lines"
