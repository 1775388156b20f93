"""The port to a queue: what a receiver owes its caller, and the values that cross it. It loads no SDK."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from bridge.contract.status import BusStatus


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceivedMessage:
    """One delivery of a message, compared by identity: the same message delivered again is another one.

    Attributes:
        body: the bytes of the body, whatever AMQP type its sender chose.
        message_id: the sender's id; made of the sequence number if the sender gave none, and of the delivery if the
            message could not be decoded, so never empty.
        properties: the application properties as text.
        enqueued_at: when the broker accepted the message, by the broker's clock.
        sequence_number: the broker's number of the message, the same for every delivery; None if it could not be
            decoded.
        may_have_waited: it may have been on the bus before this receiver connected.
        fault: why the message could not be decoded, "" if it could; its other values may be empty then, and it should
            be dead-lettered.
        handle: what the receiver needs to settle the message; of no use to anyone else.
    """

    body: bytes
    message_id: str
    properties: dict[str, str]
    enqueued_at: datetime | None
    sequence_number: int | None
    may_have_waited: bool = True
    fault: str = ""
    handle: Any = None

    def decoded_body(self) -> bytes:
        """Return the body of a message that could be decoded as a whole.

        Raises:
            ValueError: the `fault`.
        """
        if self.fault:
            raise ValueError(self.fault)
        return self.body


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """How a message ends: completed, dead-lettered if there is a reason, or released for another receiver."""

    dead_letter_reason: str = ""
    description: str = ""
    is_released: bool = False


class Receiver(Protocol):
    """Receives the messages of one queue or subscription and settles them.

    Duties:
        Threads: `run` belongs to one thread, `messages` to one other; `settle` and `status` may be called
        from any.
        Rest: from the instant of the last `receive_until` on it holds no connection, once all its messages are
        settled and it has found the queue empty since that call, however long that takes; without a call it
        never rests.
        Blocking: `messages` waits for at most the given time, `settle` and `status` not at all, `run` until
        its stop is set. A failure of the bus never reaches the caller: the receiver logs it, shows it in
        `status` and connects again.
        Locks: a message stays locked for this receiver until it is settled or the connection is lost.
        Released messages: they are available to every receiver again, without counting as a delivery; this
        receiver takes none for a while, so that another one gets them.
        Stop: `run` carries out the settlements it was given, releases every other message, closes the
        connection and returns.
        Unsettled messages: a message that was not settled, or whose settlement was lost with the connection,
        is delivered again. A settlement of an earlier delivery is ignored. So every message is delivered at
        least once, and what the caller has committed must be recognised when it comes again.
    """

    def status(self) -> BusStatus:
        """Return what the status file shows."""

    def receive_until(self, at: float) -> None:
        """Look at the queue at least once more, and rest from `at` (monotonic) on; the last call counts."""

    def messages(self, wait_seconds: float) -> Iterator[ReceivedMessage]:
        """Wait up to `wait_seconds` for a message, then yield every message that has arrived."""

    def settle(self, message: ReceivedMessage, settlement: Settlement) -> None:
        """Settle a message soon, in the order of the calls."""

    def run(self) -> None:
        """Receive, renew locks and settle until the stop."""
