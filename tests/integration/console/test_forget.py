"""VMs that are silent or stopped are put away by an approver, and return with their next event."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import requests

from bridge.config.base import Secret
from bridge.console import rows
from bridge.console.forget import forgotten
from bridge.console.rows import Where
from bridge.console.store import Store
from bridge.contract.types import TYPE_PREFIX
from tests.support.clock import MovedClock
from tests.support.console import (
    ANA,
    NOW,
    ORIGIN,
    TOKEN,
    FleetVm,
    RunningConsole,
    Shown,
    behind_proxy,
    event,
    event_id,
    received,
    running_console,
    shown,
    signed_in,
)
from tests.support.process import LIMIT_SECONDS

LATER = NOW + timedelta(hours=2)


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock(LATER.timestamp())


@pytest.fixture
def console(tmp_path: Path, clock: MovedClock) -> Iterator[RunningConsole]:
    """Return a console two hours after NOW: a VM is watched, two are silent and one was stopped."""
    settings = behind_proxy(approver_groups=["ops"])
    with running_console(tmp_path, clock=clock, **settings) as running:
        running.send(*(FleetVm(f"web-{number}").heartbeat() for number in range(2)))
        running.send(FleetVm("web-2").heartbeat(LATER, reason="Stopping"), FleetVm("web-3").heartbeat(LATER))
        clock.advance(1)
        yield running


class Approver:
    """A person with a browser's session."""

    def __init__(self, console: RunningConsole, headers: dict[str, str]) -> None:
        self._console, self._session = console, requests.Session()
        self._session.headers.update(headers)

    @property
    def cookie(self) -> str:
        return str(self._session.headers["Cookie"])

    def fields(self, path: str, action: str = "forget") -> dict[str, str]:
        """Return the fields of the form on a page, {} if there is none."""
        answer = self._session.get(f"{self._console.url}{path}", timeout=LIMIT_SECONDS)
        # requests keeps no secure cookie of plain http
        self._session.headers["Cookie"] = answer.headers.get("Set-Cookie", "").partition(";")[0]
        form = answer.text.partition(f"/{action}")[2].partition("</form>")[0]
        return {
            name: unescape(value) for name, value in re.findall('name="(token|shown)" value="([^"]*)"', form)
        }

    def forget(self, path: str, fields: dict[str, str], **headers: str) -> requests.Response:
        return self._session.post(
            f"{self._console.url}{path}",
            data=fields,
            headers={"Origin": ORIGIN, **headers},
            timeout=LIMIT_SECONDS,
            allow_redirects=False,
        )


def names(console: RunningConsole, query: str = "") -> list[str]:
    return [vm["name"] for vm in console.get(f"/api/v1/vms{query}", ANA).json()["vms"]]


def test_an_approver_puts_away_what_a_filter_chooses_until_its_next_event(console: RunningConsole) -> None:
    ana = Approver(console, ANA)
    fields = ana.fields("/fleet?status=silent")
    answer = ana.forget("/fleet/forget?status=silent", {**fields, "confirm": "2"})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/fleet?status=silent")
    assert names(console) == ["web-2", "web-3"]
    assert 'console_vms{state="silent"} 0.0' in console.get("/metrics", ANA).text
    (found,) = console.get("/api/v1/history", ANA).json()["losses"]
    assert found == {
        "at": "2026-11-20T15:00:01Z",
        "vm": "web-0, web-1",
        "text": "Forgotten by ana@contoso.example",
    }
    of_one = console.get("/api/v1/history?vm=web-1", ANA).json()["losses"]
    assert [one["vm"] for one in of_one] == ["web-1"]
    assert "Forgotten by ana@contoso.example" in console.get("/history", ANA).text
    console.send(FleetVm("web-1").heartbeat(LATER + timedelta(seconds=1)))
    assert names(console) == ["web-1", "web-2", "web-3"]


@pytest.mark.parametrize("keys", [("k" * 24, "k" * 24), ("k" * 24, "j" * 24), ("", "")])
def test_two_consoles_at_one_address_accept_each_others_forms_with_one_key(
    tmp_path: Path, keys: tuple[str, str]
) -> None:
    """Each has a subscription and a store of its own, with the same events."""
    consoles = []
    with ExitStack() as stack:
        for place, key in enumerate(keys):
            more = {"form_key": Secret(key)} if key else {}
            folder, clock = tmp_path / str(place), MovedClock(LATER.timestamp())
            settings = behind_proxy(approver_groups=["ops"], **more)
            consoles.append(stack.enter_context(running_console(folder, clock=clock, **settings)))
            consoles[-1].send(FleetVm("web-0").heartbeat())
        ana, other = (Approver(console, ANA) for console in consoles)
        fields = {**ana.fields("/fleet"), "confirm": "1"}
        status = other.forget("/fleet/forget", fields, Cookie=ana.cookie).status_code
        assert status == (303 if keys[0] == keys[1] != "" else 403)


def test_without_a_filter_everything_that_is_silent_or_stopped_is_put_away(console: RunningConsole) -> None:
    ana = Approver(console, ANA)
    ana.forget("/fleet/forget", {**ana.fields("/fleet"), "confirm": "3"})
    assert names(console) == ["web-3"]
    assert ana.fields("/fleet") == {}


@pytest.mark.parametrize(
    ("person", "change", "headers", "status"),
    [
        (ANA, {"token": "other"}, {}, 403),
        (ANA, {"confirm": "2"}, {}, 403),
        (ANA, {"shown": "other"}, {}, 403),
        (ANA, {}, {"Origin": "https://evil.example"}, 403),
        (ANA, {}, {"Cookie": ""}, 403),
        (signed_in("bob"), {}, {}, 403),
    ],
)
def test_a_post_that_is_not_from_the_form_of_an_approver_forgets_nothing(
    console: RunningConsole,
    person: dict[str, str],
    change: dict[str, str],
    headers: dict[str, str],
    status: int,
) -> None:
    ana, other = Approver(console, ANA), Approver(console, person)
    fields = {**ana.fields("/fleet"), "confirm": "3", **change}
    answer = (ana if person is ANA else other).forget("/fleet/forget", fields, **headers)
    assert answer.status_code == status
    assert len(names(console)) == 4


def test_an_approver_dismisses_an_event_until_anything_new_is_heard_of_it(
    console: RunningConsole, clock: MovedClock
) -> None:
    vm, path = FleetVm("web-3"), f"/event/{event_id('E')}"
    console.send(vm.change("scheduled", event(), LATER))
    clock.advance(1)
    ana = Approver(console, ANA)
    token = ana.fields(path, "dismiss")
    assert ana.forget(f"{path}/dismiss", {**token, "reason": ""}).status_code == 403
    assert ana.forget(f"{path}/dismiss", {"token": "x", "reason": "scaled in"}).status_code == 403
    answer = ana.forget(f"{path}/dismiss", {**token, "reason": "scaled in"})
    assert (answer.status_code, answer.headers["Location"]) == (303, path)
    assert console.get("/api/v1/events", ANA).json()["events"] == []
    page = console.get(path, ANA).text
    assert ("by ana@contoso.example" in page, "scaled in" in page, "No longer followed" in page) == (
        True,
    ) * 3
    (ends,) = console.get("/api/v1/history", ANA).json()["ends"]
    assert ends["counts"] == {"Ended": 1}
    clock.advance(1)
    console.send(vm.change("started", event(EventStatus="Started"), LATER + timedelta(seconds=1)))
    (back,) = console.get("/api/v1/events", ANA).json()["events"]
    assert back["due"] == "started"
    assert Approver(console, signed_in("bob")).fields(path, "dismiss") == {}


@pytest.mark.parametrize(
    ("order", "status"),
    [
        ({"EventId": event_id("E")}, 204),
        ({"EventId": "unknown"}, 404),
        ({"Vms": ["web-0"]}, 204),
        ({"Vms": ["web-0", "web-3"]}, 404),  # one is watched
        ({}, 404),
        ({"Reason": ""}, 400),
    ],
)
def test_a_program_puts_vms_and_events_away(
    console: RunningConsole, clock: MovedClock, order: dict[str, Any], status: int
) -> None:
    console.send(FleetVm("web-3").change("scheduled", event(vms=["web-3"]), LATER))
    clock.advance(1)
    ids = {vm["name"]: vm["resource_id"] for vm in console.get("/api/v1/vms", ANA).json()["vms"]}
    given = {"Reason": "scaled in", "ResourceIds": [ids[name] for name in order.pop("Vms", [])], **order}

    def post(headers: dict[str, str]) -> int:
        url = f"{console.url}/api/v1/forget"
        return requests.post(url, json=given, headers=headers, timeout=LIMIT_SECONDS).status_code

    assert (post({}), post(signed_in("bob")), post({**ANA, "Origin": ORIGIN})) == (401, 403, 403)
    assert post({"Authorization": f"Bearer {TOKEN}"}) == status
    left = len(names(console)) + len(console.get("/api/v1/events", ANA).json()["events"])
    assert left == (4 if status == 204 else 5)


def test_what_is_not_heard_of_for_days_is_put_away_if_the_setting_says_so(tmp_path: Path) -> None:
    clock = MovedClock(NOW.timestamp())
    with closing(Store(tmp_path / "console.db", clock=clock, away_seconds=86_400.0)) as store:
        bodies = [
            FleetVm("web-0").heartbeat(),
            FleetVm("web-1").change("scheduled", event(vms=["web-9"], minutes=60)),
        ]
        store.add(received(*bodies), received_at=NOW.timestamp())
        for seconds, left in ((86_399, (2, 1)), (2, (0, 1)), (3600, (0, 0))):
            clock.advance(seconds)
            with store.reading() as reader:
                vms, events = rows.vms(reader, Where("id IS NOT NULL", ())), rows.open_events(reader)
            assert (len(vms), len(events)) == left


def test_the_form_is_not_valid_for_other_vms(console: RunningConsole) -> None:
    ana = Approver(console, ANA)
    fields = ana.fields("/fleet?vm=web-0")
    assert ana.forget("/fleet/forget?vm=web-1", {**fields, "confirm": "1"}).status_code == 403
    console.send(FleetVm("web-0").heartbeat(LATER))
    assert ana.forget("/fleet/forget?vm=web-0", {**fields, "confirm": "1"}).status_code == 403


def test_nobody_who_only_looks_sees_the_form(console: RunningConsole) -> None:
    assert Approver(console, signed_in("bob")).fields("/fleet") == {}


def test_a_sender_of_events_puts_nothing_away(tmp_path: Path) -> None:
    with shown(tmp_path, LATER) as seen:
        seen.add(FleetVm("web-0").heartbeat())
        (note,) = forgotten(seen.vms(), by="ana", now=LATER.timestamp())
        assert f"{TYPE_PREFIX}console.forgotten.v1" in note.body.decode()
        assert received(note.body, now=LATER) == []
        assert len(seen.vms()) == 1


@pytest.mark.parametrize("late", [-3600, 60, 3600])
def test_a_vm_with_a_wrong_clock_returns_with_its_next_event_too(tmp_path: Path, late: float) -> None:
    with shown(tmp_path, LATER) as seen:
        seen.add(FleetVm("web-0").heartbeat(NOW - timedelta(seconds=late)))
        forget_all(seen)
        assert seen.vms() == []
        seen.add(
            FleetVm("web-0").heartbeat(NOW - timedelta(seconds=late - 1)), at=LATER + timedelta(seconds=9)
        )
        assert len(seen.vms()) == 1


def forget_all(seen: Shown) -> None:
    now = LATER.timestamp()
    seen.store.add(forgotten(seen.vms(), by="ana", now=now), received_at=now)


def test_what_was_put_away_is_on_no_page_and_its_losses_stay_in_the_history(tmp_path: Path) -> None:
    with shown(tmp_path, LATER) as seen:
        vm = FleetVm("web-0")
        seen.add(vm.heartbeat(), vm.loss())
        forget_all(seen)
        assert seen.read(rows.count_vms) == {}
        losses, _ = seen.read(rows.losses_since, 0.0, rows.Filter(vm="web-0"), limit=9)
        assert [(one.kind, one.at) for one in losses] == [
            ("console.forgotten", LATER.timestamp()),
            ("bridge.loss", NOW.timestamp()),
        ]
