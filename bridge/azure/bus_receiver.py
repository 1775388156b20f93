"""Receive messages from Service Bus and settle them, on one thread; others decide about them."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from azure.servicebus import ServiceBusClient, ServiceBusReceivedMessage, ServiceBusReceiver
from azure.servicebus import exceptions as sdk

from bridge.azure import internals
from bridge.azure.receiver import ReceivedMessage, Settlement
from bridge.azure.servicebus import (
    IDLE_LIMIT_SECONDS,
    address_of,
    connect,
    delivery_error,
    make_credential,
    mapped_errors,
)
from bridge.config.bus import ReceiverSettings
from bridge.contract.status import BusStatus
from bridge.errors import BridgeError, HungError, Unavailable
from bridge.runtime.text import redact
from bridge.runtime.threads import PauseWatch, Stop, report_progress
from bridge.runtime.time import Clock, RepeatLimit, full_jitter, iso_utc
from bridge.runtime.worker import Worker

log = logging.getLogger(__name__)
T = TypeVar("T")

# So much is received at a time; the others stay on the bus. Whoever cannot settle them keeps them in memory.
MAX_UNSETTLED_BYTES = 16 * 1024 * 1024
MESSAGE_BYTES = 2000  # a message counts as so many at least
RECEIVE_MESSAGES = 200
SETTLE_MESSAGES = 50
RENEW_MESSAGES = 100
# How long one receive call waits: while nothing is unsettled, while messages are being decided, and for a
# second after the last message was received or settled.
IDLE_SECONDS = 0.5
QUIET_SECONDS = 0.25
REST_SECONDS = 0.5  # how often it asks itself whether it may still rest
BUSY_SECONDS = 0.02
RENEW_AT_LATEST_SECONDS = 20.0
RENEW_AT_EARLIEST_SECONDS = 1.5
DRAINED_SECONDS = 5.0  # how long a connection is open until an empty receive shows that nothing had waited
OPEN_SECONDS = 20.0
SETTLE_SECONDS = 15.0
CLOSE_SECONDS = 20.0
STOP_SECONDS = 2.0  # what settling and releasing may take after the stop
RETRY_LIMIT_SECONDS = 4.0
RELEASE_PAUSE_SECONDS = 1.0  # how long released messages are left to other receivers


@dataclass(eq=False, kw_only=True)
class Connection:
    """An open link of the SDK, and what was received over it; all times are monotonic.

    `receive`, `settle` and the methods that renew call the SDK, so they are for the worker's thread.

    Attributes:
        opened_at: when it was opened.
        active_at: when a message was last received or settled.
        paused_until: until when released messages are left to other receivers.
        renew_at: when to renew the session's lock; infinite without a session.
        unsettled: when to renew the lock of each message.
    """

    client: ServiceBusClient
    receiver: Any
    address: str
    what: str
    session: str
    clock: Clock
    opened_at: float = field(init=False)
    active_at: float = field(init=False)
    paused_until: float = -math.inf
    renew_at: float = math.inf
    unsettled: dict[ReceivedMessage, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.opened_at = self.active_at = self.clock.monotonic()
        if session := self.receiver.session:
            self.renew_at = self._renew_at(session.locked_until_utc)

    @property
    def free_slots(self) -> int:
        """How many more messages may be received."""
        used = sum(max(MESSAGE_BYTES, len(message.body)) for message in self.unsettled)
        return max(0, MAX_UNSETTLED_BYTES - used) // MESSAGE_BYTES

    @property
    def idle_seconds(self) -> float:
        """For how long nothing was received or settled."""
        return self.clock.monotonic() - self.active_at

    @property
    def wait_seconds(self) -> float:
        """How long one receive call waits."""
        if not self.unsettled:
            return IDLE_SECONDS
        return BUSY_SECONDS if self.idle_seconds < 1.0 else QUIET_SECONDS

    def add(self, message: ReceivedMessage, locked_until: datetime | None) -> None:
        """Note a message that has arrived."""
        self.unsettled[message] = self._renew_at(locked_until)
        self.active_at = self.clock.monotonic()

    def remove(self, messages: Iterable[ReceivedMessage]) -> None:
        """Note that messages are settled."""
        for message in messages:
            self.unsettled.pop(message, None)
        self.active_at = self.clock.monotonic()

    def receive(self, count: int, wait_seconds: float) -> list[ServiceBusReceivedMessage]:
        """Receive up to so many messages.

        Raises:
            Unavailable: the SDK has closed its receiver.
        """
        received: list[ServiceBusReceivedMessage] = self.receiver.receive_messages(
            max_message_count=count, max_wait_time=wait_seconds
        )
        if not received:
            _check_open(self.receiver, self.address)
        return received

    def settle(self, batch: Sequence[tuple[ReceivedMessage, Settlement]]) -> None:
        """Carry out settlements."""
        if released := [message.handle for message, settlement in batch if settlement.is_released]:
            internals.release(self.receiver, released)
            self.paused_until = self.clock.monotonic() + RELEASE_PAUSE_SECONDS
        for message, settlement in batch:
            if not settlement.is_released:
                self._settle_one(message, settlement)

    def _settle_one(self, message: ReceivedMessage, settlement: Settlement) -> None:
        try:
            if settlement.dead_letter_reason:
                self.receiver.dead_letter_message(
                    message.handle,
                    reason=settlement.dead_letter_reason,
                    error_description=settlement.description,
                )
            else:
                self.receiver.complete_message(message.handle)
        except (sdk.MessageLockLostError, sdk.MessageAlreadySettled) as error:
            log.info("one of the %s could not be settled and will be delivered again: %s", self.what, error)

    def locks_to_renew(self) -> Iterator[Callable[[], None]]:
        """Yield what renews the locks that expire soon: the session's, or those of the messages."""
        now = self.clock.monotonic()
        if self.receiver.session:
            if self.renew_at <= now:
                yield self._renew_session
            return
        due = [message for message, renew_at in self.unsettled.items() if renew_at <= now]
        for start in range(0, len(due), RENEW_MESSAGES):
            yield partial(self._renew_messages, due[start : start + RENEW_MESSAGES])

    def _renew_session(self) -> None:
        session = self.receiver.session
        session.renew_lock()
        self.renew_at = self._renew_at(session.locked_until_utc)

    def _renew_messages(self, messages: list[ReceivedMessage]) -> None:
        """Renew the locks of messages together, or each alone if one of them is lost."""
        try:
            expirations = internals.renew_locks(self.receiver, [message.handle for message in messages])
        except sdk.MessageLockLostError as error:
            if len(messages) > 1:
                for message in messages:
                    self._renew_messages([message])
                return
            log.info("the lock of one of the %s is lost; it will be delivered again: %s", self.what, error)
            self.unsettled.pop(messages[0], None)
        else:
            for message, locked_until in zip(messages, expirations, strict=True):
                self.unsettled[message] = self._renew_at(locked_until)

    def _renew_at(self, locked_until: datetime | None) -> float:
        """Choose when to renew a lock: halfway, within bounds because the VM's clock may be wrong."""
        left_seconds = (locked_until - datetime.now(UTC)).total_seconds() if locked_until else math.inf
        wait_seconds = min(RENEW_AT_LATEST_SECONDS, max(RENEW_AT_EARLIEST_SECONDS, left_seconds / 2))
        return self.clock.monotonic() + wait_seconds


@dataclass(eq=False)
class BusReceiver:
    """A `Receiver` of a Service Bus queue or subscription.

    `run` keeps every call of the SDK on a worker thread with a time limit, because they can block without one.

    Args:
        settings: where the messages come from.
        what: what the log calls them, in the plural.
        session: returns the session id, "" for none, None while it is not known yet.
        clock: for locks and pauses.
        stop: ends `run`.
    """

    settings: ReceiverSettings
    _: KW_ONLY
    what: str
    session: Callable[[], str | None] = lambda: ""
    clock: Clock
    stop: Stop

    def __post_init__(self) -> None:
        self._address = address_of(self.settings)
        self._worker = Worker(f"servicebus-{self.what}", stop=self.stop, stop_seconds=STOP_SECONDS)
        self._credential: Any = None
        self._connection: Connection | None = None
        self._rest_from, self._asked_at = math.inf, -math.inf
        self._emptied_at = -math.inf  # when the last receive began that found nothing
        self._looked_at: datetime | None = None
        self._settlements: SimpleQueue[tuple[ReceivedMessage, Settlement]] = SimpleQueue()
        self._failures = 0
        self._was_held_up = PauseWatch()
        self._log_limit = RepeatLimit(self.clock)
        self._arrived: SimpleQueue[ReceivedMessage] = SimpleQueue()
        self.last_error = ""

    def status(self) -> BusStatus:
        """Return what the status file shows of the bus."""
        connection = self._connection
        return BusStatus(
            from_=self._address,
            unsettled=len(connection.unsettled) if connection else 0,
            rests=connection is None and self._may_rest(connection),
            looked_at=iso_utc(self._looked_at) if self._looked_at else None,
            last_error=self.last_error or None,
        )

    def receive_until(self, at: float) -> None:
        """Look at the queue at least once more, and rest from `at` (monotonic) on; the last call counts."""
        self._rest_from, self._asked_at = at, self.clock.monotonic()

    def _may_rest(self, connection: Connection | None) -> bool:
        is_asked = self._emptied_at < self._asked_at or self.clock.monotonic() < self._rest_from
        return not (is_asked or (connection and connection.unsettled))

    def messages(self, wait_seconds: float) -> Iterator[ReceivedMessage]:
        """Wait up to `wait_seconds` for a message, then yield every message that has arrived."""
        with contextlib.suppress(Empty):
            yield self._arrived.get(timeout=wait_seconds)
            while True:
                yield self._arrived.get_nowait()

    def settle(self, message: ReceivedMessage, settlement: Settlement) -> None:
        """Settle a message soon; one whose connection is gone is delivered again."""
        self._settlements.put((message, settlement))

    def run(self) -> None:
        """Receive, renew locks and settle until the stop, which no hanging call delays.

        Raises:
            HungError: too many calls of the SDK hang; the process has to be restarted.
        """
        while not self.stop:
            report_progress()
            try:
                self._step()
                self._note_success()
            except HungError as error:
                self._forget()
                if error.final:
                    raise
                self.stop.wait(self._note_failure(error))
            except Exception as error:  # noqa: BLE001 - whatever the SDK raises, connecting again may help
                self._close()
                self.stop.wait(self._note_failure(error))
        self._release_all()

    def _step(self) -> None:
        connection, session = self._connection, self.session()
        may_rest = self._may_rest(connection)
        if self._was_held_up() and connection:
            self._close()
            connection = None
        if connection:
            is_left = connection.idle_seconds >= IDLE_LIMIT_SECONDS or connection.session != session
            if may_rest or (is_left and not connection.unsettled):
                self._close()  # before the service closes an idle link
                connection = None
        if session is None or may_rest:
            self.stop.wait(REST_SECONDS)
            return
        if connection is None:
            connection = self._connection = self._open(session)
        is_other = connection.session != session  # what it has is settled first
        is_busy = is_other or self._receive_all(connection) or connection.free_slots == 0
        self._carry_out_settlements(connection, BUSY_SECONDS if is_busy else 0.0)
        for renew in connection.locks_to_renew():
            self._call(connection.receiver, renew, SETTLE_SECONDS)

    def _open(self, session: str) -> Connection:
        """Connect; only the opening of the link, which the SDK has to wait for, is on the worker's thread."""
        self._credential = self._credential or make_credential(self.settings)
        client = connect(self.settings, credential=self._credential)
        receiver = _receiver(client, self.settings, session)
        internals.close_socket_on_close(receiver)
        internals.keep_what_arrives(receiver)
        # The link is opened now: a receive would have to do it within its own wait.
        self._call(receiver, receiver.__enter__, OPEN_SECONDS)
        return Connection(
            client=client,
            receiver=receiver,
            address=self._address,
            what=self.what,
            session=session,
            clock=self.clock,
        )

    def _receive_all(self, connection: Connection) -> bool:
        """Receive what is there, unless it is left to other receivers; return whether any message came."""
        if self.clock.monotonic() < connection.paused_until:
            self.stop.wait(BUSY_SECONDS)
            return False
        began_at = self.clock.monotonic()
        has_received = self._receive_batch(connection, 1, connection.wait_seconds)
        if not has_received and connection.free_slots:
            self._emptied_at = began_at
        if has_received:  # asked for several at first, the SDK waits 0.2 s for more before it returns any
            self._receive_batch(connection, RECEIVE_MESSAGES, BUSY_SECONDS)
        return has_received

    def _receive_batch(self, connection: Connection, count: int, wait_seconds: float) -> bool:
        """Receive at most `count` messages, fewer if there are fewer free slots; return whether any came."""
        count = min(count, connection.free_slots)
        if count == 0:
            return False
        receive = partial(connection.receive, count, wait_seconds)
        received = self._call(connection.receiver, receive, wait_seconds + OPEN_SECONDS)
        self._looked_at = self.clock.now()
        may_have_waited = self._emptied_at < connection.opened_at + DRAINED_SECONDS
        for one in received:
            message = convert(one, may_have_waited=may_have_waited)
            connection.add(message, _try(lambda one=one: one.locked_until_utc))  # type: ignore[misc]
            self._arrived.put(message)
        return bool(received)

    def _call(self, receiver: Any, function: Callable[[], T], limit_seconds: float) -> T:
        """Run on the worker; the receiver's connection is ended if the call is left behind."""
        abort = partial(internals.abort_connection, receiver)
        return self._worker.call(function, limit_seconds=limit_seconds, abort=abort)

    def _carry_out_settlements(self, connection: Connection, wait_seconds: float) -> None:
        """Carry out the settlements so far, and those that follow each within `wait_seconds`."""
        while connection.unsettled and (batch := self._next_settlements(connection, wait_seconds)):
            self._call(connection.receiver, partial(connection.settle, batch), SETTLE_SECONDS)
            connection.remove(message for message, _ in batch)

    def _next_settlements(
        self, connection: Connection, wait_seconds: float
    ) -> list[tuple[ReceivedMessage, Settlement]]:
        """Return up to a batch of settlements; wait for the first one only."""
        batch: list[tuple[ReceivedMessage, Settlement]] = []
        with contextlib.suppress(Empty):
            while len(batch) < SETTLE_MESSAGES:
                wait = wait_seconds > 0 and not batch
                message, settlement = self._settlements.get(block=wait, timeout=wait_seconds)
                if message in connection.unsettled:
                    batch.append((message, settlement))
        return batch

    def _note_success(self) -> None:
        if self.last_error:
            log.info(
                "%s are received again from %s", self.what, self._address, extra={"failures": self._failures}
            )
            self._log_limit.reset()
        self._failures, self.last_error = 0, ""

    def _note_failure(self, error: BaseException) -> float:
        """Say what is wrong from the second failure on, once and then rarely; return how long to wait."""
        self._failures += 1
        if self._failures > 1:
            text = str(error) if isinstance(error, BridgeError) else str(delivery_error(error, self._address))
            if self._log_limit.is_due():
                log.error("no %s can be received: %s; trying again", self.what, text)
            self.last_error = redact(text)
        return full_jitter(self._failures - 1, base_seconds=0.5, limit_seconds=RETRY_LIMIT_SECONDS)

    def _forget(self) -> Connection | None:
        """Forget the connection, and return it; what was received is delivered again when its locks expire."""
        connection, self._connection = self._connection, None
        list(self.messages(0.0))
        return connection

    def _close(self) -> None:
        """Leave the connection without waiting until it is closed, which can take the SDK long."""
        if connection := self._forget():
            self._worker.leave(connection.client.close, limit_seconds=CLOSE_SECONDS)

    def _release_all(self) -> None:
        """Carry out the settlements so far, release the other messages, and close."""
        if connection := self._connection:
            # a message that cannot be released is delivered again when its lock expires
            with contextlib.suppress(Exception):
                self._carry_out_settlements(connection, 0.0)
                handles = [message.handle for message in connection.unsettled]
                release = partial(internals.release, connection.receiver, handles)
                self._call(connection.receiver, release, STOP_SECONDS)
        self._close()


def try_to_receive(settings: ReceiverSettings, *, what: str, session: str = "") -> str:
    """Look at a queue or subscription without taking anything; say what was found, calling its messages `what`.

    Raises:
        DeliveryError: it cannot be received from.
    """

    def look() -> str:
        with connect(settings) as client, _receiver(client, settings, session) as receiver:
            waiting = receiver.peek_messages(1, timeout=SETTLE_SECONDS)
            _check_open(receiver, address)
        return f"{address} can be received from, and {what} {'wait' if waiting else 'do not wait'} there"

    address = address_of(settings)
    try:
        with mapped_errors(address), contextlib.suppress(sdk.SessionCannotBeLockedError):
            return Worker("servicebus-check").call(look, limit_seconds=OPEN_SECONDS + SETTLE_SECONDS)
    except HungError as error:
        raise Unavailable(f"{address}: {error}") from error
    return f"{address}: the session {session} is held by a listener that runs already"


def _check_open(receiver: ServiceBusReceiver, address: str) -> None:
    if internals.is_shut_down(receiver):
        raise Unavailable(f"{address}: the SDK has closed its receiver")


def _receiver(client: ServiceBusClient, settings: ReceiverSettings, session: str) -> ServiceBusReceiver:
    options: dict[str, Any] = {"session_id": session} if session else {}
    if settings.subscription:
        return client.get_subscription_receiver(settings.topic, settings.subscription, **options)
    return client.get_queue_receiver(settings.queue, **options)


def convert(received: ServiceBusReceivedMessage, *, may_have_waited: bool = True) -> ReceivedMessage:
    """Read a message of the SDK, whatever its sender has put into it."""
    number = _try(lambda: received.sequence_number)
    fallback = (
        f"delivery-{_try(lambda: received.lock_token)}" if number is None else f"sequence-number-{number}"
    )
    return ReceivedMessage(
        body=_body(received),
        message_id=_try(lambda: _decoded(received.message_id or "")) or fallback,
        properties=_try(lambda: _properties(received)) or {},
        enqueued_at=_try(lambda: received.enqueued_time_utc),
        sequence_number=number,
        may_have_waited=may_have_waited,
        fault=internals.fault_of(received),
        handle=received,
    )


def _try(read: Callable[[], T]) -> T | None:
    """Read a value of a message, None if its type makes that impossible."""
    try:
        return read()
    except Exception:  # noqa: BLE001 - a sender's values must not stop the receiver
        return None


def _body(message: ServiceBusReceivedMessage) -> bytes:
    """Return the body whatever AMQP type its sender chose."""
    body = message.body
    if isinstance(body, bytes):
        return body
    if isinstance(body, str):
        return body.encode("utf-8", errors="replace")
    try:
        return b"".join(part if isinstance(part, bytes) else str(part).encode() for part in body)
    except (TypeError, ValueError, RecursionError):
        return b""  # neither a command nor an event


def _properties(message: ServiceBusReceivedMessage) -> dict[str, str]:
    return {_decoded(name): _decoded(value) for name, value in (message.application_properties or {}).items()}


def _decoded(value: object) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
