"""The worker as a process, with the real `forward` and `listen` on the lab's bus and IMDS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.bus import Sender, message
from tests.support.consumers import (
    ALL,
    APPROVALS,
    OWN,
    TOPIC,
    Listen,
    Script,
    bus_config,
    run_script,
    settings,
)
from tests.support.imds_lab import ImdsLab
from tests.support.process import Forward, wait_until
from tests.support.servicebus import ServiceBusLab

P = TypeVar("P", bound=Forward)
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - the vector of the standard
NOTICE_SECONDS = 86_400
# A command that records its arguments, waits for the gate, and exits with the code in the file `code`.
COMMAND = """#!/bin/sh
cd "$(dirname "$0")" || exit 9
echo "$1 $EVENT_ID $EVENT_TYPE $EVENT_STATUS $RESOURCES" >> runs
env > "$1.env"
while [ -e gate ]; do sleep 0.02; done
exit "$(cat code 2>/dev/null || echo 0)"
"""


class World:
    """A VM with its processes, and the bus."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._processes: list[Forward] = []
        self.imds = stack.enter_context(ImdsLab(vms=("web-0", "web-1"), rate_limit=None))
        self.bus = stack.enter_context(ServiceBusLab(bus_config()))
        self.command = folder / "command"
        self.command.write_text(COMMAND)
        self.command.chmod(0o755)

    def processes(self, **approvals: Any) -> None:
        """Start `forward` and `listen`."""
        given = settings(self.imds, self.bus, **approvals)
        self._enter(Forward(self.folder / "forward", given))
        self._enter(Listen(self.folder / "listen", given))

    def worker(self, *more: str, subscription: str = OWN, **env: str) -> Script:
        """Start the worker."""
        arguments = [
            "--topic",
            TOPIC,
            "--subscription",
            subscription,
            "--vm",
            "WEB-0",
            "--approvals",
            APPROVALS,
        ]
        arguments += ["--prepare", f"{self.command} prepare", "--recover", f"{self.command} recover"]
        arguments += ["--state", str(self.folder / "worker.json"), *more]
        env = {"SERVICEBUS_CONNECTION_STRING": self.bus.connection_string, **env}
        return self._enter(Script(self.folder / "worker", "worker/worker.py", arguments, env=env))

    def _enter(self, process: P) -> P:
        self._processes.append(process)
        self._stack.enter_context(process)
        return process

    def __repr__(self) -> str:
        return f"{self.runs()} {self._processes}"

    def schedule(self, event_type: str = "Reboot", *resources: str, **more: Any) -> str:
        """Schedule an event."""
        more.setdefault("notice_seconds", NOTICE_SECONDS)
        return self.imds.schedule(event_type=event_type, resources=resources or ("web-0",), **more)

    def runs(self) -> list[str]:
        """Return what the commands recorded."""
        file = self.folder / "runs"
        return file.read_text().splitlines() if file.exists() else []

    def wait_for_runs(self, *expected: str) -> None:
        """Wait until the commands have run as expected, and no more."""
        wait_until(lambda: len(self.runs()) >= len(expected), describe=self.__repr__)
        assert self.runs() == list(expected)

    def approved(self) -> list[str]:
        """Return the approved EventIds."""
        return [one.event_id for one in self.imds.approvals]

    def wait_for_approval(self, event: str) -> None:
        """Wait until an event has been approved."""
        wait_until(lambda: event in self.approved(), describe=self.__repr__)

    def wait_until_read(self, subscription: str = OWN) -> None:
        """Wait until every message is completed."""
        entity = self.bus.entity(f"{TOPIC}/Subscriptions/{subscription}")
        wait_until(lambda: entity.counts.active == 0, describe=self.__repr__)

    def gate(self, *, closed: bool) -> None:
        """Let commands wait, or continue."""
        file = self.folder / "gate"
        file.touch() if closed else file.unlink()

    def receipts(self) -> list[dict[str, Any]]:
        """Return the receipts on the bus."""
        messages = self.bus.entity(f"{TOPIC}/Subscriptions/{ALL}").messages
        events = [json.loads(message.body) for message in messages]
        return [event for event in events if ".approval." in event["type"]]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, stack)


def test_it_prepares_approves_and_recovers_once_and_a_restart_changes_nothing(world: World) -> None:
    world.processes()
    worker = world.worker()
    event = world.schedule()
    world.wait_for_approval(event)  # so it starts, a day early
    prepared = f"prepare {event} Reboot Scheduled web-0"
    world.wait_for_runs(prepared)
    worker.wait_for_text("approval accepted: approved")
    worker.wait_for_text(f"{event.lower()}: Reboot of web-0: started")
    world.imds.complete(event)
    recovered = f"recover {event} Reboot Completed web-0"
    world.wait_for_runs(prepared, recovered)
    world.wait_until_read()
    assert worker.stop() == 0, worker
    worker.start()
    second = world.schedule("Redeploy")
    world.wait_for_approval(second)
    world.wait_for_runs(prepared, recovered, f"prepare {second} Redeploy Scheduled web-0")
    assert "SERVICEBUS" not in (world.folder / "prepare.env").read_text()
    assert world.bus.failures == ()


def test_invalid_messages_and_events_of_other_vms_and_types_are_ignored(world: World) -> None:
    world.processes()
    worker = world.worker(subscription=ALL)
    with Sender(world.bus, TOPIC) as sender:
        sender.send(message(b"nonsense"), message(b'{"type": "io.imdsbridge.scheduledevent.scheduled.v1"}'))
    worker.wait_for_text("is invalid and ignored", count=2)
    world.schedule("Reboot", "web-1")
    world.schedule("Freeze")
    event = world.schedule("Terminate")
    world.wait_for_approval(event)
    world.wait_for_runs(f"prepare {event} Terminate Scheduled web-0")
    world.wait_until_read(ALL)
    assert world.approved() == [event]
    assert worker.stop() == 0, worker


def test_a_failed_prepare_is_logged_and_not_approved_and_recovers_at_the_end(world: World) -> None:
    world.processes()
    (world.folder / "code").write_text("7")
    worker = world.worker()
    event = world.schedule()
    worker.wait_for_text("ended with exit code 7")
    world.wait_until_read()
    world.imds.cancel(event)
    world.wait_for_runs(f"prepare {event} Reboot Scheduled web-0", f"recover {event} Reboot Canceled web-0")
    world.wait_until_read()
    assert world.approved() == []


def test_a_recovery_ends_when_another_event_is_announced_and_runs_again_after_it(world: World) -> None:
    world.processes()
    worker = world.worker()
    first = world.schedule("Reboot")
    worker.wait_for_text(f"{first.lower()}: Reboot of web-0: started")
    world.gate(closed=True)
    world.imds.complete(first)
    runs = [f"prepare {first} Reboot Scheduled web-0", f"recover {first} Reboot Completed web-0"]
    world.wait_for_runs(*runs)
    second = world.schedule("Redeploy")
    worker.wait_for_text("ended with exit code -15")
    world.gate(closed=False)
    worker.wait_for_text(f"{second.lower()}: Redeploy of web-0: started")
    runs.append(f"prepare {second} Redeploy Scheduled web-0")
    world.wait_for_runs(*runs)
    world.imds.complete(second)
    runs += [f"recover {first} Reboot Completed web-0", f"recover {second} Redeploy Completed web-0"]
    world.wait_for_runs(*runs)
    world.wait_until_read()
    assert world.runs() == runs


def test_an_event_of_several_vms_is_approved_only_with_group(world: World) -> None:
    world.processes()
    worker = world.worker()
    event = world.schedule("Reboot", "web-0", "web-1")
    worker.wait_for_text("not approved: it would also release web-1")
    assert worker.stop() == 0, worker
    world.imds.cancel(event)
    world.worker("--group")
    second = world.schedule("Reboot", "web-0", "web-1")
    world.wait_for_approval(second)
    assert world.approved() == [second]


def test_a_signed_command_is_accepted(world: World) -> None:
    world.processes(signing_secret=SECRET)
    worker = world.worker(SIGNING_SECRET=SECRET)
    event = world.schedule()
    world.wait_for_approval(event)
    worker.wait_for_text("approval accepted: approved")
    forged = {"type": "io.imdsbridge.approval.failed.v1", "data": {"EventId": event, "Reason": "\x1b[2J"}}
    with Sender(world.bus, TOPIC) as sender:
        properties = {"Resources": ",web-0,"}  # what the subscription selects by
        sender.send(message(json.dumps(forged), message_id="forged\x1b", properties=properties))
    worker.wait_for_text(r"message forged\x1b: a receipt without the listener's signature is ignored")
    assert "SIGNING_SECRET" not in (world.folder / "prepare.env").read_text()


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        ([], {}, "give either --namespace or"),
        (["--prepare", "/no/such/command"], {"SERVICEBUS_CONNECTION_STRING": "x"}, "'/no/such/command'"),
        ([], {"SERVICEBUS_CONNECTION_STRING": "x"}, "Connection string"),
        ([], {"SERVICEBUS_CONNECTION_STRING": "x", "SIGNING_SECRET": "whsec_x"}, "cannot be used"),
    ],
)
def test_an_invalid_option_is_reported_with_exit_code_2(
    arguments: list[str], env: dict[str, str], expected: str
) -> None:
    right = ["--topic", "t", "--subscription", "s", "--vm", "v", "--prepare", "true", "--recover", "true"]
    done = run_script("worker/worker.py", *right, *arguments, env=env)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
