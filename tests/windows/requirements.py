"""Print what of the lock file the tests on Windows need there, with its hashes.

pip evaluates markers for the Python that runs it, and Windows has no wheel of some tools: so what is needed is
followed here, from the metadata of what is installed.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = [
    "imds-bridge[console,websocket]",
    *("azure-data-tables", "azure-functions", "cloudevents", "cryptography", "httpx", "hypothesis"),
    *("jsonschema[format-nongpl]", "pycep-parser", "pytest", "pytest-timeout", "pytest-xdist", "pyyaml"),
]
WINDOWS = {
    "implementation_name": "cpython",
    "os_name": "nt",
    "platform_machine": "AMD64",
    "platform_python_implementation": "CPython",
    "platform_system": "Windows",
    "python_full_version": "3.11.3",
    "python_version": "3.11",
    "sys_platform": "win32",
}


def needed() -> set[str]:
    """Return the names of what the roots need on Windows, directly or not."""
    names: set[str] = set()
    todo, seen = [Requirement(root) for root in ROOTS], set()
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if (name, *sorted(one.extras)) in seen:
            continue
        seen.add((name, *sorted(one.extras)))
        names.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # for Windows alone: needs nothing itself
            continue
        todo += [
            line
            for line in map(Requirement, lines)
            if any(is_for_windows(line, extra) for extra in {"", *one.extras})
        ]
    return names


def is_for_windows(requirement: Requirement, extra: str = "") -> bool:
    """Return whether the markers hold there."""
    return requirement.marker is None or requirement.marker.evaluate({**WINDOWS, "extra": extra})


def main() -> None:
    """Print the blocks of the lock file given."""
    names = needed()
    for block in re.split(r"\n(?=\S)", Path(sys.argv[1]).read_text(encoding="utf-8")):
        requirement = Requirement(block.partition("\\")[0].strip())
        if canonicalize_name(requirement.name) in names and is_for_windows(requirement):
            print(block.strip())


if __name__ == "__main__":
    main()
