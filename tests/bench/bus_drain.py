"""How fast events that wait go to Service Bus, against the bare SDK sending the same batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusMessageBatch, ServiceBusSender
from azure.servicebus.exceptions import MessageSizeExceededError

from bridge.config.base import Secret
from bridge.config.bus import ServiceBusSettings
from bridge.events.model import StoredEvent
from bridge.formats.cloudevents import CONTENT_TYPE
from bridge.service.dispatcher import PAGE_EVENTS
from bridge.sinks.servicebus import ServiceBusSink, to_message
from tests.bench import bus, parts, sample
from tests.bench.measure import BenchError, Progress, Row

EVENTS = 3_000
WARM_UP = 3  # transfers, the first of which opens the link


_Ready = tuple[bytes, ServiceBusMessage]


class _Task(NamedTuple):
    folder: Path
    sink: str  # a new one for the outbox each time, so that everything waits for it
    address: str


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Send the same events through the bridge and barely, in turn."""
    progress.begin(f"bus-drain: {EVENTS:,} events are prepared")
    state = folder / "bus-drain"
    parts.fill_outbox(state, EVENTS)
    with bus.lab() as lab:
        address = lab("address")
        row = bus.compare(
            (_drained, _bare),
            lambda number: _Task(state, f"bus{number}", address),
            progress,
            name="events a second to Service Bus / the bare SDK's",
            limit=0.85,
            how=f"{EVENTS:,} in equal batches with equal properties; outbox to the broker's answer",
        )
        if (arrived := lab("enqueued", bus.TOPIC)) != EVENTS * bus.ROUNDS * 2:
            raise BenchError(f"{arrived:,} messages came to the bus, not {EVENTS * bus.ROUNDS * 2:,}")
        bus.check(lab)
    return [row]


def _drained(task: _Task) -> bus.Done:
    outbox = parts.open_outbox(task.folder, task.sink)
    settings = ServiceBusSettings(kind="servicebus", connection_string=Secret(task.address), topic=bus.TOPIC)
    with bus.sends() as border:
        sender = parts.dispatcher(task.sink, ServiceBusSink(settings), outbox)
        sender.stop_when_drained()
        sender.run()
    error = sender.status()["last_error"]
    outbox.close()
    return _sent(border, error)


def _bare(task: _Task) -> bus.Done:
    """Send with the SDK alone; what goes into the messages is ready, the messages are made of it."""
    ready = [_ready(number) for number in range(EVENTS)]
    with (
        bus.sends() as border,
        ServiceBusClient.from_connection_string(task.address, retry_total=0) as client,
        client.get_topic_sender(bus.TOPIC) as sender,
    ):
        for begin in range(0, EVENTS, PAGE_EVENTS):
            for batch in _batches(sender, ready[begin : begin + PAGE_EVENTS]):
                sender.send_messages(batch, timeout=bus.TRY_SECONDS)
    return _sent(border, None)


def _batches(
    sender: ServiceBusSender, ready: list[tuple[bytes, ServiceBusMessage]]
) -> Iterator[ServiceBusMessageBatch]:
    batch = sender.create_message_batch()
    for body, one in ready:
        message = ServiceBusMessage(
            body,
            content_type=CONTENT_TYPE,
            message_id=one.message_id,
            subject=one.subject,
            correlation_id=one.correlation_id,
            application_properties=one.application_properties,
        )
        try:
            batch.add_message(message)
        except MessageSizeExceededError:
            yield batch
            batch = sender.create_message_batch()
            batch.add_message(message)
    yield batch


def _ready(number: int) -> _Ready:
    """Return an event's body, and the message that the bridge makes of it, whose properties are taken."""
    event, body = sample.event(number)
    stored = StoredEvent(seq=number + 1, id=event.id, type=event.type, stored_at=time.time(), body=body)
    return body, to_message(stored)


def _sent(border: bus.Border, error: str | None) -> bus.Done:
    if sum(border.counts) != EVENTS:
        raise BenchError(f"{sum(border.counts):,} of {EVENTS:,} events were sent: {error}")
    return bus.Done(border.rate(WARM_UP), border.cpu_us(WARM_UP))
