"""Hold the entities of a namespace, and route messages to them. No I/O; the clock is passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bridge.lab.servicebus.config import Namespace, QueueSettings, TopicSettings
from bridge.lab.servicebus.messages import NOT_ALLOWED, NOT_FOUND, Content, Refused
from bridge.lab.servicebus.queues import DuplicateWindow, Events, MessageQueue, check_batch

DEAD_LETTER_SUFFIX = "/$deadletterqueue"


class Topic:
    """Route messages to the subscriptions whose filters match."""

    def __init__(self, settings: TopicSettings, events: Events) -> None:
        self.name = settings.name
        self.counts: Counter[str] = Counter()  # enqueued, duplicates
        self.subscriptions = [
            (one.filters(), MessageQueue(_renamed(one, settings.name), events))
            for one in settings.subscriptions
        ]
        self._ttl_seconds = settings.properties.default_message_time_to_live.total_seconds()
        self._properties = settings.properties
        self._duplicates = DuplicateWindow(settings.properties, events.now)

    def check(self, contents: Sequence[Content]) -> None:
        """Raise Refused for the batch; a message that a subscription cannot store is dead-lettered there."""
        check_batch(self._properties, contents)

    def accept(self, content: Content) -> None:
        """Accept a message that a client sent; drop a duplicate."""
        if self._duplicates.seen(content):
            self.counts["duplicates"] += 1
            return
        self.counts["enqueued"] += 1
        for filters, queue in self.subscriptions:
            if any(matches(content) for matches in filters):
                queue.put(content, ttl_seconds=self._ttl_seconds)


def _renamed(subscription: QueueSettings, topic: str) -> QueueSettings:
    name = f"{topic}/Subscriptions/{subscription.name}"
    return QueueSettings(name=name, properties=subscription.properties)


class Broker:
    """Find entities by the paths that clients use. Not thread-safe."""

    def __init__(self, namespace: Namespace, events: Events) -> None:
        """Start with the entities of a namespace, empty."""
        self._events = events
        self._targets: dict[str, MessageQueue | Topic] = {}
        self._queues: dict[str, MessageQueue] = {}
        for settings in namespace.queues:
            self.add_queue(settings)
        for topic in [Topic(settings, events) for settings in namespace.topics]:
            self._targets[topic.name.lower()] = topic
            self._queues.update({queue.name.lower(): queue for _, queue in topic.subscriptions})

    def add_queue(self, settings: QueueSettings) -> None:
        """Create a queue."""
        queue = MessageQueue(settings, self._events)
        self._targets[queue.name.lower()] = self._queues[queue.name.lower()] = queue

    def target(self, path: str) -> MessageQueue | Topic:
        """Return the entity that a client may send to; raise Refused if there is none."""
        found = self._targets.get(path.lower())
        if found is None:
            self.source(path)
            raise Refused(NOT_ALLOWED, f"Clients cannot send messages to the entity '{path}'.")
        return found

    def source(self, path: str) -> MessageQueue:
        """Return the entity that a client may receive from; raise Refused if there is none."""
        name = path.lower()
        found = self._queues.get(name.removesuffix(DEAD_LETTER_SUFFIX))
        if found is not None:
            return found.dead_letters or found if name.endswith(DEAD_LETTER_SUFFIX) else found
        if name in self._targets:
            raise Refused(NOT_ALLOWED, f"The entity '{path}' is a topic; receive from a subscription.")
        raise missing(path)

    def find(self, path: str) -> MessageQueue | Topic:
        """Return an entity; raise Refused if there is none."""
        return self._targets.get(path.lower()) or self.source(path)

    def send(self, path: str, contents: Sequence[Content]) -> None:
        """Accept all the messages, or none if one of them is refused."""
        target = self.target(path)
        target.check(contents)
        for content in contents:
            target.accept(content)

    def tick(self) -> None:
        """Let locks and messages expire."""
        for queue in self._queues.values():
            queue.tick()


def missing(path: str) -> Refused:
    """Return the error for an entity that does not exist."""
    return Refused(NOT_FOUND, f"The messaging entity '{path}' could not be found.")
