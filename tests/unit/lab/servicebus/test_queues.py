"""Queues, $cbs and $management behave as those of Service Bus, with a clock that the test moves."""

from __future__ import annotations

import base64
import hashlib
import hmac
import sys
import uuid
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

if sys.platform == "win32":
    pytest.skip("posix: proton has no wheel for Windows", allow_module_level=True)

import proton

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
from bridge.lab.servicebus.nodes import ManagementNode, check_token, manage
from bridge.lab.servicebus.queues import Events, MessageQueue
from tests.support.bus_messages import content
from tests.support.clock import MovedClock

Owner = object


class Lab:
    """A broker with one queue, and its notifications."""

    def __init__(self, **settings: Any) -> None:
        self.lost: list[object] = []
        self.changed: list[MessageQueue] = []
        self.clock = MovedClock()
        entities = {"Queues": [{"Name": "Q", "Properties": settings}], "Topics": [{"Name": "t"}]}
        events = Events(self.clock.wall, self.changed.append, self.lost.append)
        self.broker = Broker(Namespace.model_validate(entities), events)
        self.queue = self.broker.source("q")

    @property
    def dead(self) -> list[tuple[bytes, int, str]]:
        letters = self.broker.source("q/$DeadLetterQueue").messages.values()
        reason = "DeadLetterReason"
        return [
            (one.content.body, one.delivery_count, one.content.application_properties[reason])
            for one in letters
        ]

    @property
    def bodies(self) -> list[bytes]:
        return [message.content.body for message in self.queue.messages.values()]

    def send(self, *bodies: str, **options: Any) -> None:
        self.broker.send("q", [content(body, **options) for body in bodies])

    def move(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.broker.tick()

    def take(self, session_id: str | None = None) -> Message:
        message = self.queue.take(session_id)
        assert message is not None
        return message

    def take_token(self, session_id: str | None = None) -> uuid.UUID:
        token = self.take(session_id).lock_token
        assert token is not None
        return token


def refusal(work: Any, *arguments: Any) -> str:
    with pytest.raises(Refused) as caught:
        work(*arguments)
    return caught.value.condition


# --- locks, time to live, duplicates ---


def test_a_lock_that_ends_gives_the_message_to_the_next_and_its_settlement_is_refused() -> None:
    lab = Lab(LockDuration=30)
    lab.send("1")
    first = lab.take_token()
    lab.move(29)
    assert lab.queue.take() is None
    lab.changed.clear()
    lab.move(1)
    assert lab.changed == [lab.queue]
    assert lab.take().delivery_count == 1
    for settle in (lab.queue.complete, lab.queue.abandon, lab.queue.renew):
        assert refusal(settle, first) == LOCK_LOST


def test_a_renewed_lock_ends_later_and_does_not_keep_others_from_ending() -> None:
    lab = Lab(LockDuration=30)
    lab.send("1", "2")
    renewed = lab.take_token()
    lab.take()
    lab.move(20)
    assert lab.queue.renew(renewed) == lab.clock.wall() + 30
    lab.move(10)
    assert lab.take().content.body == b"2"
    assert lab.queue.take() is None


def test_after_the_last_lock_that_ends_a_message_is_dead() -> None:
    lab = Lab(MaxDeliveryCount=3, LockDuration=10)
    lab.send("1")
    for _ in range(3):
        lab.take()
        lab.move(10)
    assert (lab.queue.take(), lab.dead) == (None, [(b"1", 3, "MaxDeliveryCountExceeded")])


@pytest.mark.parametrize("dead_letter", [True, False])
def test_an_expired_message_is_dropped_or_dead_as_the_entity_says(dead_letter: bool) -> None:
    lab = Lab(DefaultMessageTimeToLive=100, DeadLetteringOnMessageExpiration=dead_letter)
    lab.send("short", ttl_seconds=10)
    lab.send("long", ttl_seconds=1000)
    lab.move(10)
    assert lab.bodies == [b"long"]
    lab.move(90)
    assert lab.bodies == []
    assert [one[2] for one in lab.dead] == (["TTLExpiredException"] * 2 if dead_letter else [])


def test_a_message_id_is_taken_once_within_the_window() -> None:
    lab = Lab(RequiresDuplicateDetection=True, DuplicateDetectionHistoryTimeWindow=20)
    lab.send("1", message_id="a")
    lab.queue.complete(lab.take_token())
    lab.move(19)
    lab.send("2", message_id="a")
    assert lab.bodies == []
    lab.move(1)
    lab.send("3", message_id="a")
    assert lab.bodies == [b"3"]
    assert lab.queue.counts["duplicates"] == 1


def test_an_entity_with_partitions_refuses_a_batch_of_several_and_drops_duplicates_within_one() -> None:
    def key(text: str) -> dict[str, Any]:
        return {"annotations": {"x-opt-partition-key": text}}

    def batch(*given: dict[str, Any]) -> str:
        try:
            lab.broker.send("q", [content("x", **one) for one in given])
        except Refused as refused:
            return refused.condition
        return ""

    lab = Lab(EnablePartitioning=True)
    assert batch({}, {}) == batch(key("a"), key("a")) == ""
    assert batch(key("a"), key("b")) == batch(key("a"), {}) == NOT_ALLOWED
    lab = Lab(EnablePartitioning=True, RequiresDuplicateDetection=True)
    ids: list[dict[str, Any]] = [{"message_id": name, **key("a")} for name in ("1", "2")]
    assert (batch(*ids), batch(ids[0]), batch(ids[1])) == (NOT_ALLOWED, "", "")
    assert batch({**ids[0], **key("b")}) == batch(ids[0]) == ""
    assert (lab.queue.counts["enqueued"], lab.queue.counts["duplicates"]) == (3, 1)


# --- sessions ---


def test_the_next_session_is_the_unlocked_one_with_the_oldest_message() -> None:
    lab = Lab(RequiresSession=True)
    for session_id in ("c", "a", "b"):
        lab.send("x", session_id=session_id)
    assert [lab.queue.accept_session(None, Owner()) for _ in range(4)] == ["c", "a", "b", None]


def test_an_expired_session_lock_counts_its_messages_and_notifies_the_owner() -> None:
    lab, owner = Lab(RequiresSession=True, LockDuration=30), Owner()
    lab.send("1", session_id="a")
    lab.queue.accept_session("a", owner)
    token = lab.take_token("a")
    assert refusal(lab.queue.locked, token, Owner()) == SESSION_LOST  # another owner
    lab.move(20)
    assert lab.queue.renew_session("a", owner) == lab.clock.wall() + 30
    lab.move(29)
    assert (lab.queue.locked(token, owner).locked_until, lab.lost) == (lab.clock.wall() + 1, [])
    lab.move(1)
    assert lab.lost == [owner]
    assert refusal(lab.queue.complete, token) == SESSION_LOST
    assert refusal(lab.queue.renew_session, "a", owner) == SESSION_LOST
    lab.queue.accept_session("a", Owner())
    assert lab.take("a").delivery_count == 1


def test_entities_are_found_in_any_letter_case_and_for_what_they_can_do() -> None:
    broker = Lab().broker
    assert broker.target("T").name == "t"
    assert broker.source("Q/$deadLetterQueue") is not broker.source("q")
    assert refusal(broker.target, "nowhere") == refusal(broker.source, "nowhere") == NOT_FOUND
    assert refusal(broker.source, "t") == refusal(broker.target, "q/$deadletterqueue") == NOT_ALLOWED


# --- $cbs ---


def signed(*, key: str = "SAS_KEY_VALUE", key_name: str = "RootManageSharedAccessKey") -> str:
    """Return a token, as in Microsoft's documentation of shared access signatures."""
    resource = quote("sb://127.0.0.1:5672/Plain", safe="")
    digest = hmac.new(key.encode(), f"{resource}\n1000".encode(), hashlib.sha256).digest()
    signature = quote(base64.b64encode(digest), safe="")
    return f"SharedAccessSignature sr={resource}&sig={signature}&se=1000&skn={key_name}"


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (signed(), ""),
        (signed(key="wrong"), "InvalidSignature"),
        (signed(key_name="Nobody"), "InvalidSignature"),
        ("SharedAccessSignature nonsense", "InvalidSignature"),
        (None, "InvalidToken"),
        ("a.b.c", ""),  # taken for one of an identity
    ],
)
def test_a_signature_must_hold(token: str | None, expected: str) -> None:
    request = proton.Message(token, properties={"operation": "put-token", "name": "sb://h/q", "type": "jwt"})
    verdict = ""
    try:
        check_token(request, key_name="RootManageSharedAccessKey", key="SAS_KEY_VALUE")
    except Refused as refused:
        verdict = refused.description.partition(":")[0]
    assert verdict == expected


# --- $management ---


def ask(queue: MessageQueue, operation: str, body: Any, *, owner: object | None = None) -> Any:
    request = proton.Message(body=body, properties={"operation": f"com.microsoft:{operation}"})
    try:
        return manage(queue, request, owner)
    except Refused as refused:
        return refused.status_code, refused.condition


def test_what_the_management_node_cannot_do_is_answered() -> None:
    queue = Lab().queue
    assert ask(queue, "dance", {}) == (501, "amqp:not-implemented")
    assert ask(queue, "renew-lock", {})[0] == 400
    assert ask(queue, "renew-lock", {"lock-tokens": [uuid.uuid4()]}) == (410, LOCK_LOST)


def test_the_reason_of_a_refusal_is_a_symbol_which_net_needs() -> None:
    node: Any = object.__new__(ManagementNode)
    node.bus = SimpleNamespace(intercept=lambda *_: False, broker=Lab().broker)
    node.path, node.connection = "q", SimpleNamespace(endpoints=())
    properties, _ = node.answer(proton.Message(body={}, properties={"operation": "dance"}))
    assert type(properties["errorCondition"]) is proton.symbol


@pytest.mark.parametrize(
    ("status", "left", "dead"),
    [("completed", [], []), ("abandoned", [b"m"], []), ("suspended", [], [(b"m", 0, "odd")])],
)
def test_a_message_is_settled_by_its_lock_token_from_another_receiver(
    status: str, left: list[bytes], dead: list[Any]
) -> None:
    lab = Lab()
    lab.send("m")
    token = lab.take_token()
    body: Any = {"disposition-status": status, "lock-tokens": [token], "deadletter-reason": "odd"}
    body["properties-to-modify"] = {"seen": "yes"}
    assert ask(lab.queue, "update-disposition", {**body, "disposition-status": "defered"})[0] == 501
    assert ask(lab.queue, "update-disposition", body) is None
    assert (lab.bodies, lab.dead) == (left, dead)
    messages = [*lab.queue.messages.values(), *lab.broker.source("q/$DeadLetterQueue").messages.values()]
    assert all(one.content.application_properties["seen"] == "yes" for one in messages)
    assert ask(lab.queue, "update-disposition", body) == (410, LOCK_LOST)


def test_a_message_of_a_session_is_settled_by_who_holds_it_only() -> None:
    lab, owner = Lab(RequiresSession=True), Owner()
    lab.send("m", session_id="a")
    lab.queue.accept_session("a", owner)
    body = {"disposition-status": "completed", "lock-tokens": [lab.take_token("a")], "session-id": "a"}
    assert ask(lab.queue, "update-disposition", body) == (410, SESSION_LOST)
    assert ask(lab.queue, "update-disposition", body, owner=owner) is None
    assert lab.bodies == []


def test_a_session_lock_is_renewed_for_who_holds_it_only() -> None:
    queue, owner, body = Lab(RequiresSession=True).queue, Owner(), {"session-id": "a"}
    queue.accept_session("a", owner)
    assert ask(queue, "renew-session-lock", body, owner=owner)["expiration"] > 0
    assert ask(queue, "renew-session-lock", body) == (410, SESSION_LOST)
    assert ask(Lab().queue, "renew-session-lock", body, owner=owner) == (400, NOT_ALLOWED)
