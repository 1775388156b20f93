"""An approval from the page over the bus to the receipt, and requests that are not from the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.support.bus import QUEUE
from tests.support.console import (
    ANA,
    APPROVABLE,
    NOW,
    ORIGIN,
    FleetVm,
    FormOf,
    RunningConsole,
    approval_console,
    event,
    event_id,
    text_of,
)
from tests.support.only import only
from tests.support.servicebus import ServiceBusLab

PAGE = f"/event/{event_id('approve').lower()}"
EVE = {**ANA, "X-Forwarded-User": "eve@contoso.example", "X-Forwarded-Groups": "staff"}
FILLED = {"confirm": event_id("approve")[-4:], "reason": "drained"}


@pytest.fixture
def console(tmp_path: Path, bus: ServiceBusLab) -> Iterator[RunningConsole]:
    """Return a console with approvals and an event of two VMs."""
    with approval_console(tmp_path, bus.connection_string) as running:
        yield running


@pytest.fixture
def form(console: RunningConsole) -> FormOf:
    """Return the form of the event, as an approver has it before her."""
    return FormOf(console, PAGE, "approve")


def test_an_approval_is_sent_and_its_receipt_appears(
    console: RunningConsole, form: FormOf, bus: ServiceBusLab
) -> None:
    text = text_of(form.page)
    assert "all 2 VMs" in text
    assert "The expected impact is unknown. 1 of 2 VMs has not seen this event." in text
    answer = form.post(**FILLED)
    assert answer.status_code == 303, answer.text
    command = json.loads(only(bus.entity(QUEUE).messages).body)
    assert command["data"] | {"ExpiresAt": ""} == {
        "EventIds": [event_id("approve")],
        "RequestedBy": "ana@contoso.example",
        "ExpiresAt": "",
        "Vm": "web-0",
        "Reason": "drained",
    }
    sent, vm = answer.headers["Location"], FleetVm("web-0")
    assert "Waiting for its receipt" in console.page(sent, ANA)
    other = vm.receipt(APPROVABLE)
    console.send(other.replace(b"drained", b"instead of " + command["id"].encode()))
    assert "Waiting for its receipt" in console.page(sent, ANA)
    console.send(vm.receipt(APPROVABLE, NOW + timedelta(seconds=1), command_id=command["id"]))
    page = console.page(sent, ANA)
    assert ("has arrived" in page, "Approval accepted" in page) == (True, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": None}, 403),
        ({"Cookie": None}, 403),
        ({"Cookie": "__Host-imds-bridge=guessed"}, 403),
        ({"X-Proxy-Secret": None}, 401),
        (EVE, 403),
    ],
)
def test_a_post_that_is_not_from_the_page_of_an_approver_sends_nothing(
    form: FormOf, bus: ServiceBusLab, headers: dict[str, str | None], status: int
) -> None:
    assert form.post(headers, **FILLED).status_code == status
    assert bus.entity(QUEUE).messages == ()


def test_two_origins_are_refused(console: RunningConsole, form: FormOf, bus: ServiceBusLab) -> None:
    connection = HTTPConnection(console.url.removeprefix("http://"), timeout=30)
    connection.putrequest("POST", f"{PAGE}/approve")
    body = urlencode({**form.fields, **FILLED}).encode()
    headers = {**ANA, "Cookie": form.cookie, "Content-Length": str(len(body)), "Origin": ORIGIN}
    for name, value in (*headers.items(), ("Origin", "https://evil.example")):
        connection.putheader(name, value)
    connection.endheaders(body)
    assert connection.getresponse().status == 403
    connection.close()
    assert bus.entity(QUEUE).messages == ()


def test_a_wrong_confirmation_says_what_is_wrong(form: FormOf, bus: ServiceBusLab) -> None:
    assert "not the last 4 characters" in form.post(**{**FILLED, "confirm": "0000"}).text
    assert bus.entity(QUEUE).messages == ()


def test_only_a_command_of_this_console_is_shown_as_sent(console: RunningConsole) -> None:
    page = console.page(f"{PAGE}?sent=0b6a3f4e-8f0e-4b1c-9d52-3a7c1f0e9d11", ANA)
    assert ("was sent" in page, 'name="confirm"' in page) == (False, True)


def test_who_may_only_look_sees_no_form(console: RunningConsole) -> None:
    seen = FormOf(console, PAGE, "approve", EVE)
    assert (seen.fields, seen.cookie, "<h2>Approve</h2>" in seen.page) == ({}, "", False)


def test_the_cookie_of_another_application_does_not_keep_anybody_from_approving(
    console: RunningConsole,
) -> None:
    cookies = "other=a b; list=[1]; name=\u00e9".encode()
    found = console.get(PAGE, {**ANA, "Cookie": cookies})  # type: ignore[dict-item] # bytes
    assert "1 of 2 VMs" in found.text
    own = found.headers["Set-Cookie"].partition(";")[0].encode()
    both = {**ANA, "Cookie": cookies + b"; " + own}
    assert "Set-Cookie" not in console.get(PAGE, both).headers  # type: ignore[arg-type] # bytes


@pytest.mark.parametrize("way", ["impact", "stay"])
def test_a_form_that_was_shown_before_the_event_changed_sends_nothing(
    console: RunningConsole, bus: ServiceBusLab, way: str
) -> None:
    vm, later = FleetVm("web-0"), NOW + timedelta(seconds=5)
    seen, longer = (event("approve", vms=["web-0", "web-1"], DurationInSeconds=long) for long in (9, 3600))
    console.send(vm.change("updated", seen))
    form = FormOf(console, PAGE, "approve")
    assert "The expected impact is 9 s" in text_of(form.page)
    if way == "impact":
        console.send(vm.change("updated", longer, later, previous=seen))
    else:
        again = vm.change("scheduled", seen, NOW + timedelta(seconds=90))
        console.send(vm.change("canceled", seen, later, previous=seen), again)
    answer = form.post(**FILLED)
    assert (answer.status_code, "has changed since the page was shown" in answer.text) == (403, True)
    assert bus.entity(QUEUE).messages == ()
    new = FormOf(console, PAGE, "approve", {**ANA, "Cookie": form.cookie})
    assert f"The expected impact is {'1 h' if way == 'impact' else '9 s'}" in text_of(new.page)
    assert new.post({"Cookie": form.cookie}, **FILLED).status_code == 303
