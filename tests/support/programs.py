"""Programs in other languages, built outside the project and once for all runs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.process import completed

BUILD_SECONDS = 300
BUILD_TRIES = 3  # the network may fail once
RUN_SECONDS = 90

Command = Sequence[str]


def tool(name: str) -> str:
    """Return the path of a program that the machine must have; skip if it is missing."""
    return shutil.which(name) or pytest.skip(f"{name} is not installed")


def build(language: str, name: str, commands: Callable[[Path], Sequence[Command]]) -> Path:
    """Return a folder in which the commands have succeeded; skip if one fails.

    Args:
        language: its folder in the cache.
        name: what the folder holds, changed whenever that changes.
        commands: given the folder, what to run in it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imds-bridge-tests"
    place = cache / language / name
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:  # parallel test workers build it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = place / "ready"
        for command in [] if ready.exists() else commands(place):
            _run(command, place)
        ready.touch()
    return place


def _run(command: Command, place: Path) -> None:
    for _ in range(BUILD_TRIES):
        result = completed(*command, cwd=place, limit_seconds=BUILD_SECONDS)
        if result.returncode == 0:
            return
    pytest.skip(f"{' '.join(command)}: {(result.stderr or result.stdout)[-500:]}")


def run_program(command: Command, *, given: Any = None, **environment: str) -> Any:
    """Run a program; return the JSON that it prints.

    Args:
        command: the program and its arguments.
        given: what it reads from standard input, as JSON.
        environment: variables to add.
    """
    env = {**os.environ, **environment}
    result = completed(*command, env=env, given=json.dumps(given), limit_seconds=RUN_SECONDS)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
