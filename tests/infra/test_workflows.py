"""The workflows of GitHub: checked by actionlint, with pinned actions and few permissions."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTIONLINT = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.7"  # the last that Debian 12's Go can build
BUILD_SECONDS = 300
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")

each_workflow = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def actionlint() -> str:
    """Return the linter, which Go builds once for all runs; skip without Go, but never in CI."""
    go = shutil.which("go")
    if go is None:
        assert "CI" not in os.environ, "Go is needed"
        pytest.skip("Go is not installed, which builds actionlint")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imds-bridge-tests"
    folder = cache / "go" / ACTIONLINT.rpartition("/")[2]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "actionlint").exists():
            command, environ = [go, "install", ACTIONLINT], {**os.environ, "GOBIN": str(folder)}
            subprocess.run(command, env=environ, check=True, timeout=BUILD_SECONDS)
    return str(folder / "actionlint")


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
def test_a_workflow_can_only_read_and_a_job_names_what_else_it_needs(file: Path) -> None:
    content = workflow(file)
    assert content["permissions"] in ({}, {"contents": "read"})
    assert content["permissions"] or all("permissions" in job for job in content["jobs"].values())


@each_workflow
def test_no_checkout_leaves_its_credentials_to_later_steps(file: Path) -> None:
    checkouts = [step for step in steps(file) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@each_workflow
def test_no_script_contains_an_expression(file: Path) -> None:
    assert [step["run"] for step in steps(file) if "${{" in step.get("run", "")] == []


@each_workflow
def test_every_job_has_a_time_limit(file: Path) -> None:
    jobs = workflow(file)["jobs"]
    assert [name for name, job in jobs.items() if "uses" not in job and "timeout-minutes" not in job] == []
