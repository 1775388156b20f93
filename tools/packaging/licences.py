"""Check the licences in an SBOM: `python -m tools.packaging.licences FILE`; exit with 1 if one is not listed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What may be installed with an MIT-licensed program. cyclonedx-py names older metadata by its classifier.
LICENCES = {
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "License :: OSI Approved :: Apache Software License",
    "License :: OSI Approved :: BSD License",
    "License :: OSI Approved :: MIT License",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)",
    "MIT",
    "MIT-0",
    "MPL-2.0",
    "PSF-2.0",
}


def licences_of(package: Mapping[str, Any]) -> set[str]:
    """Return the licences that a package declares, each part of an expression alone."""
    found = set()
    for entry in package.get("licenses", ()):
        details = entry.get("license", {})
        name = str(entry.get("expression") or details.get("id") or details.get("name"))
        found |= {*re.split(r" (?:AND|OR) ", name)}
    return found


def is_allowed(package: Mapping[str, Any]) -> bool:
    """Return whether a package declares licences, all of them on the list."""
    return bool(licences_of(package)) and licences_of(package) <= LICENCES


def main(sbom: Path) -> int:
    """Print the licences of every package; return the exit code."""
    packages = json.loads(sbom.read_text(encoding="utf-8"))["components"]
    for package in packages:
        mark = "" if is_allowed(package) else ": NOT ON THE LIST"
        print(f"{package['name']} {package['version']}: {', '.join(sorted(licences_of(package)))}{mark}")
    return 0 if packages and all(map(is_allowed, packages)) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
