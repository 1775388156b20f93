"""The messages of a queue, and counters. No I/O."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from enum import IntEnum

from bridge.lab.servicebus.sections import Content, compose


class State(IntEnum):
    """The state of a message, with the values of x-opt-message-state."""

    ACTIVE = 0
    DEFERRED = 1
    SCHEDULED = 2


@dataclass(slots=True, kw_only=True, eq=False)
class Message:
    """Hold one message of a queue. Times are seconds since 1970."""

    content: Content
    sequence_number: int
    enqueued_at: float
    expires_at: float | None = None
    state: State = State.ACTIVE
    delivery_count: int = 0
    lock_token: uuid.UUID | None = None
    locked_until: float = 0.0
    gone: bool = False
    dead_letter_source: str | None = None

    def encode(self) -> bytes:
        """Return the message as it is sent to a receiver."""
        return compose(
            self.content,
            sequence_number=self.sequence_number,
            enqueued_at=self.enqueued_at,
            delivery_count=self.delivery_count,
            locked_until=self.locked_until if self.lock_token is not None else None,
            state=self.state,
            ttl_seconds=None if self.expires_at is None else self.expires_at - self.enqueued_at,
            dead_letter_source=self.dead_letter_source,
            lock_token=self.lock_token,
        )


@dataclass(slots=True, kw_only=True)
class Tally:
    """Count what was stored and removed."""

    enqueued: int = 0
    completed: int = 0
    duplicates: int = 0
    expired: int = 0
