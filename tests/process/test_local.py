"""Drain, approve, recover on the VM alone: README's lines, two real processes and no bus."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bridge.imds.client import EVENTS_PATH
from tests.support.imds_lab import ImdsLab
from tests.support.paths import ROOT
from tests.support.process import Forward, read_outbox, wait_until

# It writes down the event that it gets, and ends once the file `go` is there.
PROGRAM = """#!/bin/sh
cat >> {file}
echo >> {file}
until [ -e {folder}/go ]; do sleep 0.02; done
"""


@pytest.mark.usefixtures("without_coverage")
@pytest.mark.timeout(300)
def test_a_vm_is_drained_approved_once_and_recovered_though_both_processes_are_killed_in_between(
    imds: ImdsLab, tmp_path: Path
) -> None:
    def events(program: str) -> list[str]:
        """Return what the runs of a program got."""
        file = tmp_path / program
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["data"]["EventId"] for line in lines]

    for name in ("drain", "recover"):
        executable = tmp_path / f"bin-{name}"
        executable.write_text(PROGRAM.format(file=tmp_path / name, folder=tmp_path))
        executable.chmod(0o755)
    (tmp_path / "teams-url").write_text("https://127.0.0.1:9/")
    section = (ROOT / "README.md").read_text().partition("## On the VM alone")[2]
    [lines] = re.findall(r"```toml\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    base = {"imds": {"endpoint": imds.url("web-0"), "vm_name": "web-0"}}
    listen, forward = Forward(tmp_path / "l", base, role="listen"), Forward(tmp_path / "f", base)
    for process in (listen, forward):
        configured = process.config.read_text() + lines.replace("/usr/local/bin/", f"{tmp_path}/bin-")
        configured = configured.replace('"teams-url"', f'"{tmp_path}/teams-url"')
        process.config.write_text(configured)

    def schedule(vm: str) -> str:
        """Schedule an event, and wait until `forward` has seen it."""
        event = imds.schedule(event_type="Reboot", resources=[vm], notice_seconds=900)
        forward.wait_for_status(lambda status: event in json.dumps(status["document"]))
        return event

    def kill_and_restart() -> None:
        for process in (listen, forward):
            process.kill()
            process.start()

    with listen, forward:
        imds.complete(schedule("web-1"))  # an event of another VM runs neither program
        event = schedule("web-0")
        wait_until(lambda: events("drain"), describe=lambda: listen)
        kill_and_restart()
        wait_until(lambda: len(events("drain")) == 2, describe=lambda: listen)
        assert imds.approvals == []
        (tmp_path / "go").touch()
        wait_until(lambda: imds.approvals, describe=lambda: listen)
        wait_until(lambda: imds.events[0]["EventStatus"] == "Started")
        wait_until(lambda: read_outbox(listen.state).events, describe=lambda: listen)
        kill_and_restart()
        forward.wait_for_status(lambda status: status["last_good_at"])
        assert events("recover") == []
        imds.complete(event)
        forward.wait_for_status(lambda status: status["sinks"]["recover"]["last_success_at"])
    assert set(events("drain")) == {event}  # once more after the kill
    assert events("recover") == [event]
    assert [one.event_id for one in imds.approvals] == [event]
    # `vm_name` is set: instance data, which a mock server does not have, is not asked for
    assert {request.path for request in imds.requests()} == {EVENTS_PATH}
