"""How fast events that wait go to Service Bus, against the bare SDK sending the same batches."""

from __future__ import annotations

import statistics
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
from tests.bench import apart, bus, parts, sample
from tests.bench.measure import BenchError, Progress, Row, spread

EVENTS = 3_000
ROUNDS = 5
WARM_UP = 3  # transfers, the first of which opens the link
LIMIT_SECONDS = 20.0


_Ready = tuple[bytes, ServiceBusMessage]


class _Task(NamedTuple):
    folder: Path
    sink: str  # a new one for the outbox each time, so that everything waits for it
    address: str


class _Sent(NamedTuple):
    rate: float
    cpu_us: float
    transfers: list[int]


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Send the same events through the bridge and barely, in turn."""
    progress.begin(f"bus-drain: {EVENTS:,} events are prepared")
    state = folder / "bus-drain"
    parts.fill_outbox(state, EVENTS)
    ours: list[_Sent] = []
    theirs: list[_Sent] = []
    with bus.lab() as lab:
        address = lab("address")
        for number in range(ROUNDS):
            progress.begin(f"bus-drain: round {number + 1} of {ROUNDS}, through the bridge and barely")
            task = _Task(state, f"bus{number}", address)
            ways = ((_drained, ours), (_bare, theirs))
            for function, known in ways if number % 2 == 0 else reversed(ways):
                known.append(apart.run(function, task, limit_seconds=LIMIT_SECONDS))
        if (arrived := lab("enqueued", bus.TOPIC)) != EVENTS * ROUNDS * 2:
            raise BenchError(f"{arrived:,} messages came to the bus, not {EVENTS * ROUNDS * 2:,}")
        bus.check(lab)
    cuts = {tuple(sent.transfers) for sent in (*ours, *theirs)}
    if len(cuts) != 1:
        raise BenchError("the bridge and the bare SDK did not send the same batches")
    rates = [sent.rate for sent in ours], [sent.rate for sent in theirs]
    costs = [sent.cpu_us for sent in ours], [sent.cpu_us for sent in theirs]
    ratios = [one / other for one, other in zip(*rates, strict=True)]  # side by side, whatever else runs
    middle = [statistics.median(values) for values in (*rates, *costs)]
    return [
        Row(
            name="events a second to Service Bus / the bare SDK's",
            measured=statistics.median(ratios),
            unit="x",
            limit=0.85,
            at_least=True,
            how=f"median of {ROUNDS} rounds, in turn; medians {middle[0]:,.0f} and {middle[1]:,.0f}, {EVENTS:,} in "
            f"{len(ours[0].transfers)} equal batches with equal properties; outbox to the broker's answer; "
            f"{middle[2]:.0f} and {middle[3]:.0f} us of CPU an event",
            details={
                "events_a_second": spread(rates[0], digits=0),
                "bare_events_a_second": spread(rates[1], digits=0),
                "cpu_us": spread(costs[0], digits=1),
                "bare_cpu_us": spread(costs[1], digits=1),
                "ratio_by_round": [round(ratio, 3) for ratio in ratios],
                "batch": max(ours[0].transfers),
            },
        )
    ]


def _drained(task: _Task) -> _Sent:
    outbox = parts.open_outbox(task.folder, task.sink)
    settings = ServiceBusSettings(kind="servicebus", connection_string=Secret(task.address), topic=bus.TOPIC)
    with bus.sends() as border:
        sender = parts.dispatcher(task.sink, ServiceBusSink(settings), outbox)
        sender.stop_when_drained()
        sender.run()
    error = sender.status()["last_error"]
    outbox.close()
    return _sent(border, error)


def _bare(task: _Task) -> _Sent:
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


def _sent(border: bus.Border, error: str | None) -> _Sent:
    if sum(border.counts) != EVENTS:
        raise BenchError(f"{sum(border.counts):,} of {EVENTS:,} events were sent: {error}")
    return _Sent(border.rate(WARM_UP), border.cpu_us(WARM_UP), border.counts)
