"""The two kinds of links that carry messages: those a client sends on, and those it receives on."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from bridge.lab.servicebus.amqp import proton
from bridge.lab.servicebus.connection import Connection, Service
from bridge.lab.servicebus.messages import (
    NOT_ALLOWED,
    NOT_IMPLEMENTED,
    TIMEOUT,
    TOO_LARGE,
    Refused,
    parse_transfer,
)
from bridge.lab.servicebus.queues import MessageQueue

CREDIT = 1000
SESSION_FILTER = "com.microsoft:session-filter"
LOCKED_UNTIL = "com.microsoft:locked-until-utc"
OPERATION_TIMEOUT = "com.microsoft:timeout"
BATCH_LIMIT = "com.microsoft:max-message-batch-size"
SESSION_WAIT_SECONDS = 60.0
# .NET's ticks: units of 100 ns since the year 1.
TICKS_1970 = 621_355_968_000_000_000
TICKS_A_SECOND = 10_000_000


def condition(refused: Refused) -> Any:
    """Return an error for proton; without an info map, clients would wait for it without end."""
    info = {proton.symbol("com.microsoft:tracking-id"): str(uuid.uuid4())}
    return proton.Condition(refused.condition, refused.description, info)


def reject(delivery: Any, refused: Refused) -> None:
    """Reject a delivery with an error."""
    delivery.local.condition = condition(refused)
    delivery.update(proton.Delivery.REJECTED)
    delivery.settle()


def refuse(link: Any, refused: Refused) -> None:
    """Refuse a link as AMQP demands: attach it without its terminus, then detach it with the error."""
    if link.is_receiver:
        link.source.address = link.remote_source.address
        link.target.type = proton.Terminus.UNSPECIFIED
    else:
        link.source.type = proton.Terminus.UNSPECIFIED
        link.target.address = link.remote_target.address
    link.open()
    link.condition = condition(refused)
    link.close()


class Endpoint:
    """The lab's end of one link."""

    opened = True

    def __init__(self, bus: Service, connection: Connection, link: Any, path: str) -> None:
        """Take over proton's link to an entity."""
        self.bus = bus
        self.connection = connection
        self.link = link
        self.path = path

    def attach(self) -> None:
        """Accept the terms that the client asked for."""
        link = self.link
        link.source.address = link.remote_source.address
        link.target.address = link.remote_target.address
        link.snd_settle_mode = link.remote_snd_settle_mode
        link.rcv_settle_mode = link.remote_rcv_settle_mode
        link.open()

    def flowed(self) -> None:
        """Handle a change of the client's credit."""

    def delivered(self, delivery: Any) -> None:
        """Handle a transfer, or the settlement of one."""

    def closed(self) -> None:
        """Release what the link held."""

    def read(self) -> bytes:
        """Return the bytes of the current transfer, and go on to the next."""
        data = bytes(self.link.recv(self.link.current.pending) or b"")
        self.link.advance()
        return data

    def intercepted(self, stage: str, delivery: Any = None) -> bool:
        """Return whether a test's fault takes over; it may raise Refused, too."""
        return self.bus.intercept(stage, self.connection, self.path, lambda: self.delivered(delivery))

    def detach(self, refused: Refused) -> None:
        """Detach the link with an error."""
        self.bus.drop(self)
        if self.opened:
            self.link.condition = condition(refused)
            self.link.close()
        else:
            refuse(self.link, refused)
        self.bus.send_later(self.connection)


class Producer(Endpoint):
    """Receive what a client sends to a queue or a topic."""

    def __init__(self, bus: Service, connection: Connection, link: Any, path: str) -> None:
        super().__init__(bus, connection, link, path)
        bus.broker.target(path)
        link.max_message_size = bus.max_message_bytes
        link.properties = {proton.symbol(BATCH_LIMIT): proton.ulong(bus.max_message_bytes)}
        self.attach()
        self.grant()

    def grant(self) -> None:
        """Grant credit when half is used up, and process what was sent without credit."""
        if self.intercepted("credit"):
            return
        while not self.connection.closed and (delivery := self.link.current):
            if delivery.partial or not delivery.readable:
                break
            self._take(delivery)
        if not self.connection.closed and self.link.credit < CREDIT // 2:
            self.link.flow(CREDIT - self.link.credit)
            self.bus.send_later(self.connection)

    def delivered(self, delivery: Any) -> None:
        """Store what is complete, and answer."""
        if delivery.partial or not delivery.readable or self.intercepted("send", delivery):
            return
        self.grant()

    def _take(self, delivery: Any) -> None:
        data = self.read()
        try:
            if self.intercepted("store"):
                return
            self._store(data)
        except Refused as refused:
            reject(delivery, refused)
        else:
            if not self.intercepted("stored"):
                delivery.update(proton.Delivery.ACCEPTED)
                delivery.settle()

    def _store(self, data: bytes) -> None:
        if len(data) > self.bus.max_message_bytes:
            raise Refused(
                TOO_LARGE,
                f"The received message (delivery-id:0, size:{len(data)} bytes) exceeds the limit "
                f"({self.bus.max_message_bytes} bytes) currently allowed on the link.",
            )
        self.bus.broker.send(self.path, parse_transfer(data))


class Consumer(Endpoint):
    """Send a client the messages of a queue or a subscription, and process its settlements."""

    opened = False

    def __init__(self, bus: Service, connection: Connection, link: Any, path: str) -> None:
        super().__init__(bus, connection, link, path)
        self.queue: MessageQueue = bus.broker.source(path)
        self.session_id: str | None = None
        filters = _object(link.remote_source.filter) or {}
        self._filter: Any = filters.get(SESSION_FILTER)
        wait = (link.remote_properties or {}).get(OPERATION_TIMEOUT)
        self._wait_until = bus.now() + (SESSION_WAIT_SECONDS if wait is None else wait / 1000)
        if link.remote_snd_settle_mode == proton.Link.SND_SETTLED:
            raise Refused(NOT_IMPLEMENTED, "The lab delivers no messages without a lock.")
        if self.queue.requires_session != (SESSION_FILTER in filters):
            asked = "non-sessionful" if self.queue.requires_session else "sessionful"
            raise Refused(NOT_ALLOWED, f"The entity '{path}' does not allow a {asked} message receiver.")

    def open(self) -> None:
        """Attach the link, unless no session is available yet. Raise Refused if it cannot be locked."""
        if self.queue.requires_session:
            is_described = isinstance(self._filter, proton.Described)
            wanted = self._filter.value if is_described else self._filter
            found: Any = self.queue.accept_session(wanted, self)
            if found is None:
                if self._wait_until <= self.bus.now():
                    raise Refused(TIMEOUT, "The operation did not complete within the allotted timeout.")
                return
            self.session_id = found
            ticks = TICKS_1970 + int(self.queue.held(found, self).locked_until * TICKS_A_SECOND)
            if is_described:  # Go's client expects the form that it sent, and other clients expect theirs
                found = proton.Described(self._filter.descriptor, found)
            self.link.source.filter.put_object({proton.symbol(SESSION_FILTER): found})
            self.link.properties = {proton.symbol(LOCKED_UNTIL): ticks}
        self.attach()
        self.opened = True
        self.bus.send_later(self.connection)

    def serve(self) -> bool:
        """Send the next message; return whether there was one."""
        if not self.opened or not self.connection.active or self.link.credit <= 0:
            return False
        message = self.queue.take(self.session_id)
        if message is None or message.lock_token is None:
            return False
        delivery = self.link.delivery(message.lock_token.bytes_le)
        self.link.send(message.encode())
        self.link.advance()
        delivery.lab_token = message.lock_token
        self.bus.send_later(self.connection)
        return True

    def flowed(self) -> None:
        """Send what the new credit allows, and drain the rest if the client asks for it."""
        self.bus.changed(self.queue)
        if self.link.drain_mode:
            self.bus.pump(self.queue)
            self.link.drained()

    def delivered(self, delivery: Any) -> None:
        """Settle a message as the client asks, and echo the outcome."""
        token = getattr(delivery, "lab_token", None)
        if token is None or not (delivery.remote_state or delivery.settled):
            return
        try:
            if self.intercepted("settle", delivery):
                return
            self._settle(token, delivery.remote)
        except Refused as refused:
            reject(delivery, refused)
            return
        if not self.intercepted("settled"):
            delivery.update(delivery.remote_state)
            delivery.settle()

    def _settle(self, token: uuid.UUID, remote: Any) -> None:
        queue = self.queue
        queue.locked(token, self if queue.requires_session else None)
        if remote.type == proton.Delivery.ACCEPTED:
            queue.complete(token)
        elif remote.type == proton.Delivery.REJECTED:
            info = _texts(remote.condition.info if remote.condition else None)
            queue.change(token, info)
            queue.dead_letter(token, info.get("DeadLetterReason"), info.get("DeadLetterErrorDescription"))
        elif remote.type == proton.Delivery.MODIFIED:
            if remote.undeliverable:
                raise Refused(NOT_IMPLEMENTED, "The lab does not defer messages.")
            queue.change(token, _texts(remote.annotations))
            queue.abandon(token)  # npm's client does not say that the delivery failed
        else:
            queue.release(token)

    def closed(self) -> None:
        """Release the session. Messages without one stay locked until the lock expires, as in Azure."""
        if self in self.bus.consumers[self.queue]:
            self.bus.consumers[self.queue].remove(self)
        if self.session_id is not None:
            self.queue.release_session(self.session_id, self)


def _object(data: Any) -> Any:
    data.rewind()
    return data.get_object() if data.next() is not None else None


def _texts(entries: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a map with strings as its keys, which proton gives as symbols."""
    return {str(name): value for name, value in (entries or {}).items()}
