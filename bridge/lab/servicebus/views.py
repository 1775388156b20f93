"""Copies of the broker's content for tests to inspect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from bridge.lab.servicebus.broker import Topic
from bridge.lab.servicebus.messages import Message, State
from bridge.lab.servicebus.queues import MessageQueue

T = TypeVar("T")


class Reader(Protocol):
    """Read an entity while nothing changes it."""

    def __call__(self, path: str, look: Callable[[MessageQueue | Topic], T]) -> T:
        """Call `look` with the entity, and return its result."""


@dataclass(frozen=True, kw_only=True)
class StoredMessage:
    """Hold a copy of one message in the broker.

    Attributes:
        state: "active", "deferred" or "scheduled".
        locked: whether a receiver has locked it.
        enqueued_at: seconds since 1970, by the lab's clock.
        dead_letter_reason: None if the message is not a dead letter, or has no reason.
    """

    message_id: str
    body: bytes
    subject: str | None
    correlation_id: str | None
    content_type: str | None
    session_id: str | None
    application_properties: Mapping[str, Any]
    sequence_number: int
    delivery_count: int
    state: str
    locked: bool
    enqueued_at: float
    dead_letter_reason: str | None
    dead_letter_description: str | None


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Count the messages of an entity, now and since it was created.

    Attributes:
        active: available or locked; a topic holds none.
        locked: active and deferred messages that a receiver has locked.
        enqueued: all that were stored; for a topic, all that were not duplicates.
        duplicates: dropped by duplicate detection.
    """

    active: int = 0
    locked: int = 0
    deferred: int = 0
    scheduled: int = 0
    dead_letters: int = 0
    enqueued: int = 0
    completed: int = 0
    duplicates: int = 0
    expired: int = 0


class Entity:
    """A view of one queue, topic or subscription. Every property is a new copy; any thread may read it."""

    def __init__(self, read: Reader, path: str) -> None:
        self._read = read
        self.path = path

    @property
    def messages(self) -> tuple[StoredMessage, ...]:
        """Return the messages in order, in any state; empty for a topic."""
        return self._read(self.path, lambda entity: _copies(_queue(entity)))

    @property
    def dead_letters(self) -> tuple[StoredMessage, ...]:
        """Return the messages of the dead-letter queue in order."""
        return self._read(self.path, lambda entity: _copies(_dead(entity)))

    @property
    def counts(self) -> Counts:
        """Return how many messages the entity holds and held."""
        return self._read(self.path, _counts)


def _queue(entity: MessageQueue | Topic) -> MessageQueue | None:
    return entity if isinstance(entity, MessageQueue) else None


def _dead(entity: MessageQueue | Topic) -> MessageQueue | None:
    return entity.dead_letters if isinstance(entity, MessageQueue) else None


def _copies(queue: MessageQueue | None) -> tuple[StoredMessage, ...]:
    return () if queue is None else tuple(_copy(message) for message in sorted(queue.messages, key=_number))


def _number(message: Message) -> int:
    return message.sequence_number


def _copy(message: Message) -> StoredMessage:
    properties, application = message.content.properties, message.content.application_properties
    dead = application if message.dead_letter_source is not None else {}
    return StoredMessage(
        message_id=message.content.message_id,
        body=message.content.body,
        subject=properties.get("subject"),
        correlation_id=properties.get("correlation_id"),
        content_type=properties.get("content_type"),
        session_id=message.content.session_id,
        application_properties=dict(application),
        sequence_number=message.sequence_number,
        delivery_count=message.delivery_count,
        state=message.state.name.lower(),
        locked=message.lock_token is not None,
        enqueued_at=message.enqueued_at,
        dead_letter_reason=dead.get("DeadLetterReason"),
        dead_letter_description=dead.get("DeadLetterErrorDescription"),
    )


def _counts(entity: MessageQueue | Topic) -> Counts:
    tally = entity.tally
    came_and_went = Counts(
        enqueued=tally.enqueued, completed=tally.completed, duplicates=tally.duplicates, expired=tally.expired
    )
    if isinstance(entity, Topic):
        return came_and_went
    messages = list(entity.messages)
    dead = 0 if entity.dead_letters is None else len(list(entity.dead_letters.messages))
    return Counts(
        active=sum(message.state == State.ACTIVE for message in messages),
        locked=sum(message.lock_token is not None for message in messages),
        deferred=sum(message.state == State.DEFERRED for message in messages),
        scheduled=sum(message.state == State.SCHEDULED for message in messages),
        dead_letters=dead,
        enqueued=came_and_went.enqueued,
        completed=came_and_went.completed,
        duplicates=came_and_went.duplicates,
        expired=came_and_went.expired,
    )
