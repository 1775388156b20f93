"""VMs that are silent or stopped are put away by an approver, and return with their next event."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from html import unescape
from pathlib import Path

import pytest
import requests

from bridge.console import rows
from bridge.console.forget import forgotten
from bridge.contract.types import TYPE_PREFIX
from tests.support.clock import MovedClock
from tests.support.console import (
    ANA,
    NOW,
    ORIGIN,
    FleetVm,
    RunningConsole,
    Shown,
    behind_proxy,
    received,
    running_console,
    shown,
    signed_in,
)
from tests.support.process import LIMIT_SECONDS

LATER = NOW + timedelta(hours=2)


@pytest.fixture
def console(tmp_path: Path) -> Iterator[RunningConsole]:
    """Return a console two hours after NOW: a VM is watched, two are silent and one was stopped."""
    settings = behind_proxy(approver_groups=["ops"])
    clock = MovedClock(LATER.timestamp())
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

    def fields(self, path: str) -> dict[str, str]:
        """Return the fields of the form on a page, {} if there is none."""
        answer = self._session.get(f"{self._console.url}{path}", timeout=LIMIT_SECONDS)
        # requests keeps no secure cookie of plain http
        self._session.headers["Cookie"] = answer.headers.get("Set-Cookie", "").partition(";")[0]
        form = answer.text.partition('action="/fleet/forget')[2].partition("</form>")[0]
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
