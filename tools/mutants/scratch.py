"""Copies of the work tree, in which tests run beside mistakes."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from coverage import CoverageData

from tests.support.paths import ROOT

MEMORY_BYTES = 4 * 2**30
SUITES = ("tests/unit", "tests/integration", "tests/contract")
_DURATION = re.compile(r"([\d.]+)s (?:call|setup|teardown) +(\S.*)")
_FAILED = re.compile(r"(?:FAILED|ERROR) (\S.*?)(?: - .*)?")


class Scratch:
    """A copy of the work tree in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        """Make the copy."""
        self.folder = folder
        ignored = shutil.ignore_patterns(".*", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)

    def run(self, *arguments: str, limit_seconds: float | None = None) -> tuple[int | None, str]:
        """Run pytest on the copy; return its exit code, None if it took too long, and what it printed."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            f"--basetemp={self.folder / 'tmp'}",
        ]
        imports = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
        with subprocess.Popen(
            [*command, *arguments],
            cwd=self.folder,
            env={**os.environ, **imports},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_limit_memory,  # noqa: PLW1509 - no thread of this process holds a lock that it needs
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_seconds)
            except subprocess.TimeoutExpired:
                return None, ""
            finally:
                _kill_group(process.pid)
        return process.returncode, output


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@dataclass(kw_only=True)
class TestMap:
    """Which tests run which lines, and how long each takes."""

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float] = field(default_factory=dict)

    def tests_of(self, path: str, first_line: int, last_line: int) -> list[str]:
        """Return the tests that run a line, the quickest first; of the module if only its import runs the line."""
        lines = self.lines.get(path, {})
        found = {test for line in range(first_line, last_line + 1) for test in lines.get(line, [])}
        if not found:
            package = Path(path).parent.name
            found = {test for tests in lines.values() for test in tests if f"/{package}/" in test}
        return sorted(found, key=lambda test: (self.seconds.get(test, 0.0), test))


def map_tests(scratch: Scratch) -> TestMap:
    """Run the tests once without a mistake, and note which lines each runs."""
    (scratch.folder / ".coveragerc").write_text("[run]\nsource = bridge\nparallel = true\n")
    measure = ("--cov", "--cov-config=.coveragerc", "--cov-context=test", "--cov-report=")
    _, output = scratch.run(*SUITES, *measure, "-n2", "-vv", "--durations=0", "-rfE")
    seconds: dict[str, float] = {}
    for took, test in _matches(_DURATION, output):
        seconds[test] = seconds.get(test, 0.0) + float(took)
    failed = {test for (test,) in _matches(_FAILED, output)}
    _, listed = scratch.run(*SUITES, "--collect-only")
    usable = {*listed.splitlines()} - failed
    data = CoverageData(str(scratch.folder / ".coverage"))
    data.read()
    lines = {
        str(Path(path).relative_to(scratch.folder)): {
            line: [test for test in (one.partition("|")[0] for one in contexts) if test in usable]
            for line, contexts in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }
    return TestMap(lines=lines, seconds=seconds)


def _matches(pattern: re.Pattern[str], text: str) -> list[tuple[str, ...]]:
    return [found.groups() for line in text.splitlines() if (found := pattern.fullmatch(line.rstrip()))]
