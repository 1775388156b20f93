"""The two kinds of links that carry messages: those a client sends on, and those it receives on."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.lab.servicebus.codec import Malformed
from bridge.lab.servicebus.conditions import (
    BUSY,
    DECODE,
    DISABLED,
    QUOTA,
    TIMEOUT,
    TOO_LARGE,
    Refused,
)
from bridge.lab.servicebus.messages import Message
from bridge.lab.servicebus.peer import Peer, proton
from bridge.lab.servicebus.queues import MessageQueue
from bridge.lab.servicebus.sections import parse_transfer
from bridge.lab.servicebus.sessions import SessionQueue

if TYPE_CHECKING:
    from bridge.lab.servicebus.amqp import Bus

CREDIT = 1000
SESSION_FILTER = "com.microsoft:session-filter"
LOCKED_UNTIL = "com.microsoft:locked-until-utc"
OPERATION_TIMEOUT = "com.microsoft:timeout"
BATCH_LIMIT = "com.microsoft:max-message-batch-size"
SESSION_WAIT_SECONDS = 60.0
# .NET's ticks: units of 100 ns since the year 1.
TICKS_1970 = 621_355_968_000_000_000
TICKS_A_SECOND = 10_000_000

SEND_REFUSALS = {
    "busy": Refused(
        BUSY, "The request was terminated because the entity is being throttled. Wait 10 seconds."
    ),
    "quota": Refused(QUOTA, "The maximum entity size has been reached or exceeded."),
    "disabled": Refused(DISABLED, "Messaging entity is currently disabled."),
}


def condition(refused: Refused) -> Any:
    """Return an error for proton; without an info map, clients would wait for it without end."""
    info = {proton.symbol("com.microsoft:tracking-id"): str(uuid.uuid4())}
    return proton.Condition(refused.condition, refused.description, info)


def reject(delivery: Any, refused: Refused) -> None:
    """Reject a delivery with an error."""
    delivery.local.condition = condition(refused)
    delivery.update(proton.Delivery.REJECTED)
    delivery.settle()


def mirror(link: Any) -> None:
    """Accept the terms that the client asked for."""
    link.source.address = link.remote_source.address
    link.target.address = link.remote_target.address
    link.snd_settle_mode = link.remote_snd_settle_mode
    link.rcv_settle_mode = link.remote_rcv_settle_mode


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

    kind = "link"
    opened = True

    def __init__(self, bus: Bus, peer: Peer, link: Any, path: str) -> None:
        """Take over a link.

        Args:
            bus: the service.
            peer: the connection.
            link: proton's link.
            path: the entity.
        """
        self.bus = bus
        self.peer = peer
        self.link = link
        self.path = path
        self.active_at = bus.now()

    def flowed(self) -> None:
        """Handle a change of the client's credit."""

    def delivered(self, delivery: Any) -> None:
        """Handle a transfer, or the settlement of one."""

    def closed(self) -> None:
        """Release what the link held."""

    def detach(self, refused: Refused) -> None:
        """Detach the link with an error."""
        self.closed()
        self.bus.forget(self)
        self.link.lab = None
        if self.opened:
            self.link.condition = condition(refused)
            self.link.close()
        else:
            refuse(self.link, refused)
        self.peer.loop.dirty.add(self.peer)


class Producer(Endpoint):
    """Receive what a client sends to a queue or a topic."""

    kind = "publisher"

    def __init__(self, bus: Bus, peer: Peer, link: Any, path: str) -> None:
        super().__init__(bus, peer, link, path)
        mirror(link)
        link.max_message_size = bus.max_message_bytes
        link.properties = {proton.symbol(BATCH_LIMIT): proton.ulong(bus.max_message_bytes)}
        link.open()
        self.grant()

    def grant(self) -> None:
        """Grant credit when half is used up, and process what was sent without credit."""
        if self.bus.faults.find("no_credit", self.path) is not None:
            return
        while not self.peer.closed and (delivery := self.link.current):
            if delivery.partial or not delivery.readable:
                break
            self._take(delivery)
        if not self.peer.closed and self.link.credit < CREDIT // 2:
            self.link.flow(CREDIT - self.link.credit)
            self.peer.loop.dirty.add(self.peer)

    def delivered(self, delivery: Any) -> None:
        """Store a complete transfer, and answer."""
        if delivery.partial or not delivery.readable:
            return
        if self.bus.connection_faults.stalls(self.peer, self.path, lambda: self.delivered(delivery)):
            return
        # azure-servicebus sends even without credit; such transfers wait until there is credit.
        if self.bus.faults.find("no_credit", self.path) is None:
            self._take(delivery)
            self.grant()

    def _take(self, delivery: Any) -> None:
        self.active_at = self.bus.now()
        data = bytes(self.link.recv(delivery.pending) or b"")
        self.link.advance()
        if self.bus.faults.applies("drop_before_store", self.path):
            self.peer.close()
            return
        try:
            self._store(data)
        except Refused as refused:
            reject(delivery, refused)
        else:
            if self.bus.faults.applies("drop_after_store", self.path):
                self.peer.close()
                return
            delivery.update(proton.Delivery.ACCEPTED)
            delivery.settle()

    def _store(self, data: bytes) -> None:
        for kind, refused in SEND_REFUSALS.items():
            if self.bus.faults.applies(kind, self.path):
                raise refused
        if len(data) > self.bus.max_message_bytes:
            raise Refused(
                TOO_LARGE,
                f"The received message (delivery-id:0, size:{len(data)} bytes) exceeds the limit "
                f"({self.bus.max_message_bytes} bytes) currently allowed on the link.",
            )
        try:
            contents = parse_transfer(data)
        except Malformed as error:
            raise Refused(DECODE, str(error)) from error
        self.bus.broker.send(self.path, contents)


class Consumer(Endpoint):
    """Send a client the messages of a queue or a subscription, and process its settlements."""

    kind = "consumer"

    def __init__(self, bus: Bus, peer: Peer, link: Any, path: str, queue: MessageQueue) -> None:
        """Take over a link.

        Args:
            bus: the service.
            peer: the connection.
            link: proton's link.
            path: the entity.
            queue: where the messages come from.
        """
        super().__init__(bus, peer, link, path)
        self.queue = queue
        self.session_id: str | None = None
        self.opened = False
        self.destructive = link.remote_snd_settle_mode == proton.Link.SND_SETTLED
        filters = _object(link.remote_source.filter) or {}
        self.sessionful = SESSION_FILTER in filters
        self._filter: Any = filters.get(SESSION_FILTER)
        wait = (link.remote_properties or {}).get(OPERATION_TIMEOUT)
        self._wait_until = bus.now() + (SESSION_WAIT_SECONDS if wait is None else wait / 1000)

    def open(self) -> bool:
        """Attach the link; return False while no session is available. Raise Refused if it cannot be locked."""
        if isinstance(self.queue, SessionQueue):
            is_described = isinstance(self._filter, proton.Described)
            wanted = self._filter.value if is_described else self._filter
            session = self.queue.accept_session(wanted, self)
            if session is None:
                if self._wait_until <= self.bus.now():
                    raise Refused(TIMEOUT, "The operation did not complete within the allotted timeout.")
                return False
            self.session_id = session.session_id
            found: Any = session.session_id
            if is_described:  # Go's client expects the form that it sent, and other clients expect theirs
                found = proton.Described(self._filter.descriptor, found)
            self.link.source.filter.put_object({proton.symbol(SESSION_FILTER): found})
            ticks = TICKS_1970 + int(session.locked_until * TICKS_A_SECOND)
            self.link.properties = {proton.symbol(LOCKED_UNTIL): ticks}
        mirror(self.link)
        self.link.open()
        self.opened = True
        self.active_at = self.bus.now()
        self.peer.loop.dirty.add(self.peer)
        return True

    @property
    def has_credit(self) -> bool:
        """Return whether the client can receive another message."""
        return self.opened and not self.peer.paused and not self.peer.closed and self.link.credit > 0

    def serve(self) -> bool:
        """Send the next message; return whether there was one."""
        message = self.queue.take(self.session_id, destructive=self.destructive)
        if message is not None:
            self._send(message)
        return message is not None

    def _send(self, message: Message) -> None:
        token = message.lock_token
        delivery = self.link.delivery((token or uuid.uuid4()).bytes_le)
        self.link.send(message.encode())
        self.link.advance()
        if token is None:
            delivery.settle()
        else:
            delivery.lab_token = token
        self.active_at = self.bus.now()
        self.peer.loop.dirty.add(self.peer)

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
        if self.bus.connection_faults.stalls(self.peer, self.path, lambda: self.delivered(delivery)):
            return
        self.active_at = self.bus.now()
        if self.bus.faults.applies("drop_before_settle", self.path):
            self.peer.close()
            return
        state = delivery.remote_state
        try:
            self._settle(token, delivery.remote)
        except Refused as refused:
            reject(delivery, refused)
            return
        if self.bus.faults.applies("drop_after_settle", self.path):
            self.peer.close()
            return
        delivery.update(state)
        delivery.settle()

    def _settle(self, token: uuid.UUID, remote: Any) -> None:
        self.queue.locked(token, self if self.sessionful else None)
        kind = remote.type
        if kind == proton.Delivery.ACCEPTED:
            self.queue.complete(token)
        elif kind == proton.Delivery.REJECTED:
            info = _texts(remote.condition.info if remote.condition else None)
            self.queue.change(token, info)
            self.queue.dead_letter(
                token, info.get("DeadLetterReason"), info.get("DeadLetterErrorDescription")
            )
        elif kind == proton.Delivery.MODIFIED:
            self.queue.change(token, _texts(remote.annotations))
            # npm's client does not say that the delivery failed
            (self.queue.defer if remote.undeliverable else self.queue.abandon)(token)
        else:
            self.queue.release(token)

    def closed(self) -> None:
        """Release the session. Messages without one stay locked until the lock expires, as in Azure."""
        if self.session_id is not None and isinstance(self.queue, SessionQueue):
            self.queue.release_session(self.session_id, self)


def _object(data: Any) -> Any:
    data.rewind()
    return data.get_object() if data.next() is not None else None


def _texts(entries: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a map with strings as its keys, which proton gives as symbols."""
    return {str(name): value for name, value in (entries or {}).items()}
