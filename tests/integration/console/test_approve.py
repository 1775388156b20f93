"""An approval from the page over the bus to the receipt, and requests that are not from the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import pytest
import requests

from tests.support.bus import QUEUE
from tests.support.console import (
    ANA,
    ORIGIN,
    FleetVm,
    RunningConsole,
    approvable,
    approval_console,
    event,
    event_id,
)
from tests.support.servicebus import ServiceBusLab

NOW = datetime.now(UTC)
pytestmark = pytest.mark.usefixtures("this_moment")
PATH = f"/event/{event_id('approve').lower()}"
EVE = {**ANA, "X-Forwarded-User": "eve@contoso.example", "X-Forwarded-Groups": "staff"}


@pytest.fixture
def console(tmp_path: Path, bus: ServiceBusLab) -> Iterator[RunningConsole]:
    """Return a console with approvals and an event of two VMs."""
    with approval_console(tmp_path, bus.connection_string) as running:
        yield running


def fields(console: RunningConsole, who: dict[str, str]) -> tuple[dict[str, str], str]:
    """Return the form's fields, filled in, and the cookie."""
    response = console.get(PATH, who)
    given = dict(re.findall(r'type="hidden" name="(\w+)" value="(\w+)"', response.text))
    cookie = response.headers.get("Set-Cookie", "").partition(";")[0]
    return {**given, "confirm": event_id("approve")[-4:], "reason": "drained"}, cookie


def post(console: RunningConsole, given: dict[str, str], headers: dict[str, str]) -> requests.Response:
    return requests.post(
        f"{console.url}{PATH}/approve", data=given, headers=headers, allow_redirects=False, timeout=30
    )


def test_an_approval_is_sent_and_its_receipt_appears(console: RunningConsole, bus: ServiceBusLab) -> None:
    given, cookie = fields(console, ANA)
    assert "all 2 VMs" in console.get(PATH, ANA).text
    response = post(console, given, {**ANA, "Cookie": cookie, "Origin": ORIGIN})
    assert response.status_code == HTTPStatus.SEE_OTHER, response.text
    (message,) = bus.entity(QUEUE).messages
    command = json.loads(message.body)
    assert command["data"] | {"ExpiresAt": ""} == {
        "EventIds": [event_id("approve")],
        "RequestedBy": "ana@contoso.example",
        "ExpiresAt": "",
        "Vm": "web-0",
        "Reason": "drained",
    }
    sent = response.headers["Location"]
    assert "Waiting for its receipt" in console.get(sent, ANA).text
    receipt = FleetVm("web-0").receipt(approvable(NOW), NOW)
    console.send(receipt.replace(b"drained", b"instead of " + command["id"].encode()))
    assert "Waiting for its receipt" in console.get(sent, ANA).text  # it is of another command
    console.send(receipt.replace(b"order-17", command["id"].encode()).replace(b'"id":"', b'"id":"2'))
    page = console.get(sent, ANA).text
    assert "has arrived" in page
    assert "Approval accepted" in page


@pytest.mark.parametrize(
    "changes",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": None},
        {"Cookie": None},
        {"Cookie": "__Host-imds-bridge=guessed"},
        {"X-Proxy-Secret": None},
        EVE,
    ],
)
def test_a_post_that_is_not_from_the_page_of_an_approver_sends_nothing(
    console: RunningConsole, bus: ServiceBusLab, changes: dict[str, str | None]
) -> None:
    given, cookie = fields(console, ANA)
    headers = {**ANA, "Cookie": cookie, "Origin": ORIGIN, **changes}
    response = post(console, given, {name: value for name, value in headers.items() if value is not None})
    assert response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    assert bus.entity(QUEUE).messages == ()


def test_two_origins_are_refused(console: RunningConsole, bus: ServiceBusLab) -> None:
    given, cookie = fields(console, ANA)
    connection = HTTPConnection(console.url.removeprefix("http://"), timeout=30)
    connection.putrequest("POST", f"{PATH}/approve")
    body = urlencode(given).encode()
    headers = {**ANA, "Cookie": cookie, "Content-Length": str(len(body))}
    for name, value in (*headers.items(), ("Origin", ORIGIN), ("Origin", "https://evil.example")):
        connection.putheader(name, value)
    connection.endheaders(body)
    assert connection.getresponse().status == HTTPStatus.FORBIDDEN
    connection.close()
    assert bus.entity(QUEUE).messages == ()


def test_only_a_command_of_this_console_is_shown_as_sent(console: RunningConsole) -> None:
    page = console.get(f"{PATH}?sent=0b6a3f4e-8f0e-4b1c-9d52-3a7c1f0e9d11", ANA).text
    assert "was sent" not in page
    assert 'name="confirm"' in page


def test_a_sentence_of_the_form_begins_after_a_blank(console: RunningConsole) -> None:
    text = re.sub(r"<[^>]+>", "", console.get(PATH, ANA).text)
    assert "The expected impact is unknown. 1 of 2 VMs has not seen this event." in " ".join(text.split())


def test_who_may_only_look_sees_no_form(console: RunningConsole) -> None:
    response = console.get(PATH, EVE)
    assert response.status_code == HTTPStatus.OK
    assert "<h2>Approve</h2>" not in response.text
    assert "Set-Cookie" not in response.headers


def test_a_wrong_confirmation_says_what_is_wrong(console: RunningConsole, bus: ServiceBusLab) -> None:
    given, cookie = fields(console, ANA)
    response = post(console, {**given, "confirm": "0000"}, {**ANA, "Cookie": cookie, "Origin": ORIGIN})
    assert "not the last 4 characters" in response.text
    assert bus.entity(QUEUE).messages == ()


@pytest.mark.parametrize("way", ["impact", "stay"])
def test_a_form_that_was_shown_before_the_event_changed_sends_nothing(
    console: RunningConsole, bus: ServiceBusLab, way: str
) -> None:
    now, vm = datetime.now(UTC), FleetVm("web-0")
    seen, longer = (
        event("approve", at=now, vms=["web-0", "web-1"], DurationInSeconds=seconds) for seconds in (9, 3600)
    )
    console.send(vm.change("updated", seen, now))
    given, cookie = fields(console, ANA)
    if way == "impact":
        console.send(vm.change("updated", longer, now + timedelta(seconds=5), previous=seen))
    else:
        console.send(
            vm.change("canceled", seen, now + timedelta(seconds=5), previous=seen),
            vm.change("scheduled", seen, now + timedelta(seconds=90)),
        )
    headers = {**ANA, "Cookie": cookie, "Origin": ORIGIN}
    response = post(console, given, headers)
    assert response.status_code == HTTPStatus.FORBIDDEN
    assert "has changed since the page was shown" in response.text
    assert bus.entity(QUEUE).messages == ()
    again, _ = fields(console, {**ANA, "Cookie": cookie})
    assert post(console, again, headers).status_code == HTTPStatus.SEE_OTHER
