"""Hold the entities of a namespace, and route messages to them. No I/O; the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from bridge.lab.servicebus.conditions import MESSAGE_NOT_FOUND, NOT_ALLOWED, NOT_FOUND, Refused
from bridge.lab.servicebus.config import Namespace, QueueSettings, SubscriptionSettings, TopicSettings
from bridge.lab.servicebus.duplicates import DuplicateWindow
from bridge.lab.servicebus.filters import Rule
from bridge.lab.servicebus.messages import Tally
from bridge.lab.servicebus.queues import MessageQueue
from bridge.lab.servicebus.sections import Content
from bridge.lab.servicebus.sessions import SessionQueue
from bridge.lab.servicebus.timers import Timers

DEAD_LETTER_SUFFIX = "/$deadletterqueue"


class _ScheduledMessage:
    """Hold a scheduled message of a topic."""

    def __init__(self, content: Content, number: int) -> None:
        self.content = content
        self.number = number
        self.gone = False


class Topic:
    """Route messages to the subscriptions whose filters match."""

    def __init__(
        self, settings: TopicSettings, timers: Timers, make_queue: Callable[[QueueSettings], MessageQueue]
    ) -> None:
        """Start empty.

        Args:
            settings: the topic and its subscriptions.
            timers: for scheduled messages.
            make_queue: creates the queue of a subscription.
        """
        self.settings = settings
        self.tally = Tally()
        self._timers = timers
        self._duplicates = DuplicateWindow(settings.duplicate_window_seconds, timers.clock)
        self._scheduled: dict[int, _ScheduledMessage] = {}
        self._numbers = count(1)
        self.subscriptions: list[tuple[SubscriptionSettings, MessageQueue]] = [
            (subscription, make_queue(subscription.queue)) for subscription in settings.subscriptions
        ]

    @property
    def name(self) -> str:
        """Return the topic's name."""
        return self.settings.name

    def check(self, content: Content) -> None:
        """Accept any message: a subscription that cannot store it dead-letters it."""

    def accept(self, content: Content) -> None:
        """Accept a message that a client sent: drop a duplicate, keep a scheduled one for later."""
        if self._duplicates.seen(content.message_id):
            self.tally.duplicates += 1
        elif content.scheduled_for is not None and content.scheduled_for > self._timers.now():
            self._hold(content, content.scheduled_for)
        else:
            self._distribute(content)

    def schedule(self, content: Content, at: float) -> int:
        """Schedule a message; return its sequence number, with which it can be canceled."""
        if self._duplicates.seen(content.message_id):
            self.tally.duplicates += 1
            return next(self._numbers)
        return self._hold(content, at)

    def cancel(self, number: int) -> None:
        """Remove a scheduled message."""
        held = self._scheduled.pop(number, None)
        if held is None:
            raise Refused(MESSAGE_NOT_FOUND, f"Failed to find the scheduled message {number}.")
        held.gone = True

    def _hold(self, content: Content, at: float) -> int:
        held = _ScheduledMessage(content, next(self._numbers))
        self._scheduled[held.number] = held
        self._timers.at(at, self._release, held)
        return held.number

    def _release(self, held: _ScheduledMessage) -> None:
        if self._scheduled.pop(held.number, None) is not None:
            self._distribute(held.content)

    def _distribute(self, content: Content) -> None:
        self.tally.enqueued += 1
        for settings, queue in self.subscriptions:
            if any(rule.matches(content) for rule in settings.rules):
                queue.put(content, ttl_seconds=self.settings.ttl_seconds)


class Broker:
    """Find entities by the paths that clients use. Not thread-safe."""

    def __init__(
        self,
        namespace: Namespace,
        clock: Callable[[], float],
        *,
        changed: Callable[[MessageQueue], None] = lambda _: None,
        session_lost: Callable[[object], None] = lambda _: None,
    ) -> None:
        """Start with the entities of a namespace, empty.

        Args:
            namespace: the entities.
            clock: seconds since 1970; the only source of time.
            changed: called when a queue has a message available.
            session_lost: called with the owner of a session whose lock has expired.
        """
        self.timers = Timers(clock)
        self._changed = changed
        self._session_lost = session_lost
        self._targets: dict[str, MessageQueue | Topic] = {}
        self._queues: dict[str, MessageQueue] = {}
        for queue in namespace.queues:
            self.add_queue(queue)
        for topic in namespace.topics:
            self.add_topic(topic)

    def add_queue(self, settings: QueueSettings) -> None:
        """Create a queue."""
        queue = self._make_queue(settings)
        self._targets[settings.name.lower()] = queue

    def add_topic(self, settings: TopicSettings) -> None:
        """Create a topic with its subscriptions."""
        self._targets[settings.name.lower()] = Topic(settings, self.timers, self._make_queue)

    def _make_queue(self, settings: QueueSettings) -> MessageQueue:
        dead_letters = MessageQueue(settings, self.timers, changed=self._changed)
        queue: MessageQueue
        if settings.requires_session:
            queue = SessionQueue(
                settings,
                self.timers,
                changed=self._changed,
                session_lost=self._session_lost,
                dead_letters=dead_letters,
            )
        else:
            queue = MessageQueue(settings, self.timers, changed=self._changed, dead_letters=dead_letters)
        self._queues[settings.name.lower()] = queue
        self._queues[settings.name.lower() + DEAD_LETTER_SUFFIX] = dead_letters
        return queue

    def target(self, path: str) -> MessageQueue | Topic:
        """Return the entity that a client may send to; raise Refused if there is none."""
        found = self._targets.get(path.lower())
        if found is None:
            if path.lower() in self._queues:
                raise Refused(NOT_ALLOWED, f"Clients cannot send messages to the entity '{path}'.")
            raise _not_found(path)
        return found

    def source(self, path: str) -> MessageQueue:
        """Return the entity that a client may receive from; raise Refused if there is none."""
        found = self._queues.get(path.lower())
        if found is None:
            if path.lower() in self._targets:
                raise Refused(NOT_ALLOWED, f"The entity '{path}' is a topic; receive from a subscription.")
            raise _not_found(path)
        return found

    def rules(self, path: str) -> tuple[Rule, ...]:
        """Return the rules of a subscription; raise Refused if it is not one."""
        for topic in self._targets.values():
            for settings, queue in topic.subscriptions if isinstance(topic, Topic) else ():
                if queue is self.source(path):
                    return settings.rules
        raise Refused(NOT_ALLOWED, f"The entity '{path}' is not a subscription.")

    def exists(self, path: str) -> bool:
        """Return whether there is such an entity."""
        return path.lower() in self._targets or path.lower() in self._queues

    def send(self, path: str, contents: Sequence[Content]) -> None:
        """Accept all the messages, or none if one of them is refused."""
        target = self.target(path)
        for content in contents:
            target.check(content)
        for content in contents:
            target.accept(content)

    def schedule(self, path: str, entries: Sequence[tuple[Content, float]]) -> list[int]:
        """Schedule messages; return their sequence numbers."""
        target = self.target(path)
        for content, _ in entries:
            target.check(content)
        return [target.schedule(content, at) for content, at in entries]

    def cancel(self, path: str, numbers: Sequence[int]) -> None:
        """Remove scheduled messages."""
        target = self.target(path)
        for number in numbers:
            target.cancel(number)

    def tick(self) -> None:
        """Expire locks and messages, and release scheduled messages that are due."""
        self.timers.run()


def _not_found(path: str) -> Refused:
    return Refused(NOT_FOUND, f"The messaging entity '{path}' could not be found.")
