"""The nodes $cbs and $management answer as those of Service Bus do."""

from __future__ import annotations

import base64
import hashlib
import hmac
import uuid
from typing import Any
from urllib.parse import quote

import pytest

from bridge.lab.servicebus.broker import Broker
from bridge.lab.servicebus.cbs import check_token, opens
from bridge.lab.servicebus.codec import Array, Described, Symbol, described, write
from bridge.lab.servicebus.config import Namespace, QueueSettings, SubscriptionSettings, TopicSettings
from bridge.lab.servicebus.filters import EVERYTHING, Correlation, Rule, Sql
from bridge.lab.servicebus.management import ManagementHandler
from bridge.lab.servicebus.sections import APPLICATION, PROPERTIES, VALUE, Content, parse
from bridge.lab.servicebus.sessions import SessionQueue
from tests.support.bus_messages import Clock, content, encoded

KEY_NAME, KEY = "RootManageSharedAccessKey", "SAS_KEY_VALUE"


def request(operation: str, value: Any, **properties: Any) -> Content:
    application = {"operation": operation, **properties}
    parts = [
        described(PROPERTIES, write(["id-1"])),
        described(APPLICATION, write(application)),
        described(VALUE, write(value)),
    ]
    return parse(b"".join(parts))


# --- $cbs ---


def signed(address: str, *, key: str = KEY, key_name: str = KEY_NAME, until: int = 1000) -> str:
    """Return a token for an address, as in Microsoft's documentation of shared access signatures."""
    resource = quote(address, safe="")
    digest = hmac.new(key.encode(), f"{resource}\n{until}".encode(), hashlib.sha256).digest()
    signature = quote(base64.b64encode(digest), safe="")
    return f"SharedAccessSignature sr={resource}&sig={signature}&se={until}&skn={key_name}"


def verdict(
    token: object, name: str = "sb://127.0.0.1:5672/plain", *, now: float = 0, operation: str = "put-token"
) -> int:
    asked = request(operation, token, name=name, type="jwt")
    return check_token(asked, key_name=KEY_NAME, key=KEY, now=now).status_code


def test_a_token_that_the_client_signs_opens_its_entity_and_what_lies_below() -> None:
    token = signed("sb://127.0.0.1:5672/Plain")
    answer = check_token(
        request("put-token", token, name="sb://127.0.0.1:5672/Plain"), key_name=KEY_NAME, key=KEY, now=0
    )
    assert answer.status_code == 202
    assert opens({answer.path}, "plain")
    assert opens({answer.path}, "PLAIN/$DeadLetterQueue")
    assert not opens({answer.path}, "plainer")
    assert not opens(set(), "plain")
    assert opens({""}, "anything")


def test_a_token_for_the_whole_namespace_opens_every_entity() -> None:
    assert verdict(signed("sb://127.0.0.1:5672/")) == 202


@pytest.mark.parametrize(
    ("token", "name", "now"),
    [
        (signed("sb://h/plain", key="wrong"), "sb://h/plain", 0),
        (signed("sb://h/plain", key_name="Nobody"), "sb://h/plain", 0),
        (signed("sb://h/other"), "sb://h/plain", 0),
        (signed("sb://h/plain"), "sb://h/plain", 1000),
        ("SharedAccessSignature nonsense", "sb://h/plain", 0),
        (
            f"SharedAccessSignature sr={quote('sb://h/plain', safe='')}&sig=&se=&skn={KEY_NAME}",
            "sb://h/plain",
            0,
        ),
    ],
    ids=["wrong key", "wrong name", "other entity", "expired", "nonsense", "empty"],
)
def test_a_signature_that_does_not_hold_is_refused(token: str, name: str, now: float) -> None:
    assert verdict(token, name, now=now) == 401


def test_a_request_without_a_token_is_refused() -> None:
    assert verdict(None) == 400
    assert verdict("a.b.c", operation="delete-token") == 400


def test_any_other_token_is_taken_for_one_of_an_identity() -> None:
    assert verdict("a.b.c") == 202


# --- $management ---


@pytest.fixture
def broker() -> Broker:
    settings = (QueueSettings(name="q"), QueueSettings(name="s", requires_session=True))
    return Broker(Namespace(queues=settings), Clock())


def ask(
    broker: Broker, operation: str, body: Any, *, path: str = "q", owner: object | None = None
) -> tuple[int, Any]:
    reply = parse(
        ManagementHandler(broker, path, lambda _: owner).answer(request(f"com.microsoft:{operation}", body))
    )
    assert reply.properties["correlation_id"] == "id-1"
    status = reply.application_properties
    return status["statusCode"], status.get("errorCondition", reply.value)


def test_an_unknown_operation_or_a_body_that_makes_no_sense_is_answered(broker: Broker) -> None:
    assert ask(broker, "dance", {}) == (501, "amqp:not-implemented")
    for body in (None, {}, {"lock-tokens": 5}, {"lock-tokens": [b"x"]}):
        assert ask(broker, "renew-lock", body)[0] in (400, 410)
    assert ask(broker, "schedule-message", {"messages": [{"message": b"no message"}]})[0] == 400
    assert ask(broker, "schedule-message", {"messages": [{"message": encoded("no time")}]})[0] == 400


def test_a_lock_that_is_not_held_is_lost(broker: Broker) -> None:
    body = {"lock-tokens": Array(0x98, [uuid.uuid4()]), "disposition-status": "completed"}
    for operation in ("renew-lock", "update-disposition"):
        assert ask(broker, operation, body) == (410, "com.microsoft:message-lock-lost")


@pytest.mark.parametrize("status", ["completed", "abandoned", "defered", "suspended"])
def test_a_message_is_settled_by_its_lock_token_and_can_get_properties(broker: Broker, status: str) -> None:
    broker.send("q", [content("1", properties={"kept": 1, "changed": "old"})])
    queue = broker.source("q")
    message = queue.take()
    assert message is not None
    body = {
        "lock-tokens": Array(0x98, [message.lock_token]),
        "disposition-status": status,
        "deadletter-reason": "r",
        "properties-to-modify": {"changed": "new", "added": True},
    }
    assert ask(broker, "update-disposition", body) == (200, {})
    left = [(one.state.name, one.delivery_count) for one in queue.messages]
    wanted = {"completed": [], "abandoned": [("ACTIVE", 1)], "defered": [("DEFERRED", 1)], "suspended": []}
    assert left == wanted[status]
    dead = list(broker.source("q/$DeadLetterQueue").messages)
    assert len(dead) == (status == "suspended")
    for one in [*queue.messages, *dead]:
        reason = {"DeadLetterReason": "r"} if one in dead else {}
        assert one.content.application_properties == {"kept": 1, "changed": "new", "added": True, **reason}


def test_the_rules_of_a_subscription_are_listed() -> None:
    system, application = {"subject": "s", "correlation_id": "c"}, {"EventType": "Reboot"}
    rules = (
        Rule(name="by-sql", matches=Sql("EventType = 'Reboot'")),
        Rule(name="by-value", matches=Correlation(system=system, application=application)),
        EVERYTHING,
    )
    settings = SubscriptionSettings(queue=QueueSettings(name="t/Subscriptions/a"), rules=rules)
    broker = Broker(
        Namespace(
            queues=(QueueSettings(name="q"),), topics=(TopicSettings(name="t", subscriptions=(settings,)),)
        ),
        Clock(),
    )

    def listed(**body: int) -> Any:
        status, answer = ask(broker, "enumerate-rules", body, path="T/subscriptions/a")
        assert status == 200
        return [one["rule-description"] for one in answer["rules"]]

    action = Described(0x13700000005, [])
    correlation = ["c", None, None, None, "s", None, None, None, {"EventType": "Reboot"}]
    descriptions = [
        Described(0x13700000004, [Described(0x1370000006, ["EventType = 'Reboot'"]), action, "by-sql"]),
        Described(0x13700000004, [Described(0x1370000009, correlation), action, "by-value"]),
        Described(0x13700000004, [Described(0x1370000007, []), action, "$Default"]),
    ]
    assert listed() == listed(skip=0, top=2**31 - 1) == descriptions
    assert listed(skip=1, top=1) == descriptions[1:2]
    assert ask(broker, "enumerate-rules", {}, path="q") == (400, "amqp:not-allowed")


def test_sessions_are_listed_and_no_sessions_are_no_content(broker: Broker) -> None:
    assert ask(broker, "get-message-sessions", {"skip": 0, "top": 10}, path="s") == (204, None)
    broker.send("s", [content("1", session_id=name) for name in ("b", "a")])
    answer = ask(broker, "get-message-sessions", {"skip": 0, "top": 10}, path="s")
    assert answer == (200, {"skip": 2, "sessions-ids": ["a", "b"]})


def test_what_is_asked_of_a_session_is_refused_to_who_does_not_hold_it(broker: Broker) -> None:
    owner = object()
    queue = broker.source("s")
    assert isinstance(queue, SessionQueue)
    queue.accept_session("a", owner)
    for operation in ("renew-session-lock", "get-session-state", "set-session-state"):
        body = {"session-id": "a", "session-state": b"x"}
        assert ask(broker, operation, body, path="s", owner=owner)[0] == 200
        assert ask(broker, operation, body, path="s", owner=None) == (410, "com.microsoft:session-lock-lost")
        assert ask(broker, operation, body, path="q", owner=owner) == (400, "amqp:not-allowed")


def test_a_symbol_is_as_good_as_a_string_for_an_operation(broker: Broker) -> None:
    assert ask(broker, Symbol("peek-message"), {"from-sequence-number": 1, "message-count": 1}) == (204, None)
