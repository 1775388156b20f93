"""Try the templates with Microsoft's Bicep, on a machine that has it: `python -m tests.support.snapshots`.

It compiles and lints every template, evaluates deployments with the parameter files of tests/data/bicep, and compares
their resources with the list that the tests' own reader makes (`python -m tests.support.bicep` writes it).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/bicep"
LIST = DATA / "resources.txt"
PARAMETERS = sorted(DATA.glob("*.bicepparam"))
SCOPE = ("--subscription-id", "00000000-0000-0000-0000-000000000000", "--resource-group", "shop")
REFUSED = "\nparam consoleName = 'console'\n", "consoleName needs consoleImage and consoleClientId"
# The name of a role assignment is a hash, or an expression of what is only known at run time.
_HASHED = re.compile(r"\[|guid\(|[0-9a-f]{8}-[0-9a-f]{4}-")


def lines(name: str, resources: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines of the list for a parameter file.

    Args:
        name: of the parameter file, without its suffix.
        resources: the type and the name of each.
    """
    return sorted({f"{name} {type_} {'*' if _HASHED.match(one) else one}" for type_, one in resources})


def compare(name: str, snapshot: Mapping[str, Any]) -> list[str]:
    """Say how a snapshot differs from the list; what Bicep did not evaluate, and says so, may be missing."""
    listed = [line for line in LIST.read_text().splitlines() if line.startswith(f"{name} ")]
    found = lines(name, ((one["type"], one["name"]) for one in snapshot["predictedResources"]))
    unlisted = [f"not in the list: {line}" for line in found if line not in listed]
    missing = [f"only in the list: {line}" for line in listed if line not in found]
    return unlisted + ([] if snapshot["diagnostics"] else missing)


def _bicep(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["bicep", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def _faults() -> Iterator[str]:
    for file in sorted((ROOT / "infra").rglob("*.bicep")):
        built, linted = _bicep("build", file, "--stdout"), _bicep("lint", file)
        if text := built.stderr + linted.stdout + linted.stderr:
            yield f"{file.relative_to(ROOT)}: {text}"
        if built.returncode or linted.returncode:
            yield f"{file.relative_to(ROOT)}: exit codes {built.returncode}, {linted.returncode}"
    for file in PARAMETERS:
        done = _bicep("snapshot", file, "--mode", "overwrite", *SCOPE)
        if done.returncode:
            yield f"{file.name}: {done.stdout}{done.stderr}"
            continue
        written = file.with_suffix(".snapshot.json")
        snapshot = json.loads(written.read_text(encoding="utf-8-sig"))
        written.unlink()
        print(file.name, *snapshot["diagnostics"], sep="\n  ")
        yield from compare(file.stem, snapshot)
    refused = DATA / "refused.bicepparam"
    refused.write_text((DATA / "minimal.bicepparam").read_text() + REFUSED[0])
    done = _bicep("snapshot", refused, "--mode", "overwrite", *SCOPE)
    refused.unlink()
    if not done.returncode or REFUSED[1] not in done.stdout + done.stderr:
        yield f"a console without its image is not refused: {done.stdout}{done.stderr}"


if __name__ == "__main__":
    faults = [*_faults()]
    print(*faults, sep="\n")
    sys.exit(bool(faults))
