"""The contract of bridge/sinks/base.py, run over every sink: a new sink is a new row."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridge.config import Secret, ServiceBusSettings, StdoutSettings, WebhookSettings
from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.lab.inbox import Inbox
from bridge.lab.servicebus import ServiceBusLab
from bridge.sinks import stdout as module
from bridge.sinks.base import Sink
from bridge.sinks.memory import MemorySink
from bridge.sinks.servicebus import ServiceBusSink
from bridge.sinks.stdout import StdoutSink
from bridge.sinks.webhook import WebhookSink
from tests.support import LIMIT_SECONDS, stored_event

SECRET = "never-to-be-shown"  # noqa: S105 - nobody's


@dataclass(kw_only=True)
class Rig:
    """A sink with its receiver.

    `received` returns the events that came, as dictionaries. Each of `failures` makes the next
    delivery fail and returns the error that is to be expected of it.
    """

    sink: Sink
    received: Callable[[], list[dict[str, Any]]]
    failures: list[Callable[[], type[DeliveryError]]]


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    build: Callable[[ExitStack, Path, pytest.MonkeyPatch], Rig]


def memory(_: ExitStack, __: Path, ___: pytest.MonkeyPatch) -> Rig:
    sink = MemorySink(max_batch=3)

    def failing(kind: type[DeliveryError]) -> Callable[[], type[DeliveryError]]:
        def fail() -> type[DeliveryError]:
            sink.failures.append(kind("on demand"))
            return kind

        return fail

    kinds = [Unavailable, Misconfigured, Rejected, Gone]
    return Rig(
        sink=sink,
        received=lambda: [event.envelope for event in sink.received],
        failures=[failing(kind) for kind in kinds],
    )


def stdout(stack: ExitStack, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    file = folder / "output"
    output = stack.enter_context(file.open("w"))
    unwritable = stack.enter_context(file.open())
    monkeypatch.setattr(module, "_descriptor", output.fileno)

    def fail() -> type[DeliveryError]:
        numbers = iter([unwritable.fileno()])
        monkeypatch.setattr(module, "_descriptor", lambda: next(numbers, output.fileno()))
        return Unavailable

    return Rig(
        sink=StdoutSink(StdoutSettings(kind="stdout")),
        received=lambda: [json.loads(line) for line in file.read_text().splitlines()],
        failures=[fail],
    )


def webhook(mode: str) -> Callable[[ExitStack, Path, pytest.MonkeyPatch], Rig]:
    def build(stack: ExitStack, folder: Path, _: pytest.MonkeyPatch) -> Rig:
        inbox = stack.enter_context(Inbox(strict=True, token=SECRET))
        token = folder / "token"
        token.write_text(SECRET)
        given = {"kind": "webhook", "url": f"{inbox.url}?sig={SECRET}", "mode": mode, "timeout_seconds": 0.5}
        settings = WebhookSettings(**given, bearer_token=Secret(file=token))

        def failing(kind: str, expected: type[DeliveryError]) -> Callable[[], type[DeliveryError]]:
            def fail() -> type[DeliveryError]:
                inbox.fault(kind, body=f"you sent {SECRET}" if kind.isdigit() else "")
                return expected

            return fail

        failures = [("503", Unavailable), ("401", Misconfigured), ("422", Rejected), ("410", Gone)]
        failures += [("drop", Unavailable), ("timeout", Unavailable), ("redirect", Misconfigured)]
        return Rig(
            sink=WebhookSink(settings),
            received=inbox.events,
            failures=[failing(*failure) for failure in failures],
        )

    return build


def servicebus(entity: str) -> Callable[[ExitStack, Path, pytest.MonkeyPatch], Rig]:
    def build(stack: ExitStack, folder: Path, _: pytest.MonkeyPatch) -> Rig:
        topic = {"Name": "topic", "Subscriptions": [{"Name": "all"}]}
        namespace = {"Name": "lab", "Queues": [{"Name": "queue"}], "Topics": [topic]}
        lab = stack.enter_context(ServiceBusLab({"UserConfig": {"Namespaces": [namespace]}}, key=SECRET))
        token = folder / "token"
        token.write_text(lab.connection_string)
        given = {"kind": "servicebus", entity: entity, "timeout_seconds": 2.0}
        sink = ServiceBusSink(ServiceBusSettings(**given, connection_string=Secret(file=token)))
        stored = lab.entity("queue" if entity == "queue" else "topic/Subscriptions/all")

        def failing(kind: str, expected: type[DeliveryError]) -> Callable[[], type[DeliveryError]]:
            def fail() -> type[DeliveryError]:
                sink.reload()  # an open link is not asked for the right to send
                lab.fault(kind, count=1)
                return expected

            return fail

        failures = [("busy", Unavailable), ("quota", Unavailable), ("drop_before_store", Unavailable)]
        failures += [
            ("unauthorized", Misconfigured),
            ("missing", Misconfigured),
            ("refuse_cbs", Misconfigured),
        ]
        return Rig(
            sink=sink,
            received=lambda: [json.loads(message.body) for message in stored.messages],
            failures=[failing(*failure) for failure in failures],
        )

    return build


ROWS = [
    Row(name="memory", build=memory),
    Row(name="stdout", build=stdout),
    Row(name="webhook-structured", build=webhook("structured")),
    Row(name="webhook-binary", build=webhook("binary")),
    Row(name="servicebus-queue", build=servicebus("queue")),
    Row(name="servicebus-topic", build=servicebus("topic")),
]
EVENTS = [stored_event(number, Description='é "quoted"\n') for number in range(7)]
ENVELOPES = [event.envelope for event in EVENTS]


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    row: Row = request.param
    with ExitStack() as stack:
        built = row.build(stack, tmp_path, monkeypatch)
        yield built
        built.sink.close()


def send(sink: Sink) -> None:
    """Send all events in batches of the size that the sink names."""
    for start in range(0, len(EVENTS), sink.max_batch):
        sink.send(EVENTS[start : start + sink.max_batch])


def test_it_takes_at_least_one_event_at_a_time(rig: Rig) -> None:
    assert rig.sink.max_batch >= 1


def test_the_receiver_has_all_events_in_their_order_when_send_returns(rig: Rig) -> None:
    send(rig.sink)
    assert rig.received() == ENVELOPES


def test_an_event_that_is_sent_again_arrives_as_it_was(rig: Rig) -> None:
    rig.sink.send(EVENTS[:1])
    rig.sink.send(EVENTS[:1])
    assert rig.received() == [ENVELOPES[0], ENVELOPES[0]]


def test_every_failure_is_told_with_how_much_arrived_and_the_next_delivery_works(rig: Rig) -> None:
    for fail in rig.failures:
        before = len(rig.received())
        expected = fail()
        with pytest.raises(DeliveryError) as raised:
            rig.sink.send(EVENTS[: rig.sink.max_batch])
        assert type(raised.value) is expected
        assert len(rig.received()) == before + raised.value.delivered
        rig.sink.send(EVENTS[:1])
        assert rig.received()[-1] == ENVELOPES[0]


def test_no_error_and_no_log_shows_a_secret(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for fail in rig.failures:
        fail()
        with pytest.raises(DeliveryError) as raised:
            rig.sink.send(EVENTS[:1])
        assert SECRET not in str(raised.value)
    rig.sink.reload()
    assert SECRET not in caplog.text
    assert SECRET not in rig.sink.check()


def test_a_reload_never_fails_and_what_was_known_stays(rig: Rig, tmp_path: Path) -> None:
    for file in tmp_path.glob("token"):
        file.unlink()
    rig.sink.reload()
    rig.sink.send(EVENTS[:1])
    assert rig.received() == ENVELOPES[:1]


def test_a_check_sends_no_event_and_tells_what_it_found(rig: Rig) -> None:
    assert rig.sink.check()
    assert rig.received() == []


def test_a_rest_sends_nothing_and_the_next_event_arrives(rig: Rig) -> None:
    rig.sink.rest()
    assert rig.received() == []
    rig.sink.send(EVENTS[:1])
    rig.sink.rest()
    assert rig.received() == ENVELOPES[:1]


def test_a_failing_receiver_is_tried_again_within_a_minute(rig: Rig) -> None:
    assert 0 < rig.sink.retry_limit_seconds <= 60


def test_it_can_be_used_from_a_thread_that_did_not_make_it(rig: Rig) -> None:
    thread = threading.Thread(target=send, args=[rig.sink])
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert rig.received() == ENVELOPES


def test_it_can_be_closed_at_any_time_and_twice(rig: Rig) -> None:
    rig.sink.close()
    rig.sink.close()


# --- what only stdout can do ---


def test_a_line_that_broke_off_is_ended_before_the_event_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "output"
    with file.open("wb") as output:
        monkeypatch.setattr(module, "_descriptor", output.fileno)
        sink = StdoutSink(StdoutSettings(kind="stdout"))
        write = os.write
        for room in (0, 10, 1, 0, 5):
            left = iter([room])

            def fill(descriptor: int, text: bytes, left: Iterator[int] = left) -> int:
                if (part := next(left, 0)) == 0:
                    raise OSError(28, "No space left on device")
                return write(descriptor, text[:part])

            monkeypatch.setattr(os, "write", fill)
            with pytest.raises(Unavailable, match="No space left on device"):
                sink.send(EVENTS[:1])
        monkeypatch.setattr(os, "write", write)
        sink.send(EVENTS[:1])
        sink.send(EVENTS[1:2])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [ENVELOPES[0], ENVELOPES[0], ENVELOPES[1]]
