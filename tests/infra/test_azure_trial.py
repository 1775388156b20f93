"""The trial on Azure, with a double of az: what it creates it removes, and its report has what was measured."""

from __future__ import annotations

import argparse
import base64
import gzip
import importlib.util
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
import urllib.request
from datetime import UTC, datetime
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from bridge.config.loader import load
from bridge.formats.samples import samples
from tests.support.bicep import deploy, parser, read_parameters, tree
from tests.support.pages import PAGES
from tests.support.paths import ROOT
from tests.support.programs import tool
from tests.support.snapshots import DATA

FOLDER = ROOT / "infra" / "azure-trial"
SCRIPT = FOLDER / "trial.sh"
EVENT = "4CAEA225-A741-474D-A72E-428C86FCD853"
SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"
# Each call that changes something, in the order of a trial.
CREATES = [
    "group create",
    "deployment group create base",
    "storage blob upload",
    "deployment group create grid",
    "deployment group create vms",
]
INTERRUPTS = [(call, what) for call in CREATES for what in ("hang-before", "hang-after")] + [
    (call, "hang-before")
    for call in (
        "vm list-skus",
        "vmss run-command invoke ready",
        "rest",
        "vmss run-command invoke drill",
        "monitor metrics list",
    )
]


def imported(name: str) -> ModuleType:
    """Import a program of the folder, whose name is no package's."""
    spec = importlib.util.spec_from_file_location(f"azure_trial_{name}", FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


report, probe = imported("report"), imported("probe")


def line(step: str, vm: str, at: float, **more: Any) -> dict[str, Any]:
    """Return a line of a log: a step of the event, or something that the VM says about itself."""
    when = datetime.fromtimestamp(1_790_000_000 + at, UTC).isoformat()
    about = {"EventId": EVENT} if "scheduledevent" in step or "approval" in step else {}
    return {
        "type": f"{step}.v1",
        "id": f"{step}-{vm if 'heartbeat' in step else ''}",
        "at": 1_790_000_000.5 + at,
        "time": when,
        **about,
        **more,
    }


def logs() -> dict[str, Any]:
    """Return what arrived where when trial_2 was redeployed: it was away when the event ended."""
    what = {"EventType": "Redeploy", "EventSource": "User", "Resources": ["trial_2"], "NoticeSeconds": 599.2}
    seen = [
        line("document.changed", "", 0),
        line("scheduledevent.scheduled", "", 0, **what),
        line("scheduledevent.started", "", 60),
    ]
    end = line("scheduledevent.completed", "", 300)
    hooks = {vm: [line("bridge.heartbeat", vm, -9), *seen] for vm in ("0", "2", "10")}
    hooks["0"].append(end)
    hooks["10"].append(end)
    hooks["2"].append(line("scheduledevent.ended", "", 301))
    receipt = line("approval.accepted", "", 20, Outcome="Accepted")
    kept = {one["id"]: one for log in hooks.values() for one in log} | {receipt["id"]: receipt}
    grid = [one for log in hooks.values() for one in log]
    observed = {"bus": [*kept.values()], "grid": grid}
    none: dict[str, Any] = {"bus": [], "grid": []}
    return {vm: {"hook": log, **(observed if vm == "0" else none)} for vm, log in hooks.items()}


def packed(found: object) -> str:
    return base64.b64encode(gzip.compress(json.dumps(found).encode())).decode()


@pytest.fixture
def az(tmp_path: Path) -> Path:
    """Put the double on a PATH, with answers; return its folder."""
    tool("ssh-keygen")  # the script makes a key with it
    folder = tmp_path / "az"
    for name in ("answers", "groups", "bin"):
        (folder / name).mkdir(parents=True)
    (folder / "bin" / "az").symlink_to(ROOT / "tests" / "support" / "az")
    # An archive of the whole checkout takes longer than all else.
    (folder / "bin" / "git").write_text(
        f'#!/bin/sh\ncase "$*" in *archive*--output*) exec touch "$9" ;; esac\nexec {tool("git")} "$@"\n'
    )
    (folder / "bin" / "git").chmod(0o755)
    (folder / "skus").write_text("Standard_D2s_v5\t1 2 3\t2\n")
    point = {"timeStamp": "2026-11-24T00:00:00Z", "total": 120.0}
    values = [
        {"name": {"value": name}, "timeseries": [{"data": [{**point, "total": total}]}]}
        for name, total in (
            ("ThrottledRequests", 0.0),
            ("IncomingMessages", 120.0),
            ("OutgoingMessages", 240.0),
        )
    ]
    (folder / "metrics.json").write_text(json.dumps({"value": values}))
    found = logs()
    answers: dict[str, Any] = {
        f"ready-{vm}": {"name": f"trial_{vm}", "zone": "1", "version": "imds-bridge 0.1.0"} for vm in found
    }
    answers |= {f"collect-{vm}": {"imds": 200, "logs": log} for vm, log in found.items()}
    answers["identity-0"] = {"named": {"forward": 200, "listen": 200, "observer": 200}, "unnamed": 400}
    answers["sends-0"] = {"cold": [1.4, 1.6, 4.0], "warm": [n / 10_000 for n in range(900, 1100)]}
    answers["restart-10"] = {"restart": 1.2, "kill": 6.1}
    answers["drill-0"] = {
        "notice": found["0"]["hook"][2],
        "approve": {"code": 0, "seconds": 3.1, "text": "someone@example.org sig=abc"},
    }
    for name, answer in answers.items():
        (folder / "answers" / name).write_text(packed(answer))
    return folder


def environment(az: Path) -> dict[str, str]:
    path = f"{az / 'bin'}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "AZ_DOUBLE": str(az),
        "IMDS_TRIAL_PAUSE": "0",
        "TMPDIR": str(az.parent),
    }


def command(*options: str, group: str = "imds-trial") -> list[str]:
    # Whoever runs the tests may ignore signals (nohup), and no shell can trap what it was started to ignore.
    return [tool("env"), "--default-signal", tool("bash"), str(SCRIPT), "--group", group, *options]


def trial(az: Path, *options: str, group: str = "imds-trial") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*options, group=group),
        env=environment(az),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=az.parent,
        stdin=subprocess.DEVNULL,
    )


def calls(az: Path) -> list[str]:
    """Return the name of each call."""
    path = az / "calls"
    return [one.partition(" | ")[0] for one in path.read_text().splitlines()] if path.exists() else []


def before_az(az: Path, commands: str) -> None:
    """Run shell commands in each call of `az`, before the double."""
    script = az / "bin" / "az"
    script.unlink()
    script.write_text(f'#!/usr/bin/env bash\n{commands}\nexec "{ROOT / "tests/support/az"}" "$@"\n')
    script.chmod(0o755)


def groups(az: Path) -> list[str]:
    return sorted(path.name for path in (az / "groups").iterdir())


def found_in(az: Path) -> Any:
    return json.loads((az.parent / "out" / "report.json").read_text())


def test_the_scripts_are_clean() -> None:
    texts = [one["content"] for one in cloud_init() if one["content"].startswith("#!")]
    assert len(texts) == 1
    for words, text in (([SCRIPT, ROOT / "tests/support/az"], ""), (["-"], texts[0])):
        done = subprocess.run(
            [tool("shellcheck"), *words], input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_a_trial_creates_measures_reports_and_removes(az: Path) -> None:
    (az / "bin" / "git").unlink()
    done = trial(az, "--yes", "--report", "out")
    assert done.returncode == 0, done.stderr
    assert groups(az) == []
    assert [name for name in calls(az) if name in CREATES] == CREATES
    assert calls(az).count("group delete") == 1
    with tarfile.open(az / "archive.tar.gz") as archive:
        assert {f"imds-bridge/infra/{name}" for name in ("azure-trial/probe.py", "systemd/install.sh")} <= {
            *archive.getnames()
        }
    given = (az / "calls").read_text()
    assert 'zones=["1","3"]' in given  # the subscription may not use zone 2
    assert re.search(r"virtualMachines/2/redeploy", given)  # another one than the observer
    assert given.count(f"--subscription {SUBSCRIPTION}") > 20
    found = found_in(az)
    assert [one for one in found["claims"] if one["holds"] is not True] == []
    figures = found["figures"]
    assert figures["cold_send_seconds"] == {"median": 1.6, "p99": 4.0, "count": 3}
    assert figures["copies_on_the_bus"] == {"sent": 15, "kept": 8, "most_of_one_id": 1}
    assert figures["vms_that_saw_the_event"] == {"vms": 3, "saw": 3}
    assert figures["documents"] == {"of_each_vm": [1, 1, 1], "seen_by_all": 1}
    assert figures["notice"]["Resources"] == ["trial_2"]
    assert figures["seconds_from_notice_to_end"] == 300
    assert figures["seconds_from_change_to_arrival"]["event_grid"]["completed"] == 0.5
    assert figures["credits_a_second_in_the_busiest_minute_at_least"] == 6
    assert {one["result"] for one in found["steps"]} == {"ok"}
    assert sorted(path.name for path in az.parent.iterdir()) == ["az", "out"]  # no key, no raw answers


def test_the_report_has_no_secrets_and_only_the_beginning_of_ids(az: Path) -> None:
    trial(az, "--yes", "--report", "out")
    for name in ("report.md", "report.json"):
        text = (az.parent / "out" / name).read_text()
        assert "11111111..." in text
        for secret in (SUBSCRIPTION, EVENT, "someone@", "sig=abc"):
            assert secret not in text, name
    assert report.clean('token eyJ0eXAi.eyJhdWQi.x "access_token": "y" SharedAccessKey=z=') == (
        'token (secret) "(secret)" (secret)'
    )


@pytest.mark.parametrize("call", CREATES)
def test_a_create_that_fails_is_reported_and_everything_is_removed(az: Path, call: str) -> None:
    (az / "fault").write_text(f"{call}|1|refuse\n")
    done = trial(az, "--yes", "--report", "out")
    assert (done.returncode, groups(az)) == (1, []), done.stderr
    failed = [one for one in found_in(az)["steps"] if one["result"] == "failed"]
    assert len(failed) == 1
    assert "(Conflict) refused for 11111111..." in failed[0]["message"]
    # Only the trial's own evidence about Event Grid depends on that subscription.
    assert ("rest" in calls(az)) == (call == "deployment group create grid")


@pytest.mark.parametrize("call", ["vmss run-command invoke sends", "rest", "monitor metrics list"])
def test_a_measurement_that_fails_does_not_stop_the_others(az: Path, call: str) -> None:
    (az / "fault").write_text(f"{call}|1|refuse\n")
    done = trial(az, "--yes", "--report", "out")
    assert (done.returncode, groups(az)) == (1, []), done.stderr
    found = found_in(az)
    assert "failed" in {one["result"] for one in found["steps"]}
    if call == "rest":
        assert "vmss run-command invoke drill" not in calls(az)
    else:
        assert None in {one["holds"] for one in found["claims"]}
    assert "vmss run-command invoke collect" in calls(az)


@pytest.mark.parametrize("call", ["storage blob upload", "deployment group create grid", "group delete"])
def test_what_fails_once_is_tried_again(az: Path, call: str) -> None:
    (az / "fault").write_text(f"{call}|1|fail\n")
    done = trial(az, "--yes", "--report", "out")
    assert (done.returncode, groups(az)) == (0, []), done.stderr


@pytest.mark.parametrize(("call", "what"), INTERRUPTS)
def test_an_interrupt_at_each_step_removes_everything(az: Path, call: str, what: str) -> None:
    (az / "fault").write_text(f"{call}|1|{what}\n")
    number = signal.SIGINT if what == "hang-before" else signal.SIGTERM
    code = interrupted(az, number)
    assert (code, groups(az)) == (128 + number, [])
    created = "group create" in calls(az)
    assert (az.parent / "out" / "report.json").exists() == created
    if created:
        steps = {one["step"]: one["result"] for one in found_in(az)["steps"]}
        assert (steps["interrupted"], steps["remove"]) == ("failed", "ok")


def test_a_terminal_or_pipe_that_is_gone_does_not_stop_the_removal(az: Path) -> None:
    (az / "fault").write_text("rest|1|hang-before\n")
    assert (interrupted(az, signal.SIGHUP, reads=False), groups(az)) == (129, [])


def interrupted(az: Path, number: signal.Signals, *, reads: bool = True) -> int:
    """Run a trial until a call hangs, send a signal to the script alone, and return its exit code."""
    process = subprocess.Popen(
        command("--yes", "--report", "out"),
        env=environment(az),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if reads else subprocess.PIPE,
        cwd=az.parent,
    )
    try:
        until(lambda: (az / "hangs").exists() or process.poll() is not None)
        assert process.poll() is None
        if process.stderr:
            process.stderr.close()
        process.send_signal(number)
        return process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()


def until(find: Any) -> None:
    end = time.monotonic() + 60
    while not find():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_in_a_terminal_it_asks_and_ctrl_c_removes_everything(az: Path) -> None:
    (az / "fault").write_text("rest|1|hang-before\n")
    ours, its = pty.openpty()
    try:
        process = subprocess.Popen(
            [
                tool("setsid"),
                "--ctty",
                "--wait",
                tool("env"),
                "--default-signal",
                tool("bash"),
                SCRIPT,
                "--report",
                "out",
            ],
            env=environment(az),
            stdin=its,
            stdout=its,
            stderr=its,
            cwd=az.parent,
        )
        try:
            for question, reply in (("resource group [", b"mine\n"), ("Create it? [y/N]", b"y\n")):
                shown = ""
                while question not in shown:
                    shown += os.read(ours, 4096).decode()
                os.write(ours, reply)
            until((az / "hangs").exists)
            assert groups(az) == ["mine"]
            os.write(ours, b"\x03")
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(ours)
        os.close(its)
    assert groups(az) == []


def test_a_second_interrupt_does_not_stop_the_removal(az: Path) -> None:
    (az / "fault").write_text("rest|1|hang-before\n")
    # The deletion takes as long as the test wants.
    before_az(
        az,
        'if [ "$1 $2" = "group delete" ]; then touch "$AZ_DOUBLE/deleting"; '
        'until [ -e "$AZ_DOUBLE/go" ]; do sleep 0.02; done; fi',
    )
    process = subprocess.Popen(
        command("--yes", "--report", "out"),
        env=environment(az),
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        cwd=az.parent,
    )
    try:
        until((az / "hangs").exists)
        process.send_signal(signal.SIGINT)
        until((az / "deleting").exists)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        (az / "go").touch()
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
    assert groups(az) == []


def test_a_group_that_cannot_be_removed_is_named_with_the_command(az: Path) -> None:
    (az / "fault").write_text("group delete|1|refuse\n")
    done = trial(az, "--yes", "--report", "out")
    assert done.returncode == 1
    assert "IS STILL THERE AND COSTS MONEY" in done.stderr
    assert "trial.sh --remove --group imds-trial" in done.stderr
    assert found_in(az)["steps"][-1] == {
        "step": "remove",
        "result": "failed",
        "seconds": "0",
        "message": "it may still be there",
    }


def test_remove_removes_what_a_trial_left_and_nothing_else(az: Path) -> None:
    assert trial(az, "--yes", "--keep", "--report", "out").returncode == 0
    assert groups(az) == ["imds-trial"]
    (az / "groups" / "shop").mkdir()
    (az / "groups" / "shop" / "tag").write_text("\n")
    for _ in range(2):
        assert trial(az, "--remove", "--yes").returncode == 0
    refused = trial(az, "--remove", "--yes", group="shop")
    assert refused.returncode == 2
    assert "shop was not created by a trial" in refused.stderr
    assert groups(az) == ["shop"]


def test_a_group_that_exists_is_left_alone(az: Path) -> None:
    (az / "groups" / "imds-trial").mkdir()
    done = trial(az, "--yes", "--report", "out")
    assert (done.returncode, groups(az)) == (2, ["imds-trial"])
    assert "give a new name" in done.stderr
    assert not {"group delete", *CREATES} & {*calls(az)}


def test_another_trial_that_created_the_group_meanwhile_keeps_it(az: Path) -> None:
    (az / "fault").write_text("group create|1|refuse\n")
    before_az(
        az,
        'if [ "$1 $2" = "group create" ]; then mkdir "$AZ_DOUBLE/groups/imds-trial"; '
        'echo another >"$AZ_DOUBLE/groups/imds-trial/tag"; fi',
    )
    done = trial(az, "--yes", "--report", "out")
    assert (done.returncode, groups(az)) == (1, ["imds-trial"])
    assert "belongs to another trial" in done.stderr


def test_a_dry_run_shows_the_plan_and_creates_nothing(az: Path) -> None:
    done = trial(az, "--dry-run")
    assert done.returncode == 0, done.stderr
    for text in ("imds-trial in westeurope", "three Standard_D2s_v5", "about one dollar", "in the zones 1 3"):
        assert text in done.stdout
    assert {*calls(az)} == {*("account show", "group exists", "provider list", "vm list-skus", "bicep build")}


def test_a_region_without_two_zones_gets_fault_domains(az: Path) -> None:
    (az / "skus").write_text("Standard_D2s_v5\t1\t\n")
    assert "fault domains" in trial(az, "--dry-run").stdout
    assert trial(az, "--yes", "--report", "out").returncode == 0
    assert "zones=[] " in (az / "calls").read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--yes", "--size", "Standard_X"], "the size Standard_X is not available"),
        (["--unknown"], "unknown option"),
        (["--location"], "needs a value"),
        ([], "there is no terminal"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_created(
    az: Path, options: list[str], text: str
) -> None:
    if "Standard_X" in options:
        (az / "skus").write_text("")
    done = trial(az, *options)
    assert done.returncode == 2
    assert text in done.stderr
    assert not {"group delete", *CREATES} & {*calls(az)}


def test_help_has_examples() -> None:
    done = subprocess.run([tool("bash"), SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert "examples:" in done.stdout
    assert "--remove --group imds-trial" in done.stdout


# --- what runs on the VMs, and the report ---


@pytest.fixture
def _vm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the probe write to a folder."""
    monkeypatch.setattr(probe, "FOLDER", tmp_path / "var")
    monkeypatch.setattr(probe, "SETTINGS", tmp_path / "settings")
    (tmp_path / "settings").write_text('{"namespace": "x.servicebus.windows.net", "forward": "f"}')


@pytest.mark.usefixtures("_vm")
def test_the_receiver_keeps_what_the_report_reads() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), probe.Receiver)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        for event in samples(datetime(2026, 11, 20, tzinfo=UTC)):
            url = f"http://127.0.0.1:{server.server_port}/"
            with urllib.request.urlopen(url, data=event.body, timeout=30) as answer:
                assert answer.status == 204
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    kept = {one["type"]: one for one in probe.log("hook")}
    notice = kept["scheduledevent.scheduled.v1"]
    assert {
        "EventId",
        "EventType",
        "EventSource",
        "Resources",
        "NoticeSeconds",
        "time",
        "at",
    } <= notice.keys()
    assert isinstance(notice["Resources"], list)
    assert kept["approval.accepted.v1"]["Outcome"] == "Accepted"
    assert {"EventId", "time"} <= kept["approval.accepted.v1"].keys()


@pytest.mark.usefixtures("_vm")
def test_a_result_is_printed_in_parts_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"random": os.urandom(4000).hex()}
    probe.pack("collect", found)
    text, number = "", 1
    while True:
        shown = capsys.readouterr().out
        assert len(shown) < 3500
        match = re.fullmatch(r"imds-trial (\d+)/(\d+) (\S+)\n", shown)
        assert match
        text += match[3]
        if match[1] == match[2]:
            break
        number += 1
        probe.part("collect", number)
    assert json.loads(gzip.decompress(base64.b64decode(text))) == found


def test_an_installation_that_fails_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("E: Unable to locate package python3-venv\n")
    monkeypatch.setattr(probe, "INSTALL_LOG", tmp_path / "log")
    monkeypatch.setattr(probe, "is_active", lambda _: False)
    with pytest.raises(SystemExit, match="Unable to locate"):
        probe.ready(argparse.Namespace(seconds=-1))


@pytest.mark.usefixtures("_vm")
def test_the_drill_approves_the_notice_of_its_vm_and_waits_for_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe.FOLDER.mkdir()
    lines = [one for one in logs()["0"]["hook"] if "scheduledevent" in one["type"]]
    for one in lines:
        one["Resources"] = ["trial_2"]
    asked: list[tuple[str, ...]] = []

    def write(upto: int) -> None:
        (probe.FOLDER / "hook.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines[:upto]))

    def shell(*words: str) -> SimpleNamespace:
        asked.append(words)
        write(3)
        return SimpleNamespace(returncode=0, stdout="accepted\n", stderr="")

    write(1)
    monkeypatch.setattr(probe, "shell", shell)
    found = probe.drill(argparse.Namespace(vm="trial_2", group="imds-trial"))
    assert found["end"]["type"] == "scheduledevent.completed.v1"
    assert found["approve"]["text"] == "accepted"
    [words] = asked
    assert words[1:3] == ("approve", EVENT)
    assert words[3:7] == ("--vm", "trial_2", "--resource-group", "imds-trial")


@pytest.mark.usefixtures("_vm")
def test_cold_sends_open_a_connection_each_and_warm_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class Sink:
        def __init__(self, settings: Any) -> None:
            assert (settings.namespace, settings.topic) == ("x.servicebus.windows.net", "scheduled-events")
            assert settings.client_id == "f"
            opened.append(self)

        def send(self, events: list[Any]) -> None:
            assert events[0].type == "io.imdsbridge.bridge.test.v1"

        def close(self) -> None:
            pass

    monkeypatch.setattr("bridge.sinks.servicebus.ServiceBusSink", Sink)
    found = probe.sends(argparse.Namespace(cold=3, warm=5))
    assert (len(found["cold"]), len(found["warm"]), len(opened)) == (3, 5, 4)


def test_every_claim_is_a_sentence_of_the_docs() -> None:
    for claim in report.CLAIMS:
        text = " ".join((ROOT / claim.doc).read_text(encoding="utf-8").split())
        assert claim.quote in text, claim.doc


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("cold_send_seconds", {"median": 1.5, "p99": 9}),
        ("ids_of_one_change", {"scheduled": 2}),
        ("vms_that_saw_the_event", {"vms": 3, "saw": 2}),
        ("copies_on_the_bus", {"sent": 9, "kept": 9, "most_of_one_id": 3}),
        ("receipts", []),
        ("reported_losses", 1),
        ("token_requests", {"named": {"forward": 400}, "unnamed": 400}),
        ("throttled_requests", 3),
    ],
)
def test_a_figure_that_contradicts_the_docs_is_shown(figure: str, value: Any) -> None:
    [row] = [one for one in report.compare({figure: value}) if one["value"] is not None]
    assert row["holds"] is False
    page = report.markdown({"facts": {}, "claims": [row], "figures": {}, "steps": []})
    assert "**does not hold**" in page


def test_every_sentence_about_what_was_not_tried_on_azure_leads_to_the_trial() -> None:
    pattern = re.compile(
        r"(?i)\b(?:not|none|nothing|never|nobody)\b[^.|:]{0,60}\b(?:on|in|to|with) Azure\b(?! Monitor)"
    )
    found = []
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        if page.parent != FOLDER:
            for part in re.split(r"\n(?:\n|- |\| )", page.read_text(encoding="utf-8")):
                text = " ".join(part.split())
                if pattern.search(text):
                    found.append((page.name, "azure-trial" in text, text))
    assert len(found) >= 8
    assert [one for one in found if not one[1]] == []


def cloud_init() -> list[dict[str, str]]:
    text = re.sub("@SHA256@|@[A-Z]+@", "contoso", (FOLDER / "cloud-init.yaml").read_text())
    found: list[dict[str, str]] = yaml.safe_load(text)["write_files"]
    return found


def test_the_configurations_of_the_vms_are_valid(tmp_path: Path) -> None:
    names = []
    for one in cloud_init():
        if one["path"].endswith(".toml"):
            text = one["content"].replace(
                'endpoint = "contoso"', 'endpoint = "https://x.westeurope-1.eventgrid.azure.net/api/events"'
            )
            text = text.replace('namespace = "contoso"', 'namespace = "contoso.servicebus.windows.net"')
            (tmp_path / "x.toml").write_text(text)
            tomllib.loads(text)
            load(tmp_path / "x.toml", {})
            names.append(Path(one["path"]).name)
    assert names == ["config.toml", "listen.toml", "approve.toml"]
    marks = set(re.findall("@[A-Z0-9]+@", (FOLDER / "cloud-init.yaml").read_text()))
    assert marks <= set(re.findall("@[A-Z0-9]+@", SCRIPT.read_text()))


# --- the Bicep ---


@pytest.mark.parametrize("file", ["base.bicep", "grid.bicep"])
def test_the_bicep_uses_what_is_declared_and_its_modules_as_they_are(file: str) -> None:
    raw = (FOLDER / file).read_text()
    parsed: dict[str, Any] = dict(parser().parse(text=raw))
    for kind in ("parameters", "variables"):
        for name in parsed.get(kind, {}):
            assert len(re.findall(rf"\b{name}\b", raw)) > 1, name
    for name, module in parsed.get("modules", {}).items():
        target = (FOLDER / module["detail"]["path"]).resolve().relative_to(ROOT / "infra" / "bicep")
        given, known = module["config"]["params"], tree(str(target))
        needed = {one for one, about in known["parameters"].items() if about["default"] is None}
        assert needed <= given.keys() <= known["parameters"].keys()
        assert set(re.findall(rf"\b{name}\.outputs\.(\w+)", raw)) <= known["outputs"].keys()


def test_the_script_gives_what_the_templates_need_and_reads_their_outputs() -> None:
    text = SCRIPT.read_text()
    for name, file in (
        ("base", "base.bicep"),
        ("grid", "grid.bicep"),
        ("vms", "../bicep/modules/scaleset.bicep"),
    ):
        [given] = re.findall(rf"deploy {name} (.*?)(?:\n    \w|\Z)", text.replace("\\\n", ""), re.DOTALL)
        parameters = parser().parse(text=(FOLDER / file).read_text())["parameters"]
        used = set(re.findall(r"\s(\w+)=", given))
        assert (
            {one for one, about in parameters.items() if about["default"] is None}
            <= used
            <= parameters.keys()
        )
    read = re.findall(r"(\w+)\.value", text.partition("outputs='")[2].partition("'")[0])
    assert read == [*parser().parse(text=(FOLDER / "base.bicep").read_text())["outputs"]]


def test_the_script_looks_for_every_resource_provider_that_the_templates_need() -> None:
    made = deploy(*read_parameters(DATA / "trial.bicepparam"))
    needed = {one.type.partition("/")[0].removeprefix("Microsoft.") for one in made} | {"Compute"}  # the VMs
    always = {"Authorization", "Resources"}
    looked_for = re.findall(r"for tool in (Compute .*?);", SCRIPT.read_text())
    assert [" ".join(sorted(needed - always))] == looked_for
