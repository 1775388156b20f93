"""The rules of CONTRIBUTING.md that a tool can check."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

DECISIONS = ("contract", "imds", "events", "formats", "approvals")
DOES_IO = re.compile(r"^I/O: ", re.MULTILINE)  # in a module's docstring, followed by what it reads or writes
FORBIDDEN = {
    "asyncio",
    "azure",
    "http",
    "io",
    "logging",
    "os",
    "pathlib",
    "requests",
    "socket",
    "sqlite3",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib3",
}
CLOCKS = {"now", "today", "utcnow", "monotonic"}  # `time` cannot be imported


def pure_modules() -> list[Path]:
    files = [file for package in DECISIONS for file in sorted((ROOT / "bridge" / package).rglob("*.py"))]
    return [file for file in files if not DOES_IO.search(ast.get_docstring(parse(file)) or "")]


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    # In its own process, because import-linter disables every logger.
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )


def copied_tree(folder: Path) -> Path:
    shutil.copytree(ROOT / "bridge", folder / "bridge", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_a_package_imports_only_from_the_layers_below_its_own() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


def test_a_sink_that_imports_from_the_command_line_breaks_the_layers(tmp_path: Path) -> None:
    tree = copied_tree(tmp_path)
    assert lint_imports(tree).returncode == 0
    (tree / "bridge" / "sinks" / "x.py").write_text("import bridge.cli.main\n")
    result = lint_imports(tree)
    assert result.returncode == 1
    assert "bridge.sinks is not allowed to import bridge.cli" in result.stdout


def test_a_new_module_beside_the_packages_breaks_the_layers(tmp_path: Path) -> None:
    tree = copied_tree(tmp_path)
    (tree / "bridge" / "x.py").write_text("")
    result = lint_imports(tree)
    assert result.returncode == 1
    assert "bridge.x" in result.stdout


def is_module(entry: Path) -> bool:
    return (entry.suffix == ".py" and entry.stem != "__init__") or (entry / "__init__.py").exists()


def contract_of(kind: str) -> dict[str, Any]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [contract for contract in contracts if contract["type"] == kind]
    return dict(found)


def test_only_the_demo_may_import_what_the_simulators_test() -> None:
    checked = {name.rpartition(".")[2] for name in contract_of("forbidden")["source_modules"]}
    modules = {entry.stem for entry in (ROOT / "bridge" / "lab").glob("*") if is_module(entry)}
    assert modules - checked == {"demo"}


def test_contributing_lists_the_layers_of_the_linter() -> None:
    layers = contract_of("layers")["layers"]
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Layers")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert [" | ".join(re.findall(r"`(\w+)`", row)) for row in rows] == layers


@pytest.mark.parametrize("file", pure_modules(), ids=lambda file: str(file.relative_to(ROOT / "bridge")))
def test_a_decision_does_no_io(file: Path) -> None:
    nodes = list(ast.walk(parse(file)))
    imported = {
        alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names
    } | {node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    assert not imported & FORBIDDEN


@pytest.mark.parametrize("file", pure_modules(), ids=lambda file: str(file.relative_to(ROOT / "bridge")))
def test_a_decision_reads_no_clock(file: Path) -> None:
    called = {
        node.func.attr
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not called & CLOCKS
