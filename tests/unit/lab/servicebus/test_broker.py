"""The broker keeps messages as Service Bus does, with a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.lab.servicebus.broker import Broker
from bridge.lab.servicebus.config import Namespace
from bridge.lab.servicebus.messages import (
    LOCK_LOST,
    NOT_ALLOWED,
    NOT_FOUND,
    SESSION_LOST,
    Message,
    Refused,
)
from bridge.lab.servicebus.queues import Events, MessageQueue
from tests.support.bus_messages import content
from tests.support.clock import MovedClock

Owner = object
DETECTION = {"RequiresDuplicateDetection": True, "DuplicateDetectionHistoryTimeWindow": 20}


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


class Lab:
    """Hold a broker with one queue, and its notifications."""

    def __init__(self, clock: MovedClock, **settings: Any) -> None:
        self.lost: list[object] = []
        self.changed: list[MessageQueue] = []
        self.broker = Broker(
            Namespace.model_validate({"Queues": [{"Name": "Q", "Properties": settings}]}),
            Events(clock.wall, self.changed.append, self.lost.append),
        )
        self.clock = clock
        self.queue = self.broker.source("q")

    @property
    def dead(self) -> list[Message]:
        return list(self.broker.source("q/$DeadLetterQueue").messages.values())

    def send(self, *bodies: str, **options: Any) -> None:
        self.broker.send("q", [content(body, **options) for body in bodies])

    def move(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.broker.tick()

    def take(self, session_id: str | None = None) -> Message:
        message = self.queue.take(session_id)
        assert message is not None
        return message


def token(message: Message) -> Any:
    assert message.lock_token is not None
    return message.lock_token


def bodies(lab: Lab) -> list[bytes]:
    return [message.content.body for message in lab.queue.messages.values()]


def refusal(work: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(Refused) as caught:
        work(*arguments, **options)
    return caught.value.condition


# --- peek-lock ---


def test_a_lock_that_ends_gives_the_message_to_the_next_and_its_settlement_is_refused(
    clock: MovedClock,
) -> None:
    lab = Lab(clock, LockDuration=30)
    lab.send("1")
    first = token(lab.take())
    lab.move(29)
    assert lab.queue.take() is None
    lab.changed.clear()
    lab.move(1)
    assert lab.changed == [lab.queue]
    assert lab.take().delivery_count == 1
    for settle in (lab.queue.complete, lab.queue.abandon, lab.queue.renew):
        assert refusal(settle, first) == LOCK_LOST


@pytest.mark.parametrize("how", ["abandon", "expiry"])
def test_after_the_last_delivery_a_message_is_dead(clock: MovedClock, how: str) -> None:
    lab = Lab(clock, MaxDeliveryCount=3, LockDuration=10)
    lab.send("1")
    for _ in range(3):
        message = lab.take()
        if how == "abandon":
            lab.queue.abandon(token(message))
        else:
            lab.move(10)
    assert lab.queue.take() is None
    (dead,) = lab.dead
    assert dead.delivery_count == 3
    assert dead.content.application_properties["DeadLetterReason"] == "MaxDeliveryCountExceeded"
    assert dead.dead_letter_source == "Q"


# --- time to live ---


@pytest.mark.parametrize("dead_letter", [True, False])
def test_an_expired_message_is_dropped_or_dead_as_the_entity_says(
    clock: MovedClock, dead_letter: bool
) -> None:
    lab = Lab(clock, DefaultMessageTimeToLive=100, DeadLetteringOnMessageExpiration=dead_letter)
    lab.send("short", ttl_seconds=10)
    lab.send("long", ttl_seconds=1000)
    lab.move(10)
    assert bodies(lab) == [b"long"]
    lab.move(90)
    assert bodies(lab) == []
    reasons = [message.content.application_properties["DeadLetterReason"] for message in lab.dead]
    assert reasons == (["TTLExpiredException"] * 2 if dead_letter else [])
    assert lab.queue.counts["expired"] == 2


def test_a_locked_message_outlives_its_time_until_it_is_settled(clock: MovedClock) -> None:
    lab = Lab(clock, LockDuration=60, DeadLetteringOnMessageExpiration=True)
    lab.send("1", "2", ttl_seconds=10)
    first, second = lab.take(), lab.take()
    lab.move(30)
    lab.queue.complete(token(first))
    lab.queue.abandon(token(second))
    assert [message.content.body for message in lab.dead] == [b"2"]


# --- duplicates ---


def test_a_message_id_is_taken_once_within_the_window(clock: MovedClock) -> None:
    lab = Lab(clock, **DETECTION)
    lab.send("1", message_id="a")
    lab.queue.complete(token(lab.take()))
    lab.send("2", message_id="a")
    lab.move(19)
    lab.send("3", message_id="a")
    assert bodies(lab) == []
    lab.move(1)
    lab.send("4", message_id="a")
    assert bodies(lab) == [b"4"]
    assert lab.queue.counts["duplicates"] == 2


# --- sessions ---


def test_the_next_session_is_the_unlocked_one_with_the_oldest_message(clock: MovedClock) -> None:
    lab = Lab(clock, RequiresSession=True)
    for session_id in ("c", "a", "b"):
        lab.send("x", session_id=session_id)
    accepted = [lab.queue.accept_session(None, Owner()) for _ in range(4)]
    assert accepted == ["c", "a", "b", None]


def test_an_expired_session_lock_counts_its_messages_and_notifies_the_owner(clock: MovedClock) -> None:
    lab = Lab(clock, RequiresSession=True, LockDuration=30)
    lab.send("1", session_id="a")
    owner = Owner()
    lab.queue.accept_session("a", owner)
    held = token(lab.take("a"))
    lab.move(30)
    assert lab.lost == [owner]
    assert refusal(lab.queue.complete, held) == SESSION_LOST
    assert refusal(lab.queue.renew_session, "a", owner) == SESSION_LOST
    lab.queue.accept_session("a", Owner())
    assert lab.take("a").delivery_count == 1


def test_a_session_that_is_given_back_gives_its_messages_back_uncounted(clock: MovedClock) -> None:
    lab = Lab(clock, RequiresSession=True)
    lab.send("1", session_id="a")
    owner = Owner()
    lab.queue.accept_session("a", owner)
    lab.take("a")
    lab.queue.release_session("a", owner)
    lab.queue.accept_session("a", Owner())
    assert lab.take("a").delivery_count == 0


def test_a_renewed_session_holds_its_messages_for_another_period(clock: MovedClock) -> None:
    lab = Lab(clock, RequiresSession=True, LockDuration=30)
    lab.send("1", session_id="a")
    owner = Owner()
    lab.queue.accept_session("a", owner)
    message = lab.take("a")
    lab.move(20)
    assert lab.queue.renew_session("a", owner) == clock.wall() + 30 == message.locked_until
    lab.move(29)
    lab.queue.complete(token(message))
    assert lab.lost == []


def test_another_owner_cannot_settle_the_messages_of_a_session(clock: MovedClock) -> None:
    lab = Lab(clock, RequiresSession=True)
    lab.send("1", session_id="a")
    lab.queue.accept_session("a", Owner())
    assert refusal(lab.queue.locked, token(lab.take("a")), Owner()) == SESSION_LOST


# --- topics ---


def topic(clock: MovedClock) -> Broker:
    subscriptions = [{"Name": "all"}, {"Name": "sessions", "Properties": {"RequiresSession": True}}]
    entry = {"Name": "t", "Subscriptions": subscriptions}
    return Broker(Namespace.model_validate({"Topics": [entry]}), Events(clock.wall))


def held(broker: Broker, name: str) -> list[bytes]:
    return [message.content.body for message in broker.source(f"T/subscriptions/{name}").messages.values()]


def test_a_subscription_with_sessions_dead_letters_what_has_none(clock: MovedClock) -> None:
    broker = topic(clock)
    broker.send("t", [content("1")])
    assert held(broker, "sessions") == []
    (dead,) = broker.source("t/Subscriptions/sessions/$DeadLetterQueue").messages.values()
    assert dead.content.application_properties["DeadLetterReason"] == "Session ID is null."


# --- entities ---


def test_entities_are_found_in_any_letter_case_and_others_are_not(clock: MovedClock) -> None:
    broker = topic(clock)
    assert broker.target("T").name == "t"
    assert broker.source("t/SUBSCRIPTIONS/All/$deadLetterQueue") is not broker.source("t/Subscriptions/all")
    assert refusal(broker.target, "nowhere") == NOT_FOUND
    assert refusal(broker.source, "nowhere") == NOT_FOUND
    assert refusal(broker.source, "t") == NOT_ALLOWED
    assert refusal(broker.target, "t/Subscriptions/all") == NOT_ALLOWED
