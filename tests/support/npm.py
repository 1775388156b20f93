"""Shared by tests with npm clients: the package, installed outside the project, and scripts that use it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest

INSTALL_SECONDS = 300
INSTALL_TRIES = 3
RUN_SECONDS = 90


def node_modules(package: str) -> Path:
    """Return the folder of the npm package, which is installed once for all runs; skip if that fails."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        _missing(f"node and npm are not installed, which {package} needs")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imds-bridge-tests"
    place = cache / "npm" / package.replace("/", "-")  # one folder each: npm removes other packages
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:  # parallel test workers install it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "node_modules" / package / "package.json").exists():
            _install(npm, package, place)
    return place / "node_modules"


def run_script(script: Path, *arguments: str, modules: Path, given: Any = None) -> Any:
    """Run a script; return the JSON that it prints.

    Args:
        script: the file.
        arguments: for its command line.
        modules: see node_modules.
        given: what it reads from standard input, as JSON.
    """
    result = subprocess.run(
        ["node", str(script), *arguments],  # noqa: S607 - looked for on the path above
        env={**os.environ, "NODE_PATH": str(modules)},
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def _install(npm: str, package: str, place: Path) -> None:
    command = [npm, "install", "--no-save", "--no-audit", "--no-fund", "--prefix", str(place), package]
    for _ in range(INSTALL_TRIES):  # the network may fail once
        result = subprocess.run(
            command, cwd=place, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
        if result.returncode == 0:
            return
    _missing(f"npm could not install {package}: {result.stderr[-500:]}")


def _missing(reason: str) -> NoReturn:
    """Skip if the machine lacks something; in CI, fail."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
