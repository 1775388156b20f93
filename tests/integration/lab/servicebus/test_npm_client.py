"""Microsoft's client for Node works with the lab as it does with Service Bus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.clients import client
from tests.support.paths import DATA
from tests.support.servicebus import ServiceBusLab

pytestmark = pytest.mark.timeout(600)  # npm installs the client

Ask = Callable[[str], Any]


@pytest.fixture
def lab() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(DATA / "servicebus" / "config.json") as started:
        yield started
        assert started.failures == ()


@pytest.fixture
def ask(lab: ServiceBusLab) -> Ask:
    run = client("node")
    return lambda scenario: run(scenario, lab.connection_string)


def test_a_message_is_sent_received_renewed_and_completed(ask: Ask, lab: ServiceBusLab) -> None:
    assert ask("send_receive_complete") == {
        "body": {"specversion": "1.0"},
        "messageId": "m1",
        "subject": "s",
        "correlationId": "c",
        "contentType": "application/json",
        "properties": {"EventStatus": "Scheduled", "number": 5, "flag": True},
        "deliveryCount": 0,
        "lockToken": "string",
        "locksFor60Seconds": True,
        "more": 0,
    }
    assert lab.entity("plain").counts.completed == 1


def test_a_batch_arrives_in_order(ask: Ask) -> None:
    assert ask("batch") == {"limit": 262144, "bodies": list(range(20))}


def test_messages_are_peeked_and_abandoned(ask: Ask) -> None:
    assert ask("abandon_peek") == {
        "peeked": ["1", "2"],
        "deliveryCount": 1,
        "second": "2",
    }


def test_sessions_are_locked_renewed_and_kept_apart(ask: Ask) -> None:
    assert ask("sessions") == {
        "own": ["1", "2"],
        "locked": "SessionCannotBeLocked",
        "renewed": True,
        "next": "b",
        "others": ["x"],
        "without": "GeneralError",
    }


def test_subscriptions_get_what_their_rules_take(ask: Ask) -> None:
    assert ask("topic_filters") == {"all": ["1", "2"], "bySubject": ["1"], "bySql": ["1"]}


def test_a_message_id_is_taken_once(ask: Ask) -> None:
    assert ask("duplicates") == ["1", "3"]


def test_what_cannot_be_sent_is_refused_by_name(ask: Ask) -> None:
    assert ask("refusals") == {"missing": "MessagingEntityNotFound", "large": "MessageSizeExceeded"}
