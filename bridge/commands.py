"""Receive commands from Service Bus and settle them, on one thread; deciding about them is others' work."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiveMode

from bridge.bus import connect, delivery_error, where
from bridge.config import ApprovalSettings
from bridge.errors import HungError
from bridge.logs import redact
from bridge.runtime import Clock, Stop, Worker, full_jitter

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_WAITING = 100  # commands side by side; the rest stays on the bus
BATCH_MESSAGES = 50
IDLE_SECONDS = 1.0
BUSY_SECONDS = 0.02
RENEW_BEFORE_SECONDS = 20.0
OPEN_SECONDS = 20.0
SETTLE_SECONDS = 15.0
RETRY_LIMIT_SECONDS = 4.0
REPEAT_LOG_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Delivery:
    """A message as it came: its body, its properties as text, and what is needed to settle it."""

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


class BusCommands:
    """The approvals entity. `run` is for one thread; deliveries come out of `arrived`, `settle` takes any thread."""

    def __init__(
        self, settings: ApprovalSettings, *, session: Callable[[], str | None], clock: Clock, stop: Stop
    ) -> None:
        """Prepare to receive.

        Args:
            settings: where the commands come from.
            session: gives the session id, "" for none, None while it is not known yet.
            clock: for locks and pauses.
            stop: ends `run`, which then gives back what is not settled.
        """
        self._settings = settings
        self._session = session
        self._clock = clock
        self._stop = stop
        self._place = where(settings)
        self._worker = Worker("servicebus-commands")
        self._receiver: Any = None
        self._client: Any = None
        self._generation = 0
        self._waiting: dict[int, Delivery] = {}
        self._settlements: SimpleQueue[tuple[Delivery, Settlement]] = SimpleQueue()
        self._failures = 0
        self._logged_at = -math.inf
        self.arrived: SimpleQueue[Delivery] = SimpleQueue()
        self.trouble = ""

    def status(self) -> dict[str, Any]:
        """Tell how the bus does, for the status file."""
        return {"from": self._place, "unsettled": len(self._waiting), "trouble": self.trouble or None}

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """Have a message settled; one whose connection is gone comes again by itself."""
        self._settlements.put((delivery, settlement))

    def run(self) -> None:
        """Receive, renew and settle until the stop; try again for as long as the bus fails."""
        while not self._stop:
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
        if self._receiver is None:
            self._call(lambda: self._open(session), OPEN_SECONDS)
        room = min(BATCH_MESSAGES, MAX_WAITING - len(self._waiting))
        if room > 0:
            wait_seconds = BUSY_SECONDS if self._waiting else IDLE_SECONDS
            for message in self._call(lambda: self._receive(room, wait_seconds), wait_seconds + OPEN_SECONDS):
                self._take(message)
        self._settle_what_is_decided()
        self._renew()

    # On the worker's thread

    def _open(self, session: str) -> None:
        self._client = connect(self._settings)
        options: dict[str, Any] = {"receive_mode": ServiceBusReceiveMode.PEEK_LOCK, "prefetch_count": 0}
        if session:
            options["session_id"] = session
        if self._settings.subscription:
            self._receiver = self._client.get_subscription_receiver(
                self._settings.topic, self._settings.subscription, **options
            )
        else:
            self._receiver = self._client.get_queue_receiver(self._settings.queue, **options)

    def _receive(self, count: int, wait_seconds: float) -> list[ServiceBusReceivedMessage]:
        received: list[ServiceBusReceivedMessage] = self._receiver.receive_messages(
            max_message_count=count, max_wait_time=wait_seconds
        )
        return received

    def _finish(self, delivery: Delivery, settlement: Settlement) -> None:
        if settlement.dead_letter_reason:
            self._receiver.dead_letter_message(
                delivery.message,
                reason=settlement.dead_letter_reason,
                error_description=settlement.description,
            )
        else:
            self._receiver.complete_message(delivery.message)

    def _renew_locks(self) -> None:
        """Renew what runs out soon: the session's lock, or that of each message."""
        receiver = self._receiver
        if receiver.session:
            if _seconds_left(receiver.session.locked_until_utc) < RENEW_BEFORE_SECONDS:
                receiver.session.renew_lock()
            return
        for delivery in list(self._waiting.values()):
            if _seconds_left(delivery.message.locked_until_utc) < RENEW_BEFORE_SECONDS:
                receiver.renew_message_lock(delivery.message)

    # On run's thread

    def _call(self, function: Callable[[], T], limit_seconds: float) -> T:
        return self._worker.call(function, limit_seconds=limit_seconds)

    def _take(self, message: ServiceBusReceivedMessage) -> None:
        delivery = Delivery(
            body=_body(message),
            message_id=str(message.message_id or ""),
            properties=_properties(message),
            enqueued_at=message.enqueued_time_utc,
            generation=self._generation,
            message=message,
        )
        self._waiting[id(delivery)] = delivery
        self.arrived.put(delivery)

    def _settle_what_is_decided(self) -> None:
        """Settle what is decided by now; with commands just taken, wait a moment for the decisions."""
        wait_seconds = BUSY_SECONDS if self._waiting else 0.0
        while True:
            try:
                delivery, settlement = (
                    self._settlements.get(timeout=wait_seconds)
                    if wait_seconds
                    else (self._settlements.get_nowait())
                )
            except Empty:
                return
            if self._waiting.get(id(delivery)) is delivery:
                self._call(lambda d=delivery, s=settlement: self._finish(d, s), SETTLE_SECONDS)  # type: ignore[misc]
                del self._waiting[id(delivery)]
            wait_seconds = BUSY_SECONDS if self._waiting else 0.0

    def _renew(self) -> None:
        if self._waiting or self._receiver.session:
            self._call(self._renew_locks, SETTLE_SECONDS)

    def _note_success(self) -> None:
        if self._failures:
            log.info("commands are received again from %s", self._place, extra={"failures": self._failures})
        self._failures, self.trouble = 0, ""

    def _note_failure(self, error: BaseException) -> float:
        """Say what is wrong, once and then rarely; return how long to wait."""
        text = str(error) if isinstance(error, HungError) else str(delivery_error(error, self._place))
        now = self._clock.monotonic()
        if self._failures == 0 or now - self._logged_at >= REPEAT_LOG_SECONDS:
            self._logged_at = now
            log.error("no commands can be received: %s; trying again", redact(text))
        self.trouble = redact(text)
        self._failures += 1
        return full_jitter(self._failures - 1, base_seconds=0.5, limit_seconds=RETRY_LIMIT_SECONDS)

    def _forget(self) -> None:
        """Start from nothing; what was received comes again when its locks run out."""
        self._receiver, self._client = None, None
        self._generation += 1
        self._waiting.clear()

    def _close(self) -> None:
        client = self._client
        self._forget()
        if client is not None:
            with contextlib.suppress(Exception):  # it is given up anyway
                self._call(client.close, 2.0)

    def _give_back(self) -> None:
        """Settle what is decided, hand the rest back at once, and close."""
        with contextlib.suppress(
            Exception
        ):  # what cannot be handed back is handed out again when its lock ends
            if self._receiver is not None:
                self._settle_what_is_decided()
                for delivery in self._waiting.values():
                    self._call(lambda d=delivery: self._receiver.abandon_message(d.message), 2.0)  # type: ignore[misc]
        self._close()
        self._worker.close()


def _seconds_left(until: datetime | None) -> float:
    return math.inf if until is None else (until - datetime.now(until.tzinfo)).total_seconds()


def _body(message: ServiceBusReceivedMessage) -> bytes:
    """Return the body whatever AMQP type its sender chose."""
    body = message.body
    if isinstance(body, bytes):
        return body
    if isinstance(body, str):
        return body.encode("utf-8", errors="replace")
    try:
        return b"".join(part if isinstance(part, bytes) else str(part).encode() for part in body)
    except TypeError:
        return str(body).encode("utf-8", errors="replace")


def _properties(message: ServiceBusReceivedMessage) -> dict[str, str]:
    return {_plain(name): _plain(value) for name, value in (message.application_properties or {}).items()}


def _plain(value: object) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
