"""The house rules of CONTRIBUTING.md that a tool can check."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

PURE = [
    "imds/document.py",
    "imds/diff.py",
    "events/builder.py",
    "events/filters.py",
    "approvals/command.py",
    "contract/data.py",
    "contract/schema.py",
    "events/envelope.py",
    "approvals/policy.py",
    *(f"formats/{name}.py" for name in ("approvals", "cloudevents", "notice", "pagerduty", "view")),
    *(f"formats/{name}.py" for name in ("scheduled", "slack", "teams", "template", "text")),
]
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
} | {
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib3",
}
CLOCKS = {"now", "today", "utcnow", "fromtimestamp", "time", "monotonic"}


def test_a_module_imports_only_from_the_floors_below_its_own() -> None:
    # In a process of its own, because import-linter silences every logger.
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_does_no_io(name: str) -> None:
    tree = ast.parse((ROOT / "bridge" / name).read_text(encoding="utf-8"))
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        node.module.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert not imported & FORBIDDEN


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_reads_no_clock(name: str) -> None:
    tree = ast.parse((ROOT / "bridge" / name).read_text(encoding="utf-8"))
    called = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not called & CLOCKS


def test_a_forwarder_with_only_a_webhook_loads_no_azure_package() -> None:
    modules = "bridge.cli.main, bridge.service.composition, bridge.sinks.webhook"
    script = f"import sys, {modules}; print('azure' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
