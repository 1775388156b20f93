"""Receive messages from Service Bus and settle them, on one thread; deciding about them is others' work."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from azure.servicebus import (
    ServiceBusClient,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
)
from azure.servicebus.exceptions import (
    MessageAlreadySettled,
    MessageLockLostError,
    SessionCannotBeLockedError,
)

from bridge.azure.servicebus import IDLE_LIMIT_SECONDS, connect, delivery_error, make_credential, where
from bridge.config.bus import ReceiverSettings
from bridge.errors import DeliveryError, HungError, Unavailable
from bridge.runtime.clock import Clock, full_jitter
from bridge.runtime.logging import redact
from bridge.runtime.threads import Stop, Worker, report_progress, start_thread

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_WAITING = 100  # messages side by side; the rest stays on the bus
MAX_WAITING_BYTES = 16 * 1024 * 1024
BATCH_MESSAGES = 50
IDLE_SECONDS = 0.5  # how long the bus is listened to while nothing waits,
QUIET_SECONDS = 0.25  # while messages wait for a decision that takes its time,
BUSY_SECONDS = 0.02  # and for a second after the last came or went
RENEW_AT_LATEST_SECONDS = 20.0
RENEW_AT_EARLIEST_SECONDS = 1.5
OPEN_SECONDS = 20.0
SETTLE_SECONDS = 15.0
CLOSE_SECONDS = 20.0
STOP_SECONDS = 2.0  # how long the stop of the process waits for the bus
RETRY_LIMIT_SECONDS = 4.0
REPEAT_LOG_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceivedMessage:
    """A message as it came: its body, its properties as text, and what is needed to settle it.

    `message_id` is never empty. `generation` counts the connections: what an older one brought comes again.
    """

    body: bytes
    message_id: str
    properties: dict[str, str]
    enqueued_at: datetime | None
    generation: int
    message: ServiceBusReceivedMessage


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """How a message ends: completed, or dead-lettered with a reason and a description."""

    dead_letter_reason: str = ""
    description: str = ""


class BusReceiver:
    """A queue or subscription. `run` is for one thread; `deliveries` is for one other, `settle` for any."""

    def __init__(
        self,
        settings: ReceiverSettings,
        *,
        what: str,
        session: Callable[[], str | None] = lambda: "",
        clock: Clock,
        stop: Stop,
    ) -> None:
        """Prepare to receive.

        Args:
            settings: where the messages come from.
            what: the log's word for them, in the plural.
            session: gives the session id, "" for none, None while it is not known yet.
            clock: for locks and pauses.
            stop: ends `run`, which then gives back what is not settled.
        """
        self._settings = settings
        self._what = what
        self._session = session
        self._clock = clock
        self._stop = stop
        self._place = where(settings)
        self._worker = Worker(f"servicebus-{what}")
        self._credential: Any = None
        self._receiver: Any = None
        self._client: Any = None
        self._generation = 0
        self._waiting: dict[ReceivedMessage, float] = {}  # with when its lock is to be renewed
        self._renew_session_at: float | None = None
        self._moved_at = -math.inf  # when a message came or went last
        self._settlements: SimpleQueue[tuple[ReceivedMessage, Settlement]] = SimpleQueue()
        self._failures = 0
        self._logged_at = -math.inf
        self._arrived: SimpleQueue[ReceivedMessage] = SimpleQueue()
        self.trouble = ""

    def status(self) -> dict[str, Any]:
        """Tell how the bus does, for the status file."""
        return {"from": self._place, "unsettled": len(self._waiting), "trouble": self.trouble or None}

    def deliveries(self, wait_seconds: float) -> Iterator[ReceivedMessage]:
        """Wait so long for a message, then give all that are there."""
        with contextlib.suppress(Empty):
            yield self._arrived.get(timeout=wait_seconds)
            while True:
                yield self._arrived.get_nowait()

    def settle(self, delivery: ReceivedMessage, settlement: Settlement) -> None:
        """Have a message settled; one whose connection is gone comes again by itself."""
        self._settlements.put((delivery, settlement))

    def run(self) -> None:
        """Receive, renew and settle until the stop, which no hanging call holds up; end if too many hang."""
        thread = start_thread(f"{self._what}-bus", self._serve)
        while thread.is_alive() and not self._stop.wait(IDLE_SECONDS):
            pass
        thread.join(STOP_SECONDS)

    def _serve(self) -> None:
        while not self._stop:
            report_progress()
            try:
                self._step()
                self._note_success()
            except HungError as error:
                self._forget()
                if error.final:
                    raise
                self._stop.wait(self._note_failure(error))
            except Exception as error:  # noqa: BLE001 - whatever the SDK raises, the bus is tried again
                self._close()
                self._stop.wait(self._note_failure(error))
        self._give_back()

    def _step(self) -> None:
        session = self._session()
        if session is None:
            self._stop.wait(IDLE_SECONDS)
            return
        idle_seconds = self._clock.monotonic() - self._moved_at
        if self._receiver is not None and not self._waiting and idle_seconds >= IDLE_LIMIT_SECONDS:
            self._close()  # before the service gives the idle link up
        if self._receiver is None:
            self._call(lambda: self._open(session), OPEN_SECONDS)
            self._moved_at = self._clock.monotonic()
        came = self._take_in(1, self._wait_seconds())
        if came:  # asked for several, the SDK would have waited 0.2 s for more before it gave the first
            self._take_in(BATCH_MESSAGES, BUSY_SECONDS)
        self._settle_what_is_decided(BUSY_SECONDS if came or self._room() == 0 else 0.0)
        self._renew()

    def _wait_seconds(self) -> float:
        if not self._waiting:
            return IDLE_SECONDS
        return BUSY_SECONDS if self._clock.monotonic() - self._moved_at < 1.0 else QUIET_SECONDS

    def _room(self) -> int:
        is_full = sum(len(delivery.body) for delivery in self._waiting) >= MAX_WAITING_BYTES
        return 0 if is_full else MAX_WAITING - len(self._waiting)

    def _take_in(self, count: int, wait_seconds: float) -> bool:
        """Receive at most `count` messages, as there is room; tell whether any came."""
        count = min(count, self._room())
        if count == 0:
            return False
        messages = self._call(lambda: self._receive(count, wait_seconds), wait_seconds + OPEN_SECONDS)
        for message in messages:
            self._take(message)
        return bool(messages)

    # On the worker's thread

    def _open(self, session: str) -> None:
        self._credential = self._credential or make_credential(self._settings)
        self._client = connect(self._settings, credential=self._credential)
        receiver = _receiver(self._client, self._settings, session)
        receiver.__enter__()  # opens the link now: a receive would have to do it within its own wait
        self._receiver = receiver
        self._renew_session_at = None

    def _receive(self, count: int, wait_seconds: float) -> list[ServiceBusReceivedMessage]:
        received: list[ServiceBusReceivedMessage] = self._receiver.receive_messages(
            max_message_count=count, max_wait_time=wait_seconds
        )
        return received

    def _finish_all(self, batch: list[tuple[ReceivedMessage, Settlement]]) -> None:
        for delivery, settlement in batch:
            self._finish(delivery, settlement)

    def _finish(self, delivery: ReceivedMessage, settlement: Settlement) -> None:
        try:
            if settlement.dead_letter_reason:
                self._receiver.dead_letter_message(
                    delivery.message,
                    reason=settlement.dead_letter_reason,
                    error_description=settlement.description,
                )
            else:
                self._receiver.complete_message(delivery.message)
        except (MessageLockLostError, MessageAlreadySettled) as error:
            log.info("one of the %s could not be settled and comes again: %s", self._what, redact(str(error)))

    def _renew_session(self) -> None:
        session, renew_at = self._receiver.session, self._renew_session_at
        if renew_at is not None and self._clock.monotonic() < renew_at:
            return
        if renew_at is not None:
            session.renew_lock()
        self._renew_session_at = self._renew_at(session.locked_until_utc)

    def _renew_message(self, delivery: ReceivedMessage) -> None:
        try:
            self._receiver.renew_message_lock(delivery.message)
        except (MessageLockLostError, MessageAlreadySettled) as error:
            log.info("the lock of one of the %s is lost, it comes again: %s", self._what, redact(str(error)))
            self._waiting.pop(delivery, None)
        else:
            self._waiting[delivery] = self._renew_at(delivery.message.locked_until_utc)

    # On run's thread

    def _call(self, function: Callable[[], T], limit_seconds: float) -> T:
        return self._worker.call(function, limit_seconds=limit_seconds)

    def _take(self, message: ServiceBusReceivedMessage) -> None:
        delivery = ReceivedMessage(
            body=_body(message),
            message_id=str(message.message_id or f"sequence-number-{message.sequence_number}"),
            properties=_properties(message),
            enqueued_at=message.enqueued_time_utc,
            generation=self._generation,
            message=message,
        )
        self._waiting[delivery] = self._renew_at(message.locked_until_utc)
        self._moved_at = self._clock.monotonic()
        self._arrived.put(delivery)

    def _settle_what_is_decided(self, wait_seconds: float) -> None:
        """Settle what is decided by now; with messages just taken, wait a moment for each next decision."""
        while self._waiting:
            batch = self._decided(wait_seconds)
            if not batch:
                return
            self._call(lambda batch=batch: self._finish_all(batch), SETTLE_SECONDS)  # type: ignore[misc]
            for delivery, _ in batch:
                self._waiting.pop(delivery, None)
            self._moved_at = self._clock.monotonic()

    def _decided(self, wait_seconds: float) -> list[tuple[ReceivedMessage, Settlement]]:
        """Take the decisions that are there, at most a batch of them; wait for the first one."""
        batch: list[tuple[ReceivedMessage, Settlement]] = []
        with contextlib.suppress(Empty):
            while len(batch) < BATCH_MESSAGES:
                wait = wait_seconds > 0 and not batch
                delivery, settlement = self._settlements.get(block=wait, timeout=wait_seconds)
                if delivery in self._waiting:
                    batch.append((delivery, settlement))
        return batch

    def _renew(self) -> None:
        """Renew what runs out soon: the session's lock, or that of each message."""
        if self._receiver.session:
            self._call(self._renew_session, SETTLE_SECONDS)
            return
        now = self._clock.monotonic()
        for delivery in [delivery for delivery, renew_at in self._waiting.items() if renew_at <= now]:
            self._call(lambda d=delivery: self._renew_message(d), SETTLE_SECONDS)  # type: ignore[misc]

    def _renew_at(self, locked_until: datetime | None) -> float:
        """Choose when to renew a lock: halfway, and within sane bounds whatever the VM's clock says."""
        left_seconds = (locked_until - datetime.now(UTC)).total_seconds() if locked_until else math.inf
        wait_seconds = min(RENEW_AT_LATEST_SECONDS, max(RENEW_AT_EARLIEST_SECONDS, left_seconds / 2))
        return self._clock.monotonic() + wait_seconds

    def _note_success(self) -> None:
        if self._failures:
            log.info(
                "%s are received again from %s", self._what, self._place, extra={"failures": self._failures}
            )
        self._failures, self.trouble = 0, ""

    def _note_failure(self, error: BaseException) -> float:
        """Say what is wrong, once and then rarely; return how long to wait."""
        text = str(error) if isinstance(error, HungError) else str(delivery_error(error, self._place))
        now = self._clock.monotonic()
        if self._failures == 0 or now - self._logged_at >= REPEAT_LOG_SECONDS:
            self._logged_at = now
            log.error("no %s can be received: %s; trying again", self._what, redact(text))
        self.trouble = redact(text)
        self._failures += 1
        return full_jitter(self._failures - 1, base_seconds=0.5, limit_seconds=RETRY_LIMIT_SECONDS)

    def _forget(self) -> None:
        """Start from nothing; what was received comes again when its locks run out."""
        self._receiver, self._client = None, None
        self._generation += 1
        self._waiting.clear()
        with contextlib.suppress(Empty):
            while True:
                self._arrived.get_nowait()

    def _close(self) -> None:
        """Give up the connection without waiting for its end: that alone can take the SDK long."""
        client = self._client
        self._forget()
        if client is not None:
            self._worker.leave(client.close, limit_seconds=CLOSE_SECONDS)

    def _give_back(self) -> None:
        """Settle what is decided, hand the rest back at once, and close."""
        if self._receiver is not None:
            # what cannot be handed back is handed out again when its lock ends
            with contextlib.suppress(Exception):
                self._settle_what_is_decided(0.0)
                for delivery in self._waiting:
                    self._call(lambda d=delivery: self._receiver.abandon_message(d.message), STOP_SECONDS)  # type: ignore[misc]
        self._close()
        self._worker.close()


def try_to_receive(settings: ReceiverSettings, *, what: str, session: str = "") -> str:
    """Look at a queue or subscription without taking anything; say what was found, calling its messages `what`.

    Raises:
        DeliveryError: it cannot be received from.
    """

    def look() -> str:
        with connect(settings) as client, _receiver(client, settings, session) as receiver:
            waiting = receiver.peek_messages(1, timeout=SETTLE_SECONDS)
        return f"{place} can be received from, and {what} {'wait' if waiting else 'do not wait'} there"

    place = where(settings)
    worker = Worker("servicebus-check")
    try:
        return worker.call(look, limit_seconds=OPEN_SECONDS + SETTLE_SECONDS)
    except SessionCannotBeLockedError:
        return f"{place}: the session {session} is held by a listener that runs already"
    except HungError as error:
        raise Unavailable(f"{place}: {error}") from error
    except DeliveryError:
        raise
    except Exception as error:
        raise delivery_error(error, place) from error
    finally:
        worker.close()


def _receiver(client: ServiceBusClient, settings: ReceiverSettings, session: str) -> ServiceBusReceiver:
    options: dict[str, Any] = {"receive_mode": ServiceBusReceiveMode.PEEK_LOCK, "prefetch_count": 0}
    if session:
        options["session_id"] = session
    if settings.subscription:
        return client.get_subscription_receiver(settings.topic, settings.subscription, **options)
    return client.get_queue_receiver(settings.queue, **options)


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
        return b""  # neither command nor event, whatever it is


def _properties(message: ServiceBusReceivedMessage) -> dict[str, str]:
    return {_plain(name): _plain(value) for name, value in (message.application_properties or {}).items()}


def _plain(value: object) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
