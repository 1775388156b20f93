"""Name what is missing to build the simulated Service Bus: `python3 -m bridge.lab.prerequisites`.

It runs before anything is installed, so it imports only the standard library.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

WITHOUT = """\
Without the Service Bus, which needs only python3-venv:
  python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/imds-bridge demo --no-bus"""


def missing() -> list[str]:
    """Return the Debian packages that are missing to build python-qpid-proton, which has no wheel."""
    found = {
        "gcc": any(map(shutil.which, ("gcc", "cc", "clang"))),
        "python3-dev": Path(sysconfig.get_path("include"), "Python.h").exists(),
        "python3-venv": find_spec("ensurepip") is not None,
    }
    return [package for package, is_there in found.items() if not is_there]


def explain(packages: list[str]) -> str:
    """Return what to install."""
    names = " ".join(packages)
    return f"the simulated Service Bus is compiled and needs: {names} (Debian: apt-get install {names})"


if __name__ == "__main__":
    sys.exit(f"{explain(missing())}\n{WITHOUT}" if missing() else 0)
