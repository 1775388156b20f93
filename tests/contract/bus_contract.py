"""What every bus must do that the project's bus code meets: the lab's, and the official emulator.

Written against azure.servicebus alone. A module that runs it has a fixture `bus` and a class of its own that
inherits from BusContract. The entities are those of tests/data/servicebus/config.json, which both read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
    ServiceBusSender,
    ServiceBusSubQueue,
)
from azure.servicebus.exceptions import (
    MessageAlreadySettled,
    MessageSizeExceededError,
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusError,
    SessionCannotBeLockedError,
)

from tests.support.paths import DATA

CONFIG = DATA / "servicebus" / "config.json"
TOPIC = "events"
SEND_SECONDS = 20.0
WAIT_SECONDS = 20.0  # for what must come
STALL_SECONDS = 0.5  # for what must not


@dataclass(frozen=True, kw_only=True)
class Bus:
    """Reach one bus, by its connection string."""

    connection_string: str

    def client(self) -> ServiceBusClient:
        """Return a client; as a context manager it closes what it gave."""
        return ServiceBusClient.from_connection_string(self.connection_string, retry_total=0)

    def receiver(self, client: ServiceBusClient, entity: str, **options: Any) -> ServiceBusReceiver:
        """Return a receiver of a queue, or of "topic/subscription"."""
        topic, _, subscription = entity.partition("/")
        if subscription:
            return client.get_subscription_receiver(topic, subscription, **options)
        return client.get_queue_receiver(entity, **options)

    def sender(self, client: ServiceBusClient, entity: str) -> ServiceBusSender:
        """Return a sender to a queue or a topic."""
        return client.get_topic_sender(entity) if entity == TOPIC else client.get_queue_sender(entity)

    def send(self, entity: str, *messages: ServiceBusMessage) -> None:
        """Send messages on a connection of their own."""
        with self.client() as client, self.sender(client, entity) as sender:
            sender.send_messages(list(messages), timeout=SEND_SECONDS)

    @contextmanager
    def receiving(self, entity: str, **options: Any) -> Iterator[ServiceBusReceiver]:
        """Give a receiver on a connection of its own."""
        with self.client() as client, self.receiver(client, entity, **options) as receiver:
            yield receiver

    def receive(self, entity: str, count: int, **options: Any) -> list[ServiceBusReceivedMessage]:
        """Receive and complete a number of messages on a connection of their own, and see that no more come."""
        with self.receiving(entity, **options) as receiver:
            messages = collect(receiver, count)
            for message in messages:
                receiver.complete_message(message)
            assert nothing(receiver)
            return messages


def collect(
    receiver: ServiceBusReceiver, count: int, seconds: float = WAIT_SECONDS
) -> list[ServiceBusReceivedMessage]:
    """Receive a number of messages; fewer where no more come in time."""
    messages: list[ServiceBusReceivedMessage] = []
    deadline = time.monotonic() + seconds
    while len(messages) < count and (rest := deadline - time.monotonic()) > 0:
        messages += receiver.receive_messages(count - len(messages), max_wait_time=rest)
    return messages


def only(receiver: ServiceBusReceiver) -> ServiceBusReceivedMessage:
    """Receive the one message that must come."""
    (message,) = collect(receiver, 1)
    return message


def nothing(receiver: ServiceBusReceiver) -> bool:
    """Return whether no message comes."""
    return not receiver.receive_messages(1, max_wait_time=STALL_SECONDS)


def bodies(messages: Iterable[ServiceBusReceivedMessage]) -> list[str]:
    """Return the bodies as texts."""
    return [str(message) for message in messages]


def refused(*kinds: type[Exception]) -> AbstractContextManager[Any]:
    """Expect one of the errors."""
    return pytest.raises(kinds)


class BusContract:
    """Hold the suite. Each test finds its entities empty."""

    # --- sending and receiving ---

    def test_a_message_arrives_with_its_properties_and_body(self, bus: Bus) -> None:
        bus.send(
            "plain",
            ServiceBusMessage(
                b'{"specversion":"1.0"}',
                message_id="m1",
                subject="io.imdsbridge.test.v1",
                correlation_id="E1",
                content_type="application/cloudevents+json; charset=utf-8",
                application_properties={"cloudEvents_type": "t", "EventStatus": "Scheduled", "empty": ""},
            ),
        )
        (message,) = bus.receive("plain", 1)
        assert b"".join(message.body) == b'{"specversion":"1.0"}'
        assert (message.message_id, message.subject, message.correlation_id) == (
            "m1",
            "io.imdsbridge.test.v1",
            "E1",
        )
        assert message.content_type == "application/cloudevents+json; charset=utf-8"
        properties = {
            name.decode(): value.decode()
            for name, value in (message.application_properties or {}).items()
            if isinstance(name, bytes) and isinstance(value, bytes)
        }
        assert properties == {"cloudEvents_type": "t", "EventStatus": "Scheduled", "empty": ""}
        assert message.delivery_count == 0
        assert message.sequence_number is not None
        assert message.enqueued_time_utc is not None
        assert abs(datetime.now(UTC) - message.enqueued_time_utc) < timedelta(minutes=1)

    @pytest.mark.parametrize("count", [1, 50])
    def test_a_batch_arrives_message_by_message_in_order(self, bus: Bus, count: int) -> None:
        expected = [(f"body {number}", f"m{number}") for number in range(count)]
        with bus.client() as client, bus.sender(client, "plain") as sender:
            batch = sender.create_message_batch()
            for body, message_id in expected:
                batch.add_message(ServiceBusMessage(body, message_id=message_id))
            sender.send_messages(batch, timeout=SEND_SECONDS)
        messages = bus.receive("plain", count)
        assert [(str(message), message.message_id) for message in messages] == expected

    def test_a_message_of_200_kilobytes_arrives_whole(self, bus: Bus) -> None:
        body = bytes(range(256)) * 800
        bus.send("plain", ServiceBusMessage(body))
        (message,) = bus.receive("plain", 1)
        assert b"".join(message.body) == body

    def test_a_message_above_the_limit_is_refused_and_the_next_one_is_taken(self, bus: Bus) -> None:
        with bus.client() as client, bus.sender(client, "plain") as sender:
            with refused(MessageSizeExceededError):
                sender.send_messages(ServiceBusMessage(b"x" * 2_000_000), timeout=SEND_SECONDS)
            sender.send_messages(ServiceBusMessage("small"), timeout=SEND_SECONDS)
        assert bodies(bus.receive("plain", 1)) == ["small"]

    def test_an_unknown_entity_is_not_found(self, bus: Bus) -> None:
        with bus.client() as client:
            with refused(MessagingEntityNotFoundError), client.get_queue_sender("nowhere"):
                pass
            with refused(MessagingEntityNotFoundError), client.get_queue_receiver("nowhere"):
                pass

    def test_receive_and_delete_leaves_nothing(self, bus: Bus) -> None:
        bus.send("plain", ServiceBusMessage("1"))
        mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
        with bus.receiving("plain", receive_mode=mode) as receiver:
            assert str(only(receiver)) == "1"
        with bus.receiving("plain") as receiver:
            assert nothing(receiver)

    # --- settlement ---

    def test_a_completed_message_does_not_come_back_and_is_not_settled_twice(self, bus: Bus) -> None:
        bus.send("plain", ServiceBusMessage("1"))
        with bus.receiving("plain") as receiver:
            message = only(receiver)
            receiver.complete_message(message)
            with refused(MessageAlreadySettled):
                receiver.complete_message(message)
            assert nothing(receiver)

    def test_an_abandoned_message_comes_back_counted(self, bus: Bus) -> None:
        bus.send("plain", ServiceBusMessage("1"))
        with bus.receiving("plain") as receiver:
            receiver.abandon_message(only(receiver))
            again = only(receiver)
            assert (str(again), again.delivery_count) == ("1", 1)
            receiver.complete_message(again)

    def test_after_three_deliveries_a_message_is_dead(self, bus: Bus) -> None:
        bus.send("plain", ServiceBusMessage("1", message_id="m1"))
        with bus.receiving("plain") as receiver:
            for _ in range(3):
                receiver.abandon_message(only(receiver))
            assert nothing(receiver)
        with bus.receiving("plain", sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
            dead = only(receiver)
            assert (dead.message_id, dead.dead_letter_reason) == ("m1", "MaxDeliveryCountExceeded")
            receiver.complete_message(dead)

    def test_a_dead_letter_has_a_reason_and_a_description(self, bus: Bus) -> None:
        bus.send("plain", ServiceBusMessage("1", application_properties={"kept": "yes"}))
        with bus.receiving("plain") as receiver:
            receiver.dead_letter_message(only(receiver), reason="malformed", error_description="no EventId")
            assert nothing(receiver)
        with bus.receiving("plain", sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
            dead = only(receiver)
            assert str(dead) == "1"
            assert (dead.dead_letter_reason, dead.dead_letter_error_description) == (
                "malformed",
                "no EventId",
            )
            assert (dead.application_properties or {})[b"kept"] == b"yes"
            receiver.complete_message(dead)
            assert nothing(receiver)

    def test_a_lock_can_be_renewed(self, bus: Bus) -> None:
        bus.send("plain", ServiceBusMessage("1"))
        with bus.receiving("plain") as receiver:
            message = only(receiver)
            before = message.locked_until_utc
            assert before is not None
            assert timedelta(seconds=30) < before - datetime.now(UTC) < timedelta(seconds=90)
            assert receiver.renew_message_lock(message) >= before
            receiver.complete_message(message)

    def test_a_message_whose_lock_ends_goes_to_another_receiver_counted(self, bus: Bus) -> None:
        bus.send("short-lock", ServiceBusMessage("1"))
        with bus.receiving("short-lock") as first:
            only(first)
            with bus.client() as other, bus.receiver(other, "short-lock") as second:
                again = only(second)
                assert (str(again), again.delivery_count) == ("1", 1)
                second.complete_message(again)

    def test_closing_a_receiver_hands_back_what_it_had_not_given_out(self, bus: Bus) -> None:
        bus.send("plain", *(ServiceBusMessage(str(number)) for number in range(5)))
        with bus.receiving("plain", prefetch_count=20) as receiver:
            receiver.complete_message(only(receiver))
        rest = bus.receive("plain", 4)
        assert sorted(bodies(rest)) == ["1", "2", "3", "4"]

    def test_peeking_neither_locks_nor_counts(self, bus: Bus) -> None:
        bus.send("plain", ServiceBusMessage("1"), ServiceBusMessage("2"))
        with bus.receiving("plain") as receiver:
            assert bodies(receiver.peek_messages(10, timeout=WAIT_SECONDS)) == ["1", "2"]
        received = bus.receive("plain", 2)
        assert [(str(message), message.delivery_count) for message in received] == [("1", 0), ("2", 0)]

    # --- time ---

    def test_an_expired_message_is_dead_where_the_entity_says_so(self, bus: Bus) -> None:
        bus.send("expiring", ServiceBusMessage("1", time_to_live=timedelta(seconds=1)))
        with (
            bus.client() as client,
            bus.receiver(client, "expiring", sub_queue=ServiceBusSubQueue.DEAD_LETTER) as dead_letters,
            bus.receiver(client, "expiring") as receiver,
        ):
            time_is_over(receiver)
            dead = only(dead_letters)
            assert (str(dead), dead.dead_letter_reason) == ("1", "TTLExpiredException")
            dead_letters.complete_message(dead)

    # --- duplicates ---

    @pytest.mark.parametrize(("entity", "read"), [("deduplicated", "deduplicated"), (TOPIC, f"{TOPIC}/all")])
    def test_a_message_id_is_taken_once_also_within_a_batch(self, bus: Bus, entity: str, read: str) -> None:
        first, second = str(uuid4()), str(uuid4())
        one, again, *both = (
            ServiceBusMessage(body, message_id=message_id)
            for body, message_id in (("1", first), ("2", first), ("3", second), ("4", second))
        )
        for messages in ([one], [again], both):
            bus.send(entity, *messages)
        assert bodies(bus.receive(read, 2)) == ["1", "3"]

    # --- sessions ---

    def test_a_session_gives_its_own_messages_in_order(self, bus: Bus) -> None:
        first, second = str(uuid4()), str(uuid4())
        for body, session_id in (("1", first), ("x", second), ("2", first)):
            bus.send("sessions", ServiceBusMessage(body, session_id=session_id))
        assert bodies(bus.receive("sessions", 2, session_id=first)) == ["1", "2"]
        (message,) = bus.receive("sessions", 1, session_id=second)
        assert (str(message), message.session_id) == ("x", second)

    def test_the_next_available_session_is_one_with_a_message(self, bus: Bus) -> None:
        session_id = str(uuid4())
        bus.send("sessions", ServiceBusMessage("1", session_id=session_id))
        with (
            bus.client() as client,
            bus.receiver(client, "sessions", session_id=NEXT_AVAILABLE_SESSION, max_wait_time=10) as receiver,
        ):
            assert receiver.session.session_id == session_id
            receiver.complete_message(only(receiver))

    def test_with_no_session_available_the_wait_ends(self, bus: Bus) -> None:
        with bus.client() as client, refused(OperationTimeoutError):
            bus.receiver(client, "sessions", session_id=NEXT_AVAILABLE_SESSION, max_wait_time=2).__enter__()

    def test_a_session_is_locked_by_one_receiver_at_a_time_and_free_again_after_it(self, bus: Bus) -> None:
        session_id = str(uuid4())
        with bus.client() as client, bus.client() as other:
            first = bus.receiver(client, "sessions", session_id=session_id)
            with first, refused(SessionCannotBeLockedError):
                bus.receiver(other, "sessions", session_id=session_id).__enter__()
            with bus.receiver(other, "sessions", session_id=session_id) as second:
                assert second.session.session_id == session_id
                assert second.session.renew_lock(timeout=WAIT_SECONDS) > datetime.now(UTC)

    def test_without_a_session_nothing_is_sent_to_or_received_from_an_entity_that_requires_one(
        self, bus: Bus
    ) -> None:
        with refused(ServiceBusError):
            bus.send("sessions", ServiceBusMessage("1"))
        with bus.client() as client, refused(ServiceBusError):
            bus.receiver(client, "sessions").__enter__()

    # --- topics ---

    def test_each_subscription_gets_what_its_rules_take(self, bus: Bus) -> None:
        def event(number: int, subject: str, **properties: str) -> ServiceBusMessage:
            given: dict[Any, Any] = dict(properties)
            return ServiceBusMessage(
                str(number), message_id=str(uuid4()), subject=subject, application_properties=given
            )

        bus.send(
            TOPIC,
            event(1, "wanted", EventStatus="Scheduled", EventType="Reboot", Resources=",vm1,vm2,"),
            event(2, "wanted", EventStatus="Started", EventType="Redeploy", Resources=",vm1,"),
            event(3, "wanted", EventStatus="Scheduled", EventType="Freeze", Resources=",vm1,"),
            event(4, "wanted", EventStatus="Started", EventType="Reboot", Resources=",vm10,"),
            event(5, "other", EventStatus="Scheduled", EventType="Reboot", Resources=",vm1,"),
            event(6, "wanted"),
        )
        wanted = {"all": ["1", "2", "3", "4", "5", "6"], "by-subject": ["1", "3"], "by-sql": ["1", "2"]}
        got = {name: bodies(bus.receive(f"{TOPIC}/{name}", len(some))) for name, some in wanted.items()}
        assert got == wanted

    def test_a_dead_letter_of_one_subscription_stays_with_the_others(self, bus: Bus) -> None:
        bus.send(
            TOPIC,
            ServiceBusMessage(
                "1",
                message_id=str(uuid4()),
                subject="wanted",
                application_properties={"EventStatus": "Scheduled"},
            ),
        )
        with bus.receiving(f"{TOPIC}/all") as receiver:
            receiver.dead_letter_message(only(receiver), reason="r", error_description="d")
        with bus.receiving(f"{TOPIC}/all", sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
            dead = only(receiver)
            assert dead.dead_letter_reason == "r"
            receiver.complete_message(dead)
        assert bodies(bus.receive(f"{TOPIC}/by-subject", 1)) == ["1"]


def time_is_over(receiver: ServiceBusReceiver) -> None:
    """Wait until a queue's messages have expired: peek until there are none."""
    deadline = time.monotonic() + WAIT_SECONDS
    while receiver.peek_messages(1, sequence_number=1, timeout=WAIT_SECONDS):
        assert time.monotonic() < deadline
        time.sleep(0.05)
