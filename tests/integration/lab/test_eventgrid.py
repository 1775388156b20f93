"""Event Grid accepts and refuses what the service does, with its errors, and delivers to webhooks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from azure.core.messaging import CloudEvent

from bridge.lab.eventgrid import delivery as delivery_module
from bridge.lab.httpd import LabError
from tests.support.eventgrid import EventGridLab
from tests.support.inbox import Inbox

LIMIT_SECONDS = 20
STRUCTURED = "application/cloudevents+json; charset=utf-8"
BATCH = "application/cloudevents-batch+json; charset=utf-8"
VERSIONS = {"custom": "2018-01-01", "namespace": "2024-06-01"}
FLAVORS = list(VERSIONS)
EVENT: dict[str, Any] = {
    "specversion": "1.0",
    "id": "1",
    "source": "urn:test",
    "type": "io.test.v1",
    "data": {"x": 1},
}


@pytest.fixture(autouse=True)
def _no_time_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry immediately, and never end a request that hangs."""
    monkeypatch.setattr(delivery_module, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(delivery_module, "ANSWER_SECONDS", 600.0)


@pytest.fixture
def lab() -> Iterator[EventGridLab]:
    with EventGridLab() as started:
        yield started


def endpoint(lab: EventGridLab, flavor: str) -> str:
    return lab.custom_endpoint if flavor == "custom" else lab.namespace_endpoint("maintenance")


def key_header(flavor: str, key: str) -> dict[str, str]:
    return {"aeg-sas-key": key} if flavor == "custom" else {"Authorization": f"SharedAccessKey {key}"}


def publish(
    lab: EventGridLab,
    flavor: str = "custom",
    content: object = EVENT,
    *,
    url: str | None = None,
    access: dict[str, str] | None = None,
    content_type: str | None = STRUCTURED,
    version: str | None = None,
    method: str = "POST",
    allow_redirects: bool = False,
) -> requests.Response:
    headers = {"Content-Type": content_type} if content_type else {}
    return requests.request(
        method,
        url or endpoint(lab, flavor),
        params={"api-version": VERSIONS[flavor] if version is None else version},
        data=content if isinstance(content, bytes) else json.dumps(content).encode(),
        headers={**headers, **(key_header(flavor, lab.keys[0]) if access is None else access)},
        allow_redirects=allow_redirects,
        timeout=LIMIT_SECONDS,
    )


def batch(count: int) -> list[dict[str, Any]]:
    return [{**EVENT, "id": str(number)} for number in range(count)]


def code(answer: requests.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# --- accepted requests ---


@pytest.mark.parametrize(("flavor", "body"), [("custom", b""), ("namespace", b"{}")])
def test_an_event_and_a_batch_are_taken_and_read_again(lab: EventGridLab, flavor: str, body: bytes) -> None:
    single, several = publish(lab, flavor), publish(lab, flavor, batch(2), content_type=BATCH)
    assert [(one.status_code, one.content) for one in (single, several)] == [(200, body)] * 2
    read: list[CloudEvent[Any]] = [CloudEvent.from_dict(event) for event in lab.events()]
    assert [(event.id, event.type, event.data) for event in read] == [
        (number, "io.test.v1", {"x": 1}) for number in ("1", "0", "1")
    ]


def test_an_event_that_comes_twice_is_taken_twice(lab: EventGridLab) -> None:
    assert publish(lab, content=[EVENT, EVENT], content_type=BATCH).status_code == 200
    assert lab.events() == [EVENT, EVENT]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_both_keys_are_taken(lab: EventGridLab, flavor: str) -> None:
    answers = [publish(lab, flavor, access=key_header(flavor, key)) for key in lab.keys]
    assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_token_is_taken_beside_the_keys(flavor: str) -> None:
    with EventGridLab(token="entra") as lab:  # noqa: S106 - a test's token
        assert publish(lab, flavor, access={"Authorization": "Bearer entra"}).status_code == 200
        assert publish(lab, flavor).status_code == 200


def test_each_topic_of_a_namespace_has_its_address() -> None:
    with EventGridLab(topics=["one", "two"]) as lab:
        for topic in ("one", "two"):
            assert publish(lab, "namespace", url=lab.namespace_endpoint(topic)).status_code == 200
        assert [one.path for one in lab.accepted] == ["/topics/one:publish", "/topics/two:publish"]


# --- refused credentials ---


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("kind", ["none", "wrong key", "key of the other kind", "foreign token"])
def test_whoever_brings_no_good_credential_is_unauthorized(lab: EventGridLab, flavor: str, kind: str) -> None:
    other = FLAVORS[FLAVORS.index(flavor) - 1]
    access = {
        "none": {},
        "wrong key": key_header(flavor, "bm90IHRoZSBrZXk="),
        "key of the other kind": key_header(other, lab.keys[0]),
        "foreign token": {"Authorization": "Bearer foreign"},
    }[kind]
    assert code(publish(lab, flavor, access=access)) == (401, "Unauthorized")
    assert lab.accepted == []


def test_a_regenerated_key_replaces_the_old_one(lab: EventGridLab) -> None:
    first, second = lab.keys
    new = lab.regenerate_key(1)
    assert lab.keys == (new, second)
    statuses = [publish(lab, access=key_header("custom", key)).status_code for key in (first, second, new)]
    assert statuses == [401, 200, 200]


def test_keys_can_be_switched_off() -> None:
    with EventGridLab(keys=(), token="entra") as lab:  # noqa: S106 - a test's token
        assert publish(lab, access={"aeg-sas-key": "any"}).status_code == 401
        assert publish(lab, access={"Authorization": "Bearer entra"}).status_code == 200


def test_a_token_expires_and_is_replaced() -> None:
    now = 1000.0
    with EventGridLab(clock=lambda: now) as lab:
        lab.require_token("old", expires=1060)
        assert publish(lab, access={"Authorization": "Bearer old"}).status_code == 200
        now = 1060.0
        answer = publish(lab, access={"Authorization": "Bearer old"})
        assert code(answer) == (401, "Unauthorized")
        assert "expired" in answer.json()["error"]["message"]
        lab.require_token("new")
        statuses = [
            publish(lab, access={"Authorization": f"Bearer {token}"}).status_code for token in ("old", "new")
        ]
        assert statuses == [401, 200]


def test_a_token_whose_owner_lacks_the_role_is_unauthorized_too(lab: EventGridLab) -> None:
    lab.require_token("entra", permitted=False)
    answer = publish(lab, access={"Authorization": "Bearer entra"})
    assert code(answer) == (401, "Unauthorized")
    assert "does not have permission to send data" in answer.json()["error"]["message"]


# --- refused addresses ---


@pytest.mark.parametrize(
    ("flavor", "path", "refused"),
    [
        ("custom", "/api/event", (404, "NotFound")),
        ("custom", "/", (404, "NotFound")),
        ("namespace", "/topics/maintenance", (404, "NotFound")),
        ("namespace", "/topics/unknown:publish", (410, "Gone")),
    ],
)
def test_an_unknown_address_is_refused(
    lab: EventGridLab, flavor: str, path: str, refused: tuple[int, str]
) -> None:
    assert code(publish(lab, flavor, url=f"{lab.base_url}{path}")) == refused


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("version", ["", "2017-01-01"])
def test_another_api_version_is_a_bad_request(lab: EventGridLab, flavor: str, version: str) -> None:
    assert code(publish(lab, flavor, version=version)) == (400, "BadRequest")


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_another_method_is_refused(lab: EventGridLab, flavor: str, method: str) -> None:
    assert code(publish(lab, flavor, method=method)) == (405, "MethodNotAllowed")


# --- refused content ---


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("content_type", [None, "application/json", "text/plain"])
def test_another_content_type_is_refused(lab: EventGridLab, flavor: str, content_type: str | None) -> None:
    expected = {"custom": (415, "UnsupportedMediaType"), "namespace": (400, "BadRequest")}
    assert code(publish(lab, flavor, content_type=content_type)) == expected[flavor]


WITHOUT_ID = {name: value for name, value in EVENT.items() if name != "id"}


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"", STRUCTURED),
        (b"{", STRUCTURED),
        (b"[1", BATCH),
        (EVENT, BATCH),
        ([EVENT], STRUCTURED),
        ([], BATCH),
        ([EVENT, 5], BATCH),
        ([EVENT, WITHOUT_ID], BATCH),
        ({**EVENT, "source": ""}, STRUCTURED),
        ({**EVENT, "type": 5}, STRUCTURED),
        ({**EVENT, "specversion": "0.3"}, STRUCTURED),
        ({**EVENT, "Upper": "x"}, STRUCTURED),
        ({**EVENT, "a" * 21: "x"}, STRUCTURED),
        ({**EVENT, "extension": {}}, STRUCTURED),
    ],
)
def test_what_holds_one_event_that_is_none_is_refused_whole(
    lab: EventGridLab, flavor: str, content: object, content_type: str
) -> None:
    answer = publish(lab, flavor, content, content_type=content_type)
    assert code(answer) == (400, "BadRequest")
    assert lab.events() == []


@pytest.mark.parametrize(
    ("flavor", "attribute", "words"),
    [
        ("custom", "id", "'CloudEventV10' schema and requires 'id' property to be set"),
        ("custom", "type", "requires 'eventType' property"),
        ("namespace", "id", "`id` must be non-empty string"),
        ("namespace", "type", "`type` must be non-empty string"),
    ],
)
def test_a_missing_attribute_is_named_in_the_words_of_the_service(
    lab: EventGridLab, flavor: str, attribute: str, words: str
) -> None:
    content = {name: value for name, value in EVENT.items() if name != attribute}
    assert words in publish(lab, flavor, content).json()["error"]["message"]


@pytest.mark.parametrize(
    ("flavor", "refused"), [("custom", (413, "RequestEntityTooLarge")), ("namespace", (403, "Forbidden"))]
)
def test_a_request_may_have_one_mebibyte(lab: EventGridLab, flavor: str, refused: tuple[int, str]) -> None:
    room = 1024 * 1024 - len(json.dumps({**EVENT, "data": ""}))
    assert publish(lab, flavor, {**EVENT, "data": "x" * room}).status_code == 200
    assert code(publish(lab, flavor, {**EVENT, "data": "x" * (room + 1)})) == refused


@pytest.mark.parametrize(("flavor", "most", "status"), [("custom", 5000, 413), ("namespace", 1000, 403)])
def test_a_batch_may_have_so_many_events(lab: EventGridLab, flavor: str, most: int, status: int) -> None:
    statuses = [
        publish(lab, flavor, batch(count), content_type=BATCH).status_code for count in (most, most + 1)
    ]
    assert statuses == [200, status]


# --- error bodies ---


def test_a_custom_topic_reports_errors_twice_and_with_a_report_id(lab: EventGridLab) -> None:
    answer = publish(lab, url=f"{lab.base_url}/elsewhere")
    error = answer.json()["error"]
    (detail,) = error["details"]
    assert (error["code"], detail["code"]) == ("NotFound", "ResourceNotFound")
    assert detail["message"] == error["message"]
    assert f"Report '{answer.headers['x-ms-request-id']}:" in error["message"]


def test_a_namespace_reports_errors_without_details(lab: EventGridLab) -> None:
    error = publish(lab, "namespace", access={}).json()["error"]
    assert sorted(error) == ["code", "message", "timestamp_utc", "tracking_id"]


def test_no_error_shows_a_credential(lab: EventGridLab) -> None:
    for access in ({"aeg-sas-key": "c2VjcmV0"}, {"Authorization": "Bearer c2VjcmV0"}):
        assert "c2VjcmV0" not in publish(lab, access=access).text


# --- faults ---


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_status_on_demand_has_the_body_of_the_service(lab: EventGridLab, flavor: str) -> None:
    lab.fault(status=429, retry_after=3)
    answer = publish(lab, flavor)
    assert code(answer) == (429, "TooManyRequests")
    assert answer.headers["Retry-After"] == "3"
    assert ("details" in answer.json()["error"]) == (flavor == "custom")
    assert publish(lab, flavor).status_code == 200


def test_a_status_that_has_no_name_and_a_body_of_ones_own_are_possible(lab: EventGridLab) -> None:
    lab.fault(status=499)
    assert code(publish(lab)) == (499, "499")
    lab.fault(status=503, body="busy")
    assert publish(lab).text == "busy"


def test_what_is_dropped_is_not_taken_and_what_lost_its_answer_is(lab: EventGridLab) -> None:
    for kind, taken in (("drop", 0), ("lost_answer", 1)):
        lab.fault(kind)
        with pytest.raises(requests.ConnectionError):
            publish(lab)
        assert len(lab.events()) == taken


def test_a_fault_can_be_meant_for_one_kind_of_topic(lab: EventGridLab) -> None:
    lab.fault(status=503, path="/topics/")
    assert [publish(lab, flavor).status_code for flavor in FLAVORS] == [200, 503]


def test_a_publisher_that_does_not_follow_a_redirect_leaks_nothing(lab: EventGridLab) -> None:
    lab.fault("redirect")
    assert publish(lab).status_code == 302
    assert lab.leaked == []


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_key_that_follows_a_redirect_is_noted_where_it_arrives(lab: EventGridLab, method: str) -> None:
    with EventGridLab(keys=["other"]) as elsewhere:
        lab.fault(302 if method == "GET" else 307)
        lab.redirect_location = f"{elsewhere.base_url}/elsewhere"
        publish(lab, allow_redirects=True)
        (leaked,) = elsewhere.leaked
        assert (leaked.method, leaked.path, leaked.headers["aeg-sas-key"]) == (
            method,
            "/elsewhere",
            lab.keys[0],
        )
    assert lab.leaked == []


def test_a_key_in_the_url_is_noted(lab: EventGridLab) -> None:
    requests.post(lab.url, params={"aeg-sas-key": lab.keys[1]}, timeout=LIMIT_SECONDS)
    assert [one.path for one in lab.leaked] == ["/api/events"]


# --- delivery ---


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with Inbox(strict=True, allowed_origin="eventgrid.azure.net") as started:
        yield started


def test_a_webhook_is_validated_and_then_gets_each_event_in_its_own_request(
    lab: EventGridLab, inbox: Inbox
) -> None:
    lab.subscribe(f"{inbox.url}?code=1", name="ops")
    publish(lab, content=batch(2), content_type=BATCH)
    publish(lab, "namespace", {**EVENT, "id": "2"})
    inbox.wait_for(3, LIMIT_SECONDS)
    handshake, *deliveries = inbox.received
    assert (handshake.method, handshake.headers["webhook-request-origin"]) == (
        "OPTIONS",
        "eventgrid.azure.net",
    )
    assert [event["id"] for event in inbox.events()] == ["0", "1", "2"]
    for delivery in deliveries:
        assert (delivery.path, delivery.query) == ("/hook", "code=1")
        assert delivery.headers["content-type"] == STRUCTURED
        reports = {name: text for name, text in delivery.headers.items() if name.startswith("aeg-")}
        assert reports == {
            "aeg-event-type": "Notification",
            "aeg-subscription-name": "OPS",
            "aeg-delivery-count": "0",
            "aeg-metadata-version": "1.0",
        }


def test_what_came_in_binary_mode_is_delivered_as_structured_json(lab: EventGridLab, inbox: Inbox) -> None:
    lab.subscribe(inbox.url)
    attributes = {f"ce-{name}": str(EVENT[name]) for name in ("specversion", "id", "source", "type")}
    access = {**key_header("custom", lab.keys[0]), **attributes}
    assert publish(lab, content={"x": 1}, content_type="application/json", access=access).status_code == 200
    inbox.wait_for(1, LIMIT_SECONDS)
    assert inbox.events() == [{**EVENT, "datacontenttype": "application/json"}]


def test_what_is_refused_is_not_delivered(lab: EventGridLab, inbox: Inbox) -> None:
    lab.subscribe(inbox.url)
    publish(lab, content=[{**EVENT, "id": "bad", "Upper": "x"}, EVENT], content_type=BATCH)
    publish(lab, content={**EVENT, "id": "good"})
    inbox.wait_for(1, LIMIT_SECONDS)
    assert [event["id"] for event in inbox.events()] == ["good"]


@pytest.mark.parametrize("origin", [None, "example.org"])
def test_a_webhook_that_does_not_consent_is_not_subscribed(lab: EventGridLab, origin: str | None) -> None:
    with Inbox(allowed_origin=origin) as inbox:
        with pytest.raises(LabError, match="expected: WebHook-Allowed-Origin"):
            lab.subscribe(inbox.url)
        publish(lab)
        assert [one.method for one in inbox.received] == ["OPTIONS"]


@pytest.mark.parametrize("url", ["https://127.0.0.1/", "127.0.0.1", "http://127.0.0.1:port/", "http://[/"])
def test_an_invalid_url_is_reported(lab: EventGridLab, url: str) -> None:
    with pytest.raises(LabError, match="url given"):
        lab.subscribe(url)


def test_an_unreachable_webhook_is_reported_without_its_query(lab: EventGridLab) -> None:
    with Inbox() as gone:
        address = gone.url
    with pytest.raises(LabError, match="answered the handshake with no answer") as raised:
        lab.subscribe(f"{address}?code=secret")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("status", "attempts"), [(500, 4), (302, 4), (400, 1), (401, 1), (413, 1)])
def test_what_cannot_be_delivered_is_given_up_and_holds_up_nothing(
    lab: EventGridLab, inbox: Inbox, status: int, attempts: int
) -> None:
    lab.subscribe(inbox.url)
    inbox.fault(status=status, count=attempts)
    publish(lab, content=batch(2), content_type=BATCH)
    inbox.wait_for(1, LIMIT_SECONDS)
    assert [event["id"] for event in inbox.events()] == ["1"]
    counts = [one.headers["aeg-delivery-count"] for one in inbox.received if one.method == "POST"]
    assert counts == [*map(str, range(attempts)), "0"]


def test_a_hanging_webhook_holds_up_no_other(lab: EventGridLab, inbox: Inbox) -> None:
    with Inbox() as hanging:
        hanging.fault("timeout", count=None)
        lab.subscribe(hanging.url)
        lab.subscribe(inbox.url)
        publish(lab)
        inbox.wait_for(1, LIMIT_SECONDS)


def test_a_closed_subscription_gets_nothing_more(lab: EventGridLab, inbox: Inbox) -> None:
    with Inbox() as closed:
        lab.subscribe(closed.url).close()
        lab.subscribe(inbox.url)
        publish(lab)
        inbox.wait_for(1, LIMIT_SECONDS)
        assert closed.accepted == []


# --- waiting and ending ---


def ended(close: Callable[[], None]) -> bool:
    """Return whether it closes in spite of a request that hangs."""
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(LIMIT_SECONDS)
    return not closing.is_alive()


def test_closing_is_prompt_while_a_publication_and_a_delivery_hang() -> None:
    with Inbox() as inbox:
        lab = EventGridLab()
        lab.subscribe(inbox.url)
        inbox.fault("timeout", count=None)
        publish(lab)
        inbox.wait_for(lambda: len(inbox.received) == 2, LIMIT_SECONDS)
        lab.fault("timeout")
        failures: list[Exception] = []

        def send() -> None:
            try:
                publish(lab)
            except requests.ConnectionError as error:
                failures.append(error)

        sender = threading.Thread(target=send)
        sender.start()
        lab.wait_for(lambda: len(lab.received) == 2, LIMIT_SECONDS)
        assert ended(lab.close)
        lab.close()  # a second call does nothing
        sender.join(LIMIT_SECONDS)
        assert len(failures) == 1


def test_waiting_counts_accepted_requests(lab: EventGridLab) -> None:
    lab.fault(status=503)
    sender = threading.Thread(target=lambda: [publish(lab) for _ in range(3)])
    sender.start()
    lab.wait_for(2, LIMIT_SECONDS)
    assert len(lab.events()) == 2
    sender.join(LIMIT_SECONDS)


def test_every_change_is_reported() -> None:
    reports: list[str] = []
    with Inbox() as inbox, EventGridLab(report=reports.append) as lab:
        lab.subscribe(f"{inbox.url}?code=1")
        inbox.fault(503)
        publish(lab)
        inbox.wait_for(1, LIMIT_SECONDS)
    assert sorted(reports) == [  # the delivery may come before the answer
        "POST /api/events io.test.v1 -> 200",
        f"delivery 1 of io.test.v1 to {inbox.url} -> 503",
    ]
