"""The rules of CONTRIBUTING.md that a tool can check, beside the layers, which `make lint` checks."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

DECISIONS = ("contract", "imds", "events", "formats", "approvals", "delivery")
DOES_IO = re.compile(r"^I/O: ", re.MULTILINE)  # in a module's docstring, followed by what it reads or writes
FORBIDDEN = {
    *("asyncio", "azure", "http", "io", "logging", "os", "pathlib", "requests", "socket", "sqlite3"),
    *("subprocess", "tempfile", "threading", "time", "urllib3"),
}
CLOCKS = {"now", "today", "utcnow", "monotonic"}  # `time` cannot be imported


def pure_modules() -> list[Path]:
    files = [file for package in DECISIONS for file in sorted((ROOT / "bridge" / package).rglob("*.py"))]
    return [file for file in files if not DOES_IO.search(ast.get_docstring(parse(file)) or "")]


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def is_module(entry: Path) -> bool:
    return (entry.suffix == ".py" and entry.stem != "__init__") or (entry / "__init__.py").exists()


def contract_of(kind: str) -> dict[str, Any]:
    """Return the first import-linter contract of a kind: of the whole package."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(dict(contract) for contract in contracts if contract["type"] == kind)


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
def test_a_decision_does_no_io_and_reads_no_clock(file: Path) -> None:
    imported, called = set(), set()
    for node in ast.walk(parse(file)):
        match node:
            case ast.Import(names=names):
                imported |= {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module="http", names=[ast.alias(name="HTTPStatus")]):
                pass  # only numbers
            case ast.ImportFrom(module=str(module)):
                imported.add(module.split(".")[0])
            case ast.Call(func=ast.Attribute(attr=name)):
                called.add(name)
    assert not imported & FORBIDDEN
    assert not called & CLOCKS
