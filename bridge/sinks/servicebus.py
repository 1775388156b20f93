"""Send each event to a Service Bus topic or queue."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, TypeVar

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusMessageBatch, ServiceBusSender
from azure.servicebus.exceptions import MessageSizeExceededError

from bridge.azure.internals import abort_connection, close_socket_on_close
from bridge.azure.servicebus import (
    TRY_SECONDS,
    address_of,
    connect,
    delivery_error,
    link_is_intact,
    make_credential,
    sender_of,
    with_current_secret,
)
from bridge.config.base import read_or_keep
from bridge.config.bus import ServiceBusSettings
from bridge.config.values import check_signing_secrets
from bridge.contract.types import session_id as fill_in
from bridge.errors import DeliveryError, HungError, Rejected, Unavailable
from bridge.events.model import StoredEvent, order_key
from bridge.formats.cloudevents import CONTENT_TYPE
from bridge.http.signing import sign
from bridge.imds.document import names
from bridge.imds.instance import resource_group_of
from bridge.runtime.json import object_of
from bridge.runtime.threads import PauseWatch
from bridge.runtime.time import Clock
from bridge.runtime.worker import Worker
from bridge.sinks.base import RequestPreview, Sink

T = TypeVar("T")

# The SDK does not always keep its time limits; a call that exceeds them by more than this is abandoned.
GRACE_SECONDS = 10.0
CLOSE_SECONDS = 20.0
# The steps of an event and their receipts follow each other within it; to connect takes up to two seconds.
REST_SECONDS = 5.0
# The SDK repeats the ids of the first message for the batch without counting them: three of 128 characters.
ENVELOPE_BYTES = 1600
MAX_RESOURCES_BYTES = 30_000  # Service Bus takes 32 KB for a property, and 64 KB for all


class ServiceBusSink(Sink):
    """A sender, opened on demand, on a thread of its own because the SDK can block without bound."""

    max_batch = 100
    # With a slow failure and the time to connect: delivery within 5 s of a recovery.
    retry_limit_seconds = 3.5

    def __init__(
        self,
        settings: ServiceBusSettings,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to send.

        Args:
            settings: where to, and as whom.
            clock: dates signatures, and times the connection.
        """
        self._given = settings
        self._known_secrets: list[str] = []
        self._settings = read_or_keep(lambda: with_current_secret(settings), settings)
        self._clock = clock or Clock()
        self._address = address_of(self._settings)
        self._worker = Worker(f"servicebus-{settings.entity}")
        self._link, self._was_held_up = _Link(self._settings, self._clock), PauseWatch()
        # 1 once the entity has refused a batch, as one with partitions does: each transfer costs a round trip.
        self._batch_limit = self.max_batch

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Send the events in as few batches as the link allows, in their order."""
        messages, fault = self._messages(events)
        delivered = 0
        try:
            for count in self._send_all(messages):
                delivered += count
        except DeliveryError as error:
            error.delivered = delivered
            raise
        if fault:
            fault.delivered = delivered
            raise fault

    def _send_all(self, messages: Sequence[ServiceBusMessage]) -> Iterator[int]:
        """Send messages, and yield how many each transfer held."""
        if self._was_held_up():
            self._drop()
        sender = self._open() if messages else None
        while sender and messages:
            transfer, count = _first_batch(sender, messages[: self._batch_limit])
            try:
                self._send(transfer)
            except DeliveryError as error:
                if count == 1 or "amqp:not-allowed" not in str(error.__cause__):
                    raise
                self.max_batch = self._batch_limit = 1
            else:
                yield count
                messages = messages[count:]

    def rest(self) -> float:
        """Close the connection a few seconds after the last send: a namespace has fewer than a fleet has VMs."""
        if not self._link.is_open:
            return math.inf
        left_seconds = self._link.used_at + REST_SECONDS - self._clock.monotonic()
        if left_seconds <= 0:
            self._drop()
            return math.inf
        return left_seconds

    def reload(self) -> None:
        """Connect again, with the current connection string and a new token."""
        self._settings = read_or_keep(lambda: with_current_secret(self._given), self._settings)
        self._address = address_of(self._settings)
        self._drop(identity=True)

    def check(self) -> str:
        """Open a sender, which needs the entity and the right to send."""
        self._drop()
        self._open()
        return f"{self._address}: ready to send"

    def preview(self, event: StoredEvent) -> RequestPreview:
        """Return the message for an event."""
        messages, fault = self._messages([event])
        if fault:
            raise fault
        shown = ("content_type", "message_id", "subject", "correlation_id", "session_id", "partition_key")
        broker: dict[Any, Any] = {"to": self._address, **{name: getattr(messages[0], name) for name in shown}}
        named = {**broker, **(messages[0].application_properties or {})}
        return RequestPreview(
            head=tuple(f"{name}: {value}" for name, value in named.items() if value is not None),
            body=event.body,
        )

    def close(self) -> None:
        """Close the connection."""
        self._drop(identity=True)

    def _messages(self, events: Sequence[StoredEvent]) -> tuple[list[ServiceBusMessage], Rejected | None]:
        """Convert events to messages, up to the first that cannot be converted: it must not delay those before it."""
        if given := self._given.signing_secrets:
            # A secret may change while no message is sent, and the readers know only the current one.
            self._known_secrets = read_or_keep(
                lambda: check_signing_secrets(given.read()), self._known_secrets
            )
        messages: list[ServiceBusMessage] = []
        for event in events:
            try:
                signature = (
                    sign(self._known_secrets, event.id, self._clock.now(), event.body) if given else None
                )
                messages.append(to_message(event, self._settings.session, signature))
            except Exception as error:  # noqa: BLE001 - any error would be the same at each try
                return messages, Rejected(
                    f"the event cannot be converted to a message ({type(error).__name__}: {error})"
                )
        return messages, None

    def _open(self) -> ServiceBusSender:
        try:
            return self._call(self._link.open, limit_seconds=TRY_SECONDS + GRACE_SECONDS)
        except DeliveryError as error:
            error.is_unreached = True
            raise

    def _send(self, transfer: _Transfer) -> None:
        link, timeout_seconds = self._link, self._settings.timeout_seconds
        self._call(
            lambda: link.send(transfer, timeout_seconds), limit_seconds=timeout_seconds + GRACE_SECONDS
        )

    def _call(self, function: Callable[[], T], *, limit_seconds: float) -> T:
        """Run on the worker; most errors close the connection, so that the next try starts with a new one."""
        link = self._link
        try:
            return self._worker.call(
                function, limit_seconds=limit_seconds, abort=link.abort, afterwards=link.close_all
            )
        except HungError as error:
            self._link = _Link(self._settings, self._clock)  # the hanging thread may hold the old one's locks
            if error.final:
                raise
            raise Unavailable(f"{self._address}: {error}") from error
        except Exception as error:
            if not link_is_intact(error):
                self._drop()
            if isinstance(error, DeliveryError):
                raise
            raise delivery_error(error, self._address) from error

    def _drop(self, *, identity: bool = False) -> None:
        """Close the link without waiting: the SDK can take a second for it, or forever."""
        link = self._link
        self._link = _Link(self._settings, self._clock, None if identity else link.credential)
        if link.is_open:
            self._worker.leave(link.close_all if identity else link.close, limit_seconds=CLOSE_SECONDS)


_Transfer = ServiceBusMessage | ServiceBusMessageBatch


class _Link:
    """A client with its sender, used on the worker's thread; the credential, which caches its token, outlives it."""

    def __init__(self, settings: ServiceBusSettings, clock: Clock, credential: Any = None) -> None:
        self._settings = settings
        self._clock = clock
        self.credential = credential
        self._client: ServiceBusClient | None = None
        self._sender: ServiceBusSender | None = None
        self._is_aborted = False
        self.used_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, or was an attempt at one."""
        return self._client is not None

    def open(self) -> ServiceBusSender:
        """Connect unless connected, and return the sender."""
        if self._sender is None:
            self.credential = self.credential or make_credential(self._settings)
            self._client = connect(self._settings, credential=self.credential)
            self._sender = sender_of(self._client, self._settings)
            close_socket_on_close(self._sender)
            self.used_at = self._clock.monotonic()
        if self._is_aborted:  # before it had a connection that could be ended
            raise Unavailable("it was left behind")
        self._sender.create_message_batch()  # opens the link unless it is open
        return self._sender

    def send(self, transfer: _Transfer, timeout_seconds: float) -> None:
        """Send a message or a batch, and return when the broker has it."""
        self.open().send_messages(transfer, timeout=timeout_seconds)
        self.used_at = self._clock.monotonic()

    def abort(self) -> None:
        """End the connection, from any thread: a call that hangs on it may return, and none connects any more."""
        self._is_aborted = True
        abort_connection(self._sender)

    def close(self) -> None:
        """Close sender and client."""
        if self._client:
            self._client.close()

    def close_all(self) -> None:
        """Close the credential, too."""
        try:
            self.close()
        finally:
            if self.credential:
                self.credential.close()


def _first_batch(sender: ServiceBusSender, messages: Sequence[ServiceBusMessage]) -> tuple[_Transfer, int]:
    """Return a batch of the first messages, as many as fit and have one session, and their number."""
    max_bytes = sender.create_message_batch().max_size_in_bytes - ENVELOPE_BYTES
    batch = sender.create_message_batch(max_bytes)
    with suppress(MessageSizeExceededError):
        for message in takewhile(lambda one: one.session_id == messages[0].session_id, messages):
            batch.add_message(message)
    # The broker decides: a single message may be larger than a batch.
    return (batch, len(batch)) if len(batch) > 1 else (messages[0], 1)


def to_message(
    event: StoredEvent, session: str = "", signature: Mapping[Any, Any] | None = None
) -> ServiceBusMessage:
    """Convert an event to a message: the id for duplicate detection, properties for filters, JSON as body."""
    envelope = event.envelope
    properties: dict[str | bytes, Any] = {
        f"cloudEvents_{name}": _text(value if isinstance(value, str) else json.dumps(value))
        for name, value in envelope.items()
        if name not in ("data", "data_base64") and value is not None
    }
    for name in ("EventType", "EventStatus", "EventSource"):
        if event.data.get(name):
            properties[name] = _text(event.data[name])
    if "Resources" in event.data:
        properties["Resources"] = _resources(names(event.data["Resources"]))
    correlation = envelope.get("correlationid")
    session_id = _session_id(event, session) if session else None
    return ServiceBusMessage(
        event.body,
        content_type=CONTENT_TYPE,
        message_id=event.id,
        subject=event.type,
        correlation_id=None if correlation is None else _text(correlation),
        session_id=session_id,
        # What has an order comes to one partition, and so do copies of several VMs.
        partition_key=session_id or fill_in("{key}", key=order_key(envelope)),
        application_properties={**properties, **(signature or {})},
    )


def _resources(given: Sequence[str]) -> str:
    """Write names for filters, `,web-0,web-1,`; those beyond what a property may have are `,*,`."""
    text, free = ",", MAX_RESOURCES_BYTES
    for name in map(_text, given):
        free -= len(name.encode()) + 1
        if free < 0:
            return f"{text}*,"
        text += f"{name},"
    return text


def _session_id(event: StoredEvent, template: str) -> str:
    """Fill in the template; an empty result becomes the subject, because a session-enabled entity needs an id."""
    envelope = event.envelope
    vm = object_of(event.data.get("Vm"))
    subject = str(envelope.get("subject") or event.id)  # a relayed event may have none
    given = fill_in(
        template,
        event=str(envelope.get("correlationid") or subject),
        vm=str(vm.get("Name") or ""),
        resource_group=resource_group_of(str(vm.get("ResourceId") or "")),
        type=event.type,
    )
    return given or fill_in("{subject}", subject=subject)


def _text(value: Any) -> str:
    """Convert a value to text that UTF-8 can encode: JSON allows lone surrogates, AMQP does not."""
    text = str(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
