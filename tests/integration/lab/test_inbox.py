"""The inbox receives webhooks as a real receiver does, and sends faults on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from bridge.lab.httpd import LabError
from bridge.lab.inbox import problem
from tests.support.inbox import Inbox

LIMIT_SECONDS = 20
STRUCTURED = "application/cloudevents+json; charset=utf-8"
BATCH = "application/cloudevents-batch+json"
EVENT: dict[str, Any] = {
    "specversion": "1.0",
    "id": "1",
    "source": "urn:test",
    "type": "io.test.v1",
    "data": {"x": 1},
}


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with Inbox() as started:
        yield started


def deliver(inbox: Inbox, content: object = EVENT, *, timeout: float = LIMIT_SECONDS, **options: Any) -> int:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    options.setdefault("headers", {"Content-Type": STRUCTURED})
    url = options.pop("url", inbox.url)
    return requests.post(url, data=data, timeout=timeout, allow_redirects=False, **options).status_code


# --- what is recorded ---


def test_a_delivery_is_recorded_as_it_came(inbox: Inbox) -> None:
    started = time.monotonic(), time.time()
    assert deliver(inbox, b"hello", url=f"{inbox.base_url}/any/path?a=1", headers={"X-Mark": "7"}) == 200
    (one,) = inbox.received
    assert (one.method, one.path, one.query, one.body) == ("POST", "/any/path", "a=1", b"hello")
    assert (one.headers["x-mark"], one.headers["X-MARK"], "X-mark" in one.headers) == ("7", "7", True)
    assert one.at >= started[0]
    assert one.wall >= started[1]
    assert one.status == 200


def test_the_status_of_acceptance_can_be_chosen() -> None:
    with Inbox(status=204) as inbox:
        assert deliver(inbox) == 204
        assert len(inbox.accepted) == 1


def test_only_deliveries_answered_by_2xx_are_accepted(inbox: Inbox) -> None:
    inbox.fault(status=500)
    assert [deliver(inbox), deliver(inbox)] == [500, 200]
    assert [one.status for one in inbox.received] == [500, 200]
    assert [one.status for one in inbox.accepted] == [200]


# --- CloudEvents ---


def test_a_structured_event_is_read(inbox: Inbox) -> None:
    deliver(inbox)
    assert inbox.events() == [EVENT]


def test_a_batch_is_read(inbox: Inbox) -> None:
    deliver(inbox, [EVENT, {**EVENT, "id": "2"}], headers={"Content-Type": BATCH})
    assert [event["id"] for event in inbox.events()] == ["1", "2"]


def test_a_binary_event_is_read_with_its_headers_decoded(inbox: Inbox) -> None:
    headers = {
        "ce-specversion": "1.0",
        "ce-id": "1",
        "ce-source": "urn:test",
        "ce-type": "io.test.v1",
        "ce-subject": "caf%C3%A9%20%22now%22",
        "Content-Type": "application/json",
    }
    deliver(inbox, {"x": 1}, headers=headers)
    subject = 'caf\u00e9 "now"'
    assert inbox.events() == [{**EVENT, "subject": subject, "datacontenttype": "application/json"}]


@pytest.mark.parametrize(
    ("body", "field"), [(b"plain", {"data": "plain"}), (b"\xff", {"data_base64": "/w=="})]
)
def test_binary_data_that_is_not_json_is_read_as_text_or_base64(
    inbox: Inbox, body: bytes, field: dict[str, str]
) -> None:
    headers = {"ce-specversion": "1.0", "ce-id": "1", "Content-Type": "text/plain"}
    deliver(inbox, body, headers=headers)
    (event,) = inbox.events()
    assert field.items() <= event.items()


def test_a_request_without_a_cloud_event_is_accepted_and_has_no_events(inbox: Inbox) -> None:
    for body in (b"{}", b"no json"):
        assert deliver(inbox, body, headers={"Content-Type": "application/json"}) == 200
    assert deliver(inbox, b"no json") == 200
    assert (len(inbox.accepted), inbox.events()) == (3, [])


def test_events_of_refused_deliveries_do_not_count(inbox: Inbox) -> None:
    inbox.fault(status=503)
    deliver(inbox)
    assert inbox.events() == []


# --- strictness ---

WITHOUT_ID = {name: value for name, value in EVENT.items() if name != "id"}


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (EVENT, STRUCTURED, 200),
        ([EVENT], BATCH, 200),
        ([], BATCH, 200),
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
    ],
)
def test_a_strict_inbox_refuses_an_invalid_event(content: object, content_type: str, status: int) -> None:
    with Inbox(strict=True) as inbox:
        assert deliver(inbox, content, headers={"Content-Type": content_type}) == status


def test_a_strict_inbox_accepts_binary_events_without_a_datacontenttype_header() -> None:
    headers = {f"ce-{name}": str(EVENT[name]) for name in ("specversion", "id", "source", "type")}
    headers["Content-Type"] = "application/json"
    with Inbox(strict=True) as inbox:
        assert deliver(inbox, {"x": 1}, headers=headers) == 200
        assert deliver(inbox, {"x": 1}, headers={**headers, "ce-datacontenttype": "application/json"}) == 400
        assert deliver(inbox, b"{", headers=headers) == 400


def test_a_strict_inbox_accepts_only_post() -> None:
    with Inbox(strict=True) as inbox:
        assert requests.put(inbox.url, json={}, timeout=LIMIT_SECONDS).status_code == 405


def test_a_lenient_inbox_lists_what_a_strict_one_would_refuse(inbox: Inbox) -> None:
    deliver(inbox)
    deliver(inbox, {**EVENT, "specversion": "9"})
    (found,) = inbox.problems
    assert "specversion" in found
    assert problem(inbox.accepted[0]) is None


# --- tokens and the handshake ---


@pytest.mark.parametrize(
    ("authorization", "status"),
    [({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer secret"}, 200)],
)
def test_a_token_is_demanded(inbox: Inbox, authorization: dict[str, str], status: int) -> None:
    inbox.require_token("secret")
    assert deliver(inbox, headers={"Content-Type": STRUCTURED, **authorization}) == status


def shake(inbox: Inbox, headers: dict[str, str]) -> requests.Response:
    return requests.options(inbox.url, headers=headers, timeout=LIMIT_SECONDS)


def test_the_handshake_consents_to_whoever_asks() -> None:
    with Inbox(allowed_rate="60", token="secret") as inbox:  # noqa: S106 - a test's token
        answer = shake(inbox, {"WebHook-Request-Origin": "imds-bridge.test"})
        assert (answer.status_code, answer.headers["WebHook-Allowed-Origin"]) == (200, "*")
        assert answer.headers["WebHook-Allowed-Rate"] == "60"
        assert (len(inbox.received), inbox.accepted) == (1, [])


def test_the_handshake_gives_no_consent_without_a_request(inbox: Inbox) -> None:
    assert "WebHook-Allowed-Origin" not in shake(inbox, {}).headers


def test_the_handshake_can_refuse_consent_though_it_answers_200() -> None:
    with Inbox(allowed_origin=None) as inbox:
        answer = shake(inbox, {"WebHook-Request-Origin": "imds-bridge.test"})
        assert (answer.status_code, "WebHook-Allowed-Origin" in answer.headers) == (200, False)


# --- faults ---


def test_a_status_fault_carries_retry_after_and_body(inbox: Inbox) -> None:
    inbox.fault(status=429, retry_after="3", body=b"slow down")
    answer = requests.post(inbox.url, data=b"x", timeout=LIMIT_SECONDS)
    assert (answer.status_code, answer.headers["Retry-After"], answer.content) == (429, "3", b"slow down")


def test_a_fault_counts_its_deliveries_and_leaves_the_handshake_alone(inbox: Inbox) -> None:
    inbox.fault(status=503, count=2)
    assert shake(inbox, {}).status_code == 200
    assert [deliver(inbox) for _ in range(3)] == [503, 503, 200]


def test_a_fault_can_be_meant_for_one_path(inbox: Inbox) -> None:
    inbox.fault(status=410, path="/old")
    assert [deliver(inbox), deliver(inbox, url=f"{inbox.base_url}/old")] == [200, 410]


def test_seconds_alone_delay_the_right_answer(inbox: Inbox) -> None:
    inbox.fault(seconds=0.3)
    started = time.monotonic()
    assert deliver(inbox) == 200
    assert time.monotonic() - started >= 0.3


def test_a_status_can_be_delayed_too(inbox: Inbox) -> None:
    inbox.fault(status=500, seconds=0.3)
    started = time.monotonic()
    assert deliver(inbox) == 500
    assert time.monotonic() - started >= 0.3


def test_a_dropped_delivery_is_not_accepted_and_a_lost_answer_is(inbox: Inbox) -> None:
    for kind, accepted in (("drop", 0), ("lost_answer", 1)):
        inbox.fault(kind=kind)
        with pytest.raises(requests.ConnectionError):
            deliver(inbox)
        assert len(inbox.accepted) == accepted


def test_a_timeout_holds_the_delivery_until_it_is_cleared(inbox: Inbox) -> None:
    inbox.fault(kind="timeout", count=None)
    with pytest.raises(requests.Timeout):
        deliver(inbox, timeout=0.3)
    inbox.clear_faults()
    assert deliver(inbox) == 200


def test_a_redirect_shows_who_follows_it(inbox: Inbox) -> None:
    inbox.fault(kind="redirect")
    assert deliver(inbox) == 302
    inbox.fault(kind="redirect")
    requests.post(inbox.url, data=b"x", timeout=LIMIT_SECONDS)
    assert [one.path for one in inbox.received] == ["/hook", "/hook", "/redirected"]


def test_an_unknown_fault_is_an_error(inbox: Inbox) -> None:
    with pytest.raises(LabError, match="wobble"):
        inbox.fault(kind="wobble")


# --- waiting and ending ---


def test_waiting_for_a_count_counts_accepted_deliveries(inbox: Inbox) -> None:
    inbox.fault(status=503)
    sender = threading.Thread(target=lambda: [deliver(inbox) for _ in range(3)])
    sender.start()
    inbox.wait_for(2, LIMIT_SECONDS)
    assert len(inbox.events()) == 2
    sender.join(LIMIT_SECONDS)


def test_waiting_for_a_predicate_returns_what_it_found(inbox: Inbox) -> None:
    sender = threading.Thread(target=lambda: deliver(inbox))
    sender.start()
    assert inbox.wait_for(inbox.events, LIMIT_SECONDS) == [EVENT]
    sender.join(LIMIT_SECONDS)


def test_a_wait_that_times_out_reports_what_arrived(inbox: Inbox) -> None:
    inbox.fault(status=500)
    deliver(inbox)
    with pytest.raises(AssertionError, match=r"1 requests arrived\s+POST /hook io.test.v1 -> 500"):
        inbox.wait_for(1, timeout=0.1)


def test_closing_is_prompt_while_deliveries_hang() -> None:
    inbox = Inbox()
    inbox.fault(kind="timeout")
    failures: list[Exception] = []

    def send() -> None:
        try:
            deliver(inbox)
        except requests.ConnectionError as error:
            failures.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
    started = time.monotonic()
    inbox.close()
    inbox.close()  # a second call does nothing
    assert time.monotonic() - started < 9  # it would wait ten seconds for an open connection
    sender.join(LIMIT_SECONDS)
    assert len(failures) == 1


def test_every_request_is_reported() -> None:
    reports: list[str] = []
    with Inbox(report=reports.append) as inbox:
        deliver(inbox)
    assert reports == ["POST /hook io.test.v1 -> 200"]


# --- control over HTTP ---


def test_the_inbox_can_be_driven_over_http(inbox: Inbox) -> None:
    base = f"{inbox.base_url}/lab"
    requests.post(f"{base}/fault", json={"status": 503, "body": "busy"}, timeout=LIMIT_SECONDS)
    assert [deliver(inbox), deliver(inbox)] == [503, 200]
    seen = requests.get(f"{base}/received", timeout=LIMIT_SECONDS).json()
    assert [(one["path"], one["status"]) for one in seen] == [("/hook", 503), ("/hook", 200)]


def test_a_wrong_control_request_is_refused_with_what_was_expected(inbox: Inbox) -> None:
    answer = requests.post(f"{inbox.base_url}/lab/fault", json={"kind": "wobble"}, timeout=LIMIT_SECONDS)
    assert (answer.status_code, "lost_answer" in answer.json()["error"]) == (400, True)
