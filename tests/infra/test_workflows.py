"""The workflows of GitHub: checked by actionlint, with pinned actions and few permissions."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.programs import build, tool

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTIONLINT = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.7"  # the last that Debian 12's Go can build
BUILD_SECONDS = 300
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")

each_workflow = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def actionlint() -> str:
    """Return the linter, which Go builds once for all runs."""
    go = tool("go")

    def commands(place: Path) -> list[list[str]]:
        return [["env", f"GOBIN={place}", go, "install", ACTIONLINT]]

    place = build("go", ACTIONLINT.rpartition("/")[2], commands)
    return str(place / "actionlint")


def workflow(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content


def steps(file: Path) -> list[dict[str, Any]]:
    return [step for job in workflow(file)["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.timeout(BUILD_SECONDS + 60)
def test_actionlint_finds_nothing() -> None:
    done = subprocess.run([actionlint(), *FILES], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@each_workflow
def test_every_action_is_pinned_by_commit_with_its_version_beside_it(file: Path) -> None:
    used = re.findall(r"uses: (?!\./)(.*)", file.read_text(encoding="utf-8"))
    assert [use for use in used if not PINNED.fullmatch(use)] == []


def test_an_action_has_the_same_version_everywhere() -> None:
    used = {use for file in FILES for use in re.findall(r"uses: (\S+@.*)", file.read_text(encoding="utf-8"))}
    names = [use.partition("@")[0] for use in used]
    assert len(names) == len(set(names)), sorted(used)


@each_workflow
def test_a_workflow_has_few_rights_no_credentials_no_expression_in_scripts_and_a_time_limit(
    file: Path,
) -> None:
    content = workflow(file)
    assert content["permissions"] in ({}, {"contents": "read"})
    assert content["permissions"] or all("permissions" in job for job in content["jobs"].values())
    for step in steps(file):
        assert "${{" not in step.get("run", "")
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
    for name, job in content["jobs"].items():
        assert "uses" in job or "timeout-minutes" in job, name
