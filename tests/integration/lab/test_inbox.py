"""The inbox records what it gets, and refuses what a strict receiver of CloudEvents refuses."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from tests.support.inbox import Inbox

LIMIT_SECONDS = 30
STRUCTURED = "application/cloudevents+json; charset=utf-8"
BATCH = "application/cloudevents-batch+json"
EVENT: dict[str, Any] = {"specversion": "1.0", "id": "1", "source": "urn:test", "type": "t.v1", "data": {}}
WITHOUT_ID = {name: value for name, value in EVENT.items() if name != "id"}
JSON = {"Content-Type": "application/json"}
BINARY = {**JSON, **{f"ce-{name}": EVENT[name] for name in ("specversion", "id", "source", "type")}}
READ = {**EVENT, "datacontenttype": "application/json"}


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
        (
            {},
            {**BINARY, "ce-subject": "caf%C3%A9%20%22now%22"},
            200,
            [{**READ, "subject": 'caf\u00e9 "now"'}],
        ),
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
