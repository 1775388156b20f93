"""A script for tests with Grafana's own Python package: print each part of a dashboard that its model does not have.

Run with that package on PYTHONPATH; it is not among the project's dependencies.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any


def find_lost(given: Any, kept: Any, where: str = "dashboard") -> Iterator[str]:
    """Yield where a value is missing or different in what the model has kept."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from find_lost(value, kept.get(key), f"{where}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from find_lost(one, other, f"{where}[{index}]")
    elif given != kept:
        yield where


if __name__ == "__main__":
    model = resolve_name("grafana_foundation_sdk.models.dashboard:Dashboard")
    encoder = resolve_name("grafana_foundation_sdk.cog.encoder:JSONEncoder")
    given = json.load(sys.stdin)
    kept = json.loads(json.dumps(model.from_json(given), cls=encoder))
    print(json.dumps(list(find_lost(given, kept))))
