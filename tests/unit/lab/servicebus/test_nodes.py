"""The nodes $cbs and $management answer as those of Service Bus do."""

from __future__ import annotations

import base64
import hashlib
import hmac
import uuid
from typing import Any
from urllib.parse import quote

import proton
import pytest

from bridge.lab.servicebus.broker import Broker
from bridge.lab.servicebus.config import Namespace
from bridge.lab.servicebus.messages import Refused
from bridge.lab.servicebus.nodes import check_token, entity_path, manage, opens
from bridge.lab.servicebus.queues import Events
from tests.support.bus_messages import Clock, content

KEY_NAME, KEY = "RootManageSharedAccessKey", "SAS_KEY_VALUE"


# --- $cbs ---


def signed(address: str, *, key: str = KEY, key_name: str = KEY_NAME, until: int = 1000) -> str:
    """Return a token for an address, as in Microsoft's documentation of shared access signatures."""
    resource = quote(address, safe="")
    digest = hmac.new(key.encode(), f"{resource}\n{until}".encode(), hashlib.sha256).digest()
    signature = quote(base64.b64encode(digest), safe="")
    return f"SharedAccessSignature sr={resource}&sig={signature}&se={until}&skn={key_name}"


def verdict(
    token: Any, name: str = "sb://127.0.0.1:5672/plain", *, now: float = 0, operation: str = "put-token"
) -> str:
    request = proton.Message(body=token, properties={"operation": operation, "name": name, "type": "jwt"})
    try:
        check_token(request, entity_path(name), key_name=KEY_NAME, key=KEY, now=now)
    except Refused as refused:
        return refused.description.partition(":")[0]
    return "accepted"


def test_a_token_that_the_client_signs_opens_its_entity_and_what_lies_below() -> None:
    address = "sb://127.0.0.1:5672/Plain"
    assert verdict(signed(address), address) == "accepted"
    path = entity_path(address)
    assert opens({path}, "plain")
    assert opens({path}, "PLAIN/$DeadLetterQueue")
    assert not opens({path}, "plainer")
    assert not opens(set(), "plain")
    assert opens({""}, "anything")


def test_a_token_for_the_whole_namespace_opens_every_entity() -> None:
    assert verdict(signed("sb://127.0.0.1:5672/")) == "accepted"


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
    assert verdict(token, name, now=now) in ("InvalidSignature", "InvalidAudience", "ExpiredToken")


def test_a_request_without_a_token_is_refused() -> None:
    assert verdict(None) == "InvalidToken"
    assert verdict("a.b.c", operation="delete-token") == "InvalidToken"


def test_any_other_token_is_taken_for_one_of_an_identity() -> None:
    assert verdict("a.b.c") == "accepted"


# --- $management ---


@pytest.fixture
def broker() -> Broker:
    queues = [{"Name": "q"}, {"Name": "s", "Properties": {"RequiresSession": True}}]
    return Broker(Namespace.model_validate({"Queues": queues}), Events(Clock()))


def ask(broker: Broker, operation: str, body: Any, *, path: str = "q", owner: object | None = None) -> Any:
    request = proton.Message(body=body, properties={"operation": f"com.microsoft:{operation}"})
    try:
        return manage(broker.source(path), request, owner)
    except Refused as refused:
        return refused.status_code, refused.condition


def test_an_unknown_operation_or_a_body_that_makes_no_sense_is_answered(broker: Broker) -> None:
    assert ask(broker, "dance", {}) == (501, "amqp:not-implemented")
    for body in (None, {}, {"lock-tokens": 5}, {"lock-tokens": [b"x"]}):
        assert ask(broker, "renew-lock", body)[0] in (400, 410)


def test_a_lock_that_is_not_held_is_lost(broker: Broker) -> None:
    body = {"lock-tokens": [uuid.uuid4()], "disposition-status": "completed"}
    for operation in ("renew-lock", "update-disposition"):
        assert ask(broker, operation, body) == (410, "com.microsoft:message-lock-lost")


@pytest.mark.parametrize("status", ["completed", "abandoned", "defered", "suspended"])
def test_a_message_is_settled_by_its_lock_token_and_can_get_properties(broker: Broker, status: str) -> None:
    broker.send("q", [content("1", properties={"kept": 1, "changed": "old"})])
    queue = broker.source("q")
    message = queue.take()
    assert message is not None
    body = {
        "lock-tokens": [message.lock_token],
        "disposition-status": status,
        "deadletter-reason": "r",
        "properties-to-modify": {"changed": "new", "added": True},
    }
    answer = ask(broker, "update-disposition", body)
    if status == "defered":
        assert answer == (501, "amqp:not-implemented")
        return
    assert answer == {}
    assert [one.delivery_count for one in queue.messages.values()] == [1] * (status == "abandoned")
    dead = list(broker.source("q/$DeadLetterQueue").messages.values())
    assert len(dead) == (status == "suspended")
    for one in [*queue.messages.values(), *dead]:
        reason = {"DeadLetterReason": "r"} if one in dead else {}
        assert one.content.application_properties == {"kept": 1, "changed": "new", "added": True, **reason}


def test_a_session_lock_is_renewed_for_who_holds_it_only(broker: Broker) -> None:
    owner = object()
    broker.source("s").accept_session("a", owner)
    body = {"session-id": "a"}
    assert ask(broker, "renew-session-lock", body, path="s", owner=owner)["expiration"] > 0
    lost = (410, "com.microsoft:session-lock-lost")
    assert ask(broker, "renew-session-lock", body, path="s", owner=None) == lost
    assert ask(broker, "renew-session-lock", body, path="q", owner=owner) == (400, "amqp:not-allowed")
