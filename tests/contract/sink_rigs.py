"""Each sink with its receiver, as the contract of bridge/sinks/base.py needs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridge.config.bus import EventGridSettings, ServiceBusSettings
from bridge.config.registry import format_class
from bridge.config.sinks import ExecSettings, StdoutSettings
from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.formats.base import ChatFormat
from bridge.sinks import eventgrid as eventgrid_module
from bridge.sinks import stdout as stdout_module
from bridge.sinks import webhook as webhook_module
from bridge.sinks.base import Sink
from bridge.sinks.eventgrid import EventGridSink
from bridge.sinks.exec import ExecSink
from bridge.sinks.servicebus import ServiceBusSink
from bridge.sinks.stdout import StdoutSink
from bridge.sinks.webhook import WebhookSink
from tests.support.clock import MovedClock
from tests.support.eventgrid import EventGridLab
from tests.support.inbox import Inbox
from tests.support.memory_sink import MemorySink
from tests.support.process import stored_event
from tests.support.receivers import ROUTING_KEY
from tests.support.servicebus import ServiceBusLab

SECRET = ROUTING_KEY  # of every sink, not only of PagerDuty's format
NEW_SECRET = "not-to-be-shown-either"  # noqa: S105 - a test's
EVENTS = [stored_event(number, Description=f'é "quoted"\n{number}') for number in range(7)]
BATCH_BYTES = 3 * len(EVENTS[0].body) + 10  # three of the events go in a batch

Fail = Callable[[], type[DeliveryError]]


def _envelope(event: StoredEvent) -> Any:
    return event.envelope


@dataclass(kw_only=True)
class Rig:
    """A sink with its receiver.

    Attributes:
        sink: may wait for its receiver as long as the row was given.
        received: returns what came, in order, each as `form` makes it of the event.
        bodies: returns what came, byte for byte, a batch as one.
        form: what an event is once it has come.
        failures: each makes the next delivery fail and returns the error to be expected of it.
        fail_second: lets the first part of what is sent next arrive, and makes the second fail.
        hang: leaves the next delivery without an answer until the returned function is called; None where there
            is no answer to wait for.
        rotate: lets the receiver take another secret only, and returns what the sink's file should hold now;
            None where there is no secret.
        fault: queues a fault of the lab's HTTP server by its name; None where there is no HTTP.
    """

    sink: Sink
    received: Callable[[], list[Any]]
    bodies: Callable[[], list[bytes]]
    form: Callable[[StoredEvent], Any] = _envelope
    failures: Sequence[Fail]
    fail_second: Fail
    hang: Callable[[], Callable[[], None]] | None = None
    rotate: Callable[[], str] | None = None
    fault: Callable[[str], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rig is built: `secret_file` is the one that its sink reads."""

    stack: ExitStack
    folder: Path
    monkeypatch: pytest.MonkeyPatch
    limit_seconds: float

    @property
    def secret_file(self) -> Path:
        return self.folder / "secret"

    def write_secret(self, text: str) -> Path:
        self.secret_file.write_text(text)
        return self.secret_file


Build = Callable[[Place], Rig]


def failing(kind: type[DeliveryError], prepare: Callable[..., object], *given: Any, **options: Any) -> Fail:
    """Return what makes the next delivery fail by calling `prepare`, with an error of this kind."""

    def fail() -> type[DeliveryError]:
        prepare(*given, **options)
        return kind

    return fail


def memory(_: Place) -> Rig:
    sink = MemorySink(max_batch=3)

    def fail(kind: type[DeliveryError], delivered: int = 0) -> Fail:
        return failing(kind, lambda: sink.failures.append(kind("on demand", delivered=delivered)))

    return Rig(
        sink=sink,
        received=lambda: [event.envelope for event in sink.received],
        bodies=lambda: [event.body for event in sink.received],
        failures=[fail(kind) for kind in (Unavailable, Misconfigured, Rejected, Gone)],
        fail_second=fail(Unavailable, delivered=1),
    )


def stdout(place: Place) -> Rig:
    file = place.folder / "output"
    output = place.stack.enter_context(file.open("w"))
    unwritable = place.stack.enter_context(file.open())
    place.monkeypatch.setattr(stdout_module, "_descriptor", output.fileno)

    def write_to(*descriptors: int) -> None:
        numbers = iter(descriptors)
        place.monkeypatch.setattr(stdout_module, "_descriptor", lambda: next(numbers, output.fileno()))

    def lines() -> list[bytes]:
        return file.read_bytes().splitlines()

    return Rig(
        sink=StdoutSink(StdoutSettings(kind="stdout")),
        received=lambda: [json.loads(line) for line in lines()],
        bodies=lines,
        failures=[failing(Unavailable, write_to, unwritable.fileno())],
        fail_second=failing(Unavailable, write_to, output.fileno(), unwritable.fileno()),
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


def exec_(place: Place) -> Rig:
    faults, file, program = (place.folder / name for name in ("faults", "received", "program"))
    faults.touch()
    file.touch()
    program.write_text(_PROGRAM.format(folder=place.folder))
    program.chmod(0o755)

    def lines() -> list[bytes]:
        return file.read_bytes().splitlines()

    return Rig(
        sink=ExecSink(ExecSettings(kind="exec", run=(str(program),))),
        received=lambda: [json.loads(line) for line in lines()],
        bodies=lines,
        failures=[
            failing(Unavailable, faults.write_text, "75\n"),
            failing(Unavailable, faults.write_text, "kill\n"),
            failing(Rejected, faults.write_text, "1\n"),
        ],
        fail_second=failing(Unavailable, faults.write_text, "\n75\n"),
    )


def _http_rig(
    sink: Sink, inbox: Inbox, failures: Sequence[tuple[str, type[DeliveryError]]], **more: Any
) -> Rig:
    """Make the rig of a sink over HTTP; every refusal repeats the secret."""

    def fault(kind: str) -> None:
        inbox.fault(kind, body=f"you sent {SECRET}" if kind.isdigit() else "")

    def fault_second() -> None:
        inbox.fault("slow", seconds=0)  # the first one passes
        inbox.fault("503")

    def hang() -> Callable[[], None]:
        inbox.fault("slow", seconds=600)
        return inbox.clear_faults

    given: dict[str, Any] = {
        "received": inbox.events,
        "fail_second": failing(Unavailable, fault_second),
        **more,
    }
    return Rig(
        sink=sink,
        bodies=lambda: [one.body for one in inbox.accepted],
        failures=[failing(kind, fault, name) for name, kind in failures],
        hang=hang,
        fault=inbox.fault,
        **given,
    )


def webhook(*, format: str = "cloudevents", **settings: Any) -> Build:  # noqa: A002 - the setting's name
    """Build a webhook's rig; with a chat format, what comes is the message that it writes."""

    def build(place: Place) -> Rig:
        place.monkeypatch.setattr(webhook_module, "MAX_BATCH_BYTES", BATCH_BYTES)
        is_chat_format = format != "cloudevents"
        inbox = place.stack.enter_context(Inbox(strict=not is_chat_format, token=SECRET))
        given = {
            "kind": "webhook",
            "url": f"{inbox.url}?sig={SECRET}",
            "format": format,
            "bearer_token_file": place.write_secret(SECRET),
            "timeout_seconds": place.limit_seconds,
            **settings,
        }
        clock = MovedClock()
        class_ = format_class(format)
        built = class_.settings(**given)

        def rotate() -> str:
            inbox.require_token(NEW_SECRET)
            return NEW_SECRET

        more: dict[str, Any] = {"rotate": rotate}
        if is_chat_format:
            shape: ChatFormat = class_(built)
            more["form"] = lambda event: json.loads(json.dumps(shape.write(event.envelope, clock.now())))
            more["received"] = lambda: [one.json() for one in inbox.accepted]
        failures: list[tuple[str, type[DeliveryError]]] = [("503", Unavailable), ("401", Misconfigured)]
        failures += [("422", Rejected), ("410", Misconfigured if is_chat_format else Gone)]
        failures += [("drop", Unavailable), ("redirect", Misconfigured)]
        return _http_rig(WebhookSink(built, clock=clock), inbox, failures, **more)

    return build


def eventgrid(flavor: str) -> Build:
    def build(place: Place) -> Rig:
        place.monkeypatch.setattr(eventgrid_module, "MAX_BATCH_BYTES", BATCH_BYTES)
        lab = place.stack.enter_context(EventGridLab(keys=[SECRET]))
        endpoint = lab.custom_endpoint if flavor == "custom" else lab.namespace_endpoint("maintenance")
        given: dict[str, Any] = {
            "kind": "eventgrid",
            "endpoint": endpoint,
            "timeout_seconds": place.limit_seconds,
        }
        given["key_file"] = place.write_secret(SECRET)
        sink = EventGridSink(EventGridSettings.model_validate(given))
        failures: list[tuple[str, type[DeliveryError]]] = [("503", Unavailable), ("401", Misconfigured)]
        failures += [("400", Rejected), ("410", Misconfigured), ("404", Misconfigured)]
        failures += [("drop", Unavailable), ("redirect", Misconfigured)]
        return _http_rig(sink, lab, failures, rotate=lambda: lab.regenerate_key(1))

    return build


def servicebus(entity: str) -> Build:
    def build(place: Place) -> Rig:
        topic = {"Name": "topic", "Subscriptions": [{"Name": "all"}]}
        namespace = {"Name": "lab", "Queues": [{"Name": "queue"}], "Topics": [topic]}
        config = {"UserConfig": {"Namespaces": [namespace]}}
        lab = place.stack.enter_context(ServiceBusLab(config, key=SECRET, max_message_bytes=4000))
        given = {
            "kind": "servicebus",
            entity: entity,
            "timeout_seconds": place.limit_seconds,
            "connection_string_file": place.write_secret(lab.connection_string),
        }
        sink = ServiceBusSink(ServiceBusSettings.model_validate(given))
        stored = lab.entity("queue" if entity == "queue" else "topic/Subscriptions/all")

        def fault(kind: str) -> None:
            sink.reload()  # an open link is not asked for the right to send
            lab.fault(kind, count=1)

        def hang() -> Callable[[], None]:
            lab.fault("stall")
            return lambda: lab.clear_faults("stall")

        def rotate() -> str:
            place.write_secret(lab.connection_string_with(NEW_SECRET))
            sink.reload()
            return lab.connection_string

        failures: list[tuple[str, type[DeliveryError]]] = [
            ("busy", Unavailable),
            ("quota", Unavailable),
            ("drop_before_store", Unavailable),
            ("unauthorized", Misconfigured),
            ("missing", Misconfigured),
            ("refuse_cbs", Misconfigured),
        ]
        return Rig(
            sink=sink,
            received=lambda: [json.loads(message.body) for message in stored.messages],
            bodies=lambda: [message.body for message in stored.messages],
            failures=[failing(kind, fault, name) for name, kind in failures],
            fail_second=failing(Unavailable, lab.fault, "busy", count=1, after=1),
            hang=hang,
            rotate=rotate,
        )

    return build
