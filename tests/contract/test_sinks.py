"""The contract of bridge/sinks/base.py, run over every sink: a new sink is a new row."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bridge.config.bus import EventGridSettings, ServiceBusSettings
from bridge.config.registry import SINK_KINDS, format_class
from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.runtime.text import redact
from bridge.sinks import eventgrid as eventgrid_module
from bridge.sinks import stdout as stdout_module
from bridge.sinks import webhook as webhook_module
from bridge.sinks.apprise import AppriseSettings, AppriseSink
from bridge.sinks.base import Inconclusive, Sink
from bridge.sinks.eventgrid import EventGridSink
from bridge.sinks.exec import ExecSettings, ExecSink
from bridge.sinks.servicebus import ServiceBusSink
from bridge.sinks.stdout import StdoutSettings, StdoutSink
from tests.support.clock import MovedClock
from tests.support.eventgrid import EventGridLab
from tests.support.inbox import Inbox
from tests.support.memory_sink import MemorySink
from tests.support.only import only
from tests.support.process import LIMIT_SECONDS, stored_event, wait_until
from tests.support.receivers import ROUTING_KEY
from tests.support.servicebus import ServiceBusLab, entities
from tests.support.sinks import QUEUE, MakeWebhook

SECRET = ROUTING_KEY
NEW_SECRET = "not-to-be-shown-either"  # noqa: S105 - a test's
SHORT_SECONDS = 0.3  # a sink's own time limit, where it is to be reached
EVENTS = [stored_event(number, Description=f'é "quoted"\n{number}') for number in range(7)]
BATCH_BYTES = 3 * len(EVENTS[0].body) + 10  # three of the events go in a batch
# No CloudEvent without a source, and no message with such an id.
BAD = replace(EVENTS[0], id="9" * 200, body=b'{"specversion":"1.0","id":"9","type":"t"}')


@dataclass(kw_only=True)
class Case:
    """A sink with its receiver.

    Attributes:
        sink: may wait for its receiver as long as it was given.
        bodies: returns what came, byte for byte, a batch as one.
        failures: names of faults, and the error to be expected of each.
        fail: makes the next delivery fail with one of them.
        fail_second: lets the first part of what is sent next arrive, and makes the second Unavailable.
        hang: leaves the next delivery without an answer until the returned function is called.
        rotate: lets the receiver take another secret only, and returns what the sink's file should hold now.
        form: what an event is once it has come.
        read: reads a body.
    """

    sink: Sink
    bodies: Callable[[], list[bytes]]
    failures: Mapping[str, type[DeliveryError]]
    fail: Callable[[str], object]
    fail_second: Callable[[], object]
    hang: Callable[[], Callable[[], None]] = lambda: pytest.fail("nothing to wait for")
    rotate: Callable[[], str] = lambda: pytest.fail("no secret")
    form: Callable[[StoredEvent], Any] = lambda event: event.envelope
    read: Callable[[bytes], Any] = json.loads

    def received(self) -> list[Any]:
        """Return what came, in order."""
        came = [self.read(body) for body in self.bodies()]
        return [one for value in came for one in (value if isinstance(value, list) else [value])]

    def expected(self, events: Sequence[StoredEvent] = EVENTS) -> list[Any]:
        return [self.form(event) for event in events]

    def error(self, *events: StoredEvent) -> DeliveryError:
        """Send what fails."""
        with pytest.raises(DeliveryError) as raised:
            self.sink.send(events or EVENTS[:1])
        return raised.value


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a case is built: with these fixtures, and a time limit of the sink."""

    request: pytest.FixtureRequest
    limit_seconds: float

    def __call__(self, fixture: str) -> Any:
        return self.request.getfixturevalue(fixture)

    @property
    def folder(self) -> Path:
        return Path(self("tmp_path"))

    def write_secret(self, text: str) -> Path:
        """Write the file that the sink reads."""
        file = self.folder / "secret"
        file.write_text(text)
        return file


def memory(_: Place) -> Case:
    sink = MemorySink(max_batch=3)
    failures = {kind.__name__: kind for kind in (Unavailable, Misconfigured, Rejected, Gone)}
    return Case(
        sink=sink,
        bodies=lambda: [event.body for event in sink.received],
        failures=failures,
        fail=lambda name: sink.failures.append(failures[name]("on demand")),
        fail_second=lambda: sink.failures.append(Unavailable("on demand", delivered=1)),
    )


def stdout(place: Place) -> Case:
    file = place.folder / "output"
    output, unwritable = file.open("w"), file.open()
    place.request.addfinalizer(output.close)
    place.request.addfinalizer(unwritable.close)

    def write_to(*files: Any) -> None:
        descriptors = iter([one.fileno() for one in files])
        place("monkeypatch").setattr(stdout_module, "_descriptor", lambda: next(descriptors, output.fileno()))

    write_to()
    return Case(
        sink=StdoutSink(StdoutSettings(kind="stdout")),
        bodies=lambda: file.read_bytes().splitlines(),
        failures={"unwritable": Unavailable},
        fail=lambda _: write_to(unwritable),
        fail_second=lambda: write_to(output, unwritable),
    )


_PROGRAM = """#!/bin/sh
cd {folder}
fault=$(head -n 1 faults)
sed -i 1d faults
case $fault in
    kill) kill -9 $$ ;;
    [0-9]*) exit "$fault" ;;
esac
body=$(cat)
case $body in *'"source"'*) ;; *) exit 65 ;; esac
printf '%s\\n' "$body" >> received
"""


def exec_(place: Place) -> Case:
    faults, file, program = (place.folder / name for name in ("faults", "received", "program"))
    faults.touch()
    file.touch()
    program.write_text(_PROGRAM.format(folder=place.folder))
    program.chmod(0o755)
    return Case(
        sink=ExecSink(ExecSettings(kind="exec", run=(str(program),))),
        bodies=lambda: file.read_bytes().splitlines(),
        failures={"75": Unavailable, "kill": Unavailable, "1": Rejected},
        fail=lambda name: faults.write_text(f"{name}\n"),
        fail_second=lambda: faults.write_text("\n75\n"),
    )


def over_http(sink: Sink, inbox: Inbox, refusals: Mapping[str, type[DeliveryError]], **more: Any) -> Case:
    """Make the case of a sink over HTTP; every refusal repeats the secret."""

    def fail_second() -> None:
        inbox.fault("slow", seconds=0)  # the first one passes
        inbox.fault("503")

    def hang() -> Callable[[], None]:
        inbox.fault("slow", seconds=600, count=None)  # an earlier request may still be on its way
        return inbox.clear_faults

    common = {"503": Unavailable, "401": Misconfigured, "drop": Unavailable, "302": Misconfigured}
    return Case(
        sink=sink,
        bodies=lambda: [one.body for one in inbox.accepted],
        failures={**common, **refusals},
        fail=lambda kind: inbox.fault(kind, body=f"you sent {SECRET}" if kind.isdigit() else ""),
        fail_second=fail_second,
        hang=hang,
        **more,
    )


def webhook(place: Place, **settings: Any) -> Case:
    """Build a webhook's case; with a chat format, what comes is the message that it writes."""
    place("monkeypatch").setattr(webhook_module, "MAX_BATCH_BYTES", BATCH_BYTES)
    inbox = place.request.getfixturevalue("any_inbox" if "format" in settings else "inbox")
    inbox.require_token(SECRET)
    make: MakeWebhook = place("webhook")
    clock, token_file = MovedClock(), place.write_secret(SECRET)
    given = {"bearer_token_file": token_file, "timeout_seconds": place.limit_seconds, **settings}
    sink = make(f"{inbox.url}?sig={SECRET}", clock=clock, **given)

    def rotate() -> str:
        inbox.require_token(NEW_SECRET)
        return NEW_SECRET

    more: dict[str, Any] = {"rotate": rotate}
    if "format" in settings:
        shape = format_class(settings["format"])(sink._settings)
        more["form"] = lambda event: json.loads(json.dumps(shape.write(event.envelope, clock.now())))
    gone = Misconfigured if "format" in settings else Gone
    return over_http(sink, inbox, {"422": Rejected, "410": gone}, **more)


def eventgrid(place: Place, flavor: str) -> Case:
    place("monkeypatch").setattr(eventgrid_module, "MAX_BATCH_BYTES", BATCH_BYTES)
    lab: EventGridLab = place("event_grid")
    settings = EventGridSettings(
        kind="eventgrid",
        endpoint=lab.custom_endpoint if flavor == "custom" else lab.namespace_endpoint("maintenance"),
        timeout_seconds=place.limit_seconds,
        key_file=place.write_secret(SECRET),  # type: ignore[call-arg]
    )
    refusals = {"400": Rejected, "410": Misconfigured, "404": Misconfigured}
    return over_http(EventGridSink(settings), lab, refusals, rotate=lambda: lab.regenerate_key(1))


def apprise(place: Place) -> Case:
    """Build the case of its plugin for JSON over HTTP."""
    inbox: Inbox = place("any_inbox")
    inbox.require_token(SECRET)

    def url(secret: str) -> str:
        where = inbox.url.replace("http", "json")
        return f"{where}?+Authorization=Bearer%20{secret}&rto={place.limit_seconds}"

    given = {"kind": "apprise", "url_file": place.write_secret(url(SECRET))}
    sink = AppriseSink(AppriseSettings.model_validate(given), clock=MovedClock())

    def rotate() -> str:
        inbox.require_token(NEW_SECRET)
        return url(NEW_SECRET)

    common = over_http(sink, inbox, {})
    return replace(
        common,
        bodies=lambda: [one.json()["message"].encode() for one in inbox.accepted],
        failures={name: kind for name, kind in common.failures.items() if name != "302"},
        rotate=rotate,
        form=lambda event: sink.preview(event).body.decode(),
        read=bytes.decode,
    )


def servicebus(place: Place) -> Case:
    bus: ServiceBusLab = place("bus")
    given = {
        "kind": "servicebus",
        "queue": QUEUE,
        "timeout_seconds": place.limit_seconds,
        "connection_string_file": place.write_secret(bus.connection_string),
    }
    sink = ServiceBusSink(ServiceBusSettings.model_validate(given))

    def fail(kind: str) -> None:
        sink.reload()  # an open link is not asked for the right to send
        bus.fault(kind, count=1)

    def hang() -> Callable[[], None]:
        bus.fault("stall")
        return lambda: bus.clear_faults("stall")

    def rotate() -> str:
        place.write_secret(bus.connection_string_with(NEW_SECRET))
        sink.reload()
        return bus.connection_string

    later = dict.fromkeys(("busy", "quota", "drop_before_store"), Unavailable)
    return Case(
        sink=sink,
        bodies=lambda: [message.body for message in bus.entity(QUEUE).messages],
        failures={**later, **dict.fromkeys(("unauthorized", "missing", "refuse_cbs"), Misconfigured)},
        fail=fail,
        fail_second=lambda: bus.fault("busy", count=1, after=1),
        hang=hang,
        rotate=rotate,
    )


@pytest.fixture
def bus() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(entities(), key=SECRET, max_message_bytes=4000) as started:
        yield started


@pytest.fixture
def event_grid() -> Iterator[EventGridLab]:
    with EventGridLab(keys=[SECRET]) as started:
        yield started


@dataclass(frozen=True, kw_only=True)
class Row:
    """A sink by its kind and what builds it: a remote one wants a secret and can hang.

    `rejects`: whether it looks at events, and refuses some for good.
    """

    kind: str
    variant: str = ""
    build: Callable[[Place], Case]
    is_remote: bool = True
    rejects: bool = True


ROWS = [
    Row(kind="memory", build=memory, is_remote=False, rejects=False),
    Row(kind="stdout", build=stdout, is_remote=False, rejects=False),
    Row(kind="exec", build=exec_, is_remote=False),
    Row(kind="webhook", build=webhook),
    Row(kind="webhook", variant="batch", build=lambda place: webhook(place, mode="batch")),
    Row(kind="webhook", variant="slack", build=lambda place: webhook(place, format="slack"), rejects=False),
    Row(kind="apprise", build=apprise, rejects=False),
    Row(kind="servicebus", build=servicebus),
    Row(kind="eventgrid", variant="custom", build=lambda place: eventgrid(place, "custom")),
    Row(kind="eventgrid", variant="namespace", build=lambda place: eventgrid(place, "namespace")),
]


@pytest.fixture
def limit_seconds() -> float:
    return LIMIT_SECONDS


@pytest.fixture
def place(request: pytest.FixtureRequest, limit_seconds: float) -> Place:
    return Place(request=request, limit_seconds=limit_seconds)


def _name(row: Row) -> str:
    return f"{row.kind}-{row.variant}".rstrip("-")


@pytest.fixture(params=ROWS, ids=_name)
def case(request: pytest.FixtureRequest, place: Place) -> Iterator[Case]:
    built = request.param.build(place)
    yield built
    built.sink.close()
    built.sink.close()  # at any time and twice


def for_rows(is_wanted: Callable[[Row], bool]) -> pytest.MarkDecorator:
    """Run a test with these rows alone."""
    return pytest.mark.parametrize("case", [*filter(is_wanted, ROWS)], ids=_name, indirect=True)


for_remote_ones = for_rows(lambda row: row.is_remote)


def test_every_kind_of_sink_has_a_row() -> None:
    assert {row.kind for row in ROWS} == {*SINK_KINDS, "memory"}


def test_all_events_have_arrived_in_their_order_when_send_returns_on_any_thread(case: Case) -> None:
    assert case.sink.max_batch >= 1

    def send() -> None:
        for start in range(0, len(EVENTS), case.sink.max_batch):
            case.sink.send(EVENTS[start : start + case.sink.max_batch])

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert case.received() == case.expected()
    assert len({json.dumps(one) for one in case.received()}) == len(EVENTS)


def test_an_event_that_is_sent_again_arrives_as_it_was(case: Case) -> None:
    case.sink.send(EVENTS[:1])
    case.sink.send(EVENTS[:1])
    assert case.received() == case.expected([EVENTS[0], EVENTS[0]])
    assert len(set(case.bodies())) == 1


# --- failures ---


def test_every_failure_has_its_kind_and_shows_no_secret_and_the_next_delivery_works(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="bridge")
    for name, kind in case.failures.items():
        before = len(case.received())
        case.fail(name)
        error = case.error()  # one event, which no sink can part: of a batch, halves may be taken
        assert (type(error), error.delivered, len(case.received())) == (kind, 0, before)
        assert SECRET not in f"{error}{caplog.text}"
        case.sink.send(EVENTS[:1])
        assert case.received()[before:] == case.expected(EVENTS[:1])
    assert 0 < case.sink.retry_limit_seconds <= 60


def test_a_send_that_fails_in_the_middle_reports_what_arrived_and_the_rest_follows_once(case: Case) -> None:
    case.fail_second()
    events = EVENTS[: case.sink.max_batch]
    if case.sink.max_batch == 1:
        case.sink.send(EVENTS[:1])
        events = EVENTS[1:2]
    error = case.error(*events)
    assert type(error) is Unavailable
    assert (error.delivered == 0) if case.sink.max_batch == 1 else (0 < error.delivered < len(events))
    case.sink.send(events[error.delivered :])
    assert case.received() == case.expected(EVENTS[:2] if case.sink.max_batch == 1 else events)


@for_rows(lambda row: row.rejects)
def test_an_event_that_is_never_accepted_is_rejected_alone(case: Case) -> None:
    before = EVENTS[: case.sink.max_batch - 1][:3]
    after = EVENTS[3 : case.sink.max_batch][:1]
    error = case.error(*before, BAD, *after)
    assert (type(error), error.delivered) == (Rejected, len(before))
    case.sink.send(EVENTS[3:4])
    assert case.received() == case.expected([*before, EVENTS[3]])


@for_remote_ones
def test_a_wrong_secret_is_a_fault_of_the_setup_until_the_right_one_is_read(case: Case, place: Place) -> None:
    secret = case.rotate()
    for _ in range(2):
        error = case.error()
        assert type(error) is Misconfigured
        assert SECRET not in str(error)
    assert case.received() == []
    place.write_secret(f"{secret}\n")
    case.sink.reload()
    case.sink.send(EVENTS[:1])
    assert case.received() == case.expected(EVENTS[:1])


@for_remote_ones
def test_an_answer_that_is_late_but_in_time_is_success(case: Case) -> None:
    case.sink.send(EVENTS[:1])
    release = threading.Timer(0.05, case.hang())
    release.start()
    case.sink.send(EVENTS[1:2])
    release.join()
    assert case.received() == case.expected(EVENTS[:2])


@pytest.mark.parametrize("limit_seconds", [SHORT_SECONDS])
@for_remote_ones
def test_a_receiver_that_is_later_than_the_limit_may_take_it_later(case: Case) -> None:
    send_at_last(case.sink, EVENTS[:1])
    release = case.hang()
    error = case.error(EVENTS[1])
    assert (type(error), error.delivered) == (Unavailable, 0)
    release()
    send_at_last(case.sink, EVENTS[1:2])
    each_once = list({json.dumps(one): one for one in case.received()}.values())
    assert each_once == case.expected(EVENTS[:2])


def send_at_last(sink: Sink, events: Sequence[StoredEvent]) -> None:
    """Send until it works: on a busy machine even a good receiver can be later than a short limit."""

    def is_sent() -> bool:
        with suppress(Unavailable):
            sink.send(events)
            return True
        return False

    wait_until(is_sent)


# --- what it reports ---


def checked(sink: Sink) -> str:
    try:
        return sink.check()
    except Inconclusive as error:
        return str(error)


def test_checks_previews_and_rests_send_nothing_and_show_what_would_be_sent(case: Case) -> None:
    answer, shown = checked(case.sink), case.sink.preview(EVENTS[0])
    case.sink.rest()
    assert answer
    assert SECRET not in "\n".join([answer, *shown.head, shown.body.decode()])
    assert case.bodies() == []
    case.sink.send(EVENTS[:1])
    case.sink.rest()
    assert shown.body == redact(only(case.bodies()).decode()).encode()
    assert all(line.isprintable() for line in shown.head)


def test_a_reload_without_the_secret_never_fails_and_what_was_known_stays(case: Case, place: Place) -> None:
    place.write_secret("").unlink()
    case.sink.reload()
    case.sink.send(EVENTS[:1])
    assert case.received() == case.expected(EVENTS[:1])
