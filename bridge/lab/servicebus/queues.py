"""Keep the messages of one queue or subscription: order, locks, settlement, dead letters. No I/O."""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bridge.lab.servicebus.conditions import LOCK_LOST, MESSAGE_NOT_FOUND, NOT_ALLOWED, Refused
from bridge.lab.servicebus.config import QueueSettings
from bridge.lab.servicebus.duplicates import DuplicateWindow
from bridge.lab.servicebus.messages import Message, State, Tally
from bridge.lab.servicebus.sections import Content
from bridge.lab.servicebus.timers import Timers

EXPIRED = ("TTLExpiredException", "The message expired and was dead lettered.")
MAX_DELIVERIES = "MaxDeliveryCountExceeded"


class MessageQueue:
    """Keep messages in order. Not thread-safe; every time comes from the timers' clock."""

    requires_session = False

    def __init__(
        self,
        settings: QueueSettings,
        timers: Timers,
        *,
        changed: Callable[[MessageQueue], None],
        dead_letters: MessageQueue | None = None,
    ) -> None:
        """Start empty.

        Args:
            settings: lock time, delivery count and the like.
            timers: for locks and messages that expire.
            changed: called when a message has become available.
            dead_letters: the dead-letter queue; None if this is one.
        """
        self.settings = settings
        self.dead_letters = dead_letters
        self.tally = Tally()
        self._timers = timers
        self._changed = changed
        self._messages: dict[int, Message] = {}
        self._locked: dict[uuid.UUID, Message] = {}
        # Sequence numbers that may be available, by session; unavailable ones are skipped when reached.
        self._ready: dict[str | None, list[int]] = {}
        self._last_number = 0
        window = None if dead_letters is None else settings.duplicate_window_seconds
        self._duplicates = DuplicateWindow(window, timers.clock)

    @property
    def name(self) -> str:
        """Return the name of the entity."""
        return self.settings.name

    @property
    def messages(self) -> Iterator[Message]:
        """Return all messages, whatever their state."""
        return iter(self._messages.values())

    # --- incoming ---

    def check(self, content: Content) -> None:
        """Raise Refused if the queue cannot accept the message."""

    def accept(self, content: Content) -> None:
        """Accept a message that a client sent: drop a duplicate, keep a scheduled one for later."""
        if self._duplicates.seen(content.message_id):
            self.tally.duplicates += 1
        elif content.scheduled_for is not None and content.scheduled_for > self._timers.now():
            self._hold(content, content.scheduled_for)
        else:
            self.put(content)

    def put(self, content: Content, *, ttl_seconds: float | None = None) -> None:
        """Add a message at the end."""
        now = self._timers.now()
        lives = [
            ttl for ttl in (self.settings.ttl_seconds, content.ttl_seconds, ttl_seconds) if ttl is not None
        ]
        message = Message(
            content=content, sequence_number=self._next_number(), enqueued_at=now, expires_at=now + min(lives)
        )
        self._timers.at(now + min(lives), self._life_over, message)
        self._add(message)

    def schedule(self, content: Content, at: float) -> int:
        """Schedule a message; return its sequence number, which is valid only until then."""
        if self._duplicates.seen(content.message_id):
            self.tally.duplicates += 1
            return self._next_number()
        return self._hold(content, at)

    def cancel(self, number: int) -> None:
        """Remove a scheduled message."""
        message = self._messages.get(number)
        if message is None or message.state != State.SCHEDULED:
            raise Refused(MESSAGE_NOT_FOUND, f"Failed to find the scheduled message {number}.")
        self._remove(message)

    def _hold(self, content: Content, at: float) -> int:
        message = Message(
            content=content, sequence_number=self._next_number(), enqueued_at=at, state=State.SCHEDULED
        )
        self._messages[message.sequence_number] = message
        self._timers.at(at, self._release, message)
        return message.sequence_number

    def _release(self, message: Message) -> None:
        if not message.gone:
            self._remove(message)
            self.put(message.content)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _add(self, message: Message) -> None:
        self._messages[message.sequence_number] = message
        self.tally.enqueued += 1
        self._offer(message)

    # --- outgoing ---

    def take(self, session_id: str | None = None, *, destructive: bool = False) -> Message | None:
        """Lock (or with `destructive` remove) the first available message and return it; None if there is none."""
        message = self._first(session_id)
        if message is None:
            return None
        heapq.heappop(self._ready[session_id])
        self._hand_out(message, destructive=destructive)
        return message

    def take_deferred(self, numbers: Sequence[int], *, destructive: bool = False) -> list[Message]:
        """Lock (or with `destructive` remove) deferred messages and return them."""
        found = [self._messages.get(number) for number in numbers]
        taken = [m for m in found if m is not None and m.state == State.DEFERRED and m.lock_token is None]
        if len(taken) < len(numbers):
            raise Refused(MESSAGE_NOT_FOUND, "Failed to lock one or more specified messages.")
        for message in taken:
            self._hand_out(message, destructive=destructive)
        return taken

    def peek(self, start: int, count: int, session_id: str | None = None) -> list[Message]:
        """Return messages in any state without locking them.

        Args:
            start: the first sequence number.
            count: the maximum number of messages.
            session_id: only this session; None for all.
        """
        found: list[Message] = []
        for number in sorted(n for n in self._messages if n >= start):
            message = self._messages[number]
            if len(found) >= count:
                break
            if session_id is None or message.content.session_id == session_id:
                found.append(message)
        return found

    def _first(self, session_id: str | None) -> Message | None:
        heap = self._ready.get(session_id)
        while heap:
            message = self._messages.get(heap[0])
            if message is not None and message.state == State.ACTIVE and message.lock_token is None:
                if not self._is_expired(message):
                    return message
                self._expire(message)
            heapq.heappop(heap)
        self._ready.pop(session_id, None)
        return None

    def _hand_out(self, message: Message, *, destructive: bool) -> None:
        if destructive:
            self._remove(message)
            self.tally.completed += 1
            return
        message.lock_token = uuid.uuid4()
        self._locked[message.lock_token] = message
        self._lock(message)

    def _lock(self, message: Message) -> None:
        message.locked_until = self._timers.now() + self.settings.lock_seconds
        self._timers.at(message.locked_until, self._lock_over, message)

    # --- settlement ---

    def locked(self, token: uuid.UUID, owner: object | None = None) -> Message:  # noqa: ARG002 - of sessions
        """Return the message of a lock token; raise Refused if the lock is lost."""
        message = self._locked.get(token)
        if message is None:
            raise Refused(
                LOCK_LOST,
                "The lock supplied is invalid. Either the lock expired, or the message has already been removed "
                "from the queue.",
            )
        return message

    def change(self, token: uuid.UUID, changes: Mapping[str, Any]) -> None:
        """Set application properties of a locked message, as a client can when it settles one."""
        if changes:
            message = self.locked(token)
            message.content = message.content.with_properties(changes)

    def complete(self, token: uuid.UUID) -> None:
        """Complete a message: remove it."""
        self._remove(self.locked(token))
        self.tally.completed += 1

    def abandon(self, token: uuid.UUID) -> None:
        """Make a message available again, and count the delivery."""
        self._give_back(self.locked(token), tried=True)

    def release(self, token: uuid.UUID) -> None:
        """Make a message available again, without counting the delivery."""
        self._give_back(self.locked(token), tried=False)

    def defer(self, token: uuid.UUID) -> None:
        """Defer a message: it can be received only by its sequence number."""
        message = self.locked(token)
        message.state = State.DEFERRED
        self._give_back(message, tried=True)

    def dead_letter(self, token: uuid.UUID, reason: str | None, description: str | None) -> None:
        """Move a message to the dead-letter queue.

        Args:
            token: its lock token.
            reason: DeadLetterReason.
            description: DeadLetterErrorDescription.
        """
        self._move_to_dead_letters(self.locked(token), reason, description)

    def renew(self, token: uuid.UUID) -> float:
        """Renew a message's lock; return when it expires."""
        message = self.locked(token)
        self._lock(message)
        return message.locked_until

    def _give_back(self, message: Message, *, tried: bool) -> None:
        self._unlock(message)
        if tried:
            message.delivery_count += 1
        limit = self.settings.max_delivery_count
        if (
            self.dead_letters is not None
            and message.delivery_count >= limit
            and message.state == State.ACTIVE
        ):
            self._move_to_dead_letters(
                message, MAX_DELIVERIES, f"Message could not be consumed after {limit} delivery attempts."
            )
        elif self._is_expired(message):
            self._expire(message)
        else:
            self._offer(message)

    def _offer(self, message: Message) -> None:
        if message.state == State.ACTIVE:
            heapq.heappush(self._ready.setdefault(self._group(message), []), message.sequence_number)
            self._changed(self)

    def _group(self, message: Message) -> str | None:  # noqa: ARG002 - of sessions
        return None

    def _unlock(self, message: Message) -> None:
        if message.lock_token is not None:
            self._locked.pop(message.lock_token, None)
            message.lock_token = None

    def _remove(self, message: Message) -> None:
        self._unlock(message)
        message.gone = True
        self._messages.pop(message.sequence_number, None)

    def _move_to_dead_letters(self, message: Message, reason: str | None, description: str | None) -> None:
        if self.dead_letters is None:
            raise Refused(NOT_ALLOWED, "A message of a dead-letter queue cannot be dead-lettered.")
        self._remove(message)
        self.dead_letters._receive_dead(message, reason, description)

    def _receive_dead(self, message: Message, reason: str | None, description: str | None) -> None:
        given = {"DeadLetterReason": reason, "DeadLetterErrorDescription": description}
        self._add(
            Message(
                content=message.content.with_properties({name: text for name, text in given.items() if text}),
                sequence_number=self._next_number(),
                enqueued_at=message.enqueued_at,
                delivery_count=message.delivery_count,
                dead_letter_source=self.name,
            )
        )

    # --- expiry ---

    def _is_expired(self, message: Message) -> bool:
        return message.expires_at is not None and message.expires_at <= self._timers.now()

    def _life_over(self, message: Message) -> None:
        # A locked message does not expire; it is checked when its lock ends.
        if not message.gone and message.lock_token is None:
            self._expire(message)

    def _expire(self, message: Message) -> None:
        self.tally.expired += 1
        if self.settings.dead_letter_on_expiration and self.dead_letters is not None:
            self._move_to_dead_letters(message, *EXPIRED)
        else:
            self._remove(message)

    def _lock_over(self, message: Message) -> None:
        if not message.gone and message.lock_token is not None and message.locked_until <= self._timers.now():
            self._give_back(message, tried=True)
