"""Event Grid accepts and refuses what the service does, and delivers to webhooks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from bridge.lab import eventgrid
from bridge.lab.httpd import LabError
from tests.support.eventgrid import EventGridLab
from tests.support.inbox import Inbox

LIMIT_SECONDS = 20
STRUCTURED = "application/cloudevents+json; charset=utf-8"
BATCH = "application/cloudevents-batch+json; charset=utf-8"
VERSIONS = {"custom": "2018-01-01", "namespace": "2024-06-01"}
EVENT: dict[str, Any] = {"specversion": "1.0", "id": "1", "source": "urn:test", "type": "t.v1", "data": {}}

each_flavor = pytest.mark.parametrize("flavor", VERSIONS)


@pytest.fixture(autouse=True)
def _no_time_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry immediately, and never end a request that hangs."""
    monkeypatch.setattr(eventgrid, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(eventgrid, "ANSWER_SECONDS", 600.0)


@pytest.fixture
def lab() -> Iterator[EventGridLab]:
    with EventGridLab() as started:
        yield started


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with Inbox(strict=True, allowed_origin="eventgrid.azure.net") as started:
        yield started


def with_key(flavor: str, key: str) -> dict[str, str]:
    return {"aeg-sas-key": key} if flavor == "custom" else {"Authorization": f"SharedAccessKey {key}"}


def publish(
    lab: EventGridLab,
    flavor: str = "custom",
    content: object = EVENT,
    *,
    path: str | None = None,
    access: dict[str, str] | None = None,
    content_type: str | None = STRUCTURED,
    version: str | None = None,
    method: str = "POST",
    allow_redirects: bool = False,
) -> requests.Response:
    """Publish as a good client does, except for what is given."""
    endpoint = lab.custom_endpoint if flavor == "custom" else lab.namespace_endpoint("maintenance")
    headers = {"Content-Type": content_type} if content_type else {}
    return requests.request(
        method,
        endpoint if path is None else f"{lab.base_url}{path}",
        params={"api-version": VERSIONS[flavor] if version is None else version},
        data=content if isinstance(content, bytes) else json.dumps(content).encode(),
        headers={**headers, **(with_key(flavor, lab.keys[0]) if access is None else access)},
        allow_redirects=allow_redirects,
        timeout=LIMIT_SECONDS,
    )


def batch(count: int) -> list[dict[str, Any]]:
    return [{**EVENT, "id": str(number)} for number in range(count)]


@pytest.mark.parametrize(("flavor", "body"), [("custom", b""), ("namespace", b"{}")])
def test_an_event_and_a_batch_are_taken_with_either_key(lab: EventGridLab, flavor: str, body: bytes) -> None:
    access = with_key(flavor, lab.keys[1])
    answers = publish(lab, flavor), publish(lab, flavor, batch(2), content_type=BATCH, access=access)
    assert [(one.status_code, one.content) for one in answers] == [(200, body)] * 2
    assert lab.events() == [EVENT, *batch(2)]


@each_flavor
@pytest.mark.parametrize(
    ("given", "statuses"),
    [
        ({"access": {}}, (401, 401)),
        ({"access": {"aeg-sas-key": "bm8=", "Authorization": "SharedAccessKey bm8="}}, (401, 401)),
        ({"access": {"Authorization": "Bearer foreign"}}, (401, 401)),
        ({"path": "/elsewhere"}, (404, 404)),
        ({"version": ""}, (400, 400)),
        ({"version": "2017-01-01"}, (400, 400)),
        ({"method": "GET"}, (405, 405)),
        ({"content_type": "application/json"}, (415, 400)),
        ({"content_type": None}, (415, 400)),
        ({"content": [], "content_type": BATCH}, (400, 400)),
        ({"content": [EVENT, {**EVENT, "id": ""}], "content_type": BATCH}, (400, 400)),
        ({"content": b"{"}, (400, 400)),
        ({"content": {**EVENT, "data": "x" * 1024 * 1024}}, (413, 403)),
    ],
)
def test_what_the_service_refuses_is_refused_whole(
    lab: EventGridLab, flavor: str, given: dict[str, Any], statuses: tuple[int, int]
) -> None:
    answer = publish(lab, flavor, **given)
    assert answer.status_code == dict(zip(VERSIONS, statuses, strict=True))[flavor]
    assert sorted(answer.json()["error"]) == ["code", "message", "tracking_id"]
    assert lab.accepted == []


def test_each_topic_of_a_namespace_has_its_address_and_another_is_gone() -> None:
    with EventGridLab(topics=["one", "two"]) as lab:
        paths = [f"/topics/{topic}:publish" for topic in ("one", "two", "three")]
        assert [publish(lab, "namespace", path=path).status_code for path in paths] == [200, 200, 410]
        assert publish(lab, "namespace", path="/topics/one").status_code == 404


@pytest.mark.parametrize(("flavor", "most", "status"), [("custom", 5000, 413), ("namespace", 1000, 403)])
def test_a_batch_may_have_so_many_events(lab: EventGridLab, flavor: str, most: int, status: int) -> None:
    answers = [publish(lab, flavor, batch(count), content_type=BATCH) for count in (most, most + 1)]
    assert [one.status_code for one in answers] == [200, status]


# --- what tests ask of it ---


def test_keys_are_regenerated_and_tokens_expire_or_lack_the_role() -> None:
    now = 1000.0
    bearer = {"Authorization": "Bearer entra"}
    with EventGridLab(token="entra", clock=lambda: now) as lab:  # noqa: S106 - a test's token
        old = lab.keys[0]
        assert lab.regenerate_key(1) == lab.keys[0]
        statuses = [publish(lab, access=with_key("custom", key)).status_code for key in (old, *lab.keys)]
        assert statuses == [401, 200, 200]
        assert publish(lab, access=bearer).status_code == 200
        lab.require_token("entra", expires=1060)
        assert publish(lab, access=bearer).status_code == 200
        now = 1060.0
        assert "has expired" in publish(lab, access=bearer).text
        lab.require_token("entra", permitted=False)
        answer = publish(lab, access=bearer)
        assert (answer.status_code, "does not have permission" in answer.text) == (401, True)


@each_flavor
def test_a_status_on_demand_has_a_body_of_the_service_unless_one_is_given(
    lab: EventGridLab, flavor: str
) -> None:
    lab.fault(429, retry_after=3)
    lab.fault(503, body="busy")
    first, second = publish(lab, flavor), publish(lab, flavor)
    assert (first.json()["error"]["code"], first.headers["Retry-After"]) == ("TooManyRequests", "3")
    assert (second.status_code, second.text) == (503, "busy")


def test_a_key_that_follows_a_redirect_or_stands_in_the_url_is_noted(lab: EventGridLab) -> None:
    with EventGridLab(keys=["other"]) as elsewhere:
        lab.redirect_location = f"{elsewhere.base_url}/elsewhere"
        lab.fault(307)
        publish(lab)
        assert elsewhere.leaked == []
        lab.fault(307)
        publish(lab, allow_redirects=True)
        assert [one.path for one in elsewhere.leaked] == ["/elsewhere"]
    assert lab.leaked == []
    requests.post(lab.url, params={"aeg-sas-key": lab.keys[1]}, timeout=LIMIT_SECONDS)
    assert [one.path for one in lab.leaked] == ["/api/events"]


# --- delivery ---


def test_a_webhook_is_validated_and_then_gets_each_accepted_event_in_its_own_request(
    lab: EventGridLab, inbox: Inbox
) -> None:
    lab.subscribe(f"{inbox.url}?code=1")
    publish(lab, content=[EVENT, {**EVENT, "Upper": "x"}], content_type=BATCH)
    publish(lab, content=batch(2), content_type=BATCH)
    publish(lab, "namespace", {**EVENT, "id": "2"})
    inbox.wait_for(3, LIMIT_SECONDS)
    handshake, delivery, *_ = inbox.received
    origins = [one.headers["webhook-request-origin"] for one in (handshake, delivery)]
    assert (handshake.method, origins) == ("OPTIONS", ["eventgrid.azure.net"] * 2)
    assert (delivery.path, delivery.query) == ("/hook", "code=1")
    assert delivery.headers["content-type"] == STRUCTURED
    assert [event["id"] for event in inbox.events()] == ["0", "1", "2"]


@pytest.mark.parametrize("origin", [None, "example.org"])
def test_a_webhook_that_does_not_consent_is_not_subscribed(lab: EventGridLab, origin: str | None) -> None:
    with Inbox(allowed_origin=origin) as inbox:
        with pytest.raises(LabError, match="expected: WebHook-Allowed-Origin"):
            lab.subscribe(inbox.url)
        publish(lab)
        assert [one.method for one in inbox.received] == ["OPTIONS"]
    with pytest.raises(LabError, match="no answer") as raised:
        lab.subscribe(f"{inbox.url}?code=secret")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("status", "attempts"), [(500, 4), (400, 1)])
def test_what_cannot_be_delivered_is_given_up_and_holds_up_nothing(
    lab: EventGridLab, inbox: Inbox, status: int, attempts: int
) -> None:
    lab.subscribe(inbox.url)
    inbox.fault(status, count=attempts)
    publish(lab, content=batch(2), content_type=BATCH)
    inbox.wait_for(1, LIMIT_SECONDS)
    assert [event["id"] for event in inbox.events()] == ["1"]
    counts = [one.headers["aeg-delivery-count"] for one in inbox.received if one.method == "POST"]
    assert counts == [*map(str, range(attempts)), "0"]


def test_a_hanging_webhook_holds_up_neither_another_nor_the_end(inbox: Inbox) -> None:
    with Inbox() as hanging, EventGridLab() as lab:
        hanging.fault("timeout", count=None)
        lab.subscribe(hanging.url)
        lab.subscribe(inbox.url)
        publish(lab)
        inbox.wait_for(1, LIMIT_SECONDS)
        closing = threading.Thread(target=lab.close, daemon=True)
        closing.start()
        closing.join(LIMIT_SECONDS)
        assert not closing.is_alive()
