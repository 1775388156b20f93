"""What is built once for all systems."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.only import only
from tests.support.paths import ROOT


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that `make dist` makes of this checkout."""
    folder = tmp_path_factory.mktemp("release")
    wheel = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(wheel, cwd=ROOT, check=True)
    command = [str(ROOT / "tools/packaging/release.sh"), str(only(folder.glob("*.whl"))), str(folder)]
    subprocess.run(command, env={**os.environ, "VENV": sys.prefix}, check=True)
    return only(folder.glob("*.tar"))
