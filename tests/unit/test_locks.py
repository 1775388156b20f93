"""The lock files: versions, markers and hashes, each with no more than its purpose needs."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from tests.support.paths import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ALL, RUNTIME, BUILD, DEMO, RELEASE, PIP = (
    f"requirements/{name}.lock" for name in ("dev", "runtime", "build", "demo", "release", "pip")
)
FOR_TESTS_ONLY = {"azure-functions", "hypothesis", "mypy", "pytest", "ruff", "testcontainers"}


def entries(lock: str) -> list[str]:
    """Return the lock file's entries, each with its marker and hashes."""
    return re.split(r"\n(?=\S)", (ROOT / lock).read_text(encoding="utf-8").strip())


def pinned(lock: str) -> set[tuple[str, ...]]:
    """Return each entry's name, version and hashes, without its marker."""
    return {tuple(re.findall(r"^[\w.-]+==[\w.]+|--hash=\S+", entry, re.MULTILINE)) for entry in entries(lock)}


def names(lock: str) -> set[str]:
    return {entry.partition("==")[0] for entry in entries(lock)}


def normalized(requirements: list[str]) -> set[str]:
    """Return the names of the packages that requirements ask for, spelled as in a lock file."""
    return {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", line)[0]).lower() for line in requirements}


@pytest.mark.parametrize("lock", [ALL, RUNTIME, BUILD, DEMO, RELEASE, PIP])
def test_every_entry_has_a_version_and_hashes_and_no_address(lock: str) -> None:
    line = r"[a-z0-9.-]+==[\w.]+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+"
    assert [entry for entry in entries(lock) if not re.fullmatch(line, entry)] == []


@pytest.mark.parametrize("lock", [RUNTIME, BUILD, DEMO])
def test_what_is_installed_has_the_versions_and_hashes_that_are_tested(lock: str) -> None:
    assert pinned(lock) <= pinned(ALL)


def test_the_runtime_has_every_dependency_and_no_tool() -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["websocket"]]
    assert normalized(wanted) <= names(RUNTIME)
    assert not {*FOR_TESTS_ONLY, "hatchling", "python-qpid-proton"} & names(RUNTIME)


def test_the_runtime_is_the_same_for_each_python_for_which_a_release_has_wheels() -> None:
    """`pip download` judges markers by the Python that runs it."""
    markers = {entry.partition(" ; ")[2].partition(" \\")[0] for entry in entries(RUNTIME)}
    assert [
        marker for marker in markers if re.search(r"python_(full_)?version|platform_machine", marker)
    ] == []


def test_the_build_has_the_backend_and_nothing_of_the_runtime() -> None:
    assert normalized(PROJECT["build-system"]["requires"]) <= names(BUILD)
    assert not names(BUILD) & names(RUNTIME)


def test_the_demo_has_the_runtime_the_lab_and_the_build_but_nothing_for_tests() -> None:
    project = PROJECT["project"]
    lab = normalized(project["optional-dependencies"]["lab"])
    assert normalized(project["dependencies"]) | lab | names(BUILD) <= names(DEMO)
    assert not FOR_TESTS_ONLY & names(DEMO)


def test_the_tools_for_a_release_have_the_versions_that_the_tests_have() -> None:
    assert normalized(PROJECT["dependency-groups"]["release"]) <= names(RELEASE)
    shared = names(RELEASE) & names(ALL)
    assert {entry for entry in pinned(RELEASE) if entry[0].partition("==")[0] in shared} <= pinned(ALL)
