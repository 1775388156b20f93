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
from bridge.lab.servicebus.nodes import check_token, manage
from bridge.lab.servicebus.queues import Events
from tests.support.clock import MovedClock

KEY_NAME, KEY = "RootManageSharedAccessKey", "SAS_KEY_VALUE"


# --- $cbs ---


def signed(address: str, *, key: str = KEY, key_name: str = KEY_NAME, until: int = 1000) -> str:
    """Return a token for an address, as in Microsoft's documentation of shared access signatures."""
    resource = quote(address, safe="")
    digest = hmac.new(key.encode(), f"{resource}\n{until}".encode(), hashlib.sha256).digest()
    signature = quote(base64.b64encode(digest), safe="")
    return f"SharedAccessSignature sr={resource}&sig={signature}&se={until}&skn={key_name}"


def verdict(token: Any, operation: str = "put-token") -> str:
    request = proton.Message(
        body=token, properties={"operation": operation, "name": "sb://h/q", "type": "jwt"}
    )
    try:
        check_token(request, key_name=KEY_NAME, key=KEY)
    except Refused as refused:
        return refused.description.partition(":")[0]
    return "accepted"


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (signed("sb://127.0.0.1:5672/Plain"), "accepted"),
        (signed("sb://h/plain", key="wrong"), "InvalidSignature"),
        (signed("sb://h/plain", key_name="Nobody"), "InvalidSignature"),
        ("SharedAccessSignature nonsense", "InvalidSignature"),
    ],
    ids=["good", "wrong key", "wrong name", "nonsense"],
)
def test_a_signature_must_hold(token: str, expected: str) -> None:
    assert verdict(token) == expected


def test_a_request_without_a_token_is_refused() -> None:
    assert verdict(None) == "InvalidToken"
    assert verdict("a.b.c", operation="delete-token") == "InvalidToken"


def test_any_other_token_is_taken_for_one_of_an_identity() -> None:
    assert verdict("a.b.c") == "accepted"


# --- $management ---


@pytest.fixture
def broker() -> Broker:
    queues = [{"Name": "q"}, {"Name": "s", "Properties": {"RequiresSession": True}}]
    return Broker(Namespace.model_validate({"Queues": queues}), Events(MovedClock().wall))


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
    lost = (410, "com.microsoft:message-lock-lost")
    assert ask(broker, "renew-lock", {"lock-tokens": [uuid.uuid4()]}) == lost


def test_a_session_lock_is_renewed_for_who_holds_it_only(broker: Broker) -> None:
    owner = object()
    broker.source("s").accept_session("a", owner)
    body = {"session-id": "a"}
    assert ask(broker, "renew-session-lock", body, path="s", owner=owner)["expiration"] > 0
    lost = (410, "com.microsoft:session-lock-lost")
    assert ask(broker, "renew-session-lock", body, path="s", owner=None) == lost
    assert ask(broker, "renew-session-lock", body, path="q", owner=owner) == (400, "amqp:not-allowed")
