"""What the summary of a test run says about skipped tests, and what CI makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TESTS = """
import pytest

@pytest.mark.parametrize("missing", ["node is not installed"] * 2 + ["it needs Docker", "they need .NET"])
def test_it(missing):
    pytest.skip(missing)
"""


@pytest.mark.parametrize(
    ("ci", "counts"), [("", "4 skipped"), ("true", "2 failed, 2 skipped")], ids=["by hand", "in CI"]
)
def test_each_reason_is_told_once_and_ci_may_lack_docker_and_dotnet_alone(
    tmp_path: Path, ci: str, counts: str
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "-p", "tests.support.skips", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert {"1  it needs Docker", "1  they need .NET"} <= {*lines}
    assert ("2  node is not installed" in lines) is (not ci)
    assert f"= {counts} in " in lines[-1]
