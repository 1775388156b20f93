"""The audit on a subscription: messages are archived before they are completed, and none is read twice."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from azure.servicebus import ServiceBusReceiver
from azure.servicebus.exceptions import MessageLockLostError

from infra.consumers.audit.audit import RECEIVERS, consume
from tests.support.audit import Json, Process, run_audit, write
from tests.support.bus import Sender, message
from tests.support.consumers import ALL, TOPIC, bus_config, run_script
from tests.support.process import LIMIT_SECONDS
from tests.support.servicebus import ServiceBusLab

BUS = ["--topic", TOPIC, "--subscription", ALL]
PLACE = f"{TOPIC}/Subscriptions/{ALL}"


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceBusLab]:
    """Return a bus, for whose messages an audit of this process waits only while there are any."""
    receive = ServiceBusReceiver.receive_messages

    def receive_soon(receiver: Any, count: int, *, max_wait_time: float) -> list[Any]:
        wait_seconds = max_wait_time if lab.entity(PLACE).counts.active else 0.01
        return receive(receiver, count, max_wait_time=wait_seconds)

    with ServiceBusLab(bus_config()) as lab:
        monkeypatch.setattr(ServiceBusReceiver, "receive_messages", receive_soon)
        monkeypatch.setattr("infra.consumers.audit.audit.RECEIVERS", 1)
        monkeypatch.setenv("SERVICEBUS_CONNECTION_STRING", lab.connection_string)
        yield lab


class Subscription:
    """A subscription in memory, of which receivers get a message each, and complete what the archive has."""

    def __init__(self, archive: Path, bodies: list[bytes], on_complete: Callable[[bytes], object]) -> None:
        self.archive, self.waiting = archive, [SimpleNamespace(body=[one]) for one in bodies]
        self.lock, self.on_complete = threading.Lock(), on_complete
        self.completed: list[bytes] = []

    def receive_messages(self, _: int, *, max_wait_time: float) -> list[SimpleNamespace]:  # noqa: ARG002
        with self.lock:
            return [self.waiting.pop()] if self.waiting else []

    def complete_message(self, one: SimpleNamespace) -> None:
        assert one.body[0] + b"\n" in self.archive.read_bytes()
        self.completed.append(one.body[0])
        self.on_complete(one.body[0])


def completed(folder: Path, bodies: list[bytes], on_complete: Callable[[bytes], object]) -> list[bytes]:
    """Move messages to an archive; return those that were completed."""
    subscription = Subscription(folder / "archive.jsonl", bodies, on_complete)
    consume(lambda: nullcontext(subscription), subscription.archive)
    return subscription.completed


def send(bus: ServiceBusLab, events: list[Json]) -> None:
    with Sender(bus, TOPIC) as sender:
        sender.send(*(message(json.dumps(one).encode(), message_id=one["id"]) for one in events))


def audited(*arguments: str | Path) -> Json:
    done = run_audit(*BUS, "--json", *arguments)
    assert done.err == ""
    report: Json = json.loads(done.out)
    return report


def test_messages_are_completed_at_the_same_time_each_once_the_archive_has_it(tmp_path: Path) -> None:
    together = threading.Barrier(RECEIVERS)
    bodies = [b'{"n": %d}' % number for number in range(RECEIVERS)]
    found = completed(tmp_path, bodies, lambda _: together.wait(LIMIT_SECONDS))
    assert len(found) == len((tmp_path / "archive.jsonl").read_bytes().splitlines()) == RECEIVERS


def test_a_message_is_completed_once_its_line_is_synced_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, synced = tmp_path / "archive.jsonl", [b""]
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(archive.read_bytes()))

    def check(body: bytes) -> None:
        assert body in synced[-1]

    assert len(completed(tmp_path, [b"1", b"2", b"3"], check)) == 3


def test_a_lost_lock_ends_nothing(tmp_path: Path) -> None:
    lose = Mock(side_effect=MessageLockLostError)
    assert len(completed(tmp_path, [b"1", b"2", b"3"], lose)) == 3


def test_an_error_of_one_receiver_is_the_audits(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot complete"):
        completed(tmp_path, [b"1"], Mock(side_effect=OSError("cannot complete")))


@pytest.mark.parametrize("size", [-1, -200])
def test_a_line_that_a_killed_audit_began_spoils_no_other(
    tmp_path: Path, bus: ServiceBusLab, size: int
) -> None:
    process = Process().start().hours(1).stop()
    archive = write(tmp_path / "archive.jsonl", process.events[:2])
    archive.write_bytes(archive.read_bytes()[:size])
    send(bus, process.events[1:])
    report = audited("--consume", archive)
    assert (report["missing"], report["events"], report["duplicates"]) == ([], 3, 1 if size == -1 else 0)
    assert len(archive.read_text().splitlines()) == report["events"] + report["duplicates"]


def test_an_audit_that_only_looks_reads_each_message_once(bus: ServiceBusLab, tmp_path: Path) -> None:
    process = Process().start().hours(1)
    send(bus, process.events)
    first = audited("--state", tmp_path / "state", "--now", process.events[-1]["time"])
    send(bus, process.stop().events[2:])
    second = audited("--state", tmp_path / "state")
    assert [(one["events"], one["duplicates"], one["missing"]) for one in (first, second)] == [
        (2, 0, []),
        (3, 0, []),
    ]
    assert bus.entity(PLACE).counts.active == 3


def test_what_is_new_in_the_archive_is_audited(bus: ServiceBusLab, tmp_path: Path) -> None:
    process, archive = Process().start().hours(1), tmp_path / "archive.jsonl"
    now: list[Any] = ["--now", process.events[-1]["time"]]
    for events in (process.events[:2], process.stop().events[2:]):
        send(bus, events)
        report = audited("--consume", archive, "--state", tmp_path / "state", *now)
        assert (report["missing"], report["duplicates"]) == ([], 0)
        assert report["reporters"][0]["last"] == report["events"] == len(archive.read_text().splitlines())


def test_the_program_moves_what_it_gets_to_the_archive_and_ends_with_its_verdict(
    bus: ServiceBusLab, tmp_path: Path
) -> None:
    send(bus, Process().start().hours(2).events[1:])
    done = run_script("audit/audit.py", *BUS, "--consume", tmp_path / "archive.jsonl")
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.splitlines()[-1].startswith("audit: INCOMPLETE, 2 missing of 2 events")
    assert len((tmp_path / "archive.jsonl").read_text().splitlines()) == 2
    assert bus.entity(PLACE).counts.active == 0
