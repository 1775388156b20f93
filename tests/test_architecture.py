"""The house rules of CONTRIBUTING.md that a tool can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent
PURE = ["model.py", "diff.py", "events.py", "delivery.py", "formats/cloudevents.py"]
FORBIDDEN = {"asyncio", "azure", "http", "io", "logging", "os", "pathlib", "requests", "socket", "sqlite3"} | {
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib3",
}
CLOCKS = {"now", "today", "utcnow", "fromtimestamp", "time", "monotonic"}


def test_a_module_imports_only_from_the_floors_below_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == 0


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_does_no_io(name: str) -> None:
    tree = ast.parse((ROOT / "bridge" / name).read_text(encoding="utf-8"))
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    } | {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert not imported & FORBIDDEN


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_reads_no_clock(name: str) -> None:
    tree = ast.parse((ROOT / "bridge" / name).read_text(encoding="utf-8"))
    called = {
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not called & CLOCKS


def test_a_forwarder_with_only_a_webhook_loads_no_azure_package() -> None:
    script = "import sys, bridge.cli, bridge.app, bridge.sinks.webhook; print([m for m in sys.modules if m == 'azure'])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
