"""Receive events from Service Bus, commit them, and only then complete their messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.console.received import Received, receive
from bridge.console.writer import RETRY_AFTER_SECONDS, Writer
from bridge.contract.status import ConsoleBus
from bridge.errors import Unavailable
from bridge.events.envelope import decode_event
from bridge.forward.relay import Refusals
from bridge.runtime.threads import Stop, extend_deadline, report_progress
from bridge.runtime.time import Clock

PASS_SECONDS = 0.25
BATCH_EVENTS = 200
COMMIT_SECONDS = 60.0


class BusInput:
    """Commits events from the bus. `run` and `run_once` are for one thread; `status` may be called from any."""

    def __init__(
        self, *, receiver: Receiver, writer: Writer, clock: Clock, stop: Stop, settled: Stop
    ) -> None:
        """Prepare to receive.

        Args:
            receiver: where the events come from.
            writer: commits them.
            clock: dates them.
            stop: ends `run`.
            settled: `run` sets it at its end, when it will settle nothing more.
        """
        self._receiver = receiver
        self._writer = writer
        self._clock = clock
        self._stop = stop
        self._settled = settled
        self._refusals = Refusals(receiver, clock)

    def run(self) -> None:
        """Receive until the stop; messages that are not committed by then are delivered again."""
        try:
            while not self._stop:
                report_progress()
                self.run_once(PASS_SECONDS)
        finally:
            self._settled.set()

    def run_once(self, wait_seconds: float) -> None:
        """Wait up to `wait_seconds` for messages, commit their events, and complete the messages."""
        delivered: list[tuple[ReceivedMessage, Received | None]] = []
        for message in islice(self._receiver.messages(wait_seconds), BATCH_EVENTS):
            try:
                body = message.decoded_body()
                delivered.append((message, receive(decode_event(body), body, now=self._clock.wall())))
            except ValueError as error:
                self._refusals.refuse(message, str(error))
        if delivered:
            self._commit(delivered)

    def status(self) -> ConsoleBus:
        """Return what the status file shows of the bus."""
        return ConsoleBus(**vars(self._receiver.status()), malformed=self._refusals.count)

    def _commit(self, delivered: Sequence[tuple[ReceivedMessage, Received | None]]) -> None:
        """Commit events, again and again while the store fails, and then complete their messages."""
        events = [event for _, event in delivered if event]
        while not self._stop:
            extend_deadline(COMMIT_SECONDS)
            try:
                self._writer.submit(events).result(COMMIT_SECONDS)
            except (Unavailable, TimeoutError):
                self._stop.wait(RETRY_AFTER_SECONDS)
            except ValueError as error:
                self._refuse(delivered, error)
                return
            else:
                for message, _ in delivered:
                    self._receiver.settle(message, Settlement())
                return

    def _refuse(
        self, delivered: Sequence[tuple[ReceivedMessage, Received | None]], error: ValueError
    ) -> None:
        """Dead-letter the one message whose event cannot be stored, and commit the others."""
        if len(delivered) == 1:
            self._refusals.refuse(delivered[0][0], str(error))
            return
        for one in delivered:
            self._commit([one])
