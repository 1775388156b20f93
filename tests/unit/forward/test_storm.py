"""A storm of 500 events within ten minutes, from the relay's queue to Teams and Slack, with a clock that is moved."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from random import Random

import pytest

from bridge.delivery.dispatcher import Dispatcher
from bridge.delivery.holding import Gathering
from bridge.errors import DeliveryError, Rejected, Unavailable
from bridge.events.model import StoredEvent
from tests.support.memory_sink import MemorySink
from tests.support.receivers import CONSOLE, FORMATS, make_format
from tests.support.storm import EVENTS, Told, event_ids, instants, scheduled, started
from tests.unit.forward.test_relay import RelayOnDoubles

FORMATS_BY_SINK = {"sink0": "teams", "sink1": "slack"}
STORM_SECONDS = 600.0


class ChatSink(MemorySink):
    """A chat in memory: it takes one message at a time."""

    def __init__(self, format_: str, now: Callable[[], datetime]) -> None:
        super().__init__()
        self.is_digest = True
        self._format, self._now = make_format(format_, console_url=CONSOLE), now
        self.bodies: list[bytes] = []
        self.before: Callable[[], DeliveryError | None] = lambda: None

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Take a message."""
        _, body = self._format.encode(events, self._now())
        if error := self.before():
            raise error
        super().send(events)
        self.bodies.append(body)


class Fleet(RelayOnDoubles):
    """The relay with a channel in Teams and one in Slack, which gather for five minutes."""

    def __init__(self, folder: Path) -> None:
        self.sinks: dict[str, ChatSink] = {}
        super().__init__(folder, sinks=2)

    def start(self) -> None:
        """Start the relay and what delivers; the chats stay as they are."""
        super().start()
        for name, format_ in FORMATS_BY_SINK.items():
            self.sinks.setdefault(name, ChatSink(format_, self.clock.now))
        gathering = Gathering(300.0, self.clock)
        self.outbox.held = dict.fromkeys(self.sinks, gathering.until)
        self.dispatchers = [
            Dispatcher(
                name,
                sink,
                max_age_seconds=3600.0,
                outbox=self.outbox,
                clock=self.clock,
                max_per_second=FORMATS[FORMATS_BY_SINK[name]].per_second,
                holding=gathering,
            )
            for name, sink in self.sinks.items()
        ]

    def until(self, monotonic: float) -> None:
        """Relay and deliver until then."""
        self.relay.run_once(0.0)
        while self.clock.monotonic() < monotonic:
            waits = [self._wait(one) for one in self.dispatchers]
            self.clock.advance(min(*waits, monotonic - self.clock.monotonic()))

    def _wait(self, dispatcher: Dispatcher) -> float:
        while (wait_seconds := dispatcher.step()) is None:
            pass
        return wait_seconds

    def storm(self, at: Sequence[float], make: Callable[[str, datetime], StoredEvent]) -> None:
        """Put an event on the bus at each of these times."""
        began_at = self.clock.monotonic()
        for event_id, second in zip(event_ids(len(at)), at, strict=True):
            self.until(began_at + second)
            one = make(event_id, self.clock.now())
            self.queue.send(one.body, message_id=one.id)
        self.until(self.clock.monotonic() + 1)

    def close(self) -> None:
        """Close the outbox."""
        self.outbox.close()

    def told(self) -> list[Told]:
        """Deliver all, and return what both chats were told, each of each event once."""
        while any(self.outbox.backlogs().values()):
            self.until(self.clock.monotonic() + 10)
        told = [Told.by(FORMATS_BY_SINK[name], sink.bodies) for name, sink in self.sinks.items()]
        for sink, one in zip(self.sinks.values(), told, strict=True):
            assert max(Counter(sink.ids()).values()) == 1
            assert max(one.shown.values()) == 1 or one.events > EVENTS
            assert one.largest <= 20_000
        return told


@pytest.fixture(autouse=True)
def _fixed() -> None:
    random.seed(1)


def test_500_notices_in_ten_minutes_are_six_messages_and_their_starts_three_more(tmp_path: Path) -> None:
    with closing(Fleet(tmp_path)) as fleet:
        fleet.storm(instants(STORM_SECONDS), scheduled)
        assert [(told.messages, told.events) for told in fleet.told()] == [(6, EVENTS)] * 2
        fleet.storm(instants(STORM_SECONDS, seed=2), started)
        assert [(told.messages, told.events) for told in fleet.told()] == [(9, 2 * EVENTS)] * 2


def test_notices_of_30_seconds_are_told_within_two_and_still_few_messages(tmp_path: Path) -> None:
    with closing(Fleet(tmp_path)) as fleet:
        fleet.storm(instants(30.0), lambda event_id, at: scheduled(event_id, at, minutes=0.5))
        for told in fleet.told():
            assert told.events == EVENTS
            assert told.messages <= 1 + 30 / 2 + 1


@pytest.mark.parametrize("seed", range(2))
def test_with_receivers_that_fail_and_a_kill_every_event_is_told_once(tmp_path: Path, seed: int) -> None:
    chance = Random(seed)  # noqa: S311 - a seed
    with closing(Fleet(tmp_path)) as fleet:
        errors: list[DeliveryError | None] = [
            *(Unavailable("503", status=503), Unavailable("429", status=429, retry_after_seconds=20)),
            *(Unavailable("hangs"), None, None, None, None),
        ]
        for sink in fleet.sinks.values():
            sink.before = lambda: chance.choice(errors)
        is_killed = False

        def make(event_id: str, at: datetime) -> StoredEvent:
            nonlocal is_killed
            if not is_killed and event_id == event_ids()[250]:
                is_killed = True
                fleet.restart()
            return scheduled(event_id, at)

        fleet.storm(instants(STORM_SECONDS), make)
        for sink in fleet.sinks.values():
            sink.before = lambda: None
        assert is_killed
        for told in fleet.told():
            assert told.events == EVENTS
            assert told.messages <= 50


def test_a_receiver_that_refuses_digests_gets_every_event_alone(tmp_path: Path) -> None:
    with closing(Fleet(tmp_path)) as fleet:
        for sink in fleet.sinks.values():
            accept = sink.send

            def send(events: Sequence[StoredEvent], accept: Callable[..., None] = accept) -> None:
                if len(events) > 1:
                    raise Rejected("too large", status=413)
                accept(events)

            sink.send = send  # type: ignore[method-assign]
        fleet.storm(instants(60.0, 100), scheduled)
        assert [told.messages for told in fleet.told()] == [100, 100]
