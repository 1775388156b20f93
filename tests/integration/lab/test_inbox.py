"""The inbox receives webhooks as a real receiver does, and sends faults on demand."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import requests

from tests.support.inbox import Inbox

LIMIT_SECONDS = 20
STRUCTURED = "application/cloudevents+json; charset=utf-8"
BATCH = "application/cloudevents-batch+json"
EVENT: dict[str, Any] = {"specversion": "1.0", "id": "1", "source": "urn:test", "type": "t.v1", "data": {}}
WITHOUT_ID = {name: value for name, value in EVENT.items() if name != "id"}
BINARY = {f"ce-{name}": EVENT[name] for name in ("specversion", "id", "source", "type")}


def deliver(inbox: Inbox, content: object = EVENT, *, timeout: float = LIMIT_SECONDS, **options: Any) -> int:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    options.setdefault("headers", {"Content-Type": STRUCTURED})
    url = options.pop("url", inbox.url)
    return requests.post(url, data=data, timeout=timeout, allow_redirects=False, **options).status_code


def shake(inbox: Inbox, **headers: str) -> requests.Response:
    return requests.options(inbox.url, headers=headers, timeout=LIMIT_SECONDS)


def test_every_request_is_recorded_and_reported_and_those_answered_by_2xx_count() -> None:
    reports: list[str] = []
    with Inbox(report=reports.append) as inbox:
        inbox.fault(500)
        assert deliver(inbox) == 500
        url = f"{inbox.base_url}/any/path?a=1"
        started = time.monotonic(), time.time()
        assert deliver(inbox, b"hello", url=url, headers={"X-Mark": "7"}) == 200
        refused, one = inbox.received
        assert (refused.status, inbox.accepted, inbox.events()) == (500, [one], [])
    assert (one.method, one.path, one.query, one.body) == ("POST", "/any/path", "a=1", b"hello")
    assert (one.headers["x-mark"], one.headers["X-MARK"]) == ("7", "7")
    assert (one.at >= started[0], one.wall >= started[1]) == (True, True)
    assert reports == ["POST /hook t.v1 -> 500", "POST /any/path 5 bytes -> 200"]


@pytest.mark.parametrize(
    ("content", "headers", "events"),
    [
        (EVENT, {"Content-Type": STRUCTURED}, [EVENT]),
        ([EVENT, WITHOUT_ID], {"Content-Type": BATCH}, [EVENT, WITHOUT_ID]),
        (b"no json", {"Content-Type": STRUCTURED}, []),
        (EVENT, {"Content-Type": "application/json"}, []),
        (
            {},
            {**BINARY, "ce-subject": "caf%C3%A9%20%22now%22", "Content-Type": "application/json"},
            [{**EVENT, "subject": 'caf\u00e9 "now"', "datacontenttype": "application/json"}],
        ),
    ],
)
def test_the_events_of_each_mode_are_read(
    content: object, headers: dict[str, str], events: list[object]
) -> None:
    with Inbox() as lenient:
        assert deliver(lenient, content, headers=headers) == 200
        assert lenient.events() == events


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (EVENT, STRUCTURED, 200),
        ([EVENT], BATCH, 200),
        (EVENT, "application/json", 415),
        (EVENT, "", 415),
        (b"{", STRUCTURED, 400),
        (EVENT, BATCH, 400),
        ([EVENT], STRUCTURED, 400),
        ([EVENT, 5], BATCH, 400),
        (WITHOUT_ID, STRUCTURED, 400),
        ({**EVENT, "id": ""}, STRUCTURED, 400),
        ({**EVENT, "specversion": "9"}, STRUCTURED, 400),
        ({**EVENT, "Upper": "x"}, STRUCTURED, 400),
        ({**EVENT, "a" * 21: "x"}, STRUCTURED, 400),
        ({**EVENT, "extension": {}}, STRUCTURED, 400),
        ({**EVENT, "extension": True, "data": None}, STRUCTURED, 200),
        ({}, {**BINARY, "Content-Type": "application/json"}, 200),
        ({}, {**BINARY, "Content-Type": "application/json", "ce-datacontenttype": "application/json"}, 400),
        (b"{", {**BINARY, "Content-Type": "application/json"}, 400),
    ],
)
def test_a_strict_inbox_refuses_an_invalid_event_which_a_lenient_one_lists(
    inbox: Inbox, content: object, headers: str | dict[str, str], status: int
) -> None:
    given = {"Content-Type": headers} if isinstance(headers, str) else headers
    assert deliver(inbox, content, headers=given) == status
    with Inbox() as lenient:
        assert deliver(lenient, content, headers=given) == 200
        assert len(lenient.problems) == (status != 200)


@pytest.mark.parametrize(("given", "status"), [("", 401), ("Bearer wrong", 401), ("Bearer secret", 200)])
def test_a_token_is_demanded(inbox: Inbox, given: str, status: int) -> None:
    inbox.require_token("secret")
    assert deliver(inbox, headers={"Content-Type": STRUCTURED, "Authorization": given}) == status


def test_the_handshake_consents_to_whoever_asks_unless_it_is_told_not_to() -> None:
    ask = {"WebHook-Request-Origin": "imds-bridge.test"}
    with Inbox(allowed_rate="60", token="secret") as inbox:  # noqa: S106 - a test's token
        answer = shake(inbox, **ask)
        assert (answer.status_code, answer.headers["WebHook-Allowed-Origin"]) == (200, "*")
        assert answer.headers["WebHook-Allowed-Rate"] == "60"
        assert (len(inbox.received), inbox.accepted) == (1, [])
        assert "WebHook-Allowed-Origin" not in shake(inbox).headers
    with Inbox(allowed_origin=None) as inbox:
        assert "WebHook-Allowed-Origin" not in shake(inbox, **ask).headers


def test_a_status_can_carry_retry_after_and_body_and_is_meant_for_deliveries(inbox: Inbox) -> None:
    inbox.fault(429, retry_after="3", body="slow down", path="/hook")
    assert shake(inbox).status_code == 200
    assert deliver(inbox, url=f"{inbox.base_url}/other") == 200
    answer = requests.post(inbox.url, timeout=LIMIT_SECONDS)
    assert (answer.status_code, answer.headers["Retry-After"], answer.text) == (429, "3", "slow down")
    inbox.fault("timeout", count=None)
    inbox.clear()
    assert (inbox.received, deliver(inbox)) == ([], 200)


def test_waiting_counts_accepted_deliveries_and_reports_what_arrived(inbox: Inbox) -> None:
    inbox.fault(503)
    sender = threading.Thread(target=lambda: [deliver(inbox) for _ in range(3)])
    sender.start()
    inbox.wait_for(2, LIMIT_SECONDS)
    assert inbox.wait_for(inbox.events, LIMIT_SECONDS) == [EVENT, EVENT]
    sender.join(LIMIT_SECONDS)
    with pytest.raises(AssertionError, match=r"3 requests arrived\s+POST /hook t.v1 -> 503"):
        inbox.wait_for(3, timeout=0.1)


def test_closing_lets_go_of_deliveries_that_hang() -> None:
    inbox = Inbox()
    inbox.fault("timeout")
    failures: list[Exception] = []

    def send() -> None:
        try:
            deliver(inbox, timeout=600)
        except requests.ConnectionError as error:
            failures.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
    inbox.close()
    inbox.close()  # a second call does nothing
    sender.join(LIMIT_SECONDS)
    assert len(failures) == 1


def test_the_inbox_can_be_driven_over_http(inbox: Inbox) -> None:
    base = f"{inbox.base_url}/lab"
    requests.post(f"{base}/fault", json={"kind": 503, "body": "busy"}, timeout=LIMIT_SECONDS)
    assert [deliver(inbox), deliver(inbox)] == [503, 200]
    seen = requests.get(f"{base}/received", timeout=LIMIT_SECONDS).json()
    assert [(one["path"], one["status"]) for one in seen] == [("/hook", 503), ("/hook", 200)]
    answer = requests.post(f"{base}/fault", json={"kind": "wobble"}, timeout=LIMIT_SECONDS)
    assert (answer.status_code, "wobble" in answer.json()["error"]) == (400, True)
