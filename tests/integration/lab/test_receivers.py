"""The inbox and Event Grid take and refuse what a strict receiver of CloudEvents and the service do."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from tests.support.eventgrid import EventGridLab
from tests.support.inbox import Inbox

LIMIT_SECONDS = 30
STRUCTURED = "application/cloudevents+json; charset=utf-8"
BATCH = "application/cloudevents-batch+json; charset=utf-8"
EVENT: dict[str, Any] = {"specversion": "1.0", "id": "1", "source": "urn:test", "type": "t.v1", "data": {}}
WITHOUT_ID = {name: value for name, value in EVENT.items() if name != "id"}
JSON = {"Content-Type": "application/json"}
BINARY = {**JSON, **{f"ce-{name}": EVENT[name] for name in ("specversion", "id", "source", "type")}}
READ = {**EVENT, "datacontenttype": "application/json"}
VERSIONS = {"custom": "2018-01-01", "namespace": "2024-06-01"}


# --- the inbox ---


def deliver(inbox: Inbox, content: object = EVENT, path: str = "/hook", **headers: str) -> int:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    given = headers or {"Content-Type": STRUCTURED}
    url = inbox.base_url + path
    return requests.post(url, data=data, headers=given, timeout=LIMIT_SECONDS).status_code


def test_every_request_is_recorded_reported_and_shown_and_those_answered_by_2xx_count() -> None:
    reports: list[str] = []
    with Inbox(report=reports.append) as inbox:
        inbox.fault(500)
        assert deliver(inbox) == 500
        assert deliver(inbox, b"hello", "/any/path?a=1", **{"X-Mark": "7"}) == 200
        refused, one = inbox.received
        assert (refused.status, inbox.accepted, inbox.events()) == (500, [one], [])
        shown = requests.get(f"{inbox.base_url}/lab/received", timeout=LIMIT_SECONDS).json()
        assert [(one["path"], one["body"], one["status"]) for one in shown] == [
            ("/hook", json.dumps(EVENT), 500),
            ("/any/path", "hello", 200),
        ]
        # As .NET's HttpClient sends JSON: without a length.
        requests.post(inbox.url, data=iter([b"hel", b"lo"]), timeout=LIMIT_SECONDS)
        assert inbox.received[-1].body == b"hello"
    assert (one.method, one.path, one.query, one.body) == ("POST", "/any/path", "a=1", b"hello")
    assert (one.headers["x-mark"], one.headers["X-MARK"]) == ("7", "7")
    assert reports == [
        "POST /hook t.v1 -> 500",
        "POST /any/path 5 bytes -> 200",
        "POST /hook 5 bytes -> 200",
    ]


@pytest.mark.parametrize(
    ("chunks", "is_recorded"),
    [
        (b"3;name=value\r\nabc\r\n0\r\nTrailer: x\r\n\r\n", True),
        (b"3\r\nabcd", False),
        (b"x\r\n", False),
        (b"-3\r\n", False),
        (b"5000000\r\nabc", False),  # 80 MiB
        (b"3\r\nab", False),
        (b"1" * 70_000, False),
    ],
)
def test_a_body_in_chunks_is_read_whole_within_the_limit_or_not_recorded(
    chunks: bytes, is_recorded: bool
) -> None:
    with Inbox() as inbox, socket.create_connection(("127.0.0.1", urlsplit(inbox.url).port), 10) as client:
        client.sendall(b"POST /hook HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        client.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while client.recv(1000):
                pass
        assert [one.body for one in inbox.received] == ([b"abc"] if is_recorded else [])


@pytest.mark.parametrize(
    ("content", "headers", "status", "events"),
    [
        (EVENT, STRUCTURED, 200, [EVENT]),
        ([EVENT], BATCH, 200, [EVENT]),
        (EVENT, "application/json", 415, []),
        (EVENT, "", 415, []),
        (b"{", STRUCTURED, 400, []),
        (EVENT, BATCH, 400, []),
        ([EVENT], STRUCTURED, 400, []),
        ([EVENT, 5], BATCH, 400, [EVENT]),
        (WITHOUT_ID, STRUCTURED, 400, [WITHOUT_ID]),
        ({**EVENT, "id": ""}, STRUCTURED, 400, 1),
        ({**EVENT, "specversion": "9"}, STRUCTURED, 400, 1),
        ({**EVENT, "Upper": "x"}, STRUCTURED, 400, 1),
        ({**EVENT, "a" * 21: "x"}, STRUCTURED, 400, 1),
        ({**EVENT, "extension": {}}, STRUCTURED, 400, 1),
        ({**EVENT, "extension": True, "data": None}, STRUCTURED, 200, 1),
        ({}, {**BINARY, "ce-subject": "caf%C3%A9%20%22a%22"}, 200, [{**READ, "subject": 'caf\u00e9 "a"'}]),
        ({}, {**BINARY, "ce-datacontenttype": "application/json"}, 400, 1),
        (b"{", BINARY, 400, []),
    ],
)
def test_a_strict_inbox_refuses_an_invalid_event_which_a_lenient_one_lists(
    inbox: Inbox, content: object, headers: str | dict[str, str], status: int, events: list[object] | int
) -> None:
    given = {"Content-Type": headers} if isinstance(headers, str) else headers
    assert deliver(inbox, content, **given) == status
    with Inbox() as lenient:
        assert deliver(lenient, content, **given) == 200
        assert len(lenient.problems) == (status != 200)
        assert events in (lenient.events(), len(lenient.events()))


# --- Event Grid ---


@pytest.fixture
def lab() -> Iterator[EventGridLab]:
    with EventGridLab(topics=["maintenance", "two"]) as started:
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


@pytest.mark.parametrize(
    ("flavor", "body", "most", "status"), [("custom", b"", 5000, 413), ("namespace", b"{}", 1000, 403)]
)
def test_an_event_and_a_batch_up_to_the_limit_are_taken_with_either_key(
    lab: EventGridLab, flavor: str, body: bytes, most: int, status: int
) -> None:
    access = with_key(flavor, lab.keys[1])
    answers = publish(lab, flavor), publish(lab, flavor, batch(most), content_type=BATCH, access=access)
    assert [(one.status_code, one.content) for one in answers] == [(200, body)] * 2
    assert publish(lab, flavor, batch(most + 1), content_type=BATCH).status_code == status
    assert lab.events() == [EVENT, *batch(most)]


@pytest.mark.parametrize("flavor", VERSIONS)
@pytest.mark.parametrize(
    ("given", "statuses"),
    [
        ({"access": {}}, (401, 401)),
        ({"access": {"aeg-sas-key": "bm8=", "Authorization": "SharedAccessKey bm8="}}, (401, 401)),
        ({"access": {"Authorization": "Bearer foreign"}}, (401, 401)),
        ({"path": "/elsewhere"}, (404, 404)),
        ({"path": "/topics/two"}, (404, 404)),
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


def test_each_topic_of_a_namespace_has_its_address_and_another_is_gone(lab: EventGridLab) -> None:
    paths = [f"/topics/{topic}:publish" for topic in ("two", "three")]
    assert [publish(lab, "namespace", path=path).status_code for path in paths] == [200, 410]


def test_a_status_on_demand_has_a_body_of_the_service_unless_one_is_given(lab: EventGridLab) -> None:
    lab.fault(429, retry_after=3)
    lab.fault(503, body="busy")
    first, second = publish(lab), publish(lab)
    assert (first.json()["error"]["code"], first.headers["Retry-After"]) == ("TooManyRequests", "3")
    assert (second.status_code, second.text) == (503, "busy")


def test_a_key_that_follows_a_redirect_or_stands_in_the_url_is_noted(lab: EventGridLab) -> None:
    with EventGridLab(keys=["other"]) as elsewhere:
        lab.redirect_location = f"{elsewhere.base_url}/elsewhere"
        for follow in (False, True):
            assert elsewhere.leaked == []
            lab.fault(307)
            publish(lab, allow_redirects=follow)
        assert [one.path for one in elsewhere.leaked] == ["/elsewhere"]
    assert lab.leaked == []
    requests.post(lab.url, params={"aeg-sas-key": lab.keys[1]}, timeout=LIMIT_SECONDS)
    assert [one.path for one in lab.leaked] == ["/api/events"]
