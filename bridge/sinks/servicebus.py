"""Send each event to a Service Bus topic or queue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSender
from azure.servicebus.exceptions import MessageSizeExceededError

from bridge.bus import IDLE_LIMIT_SECONDS, connect, delivery_error, where
from bridge.config import ServiceBusSettings
from bridge.errors import DeliveryError, HungError, Unavailable
from bridge.formats.cloudevents import CONTENT_TYPE
from bridge.model import StoredEvent, names, resource_group_of
from bridge.runtime import Clock, Worker

# Opening takes half a second; a silent peer is given up after this.
OPEN_SECONDS = 20.0


class ServiceBusSink:
    """One long-lived sender, on a thread of its own because the SDK can block without bound."""

    max_batch = 100
    retry_limit_seconds = 4.0  # half a second to connect included, deliveries go on within five of its return

    def __init__(self, settings: ServiceBusSettings, *, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or Clock()
        self._place = where(settings)
        self._worker = Worker(f"servicebus-{settings.entity}")
        self._link: _Link | None = None

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Send the events in as few batches as the link allows, in their order."""
        link = self._open_link()
        progress = _Progress()
        limit_seconds = self._settings.timeout_seconds * 2 + OPEN_SECONDS
        try:
            self._call(lambda: link.send(events, progress), limit_seconds=limit_seconds)
        except DeliveryError as error:
            error.delivered = progress.delivered
            raise

    def rest(self) -> None:
        """Reopen the sender before the service gives it up for being idle."""
        link = self._link
        if link and self._clock.monotonic() - link.used_at >= IDLE_LIMIT_SECONDS:
            self._drop()
            self._call(self._open_link().open, limit_seconds=OPEN_SECONDS)

    def reload(self) -> None:
        """Connect anew, with the connection string as it stands now."""
        self._drop()
        self._place = where(self._settings)

    def check(self) -> str:
        """Open a sender, which needs the entity and the right to send."""
        self._call(self._open_link().open, limit_seconds=OPEN_SECONDS)
        return f"{self._place} lets us send"

    def close(self) -> None:
        """Give up the connection."""
        self._drop()
        self._worker.close()

    def _open_link(self) -> _Link:
        if self._link is None:
            self._link = _Link(self._settings, self._clock)
        return self._link

    def _call(self, function: Any, *, limit_seconds: float) -> None:
        """Run on the worker; whatever fails costs the connection, so that the next try starts from nothing."""
        try:
            self._worker.call(function, limit_seconds=limit_seconds)
        except HungError as error:
            self._link = None  # it stays with the thread that hangs
            if error.final:
                raise
            raise Unavailable(f"{self._place}: {error}") from error
        except DeliveryError:
            self._drop()
            raise
        except MessageSizeExceededError as error:
            raise delivery_error(error, self._place) from error
        except Exception as error:
            self._drop()
            raise delivery_error(error, self._place) from error

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link:
            with contextlib.suppress(Exception):  # it is given up anyway
                self._worker.call(link.close, limit_seconds=1.0)


class _Progress:
    """How many events of a `send` are with the broker; told across threads when the call fails."""

    delivered = 0


class _Link:
    """A client with its sender; used on the worker's thread only."""

    def __init__(self, settings: ServiceBusSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._client: ServiceBusClient | None = None
        self._sender: ServiceBusSender | None = None
        self.used_at = clock.monotonic()

    def open(self) -> ServiceBusSender:
        """Connect, unless that is done, and return the sender."""
        if self._sender is None:
            self._client = connect(self._settings)
            get = self._client.get_topic_sender if self._settings.topic else self._client.get_queue_sender
            self._sender = get(self._settings.entity)
            self._sender.create_message_batch()  # opens the link
            self.used_at = self._clock.monotonic()
        return self._sender

    def send(self, events: Sequence[StoredEvent], progress: _Progress) -> None:
        """Send all, counting in `progress` what the broker has."""
        sender = self.open()
        for batch, count in _batches(sender, [to_message(event, self._settings.session) for event in events]):
            sender.send_messages(batch, timeout=self._settings.timeout_seconds)
            progress.delivered += count
            self.used_at = self._clock.monotonic()

    def close(self) -> None:
        """Close sender and client."""
        if self._client:
            self._client.close()


def _batches(sender: ServiceBusSender, messages: Sequence[ServiceBusMessage]) -> Iterator[tuple[Any, int]]:
    """Cut messages into what one transfer can carry; a batch is of one session."""
    for _, same_session in groupby(messages, key=lambda message: message.session_id):
        batch, count = sender.create_message_batch(), 0
        for message in same_session:
            try:
                batch.add_message(message)
            except MessageSizeExceededError:
                if count:
                    yield batch, count
                    batch, count = sender.create_message_batch(), 0
                if not _fits(batch, message):
                    yield message, 1  # the broker decides: alone, a message may be larger than in a batch
                    continue
            count += 1
        if count:
            yield batch, count


def _fits(batch: Any, message: ServiceBusMessage) -> bool:
    try:
        batch.add_message(message)
    except MessageSizeExceededError:
        return False
    return True


def to_message(event: StoredEvent, session: str = "") -> ServiceBusMessage:
    """Lay an event down as a message: the id for duplicate detection, properties for filters, JSON as body."""
    envelope = event.envelope
    data = envelope.get("data") or {}
    vm = data.get("Vm") or {}
    properties: dict[str | bytes, Any] = {
        f"cloudEvents_{name}": str(value) for name, value in envelope.items() if name != "data"
    }
    for name in ("EventType", "EventStatus", "EventSource"):
        if data.get(name):
            properties[name] = str(data[name])
    if "Resources" in data:
        properties["Resources"] = "".join(f",{name}" for name in names(data["Resources"])) + ","
    session_id = session.format(
        event=envelope.get("correlationid", envelope["subject"]),
        vm=str(vm.get("Name") or "").lower(),
        resource_group=resource_group_of(str(vm.get("ResourceId") or "")).lower(),
        type=event.type,
    )
    return ServiceBusMessage(
        event.body,
        content_type=CONTENT_TYPE,
        message_id=event.id,
        subject=event.type,
        correlation_id=envelope.get("correlationid"),
        session_id=session_id or None,
        application_properties=properties,
    )
