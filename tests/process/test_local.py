"""Drain, approve, recover on the VM alone: one real process, real programs and no bus."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from bridge.imds.client import EVENTS_PATH
from tests.support.imds_lab import ImdsLab
from tests.support.only import only
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS, Forward, run, wait_until

# It notes when it begins and ends, and for what; it ends once the file `hold` is not there, with the code in `code`.
PROGRAM = """#!/bin/sh
echo "{name} begins $IMDS_BRIDGE_EVENT_ID $IMDS_BRIDGE_EVENT_STATUS $IMDS_BRIDGE_SECONDS_LEFT" >> {folder}/story
trap 'sleep 0.5; echo "{name} is ended" >> {folder}/story; exit 1' TERM
while [ -e {folder}/hold-{name} ]; do sleep 0.02; done
echo "{name} ends" >> {folder}/story
exit "$(cat {folder}/code-{name} 2>/dev/null || echo 0)"
"""

# It shows its status often.
LISTENER = """
import sys
from bridge.process import process
from bridge.cli.main import main

process.TICK_SECONDS = 0.2
sys.exit(main(sys.argv[1:]))
"""

pytestmark = [pytest.mark.usefixtures("without_coverage"), pytest.mark.timeout(300)]


class Vm:
    """A VM with a listener and two programs; `hold` keeps one of them from ending."""

    def __init__(self, folder: Path, imds: ImdsLab, rules: str) -> None:
        self.folder, self.imds = folder, imds
        for name in ("drain", "recover"):
            executable = folder / f"bin-{name}"
            executable.write_text(PROGRAM.format(name=name, folder=folder))
            executable.chmod(0o755)
        (folder / "teams-url").write_text("https://127.0.0.1:9/")
        base = {"imds": {"endpoint": imds.url("web-0"), "vm_name": "web-0"}}
        self.listen = Forward(folder / "l", base, role="listen")
        self.listen._command[1:3] = ["-c", LISTENER]
        configured = self.listen.config.read_text() + rules.replace("/usr/local/bin/", f"{folder}/bin-")
        self.listen.config.write_text(configured.replace('"teams-url"', f'"{folder}/teams-url"'))

    def hold(self, name: str) -> Path:
        (self.folder / f"hold-{name}").touch()
        return self.folder / f"hold-{name}"

    @property
    def story(self) -> list[str]:
        """What the programs did, without the ids of events and the seconds."""
        file = self.folder / "story"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.partition(" begins")[0] + " begins" if " begins " in line else line for line in lines]

    def wait(self, *lines: str) -> None:
        wait_until(lambda: self.story == [*lines], describe=lambda: (self.story, self.listen))

    def wait_for_documents(self, count: int) -> None:
        """Wait until the listener has read so many documents and gone on to the next."""
        enough = len(self.imds.requests()) + count + 1
        wait_until(lambda: len(self.imds.requests()) >= enough, describe=lambda: self.listen)

    def schedule(self, *resources: str, **changes: Any) -> str:
        options = {"event_type": "Reboot", "notice_seconds": 900, **changes}
        return self.imds.schedule(resources=[*resources] or ["web-0"], **options)

    def kill_and_restart(self) -> None:
        self.listen.kill()
        self.listen.start()


@pytest.fixture
def vm(imds: ImdsLab, tmp_path: Path) -> Vm:
    section = (ROOT / "README.md").read_text().partition("## On the VM alone")[2]
    rules = only(re.findall(r"```toml\n(.*?)```", section.partition("\n## ")[0], re.DOTALL))
    return Vm(tmp_path, imds, rules.replace("max_unavailable = 1", ""))


def test_the_lines_of_the_readme_drain_approve_once_and_recover_though_the_process_is_killed_in_between(
    vm: Vm, imds: ImdsLab
) -> None:
    drain, recover = vm.hold("drain"), vm.hold("recover")
    with vm.listen:
        imds.complete(vm.schedule("web-1"))  # an event of another VM runs neither program
        event = vm.schedule()
        vm.wait("drain begins")
        vm.kill_and_restart()
        vm.wait(*["drain begins"] * 2)
        assert imds.approvals == []
        drain.unlink()
        wait_until(lambda: imds.approvals, describe=lambda: vm.listen)
        wait_until(lambda: imds.events[0]["EventStatus"] == "Started")
        vm.kill_and_restart()
        vm.wait_for_documents(2)
        assert "recover begins" not in vm.story
        imds.complete(event)
        wait_until(lambda: "recover begins" in vm.story, describe=lambda: vm.listen)
        vm.kill_and_restart()
        wait_until(lambda: vm.story.count("recover begins") == 2, describe=lambda: vm.listen)
        recover.unlink()
        vm.listen.wait_for_status(lambda status: status["out_of_work"] == [])
    assert vm.story.count("drain begins") == 2
    assert [one.event_id for one in imds.approvals] == [event]
    # `vm_name` is set: instance data, which a mock server does not have, is not asked for
    assert {request.path for request in imds.requests()} == {EVENTS_PATH}


def test_an_event_that_is_canceled_in_mid_drain_recovers_after_the_drain_has_ended(
    vm: Vm, imds: ImdsLab
) -> None:
    vm.hold("drain")
    with vm.listen:
        event = vm.schedule()
        vm.wait("drain begins")
        imds.cancel(event)
        vm.wait("drain begins", "drain is ended", "recover begins", "recover ends")
        event = vm.schedule()
        wait_until(lambda: vm.story[-1] == "drain begins", describe=lambda: vm.listen)
        imds.cancel(event)
        wait_until(lambda: vm.story[-1] == "recover ends" and len(vm.story) == 8, describe=lambda: vm.listen)


@pytest.mark.parametrize("seconds", [100, -3])
def test_an_eviction_is_drained_at_once_and_a_moved_not_before_repeats_nothing(
    vm: Vm, imds: ImdsLab, seconds: int
) -> None:
    vm.hold("drain")
    with vm.listen:
        wait_until(imds.requests)
        with imds.at_once():
            event = vm.schedule(event_type="Preempt")
            at = datetime.now(UTC) + timedelta(seconds=seconds)
            imds.update(event, NotBefore=format_datetime(at, usegmt=True))
            asked = len(imds.requests())
        wait_until(lambda: vm.story, describe=lambda: vm.listen)
        began_at = (vm.folder / "story").stat().st_mtime
        assert sum(one.wall < began_at for one in imds.requests()[asked:]) <= 3  # one a second
        imds.update(event, NotBefore=format_datetime(at + timedelta(seconds=1), usegmt=True))
        imds.start(event)
        vm.wait_for_documents(2)
        vm.wait("drain begins")
        left = int((vm.folder / "story").read_text().split()[-1])
        assert max(0, seconds - LIMIT_SECONDS) <= left <= max(0, seconds)


def test_the_command_recover_waits_for_events_and_ends_what_fails(vm: Vm, imds: ImdsLab) -> None:
    def command(*options: str) -> tuple[int, str]:
        done = run("recover", *options, "--config", vm.listen.config)
        return done.returncode, done.stdout + done.stderr

    (vm.folder / "code-recover").write_text("1")
    with vm.listen:
        event = vm.schedule("web-0", "web-1")
        wait_until(lambda: "drain ends" in vm.story, describe=lambda: vm.listen)
        vm.listen.wait_for_status(lambda status: status["out_of_work"])
        code, text = command("--done")
        assert (code, f"until Reboot {event} is over" in text) == (2, True)
        imds.cancel(event)
        vm.listen.wait_for_status(lambda status: status["out_of_work"][0]["NeedsPerson"])
        before = vm.story.count("recover begins")
        assert command()[0] == 0
        wait_until(lambda: vm.story.count("recover begins") > before, describe=lambda: vm.listen)
        wait_until(lambda: command("--done")[0] == 0)  # not while it runs
        vm.listen.wait_for_status(lambda status: status["out_of_work"] == [])
        assert "not out of work" in command()[1]
