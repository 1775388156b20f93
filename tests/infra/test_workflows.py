"""The workflows of GitHub: checked by actionlint, with pinned actions and few permissions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.process import completed
from tests.support.programs import build, tool

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTIONLINT = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.7"  # the last that Debian 12's Go can build
BUILD_SECONDS = 300
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


@pytest.mark.timeout(BUILD_SECONDS + 60)
def test_actionlint_finds_nothing() -> None:
    go = tool("go")  # which builds it once for all runs
    name = ACTIONLINT.rpartition("/")[2]
    place = build("go", name, lambda place: [["env", f"GOBIN={place}", go, "install", ACTIONLINT]])
    done = completed(place / "actionlint", *FILES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_action_is_pinned_by_commit_with_its_version_beside_it_the_same_everywhere() -> None:
    used = {use for file in FILES for use in re.findall(r"uses: (?!\./)(.*)", file.read_text())}
    assert [use for use in used if not PINNED.fullmatch(use)] == []
    names = [use.partition("@")[0] for use in used]
    assert len(names) == len(set(names)), sorted(used)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_workflow_has_few_rights_no_credentials_no_expression_in_scripts_and_a_time_limit(
    file: Path,
) -> None:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    jobs = content["jobs"].values()
    assert content["permissions"] in ({}, {"contents": "read"})
    assert content["permissions"] or all("permissions" in job for job in jobs)
    assert all("uses" in job or "timeout-minutes" in job for job in jobs)
    for step in (step for job in jobs for step in job.get("steps", [])):
        assert "${{" not in step.get("run", "")
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
