"""The outbox's tests on the oldest SQLite that imds-bridge runs on: Debian 11's and RHEL 9's, 3.34."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.process import COMMAND, completed, environment, toml
from tests.support.programs import tool

TESTS = ("tests/integration/outbox", "tests/integration/cli/test_check_outbox.py")
LIMIT_SECONDS = 300.0


@pytest.fixture(scope="module")
def old_sqlite() -> dict[str, str]:
    """Return an environment in which Python has SQLite 3.34; skip where it cannot be had."""
    tool("apt-get")
    tool("gcc")
    got = completed(ROOT / "tests/support/old_sqlite", limit_seconds=LIMIT_SECONDS)
    if got.returncode:
        pytest.skip(f"Debian 11's SQLite cannot be had: {got.stderr.strip()[-300:]}")
    folder = got.stdout.strip()
    given = environment({"LD_LIBRARY_PATH": folder, "LD_PRELOAD": f"{folder}/newer.so"})
    said = completed(sys.executable, "-c", "import sqlite3; print(sqlite3.sqlite_version)", env=given)
    if said.stdout.strip() != "3.34.1":
        pytest.skip(f"this Python does not take another SQLite: {said.stdout}{said.stderr[-300:]}")
    return {name: value for name, value in given.items() if not name.startswith("PYTEST_")}


def test_the_outboxs_tests_pass(old_sqlite: dict[str, str]) -> None:
    options = ("-q", "-n", "2", "-p", "no:cacheprovider")
    done = completed(
        *(sys.executable, "-m", "pytest", *options, *TESTS),
        env=old_sqlite,
        cwd=ROOT,
        limit_seconds=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "[100%]" in done.stdout


def test_the_console_says_what_it_needs_and_leaves_its_store_alone(
    old_sqlite: dict[str, str], tmp_path: Path
) -> None:
    config, store = tmp_path / "console.toml", tmp_path / "state/console/console.db"
    config.write_text(toml({"state_dir": tmp_path / "state"}))
    store.parent.mkdir(parents=True)
    store.write_bytes(b"the store")
    for action in ([], ["import", str(config)]):
        done = completed(*COMMAND, "console", *action, "--config", config, env=old_sqlite)
        assert done.returncode == 3, done.stderr
        assert "the console needs SQLite 3.37 or newer, and this Python has 3.34.1" in done.stderr
    assert [one.name for one in store.parent.glob("console.db*")] == ["console.db"]
