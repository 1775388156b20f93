"""The contract of bridge/sinks/base.py, run over every sink: a new sink is a new row."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from bridge.config.registry import SINK_KINDS
from bridge.config.sinks import StdoutSettings
from bridge.errors import DeliveryError, Misconfigured, Unavailable
from bridge.events.model import StoredEvent
from bridge.runtime.text import redact
from bridge.sinks import stdout as module
from bridge.sinks.base import Inconclusive, Sink
from bridge.sinks.stdout import StdoutSink
from tests.contract.sink_rigs import (
    EVENTS,
    SECRET,
    Build,
    Place,
    Rig,
    eventgrid,
    exec_,
    memory,
    servicebus,
    stdout,
    webhook,
)
from tests.support.delivery import Killed, opened, running
from tests.support.process import LIMIT_SECONDS, stored_event, wait_until
from tests.support.receivers import FORMATS

SHORT_SECONDS = 0.5  # a sink's own time limit, where it is to be reached


@dataclass(frozen=True, kw_only=True)
class Row:
    """A sink by its kind and what sets it up: a remote one wants a secret and can hang.

    `rejects`: whether it looks at events, and refuses some for good.
    """

    kind: str
    variant: str = ""
    build: Build
    is_remote: bool = True
    rejects: bool = True

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.variant}" if self.variant else self.kind


ROWS = [
    Row(kind="memory", build=memory, is_remote=False, rejects=False),
    Row(kind="stdout", build=stdout, is_remote=False, rejects=False),
    Row(kind="exec", build=exec_, is_remote=False),
    *(
        Row(
            kind="webhook",
            variant=format_,
            build=webhook(format=format_, **row.needed),
            rejects=format_ == "cloudevents",
        )
        for format_, row in FORMATS.items()
    ),
    Row(kind="webhook", variant="binary", build=webhook(mode="binary")),
    Row(kind="webhook", variant="batch", build=webhook(mode="batch")),
    Row(kind="servicebus", variant="queue", build=servicebus("queue")),
    Row(kind="servicebus", variant="topic", build=servicebus("topic")),
    Row(kind="eventgrid", variant="custom", build=eventgrid("custom")),
    Row(kind="eventgrid", variant="namespace", build=eventgrid("namespace")),
]
ENVELOPES = [event.envelope for event in EVENTS]
# No CloudEvent without a source, and no message with such an id.
BAD = StoredEvent(
    seq=99, id="9" * 200, type="t", stored_at=0.0, body=b'{"specversion":"1.0","id":"9","type":"t"}'
)


@pytest.fixture
def limit_seconds() -> float:
    return LIMIT_SECONDS


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_seconds: float) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(stack=stack, folder=tmp_path, monkeypatch=monkeypatch, limit_seconds=limit_seconds)


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def rig(request: pytest.FixtureRequest, place: Place) -> Iterator[Rig]:
    row: Row = request.param
    built = row.build(place)
    yield built
    built.sink.close()


def only(rows: Sequence[Row]) -> pytest.MarkDecorator:
    """Run a test with these rows alone."""
    return pytest.mark.parametrize("rig", rows, ids=lambda row: row.name, indirect=True)


for_remote_ones = only([row for row in ROWS if row.is_remote])
for_those_that_reject = only([row for row in ROWS if row.rejects])
with_a_short_limit = pytest.mark.parametrize("limit_seconds", [SHORT_SECONDS], ids=["short limit"])


def expected(rig: Rig, events: Sequence[StoredEvent] = EVENTS) -> list[Any]:
    return [rig.form(event) for event in events]


def send(sink: Sink) -> None:
    """Send all events in batches of the size that the sink names."""
    for start in range(0, len(EVENTS), sink.max_batch):
        sink.send(EVENTS[start : start + sink.max_batch])


def test_every_kind_of_sink_has_a_row() -> None:
    assert {row.kind for row in ROWS} == {*SINK_KINDS, "memory"}


def test_it_takes_at_least_one_event_at_a_time(rig: Rig) -> None:
    assert rig.sink.max_batch >= 1


def test_the_receiver_has_all_events_in_their_order_when_send_returns(rig: Rig) -> None:
    send(rig.sink)
    assert rig.received() == expected(rig)
    assert len({json.dumps(one) for one in rig.received()}) == len(EVENTS)


def test_an_event_that_is_sent_again_arrives_as_it_was(rig: Rig) -> None:
    rig.sink.send(EVENTS[:1])
    rig.sink.send(EVENTS[:1])
    assert rig.received() == expected(rig, [EVENTS[0], EVENTS[0]])


# --- failures ---


def test_every_failure_reports_how_much_arrived_and_the_next_delivery_works(rig: Rig) -> None:
    for fail in rig.failures:
        before = len(rig.received())
        kind = fail()
        # One event, which no sink can part: of a batch that is refused, its halves may be taken.
        with pytest.raises(DeliveryError) as raised:
            rig.sink.send(EVENTS[:1])
        assert type(raised.value) is kind
        assert (len(rig.received()), raised.value.delivered) == (before, 0)
        rig.sink.send(EVENTS[:1])
        assert rig.received()[before:] == expected(rig, EVENTS[:1])


def test_a_send_that_fails_in_the_middle_reports_what_arrived(rig: Rig) -> None:
    kind = rig.fail_second()
    if rig.sink.max_batch == 1:
        rig.sink.send(EVENTS[:1])
    events = EVENTS[: rig.sink.max_batch]
    with pytest.raises(DeliveryError) as raised:
        rig.sink.send(events)
    delivered = raised.value.delivered
    assert type(raised.value) is kind
    assert rig.received() == expected(rig, events[: delivered or 1])
    assert (delivered == 0) if rig.sink.max_batch == 1 else (0 < delivered < len(events))


@for_remote_ones
def test_a_wrong_secret_is_a_fault_of_the_setup_until_the_right_one_is_read(rig: Rig, place: Place) -> None:
    assert rig.rotate is not None
    secret = rig.rotate()
    for _ in range(2):
        with pytest.raises(Misconfigured) as raised:
            rig.sink.send(EVENTS[:1])
        assert SECRET not in str(raised.value)
    assert rig.received() == []
    place.write_secret(secret)
    rig.sink.reload()
    rig.sink.send(EVENTS[:1])
    assert rig.received() == expected(rig, EVENTS[:1])


@for_remote_ones
def test_an_answer_that_is_late_but_in_time_is_success(rig: Rig) -> None:
    rig.sink.send(EVENTS[:1])
    assert rig.hang is not None
    release = threading.Timer(0.2, rig.hang())
    release.start()
    rig.sink.send(EVENTS[1:2])
    release.join()
    assert rig.received() == expected(rig, EVENTS[:2])


@with_a_short_limit
@for_remote_ones
def test_a_receiver_that_is_later_than_the_limit_may_take_it_later(rig: Rig) -> None:
    send_at_last(rig.sink, EVENTS[:1])
    assert rig.hang is not None
    release = rig.hang()
    with pytest.raises(Unavailable) as raised:
        rig.sink.send(EVENTS[1:2])
    assert raised.value.delivered == 0
    release()
    send_at_last(rig.sink, EVENTS[1:2])
    assert in_order(rig) == expected(rig, EVENTS[:2])


def send_at_last(sink: Sink, events: Sequence[StoredEvent]) -> None:
    """Send until it works: on a busy machine even a good receiver can be later than a short limit."""

    def is_sent() -> bool:
        with suppress(Unavailable):
            sink.send(events)
            return True
        return False

    wait_until(is_sent)


# --- what it reports ---


def checked(rig: Rig) -> str:
    try:
        return rig.sink.check()
    except Inconclusive as error:
        return str(error)


def test_no_error_and_no_log_shows_a_secret(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="bridge")
    text = [checked(rig), *rig.sink.preview(EVENTS[0]).head, rig.sink.preview(EVENTS[0]).body.decode()]
    for fail in rig.failures:
        fail()
        with pytest.raises(DeliveryError) as raised:
            rig.sink.send(EVENTS[:1])
        text.append(str(raised.value))
    rig.sink.reload()
    assert SECRET not in "\n".join([*text, caplog.text])


def test_a_check_sends_no_event_and_returns_its_result(rig: Rig) -> None:
    assert checked(rig)
    assert rig.received() == []


def test_what_is_shown_is_what_is_sent_but_for_secrets_and_showing_sends_nothing(rig: Rig) -> None:
    shown = rig.sink.preview(EVENTS[0])
    assert rig.bodies() == []
    rig.sink.send(EVENTS[:1])
    (sent,) = rig.bodies()
    assert shown.body == redact(sent.decode()).encode()
    assert all(line.isprintable() for line in shown.head)


# --- its life ---


def test_a_reload_never_fails_and_what_was_known_stays(rig: Rig, place: Place) -> None:
    place.secret_file.unlink(missing_ok=True)
    rig.sink.reload()
    rig.sink.send(EVENTS[:1])
    assert rig.received() == expected(rig, EVENTS[:1])


def test_a_keep_alive_sends_nothing_and_the_next_event_arrives(rig: Rig) -> None:
    rig.sink.keep_alive()
    assert rig.received() == []
    rig.sink.send(EVENTS[:1])
    rig.sink.keep_alive()
    assert rig.received() == expected(rig, EVENTS[:1])


def test_a_failing_receiver_is_tried_again_within_a_minute(rig: Rig) -> None:
    assert 0 < rig.sink.retry_limit_seconds <= 60


def test_it_can_be_used_from_a_thread_that_did_not_make_it(rig: Rig) -> None:
    thread = threading.Thread(target=send, args=[rig.sink])
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert rig.received() == expected(rig)


def test_it_can_be_closed_at_any_time_and_twice(rig: Rig) -> None:
    rig.sink.close()
    rig.sink.close()


# --- with the outbox and the dispatcher ---


def in_order(rig: Rig) -> list[Any]:
    """Return what came, each once, in the order in which it came first."""
    return list({json.dumps(one, sort_keys=True): one for one in rig.received()}.values())


class _Wrapped:
    """A sink behind another one."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)


class _Mortal(_Wrapped):
    """A sink whose process is killed once its receiver has the second send, before that is noted."""

    _sends = 0

    def send(self, events: Sequence[StoredEvent]) -> None:
        self._sink.send(events)
        self._sends += 1
        if self._sends == 2:
            raise Killed


def test_the_dispatcher_goes_on_behind_what_arrived_of_a_send_that_failed(rig: Rig, tmp_path: Path) -> None:
    rig.fail_second()
    with running(tmp_path / "state", rig.sink, *EVENTS):
        pass
    assert rig.received() == expected(rig)


@for_those_that_reject
def test_an_event_that_is_never_accepted_is_dead_lettered_alone(rig: Rig, tmp_path: Path) -> None:
    with running(tmp_path / "state", rig.sink, *EVENTS[:4], BAD, *EVENTS[4:]) as delivery:
        delivery.finish()
        assert delivery.dead() == [BAD.id]
    assert rig.received() == expected(rig)


@with_a_short_limit
@for_remote_ones
def test_it_ends_while_a_send_hangs_and_everything_arrives(rig: Rig, tmp_path: Path) -> None:
    assert rig.hang is not None
    send_at_last(rig.sink, EVENTS[:1])  # connecting has limits of its own
    release = rig.hang()
    with running(tmp_path / "state", rig.sink, *EVENTS) as delivery:
        delivery.dispatcher.stop_when_drained()
        wait_until(lambda: delivery.status("failures"))
        release()
        delivery.finish()
        assert delivery.backlog() == 0
    assert in_order(rig) == expected(rig)


class _Choosy(_Wrapped):
    """A sink whose receiver answers 500 to events with one subject."""

    def __init__(self, sink: Sink, subject: str) -> None:
        super().__init__(sink)
        self._subject = subject
        self.is_choosy = True
        self.refused = 0
        self.refused_before_others: int | None = None

    def send(self, events: Sequence[StoredEvent]) -> None:
        if self.is_choosy and any(event.envelope["subject"] == self._subject for event in events):
            self.refused += 1
            raise Unavailable("not this one", status=500)
        self._sink.send(events)
        if self.refused_before_others is None:
            self.refused_before_others = self.refused


def test_an_event_that_keeps_failing_holds_back_only_its_own_subject(rig: Rig, tmp_path: Path) -> None:
    subjects = [str(uuid4()) for _ in range(3)]
    events = [
        stored_event(number, subject=subjects[number % 3], Description=f"number {number}")
        for number in range(9)
    ]
    failing = [event for event in events if event.envelope["subject"] == subjects[0]]
    others = [event for event in events if event.envelope["subject"] != subjects[0]]
    choosy = _Choosy(rig.sink, subjects[0])
    with running(tmp_path / "state", choosy, *events) as delivery:
        wait_until(lambda: len(rig.received()) >= len(others))
        # A batch, and the event alone.
        assert choosy.refused_before_others == (1 if rig.sink.max_batch == 1 else 2)
        for subject in subjects[1:]:
            mine = expected(rig, [event for event in others if event.envelope["subject"] == subject])
            assert [one for one in in_order(rig) if one in mine] == mine
        wait_until(lambda: delivery.status("next_retry_at"))
        choosy.is_choosy = False
    assert in_order(rig)[len(others) :] == expected(rig, failing)


for_webhooks = only([row for row in ROWS if row.kind == "webhook"])


@for_webhooks
def test_a_409_after_a_restart_is_a_delivery(rig: Rig, tmp_path: Path) -> None:
    """A process that was killed may have sent the event."""
    assert rig.fault is not None
    with opened(tmp_path / "state", rig.sink) as killed:
        killed.commit(EVENTS[0])
    with opened(tmp_path / "state", rig.sink) as restarted:
        for event, dead in ((None, []), (EVENTS[1], [EVENTS[1].id])):
            if event:
                restarted.commit(event)
            rig.fault("409")
            restarted.deliver_to(rig.sink)
            restarted.finish()
            assert restarted.dead() == dead


def test_after_a_kill_with_half_of_the_events_out_all_arrive_in_order(rig: Rig, tmp_path: Path) -> None:
    with opened(tmp_path / "state", _Mortal(rig.sink)) as delivery:
        delivery.commit(*EVENTS[:3])
        delivery.thread.start()
        wait_until(rig.received)
        delivery.commit(*EVENTS[3:])
        delivery.thread.join(LIMIT_SECONDS)
        assert not delivery.thread.is_alive()
        assert delivery.backlog() > 0
        delivery.deliver_to(rig.sink)
        delivery.finish()
    assert in_order(rig) == expected(rig)
    assert len(rig.received()) > len(EVENTS)


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
