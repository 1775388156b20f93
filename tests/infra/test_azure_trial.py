"""A smoke test of the trial on Azure, with a double of az."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from bridge.config.loader import load
from tests.support.paths import ROOT
from tests.support.process import completed
from tests.support.programs import tool

FOLDER = ROOT / "infra" / "azure-trial"
SCRIPT = FOLDER / "trial.sh"
DOUBLE = ROOT / "tests" / "support" / "az"
# What each measure on a VM finds, as one answer for all.
FOUND: dict[str, object] = {
    "logs": {"hook": [], "bus": [], "grid": []},
    "cold": [1.4, 1.6, 4.0],
    "warm": [0.1, 0.2],
    "restart": 1.2,
    "kill": 6.1,
    "named": {"forward": 200},
    "unnamed": 400,
    "approve": {"code": 0, "text": "someone@example.org sig=abc"},
}


@pytest.fixture
def az(tmp_path: Path) -> Path:
    """Return the folder of a double of az; the script asks for the other tools before all else."""
    tool("ssh-keygen")
    folder = tmp_path / "az"
    for name in ("bin", "groups/shop"):  # shop was created by no trial
        (folder / name).mkdir(parents=True)
    (folder / "groups/shop/tag").write_text("\n")
    (folder / "bin/az").symlink_to(DOUBLE)
    (folder / "answer").write_bytes(base64.b64encode(gzip.compress(json.dumps(FOUND).encode())))
    return folder


def trial(az: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{az / 'bin'}:{os.environ['PATH']}", "AZ_DOUBLE": str(az), "TMPDIR": str(az)}
    env = {**os.environ, **env, "IMDS_TRIAL_PAUSE": "0"}
    return completed(tool("bash"), SCRIPT, "--report", "out", *options, env=env, cwd=az)


def groups(az: Path) -> set[str]:
    return {path.name for path in (az / "groups").iterdir()}


def test_the_script_and_the_configurations_of_the_vms_are_valid(tmp_path: Path) -> None:
    text = (FOLDER / "cloud-init.yaml").read_text().replace('"@GRID@"', '"https://contoso/api/events"')
    files = yaml.safe_load(re.sub("@[A-Z0-9]+@", "contoso.servicebus.windows.net", text))["write_files"]
    for file in files:
        written = tmp_path / Path(file["path"]).name
        written.write_text(file["content"])
        if written.suffix == ".toml":
            load(written, {})
    done = completed(tool("shellcheck"), *tmp_path.glob("*.sh"))
    assert done.returncode == 0, done.stdout


def test_a_trial_creates_measures_reports_and_removes_its_group_alone(az: Path) -> None:
    done = trial(az, "--group", "imds-trial", "--yes")
    assert (done.returncode, groups(az)) == (0, {"shop"}), done.stderr
    report = json.loads((az / "out/report.json").read_text())
    assert {one["result"] for one in report["steps"]} == {"ok"}
    assert report["figures"]["cold_send_seconds"] == {"median": 1.6, "p99": 4.0, "count": 3}
    assert {one["holds"] for one in report["claims"]} == {True, None}
    page = (az / "out/report.md").read_text()
    assert "11111111..." in page
    assert [word for word in ("11111111-2222", "someone@", "sig=abc") if word in page] == []


def test_a_trial_that_fails_half_way_says_so_and_removes_its_group(az: Path) -> None:
    (az / "fault").write_text("deployment group create vms")
    done = trial(az, "--group", "imds-trial", "--yes")
    assert (done.returncode, groups(az)) == (1, {"shop"}), done.stderr
    assert "(Conflict) refused for 11111111..." in (az / "out/report.md").read_text()


def test_help_and_a_dry_run_explain_and_create_nothing(az: Path) -> None:
    assert "--remove --group imds-trial" in trial(az, "--help").stdout
    planned = trial(az, "--dry-run", "--group", "imds-trial")
    assert planned.returncode == 0, planned.stderr
    assert "three Standard_D2s_v5 with disks,\n    in the zones 1 3 " in planned.stdout
    assert groups(az) == {"shop"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--group shop --yes", "the group shop exists"),
        ("--group shop --remove --yes", "shop was not created by a trial"),
        ("--group imds-trial", "there is no terminal to ask on"),
        ("--yes", "--group is missing"),
        ("--unknown", "unknown option"),
    ],
)
def test_what_is_dangerous_is_refused_and_nothing_changes(az: Path, options: str, text: str) -> None:
    done = trial(az, *options.split())
    assert (done.returncode, groups(az)) == (2, {"shop"})
    assert text in done.stderr


def test_the_script_gives_what_the_templates_need() -> None:
    files = {"base": "base.bicep", "grid": "grid.bicep", "vms": "../bicep/modules/scaleset.bicep"}
    text = SCRIPT.read_text().replace("\\\n", "")
    for name, given in re.findall(r"deploy (\w+) (\".*?)\n    \w", text, re.DOTALL):
        known = re.findall(r"(?m)^param (\w+) \S+(.*)", (FOLDER / files.pop(name)).read_text())
        needed = {one for one, default in known if not default}
        assert needed <= set(re.findall(r"\s(\w+)=", given)) <= {one for one, _ in known}, name
    assert files == {}
