"""Drain, approve, recover on the VM alone: README's lines, two real processes and no bus."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridge.imds.client import EVENTS_PATH
from tests.support.imds_lab import ImdsLab
from tests.support.paths import ROOT
from tests.support.process import Forward, read_outbox, wait_until

pytestmark = pytest.mark.usefixtures("without_coverage")

# It writes down the event that it gets, and ends once a file is there, with the exit code in it. A test that has seen
# the event may end it: it must note the signal already then.
PROGRAM = """#!/bin/sh
trap 'echo TERM >> {file}.signals; exit 1' TERM
cat >> {file}
echo >> {file}
until [ -s {file}.go ]; do sleep 0.02; done
exit $(cat {file}.go)
"""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that a test lets end; `events` are what its runs got."""

    file: Path

    def finish(self, code: int = 0) -> None:
        self.file.with_suffix(".go").write_text(f"{code}\n")

    def events(self) -> list[str]:
        text = self.file.read_text() if self.file.exists() else ""
        return [json.loads(line)["data"]["EventId"] for line in text.splitlines()]


@dataclass(frozen=True, kw_only=True)
class Vm:
    """A VM with README's configuration and its two processes."""

    imds: ImdsLab
    listen: Forward
    forward: Forward
    drain: Program
    recover: Program

    def kill_and_restart(self) -> None:
        for process in (self.listen, self.forward):
            process.kill()
            process.start()

    def schedule(self, name: str = "web-0") -> str:
        """Schedule an event, and wait until `forward` has seen it."""
        event = self.imds.schedule(event_type="Reboot", resources=[name], notice_seconds=900)

        def is_seen() -> bool:
            document = self.forward.status().get("document") or {}
            return any(one["EventId"] == event for one in document.get("Events", ()))

        wait_until(is_seen, describe=lambda: self.forward)
        return event


def readme_lines() -> str:
    """Return README's configuration for a VM alone."""
    section = (ROOT / "README.md").read_text().partition("## On the VM alone")[2]
    found = re.search(r"```toml\n(.*?)```", section, re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def vm(tmp_path: Path, imds: ImdsLab) -> Iterator[Vm]:
    programs = {}
    for name in ("drain", "recover"):
        programs[name] = Program(file=tmp_path / name)
        executable = tmp_path / f"bin-{name}"
        executable.write_text(PROGRAM.format(file=programs[name].file))
        executable.chmod(0o755)
    base = {"imds": {"endpoint": imds.url("web-0"), "vm_name": "web-0"}}
    listen, forward = Forward(tmp_path / "l", base, role="listen"), Forward(tmp_path / "f", base)
    lines = readme_lines().replace("/usr/local/bin/", f"{tmp_path}/bin-")
    for process in (listen, forward):
        process.config.write_text(process.config.read_text() + lines)
    with listen, forward:
        yield Vm(imds=imds, listen=listen, forward=forward, **programs)
        for program in programs.values():
            program.finish()


def test_the_lines_in_readme_are_six() -> None:
    assert len([line for line in readme_lines().splitlines() if line.strip()]) == 6


@pytest.mark.timeout(300)
def test_a_vm_is_drained_approved_once_and_recovered_though_both_processes_are_killed_in_between(
    vm: Vm,
) -> None:
    vm.imds.complete(vm.schedule("web-1"))  # an event of another VM runs neither program
    event = vm.schedule()
    wait_until(vm.drain.events, describe=lambda: vm.listen)
    vm.kill_and_restart()
    wait_until(lambda: len(vm.drain.events()) == 2, describe=lambda: vm.listen)
    assert vm.imds.approvals == []
    vm.drain.finish()
    wait_until(lambda: vm.imds.approvals, describe=lambda: vm.listen)
    wait_until(lambda: vm.imds.events[0]["EventStatus"] == "Started")
    wait_until(lambda: read_outbox(vm.listen.state).events, describe=lambda: vm.listen)
    vm.kill_and_restart()
    vm.forward.wait_for_status(lambda status: status["last_good_at"])
    assert vm.recover.events() == []
    vm.imds.complete(event)
    wait_until(vm.recover.events, describe=lambda: vm.forward)
    vm.recover.finish()
    vm.forward.wait_for_status(lambda status: status["sinks"]["recover"]["last_success_at"])
    assert set(vm.drain.events()) == {event}  # once more after the kill
    assert vm.recover.events() == [event]
    assert [one.event_id for one in vm.imds.approvals] == [event]
    # `vm_name` is set: instance data, which a mock server does not have, is not asked for
    assert {request.path for request in vm.imds.requests()} == {EVENTS_PATH}


def test_the_end_of_a_process_ends_its_program_soon(vm: Vm) -> None:
    event = vm.schedule()
    wait_until(vm.drain.events)
    vm.imds.complete(event)
    signals = vm.drain.file.with_suffix(".signals")
    wait_until(signals.exists, describe=lambda: vm.listen)  # the event has gone
    vm.schedule()
    wait_until(lambda: len(vm.drain.events()) == 2)
    wait_until(vm.recover.events)
    vm.listen.signal(signal.SIGTERM)
    vm.forward.signal(signal.SIGTERM)
    assert (vm.listen.wait(), vm.forward.wait()) == (0, 0)
    wait_until(lambda: len(signals.read_text().splitlines()) == 2)
    wait_until(vm.recover.file.with_suffix(".signals").exists)


@pytest.mark.timeout(300)
def test_an_event_that_returns_is_drained_again_before_it_is_approved_again(vm: Vm) -> None:
    event: dict[str, Any] = {
        "EventId": "602D9444-D2CD-49C7-8624-8643E7171297",
        "EventType": "Reboot",
        "ResourceType": "VirtualMachine",
        "Resources": ["web-0"],
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 19 Jan 2037 22:26:58 GMT",
    }

    def show(incarnation: int, *events: dict[str, Any]) -> None:
        vm.imds.serve_document({"DocumentIncarnation": incarnation, "Events": list(events)})

    def posts() -> int:
        return sum(request.method == "POST" for request in vm.imds.requests())

    show(1, event)
    wait_until(vm.drain.events, describe=lambda: vm.listen)
    vm.drain.finish()
    wait_until(posts, describe=lambda: vm.listen)
    vm.listen.wait_for_log(": approved")
    show(2)
    vm.listen.wait_for_log("an approval counts no more")
    wait_until(vm.recover.events, describe=lambda: vm.forward)
    vm.recover.finish()
    vm.drain.file.with_suffix(".go").unlink()
    vm.kill_and_restart()
    show(3, event)
    wait_until(lambda: len(vm.drain.events()) == 2, describe=lambda: vm.listen)
    assert posts() == 1
    vm.drain.finish()
    wait_until(lambda: posts() == 2, describe=lambda: vm.listen)
