"""Keep the messages of one queue or subscription: order, locks, sessions, settlement, dead letters. No I/O."""

from __future__ import annotations

import heapq
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.lab.servicebus.config import Properties, QueueSettings
from bridge.lab.servicebus.messages import (
    LOCK_LOST,
    NOT_ALLOWED,
    SESSION_LOCKED,
    SESSION_LOST,
    Content,
    Message,
    Refused,
)

EXPIRED = ("TTLExpiredException", "The message expired and was dead lettered.")
NO_SESSION = ("Session ID is null.", "Session enabled entity doesn't allow a message without a session id.")
MAX_DELIVERIES = "MaxDeliveryCountExceeded"
NEVER = float("inf")


@dataclass
class Events:
    """What a queue needs: the clock, and whom it tells.

    Attributes:
        now: returns the seconds since 1970; the only source of time.
        changed: called when a queue has a message available.
        session_lost: called with the owner of a session whose lock has expired.
    """

    now: Callable[[], float]
    changed: Callable[[MessageQueue], None] = lambda _: None
    session_lost: Callable[[object], None] = lambda _: None


def check_batch(properties: Properties, contents: Sequence[Content]) -> None:
    """Raise Refused for a batch that belongs to several partitions.

    The service names all three ids; whether it compares those of messages with one key is not known, so the lab does.
    """
    has_ids = properties.requires_duplicate_detection
    keys = {(one.partition_key, one.message_id if has_ids else "") for one in contents}
    if properties.enable_partitioning and len(keys) > 1:
        raise Refused(
            NOT_ALLOWED,
            "Batching brokered messages with distinct SessionId, PartitionKey, or MessageId is not supported.",
        )


class DuplicateWindow:
    """Remember message ids for the time that an entity says, in each of its partitions."""

    def __init__(self, properties: Properties, now: Callable[[], float]) -> None:
        window = properties.duplicate_detection_history_time_window.total_seconds()
        self._seconds = window if properties.requires_duplicate_detection else 0.0
        self._has_partitions = properties.enable_partitioning
        self._now = now
        self._until: dict[tuple[str | None, str], float] = {}  # in the order in which they end

    def seen(self, content: Content) -> bool:
        """Return whether the id was seen, and remember it; without an id or a window always False."""
        if not self._seconds or not content.message_id:
            return False
        message_id = (content.partition_key if self._has_partitions else None, content.message_id)
        now = self._now()
        while self._until and (oldest := next(iter(self._until))) and self._until[oldest] <= now:
            del self._until[oldest]
        if message_id in self._until:
            return True
        self._until[message_id] = now + self._seconds
        return False


@dataclass(kw_only=True, eq=False)
class Session:
    """Hold the lock of a session."""

    owner: object
    locked_until: float = 0.0
    messages: dict[uuid.UUID, Message] = field(default_factory=dict)  # those that its owner has received


class MessageQueue:
    """Keep messages in order. Not thread-safe."""

    def __init__(self, settings: QueueSettings, events: Events, *, dead_letters: bool = True) -> None:
        """Start empty.

        Args:
            settings: lock time, delivery count and the like.
            events: the clock, and whom to tell.
            dead_letters: whether it has a dead-letter queue.
        """
        properties = settings.properties
        self.name = settings.name
        self.counts: Counter[str] = Counter()  # enqueued, completed, duplicates, expired
        self.messages: dict[int, Message] = {}
        self.requires_session = properties.requires_session and dead_letters
        self.dead_letters = MessageQueue(settings, events, dead_letters=False) if dead_letters else None
        self._properties = properties
        self._lock_seconds = properties.lock_duration.total_seconds()
        self._events = events
        self._duplicates = DuplicateWindow(properties, events.now)
        self._locked: dict[uuid.UUID, Message] = {}  # in the order in which the locks end
        self._sessions: dict[str | None, Session] = {}  # those that somebody holds
        # Sequence numbers that may be available, by session; unavailable ones are skipped when reached.
        self._ready: dict[str | None, list[int]] = {}
        self._last_number = 0
        self._expiry_at = NEVER

    # --- incoming ---

    def check(self, contents: Sequence[Content]) -> None:
        """Raise Refused if the queue cannot accept the messages of a transfer."""
        check_batch(self._properties, contents)
        if self.requires_session and any(content.session_id is None for content in contents):
            raise Refused(
                NOT_ALLOWED,
                "The SessionId was not set on a message, and it cannot be sent to the entity. Entities that have "
                "session support enabled can only receive messages that have the SessionId set to a valid value.",
            )

    def accept(self, content: Content) -> None:
        """Accept a message that a client sent; drop a duplicate."""
        if self._duplicates.seen(content):
            self.counts["duplicates"] += 1
        else:
            self.put(content)

    def put(self, content: Content, *, ttl_seconds: float = NEVER) -> None:
        """Add a message at the end."""
        now = self._events.now()
        ttl_seconds = min(ttl_seconds, self._properties.default_message_time_to_live.total_seconds())
        if content.ttl_seconds is not None:
            ttl_seconds = min(ttl_seconds, content.ttl_seconds)
        message = self._add(content, enqueued_at=now, expires_at=now + ttl_seconds)
        self._expiry_at = min(self._expiry_at, now + ttl_seconds)
        if self.requires_session and content.session_id is None:  # it came through a topic
            self._bury(message, *NO_SESSION)

    def _add(self, content: Content, **more: Any) -> Message:
        self._last_number += 1
        message = Message(content=content, sequence_number=self._last_number, **more)
        self.messages[message.sequence_number] = message
        self.counts["enqueued"] += 1
        self._offer(message)
        return message

    # --- outgoing ---

    def take(self, session_id: str | None = None) -> Message | None:
        """Lock the first available message and return it; None if there is none."""
        message = self._first(session_id)
        if message is None:
            return None
        heapq.heappop(self._ready[session_id])
        message.lock_token = uuid.uuid4()
        self._locked[message.lock_token] = message
        if session := self._sessions.get(session_id):
            session.messages[message.lock_token] = message
            message.locked_until = session.locked_until
        else:
            message.locked_until = self._events.now() + self._lock_seconds
        return message

    def peek(self, start: int, count: int, session_id: str | None = None) -> list[Message]:
        """Return messages without locking them, from a sequence number on; of all sessions or one."""
        found: Iterator[Message] = (
            self.messages[number] for number in sorted(self.messages) if number >= start
        )
        wanted = (one for one in found if session_id in (None, one.content.session_id))
        return [message for message, _ in zip(wanted, range(count), strict=False)]

    def _first(self, session_id: str | None) -> Message | None:
        heap = self._ready.get(session_id)
        while heap:
            message = self.messages.get(heap[0])
            if message is not None and message.lock_token is None:
                if not self._is_expired(message):
                    return message
                self._expire(message)
            heapq.heappop(heap)
        self._ready.pop(session_id, None)
        return None

    # --- sessions ---

    def accept_session(self, session_id: str | None, owner: object) -> str | None:
        """Lock a session, or without an id the first that has a message; return its id, None if there is none yet."""
        if session_id is None:
            free = [one for one in self._ready if one is not None and one not in self._sessions]
            heads = [(message.sequence_number, one) for one in free if (message := self._first(one))]
            if not heads:
                return None
            session_id = min(heads)[1]
        if session_id in self._sessions:
            raise Refused(
                SESSION_LOCKED,
                f"The requested session '{session_id}' cannot be accepted. It may be locked by another receiver.",
            )
        self._sessions[session_id] = Session(owner=owner)
        self.renew_session(session_id, owner)
        return session_id

    def renew_session(self, session_id: str, owner: object) -> float:
        """Renew a session's lock; return when it expires."""
        session = self.held(session_id, owner)
        session.locked_until = self._events.now() + self._lock_seconds
        for message in session.messages.values():
            message.locked_until = session.locked_until
        return session.locked_until

    def release_session(self, session_id: str, owner: object) -> None:
        """Release a session; its messages become available without counting the delivery."""
        session = self._sessions.get(session_id)
        if session is not None and session.owner is owner:
            self._free(session_id, tried=False)

    def held(self, session_id: str, owner: object) -> Session:
        """Return a session that an owner holds; raise Refused if the lock is lost."""
        session = self._sessions.get(session_id)
        if session is None or session.owner is not owner:
            raise Refused(
                SESSION_LOST, f"The session lock of '{session_id}' has expired on the MessageSession."
            )
        return session

    def _free(self, session_id: str | None, *, tried: bool) -> None:
        for message in self._sessions.pop(session_id).messages.values():
            self._give_back(message, tried=tried)
        self._events.changed(self)

    # --- settlement ---

    def locked(self, token: uuid.UUID, owner: object | None = None) -> Message:
        """Return the message of a lock token; raise Refused if the lock, or the owner's session, is lost."""
        message = self._locked.get(token)
        if message is None:
            raise Refused(
                SESSION_LOST if self.requires_session else LOCK_LOST,
                "The lock supplied is invalid. Either the lock expired, or the message has already been removed "
                "from the queue.",
            )
        if owner is not None:
            self.held(str(message.content.session_id), owner)
        return message

    def change(self, token: uuid.UUID, changes: Mapping[str, Any]) -> None:
        """Set application properties of a locked message, as a client can when it settles one."""
        message = self.locked(token)
        message.content = message.content.with_properties(changes)

    def complete(self, token: uuid.UUID) -> None:
        """Complete a message: remove it."""
        self._remove(self.locked(token))
        self.counts["completed"] += 1

    def abandon(self, token: uuid.UUID) -> None:
        """Make a message available again, and count the delivery."""
        self._give_back(self.locked(token), tried=True)

    def release(self, token: uuid.UUID) -> None:
        """Make a message available again, without counting the delivery."""
        self._give_back(self.locked(token), tried=False)

    def dead_letter(self, token: uuid.UUID, reason: str | None, description: str | None) -> None:
        """Move a message to the dead-letter queue, with DeadLetterReason and DeadLetterErrorDescription."""
        self._bury(self.locked(token), reason, description)

    def renew(self, token: uuid.UUID) -> float:
        """Renew a message's lock; return when it expires."""
        message = self.locked(token)
        self._locked[token] = self._locked.pop(token)
        message.locked_until = self._events.now() + self._lock_seconds
        return message.locked_until

    def _give_back(self, message: Message, *, tried: bool) -> None:
        self._unlock(message)
        message.delivery_count += tried
        limit = self._properties.max_delivery_count
        if self.dead_letters is not None and message.delivery_count >= limit:
            self._bury(
                message, MAX_DELIVERIES, f"Message could not be consumed after {limit} delivery attempts."
            )
        elif self._is_expired(message):
            self._expire(message)
        else:
            self._offer(message)

    def _offer(self, message: Message) -> None:
        group = message.content.session_id if self.requires_session else None
        heapq.heappush(self._ready.setdefault(group, []), message.sequence_number)
        self._events.changed(self)

    def _unlock(self, message: Message) -> None:
        if (token := message.lock_token) is not None:
            message.lock_token = None
            self._locked.pop(token, None)
            if self.requires_session and (session := self._sessions.get(message.content.session_id)):
                session.messages.pop(token, None)

    def _remove(self, message: Message) -> None:
        self._unlock(message)
        self.messages.pop(message.sequence_number, None)

    def _bury(self, message: Message, reason: str | None, description: str | None) -> None:
        if self.dead_letters is None:
            raise Refused(NOT_ALLOWED, "A message of a dead-letter queue cannot be dead-lettered.")
        self._remove(message)
        given = {"DeadLetterReason": reason, "DeadLetterErrorDescription": description}
        self.dead_letters._add(
            message.content.with_properties({name: text for name, text in given.items() if text}),
            enqueued_at=message.enqueued_at,
            delivery_count=message.delivery_count,
            dead_letter_source=self.name,
        )

    # --- time ---

    def tick(self) -> None:
        """Let what is due expire: locks, sessions, messages."""
        now = self._events.now()
        for session_id, session in list(self._sessions.items()):
            if session.locked_until <= now:
                self._free(session_id, tried=True)
                self._events.session_lost(session.owner)
        while not self.requires_session and self._locked:
            message = next(iter(self._locked.values()))
            if message.locked_until > now:
                break
            self._give_back(message, tried=True)
        if self._expiry_at <= now:
            for message in [one for one in self.messages.values() if self._is_expired(one)]:
                if message.lock_token is None:  # a locked one is looked at when its lock ends
                    self._expire(message)
            rest = [one.expires_at for one in self.messages.values() if one.lock_token is None]
            self._expiry_at = min((at for at in rest if at is not None), default=NEVER)
        if self.dead_letters is not None:
            self.dead_letters.tick()

    def _is_expired(self, message: Message) -> bool:
        return message.expires_at is not None and message.expires_at <= self._events.now()

    def _expire(self, message: Message) -> None:
        self.counts["expired"] += 1
        if self._properties.dead_lettering_on_message_expiration and self.dead_letters is not None:
            self._bury(message, *EXPIRED)
        else:
            self._remove(message)
