"""VMs that are silent or stopped are put away by an approver, and return with their next event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge.config.base import Secret
from bridge.console import rows
from bridge.console.expected import read_expected
from bridge.console.forget import dismissed, forgotten
from bridge.console.rows import Where
from bridge.console.store import Store
from tests.support.clock import MovedClock
from tests.support.console import (
    ANA,
    NOW,
    ORIGIN,
    TOKEN,
    FleetVm,
    FormOf,
    RunningConsole,
    Shown,
    behind_proxy,
    console_at,
    event,
    event_id,
    received,
    shown,
    signed_in,
)
from tests.support.only import only

LATER = NOW + timedelta(hours=2)
EVENT = f"/event/{event_id('E')}"
BOB = signed_in("bob")


@pytest.fixture
def console(tmp_path: Path) -> Iterator[RunningConsole]:
    """Return a console two hours after NOW: a VM is watched, two are silent and one was stopped."""
    with console_at(tmp_path, LATER, **behind_proxy(approver_groups=["ops"])) as running:
        running.send(*(FleetVm(f"web-{number}").heartbeat() for number in range(2)))
        running.send(FleetVm("web-2").heartbeat(LATER, reason="Stopping"), FleetVm("web-3").heartbeat(LATER))
        running.advance(1)
        yield running


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Shown]:
    """Return a store two hours after NOW."""
    with shown(tmp_path, LATER) as opened:
        yield opened


def fleet_form(console: RunningConsole, query: str = "", person: dict[str, str] = ANA) -> FormOf:
    return FormOf(console, f"/fleet{query}", "forget", person)


def read(console: RunningConsole, path: str) -> Any:
    return console.get(f"/api/v1/{path}", ANA).json()


def names(console: RunningConsole) -> list[str]:
    return [vm["name"] for vm in read(console, "vms")["vms"]]


def test_an_approver_puts_away_what_a_filter_chooses_until_its_next_event(console: RunningConsole) -> None:
    answer = fleet_form(console, "?status=silent").post(confirm="2")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/fleet?status=silent")
    assert names(console) == ["web-2", "web-3"]
    assert 'console_vms{state="silent"} 0.0' in console.page("/metrics", ANA)
    by = "Forgotten by ana@contoso.example"
    expected = {"at": "2026-11-20T15:00:01Z", "vm": "web-0, web-1", "text": by}
    assert read(console, "history")["losses"] == [expected]
    assert read(console, "history?vm=web-1")["losses"] == [{**expected, "vm": "web-1"}]
    assert by in console.page("/history", ANA)
    console.send(FleetVm("web-1").heartbeat(LATER + timedelta(seconds=1)))
    assert names(console) == ["web-1", "web-2", "web-3"]


@pytest.mark.parametrize("keys", [("k" * 24, "k" * 24), ("k" * 24, "j" * 24), ("", "")])
def test_two_consoles_at_one_address_accept_each_others_forms_with_one_key(
    tmp_path: Path, keys: tuple[str, str]
) -> None:
    """Each has a subscription and a store of its own, with the same events."""
    with ExitStack() as stack:

        def start(place: int) -> RunningConsole:
            more = {"form_key": Secret(keys[place])} if keys[place] else {}
            settings = behind_proxy(approver_groups=["ops"], **more)
            console = stack.enter_context(console_at(tmp_path / str(place), LATER, **settings))
            console.send(FleetVm("web-0").heartbeat())
            return console

        form, other = fleet_form(start(0)), start(1)
        form.console = other
        assert form.post(confirm="1").status_code == (303 if keys[0] == keys[1] != "" else 403)


def test_without_a_filter_everything_that_is_silent_or_stopped_is_put_away(console: RunningConsole) -> None:
    fleet_form(console).post(confirm="3")
    assert names(console) == ["web-3"]
    assert fleet_form(console).fields == {}


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({}, {"token": "other"}),
        ({}, {"confirm": "2"}),
        ({}, {"shown": "other"}),
        ({"Origin": "https://evil.example"}, {}),
        ({"Cookie": None}, {}),
        ({"X-Forwarded-Groups": None, **BOB}, {}),
    ],
)
def test_a_post_that_is_not_from_the_form_of_an_approver_forgets_nothing(
    console: RunningConsole, headers: dict[str, str | None], fields: dict[str, str]
) -> None:
    assert fleet_form(console).post(headers, **{"confirm": "3", **fields}).status_code == 403
    assert len(names(console)) == 4


def test_the_form_is_not_valid_for_other_vms_nor_for_one_that_was_heard_of_since(
    console: RunningConsole,
) -> None:
    form = fleet_form(console, "?vm=web-0")
    form.action = "/fleet/forget?vm=web-1"
    assert form.post(confirm="1").status_code == 403
    form.action = "/fleet/forget?vm=web-0"
    console.send(FleetVm("web-0").heartbeat(LATER))
    assert form.post(confirm="1").status_code == 403


def test_an_approver_dismisses_an_event_until_anything_new_is_heard_of_it(console: RunningConsole) -> None:
    vm = FleetVm("web-3")
    console.send(vm.change("scheduled", event(at=LATER), LATER))
    console.advance(1)
    form = FormOf(console, EVENT, "dismiss")
    assert form.post(reason="", hours="1").status_code == 403
    assert form.post(reason="scaled in", hours="1", token="x").status_code == 403  # noqa: S106 - a wrong one
    assert form.post(reason="scaled in").status_code == 403  # it is still to come
    answer = form.post(reason="scaled in", hours="1")
    assert (answer.status_code, answer.headers["Location"]) == (303, EVENT)
    assert read(console, "events")["events"] == []
    page = console.page(EVENT, ANA)
    assert all(words in page for words in ("by ana@contoso.example", "scaled in", "No longer followed"))
    assert only(read(console, "history")["ends"])["counts"] == {"Put away": 1}
    console.advance(1)
    console.send(vm.change("started", event(EventStatus="Started"), LATER + timedelta(seconds=1)))
    assert only(read(console, "events")["events"])["due"] == "started"


@pytest.mark.parametrize(("page", "action"), [("/fleet", "forget"), (EVENT, "dismiss")])
def test_nobody_who_only_looks_sees_the_form(console: RunningConsole, page: str, action: str) -> None:
    console.send(FleetVm("web-3").change("scheduled", event(), LATER))
    assert [bool(FormOf(console, page, action, one).fields) for one in (ANA, BOB)] == [True, False]


@pytest.mark.parametrize(
    ("order", "status"),
    [
        ({"EventId": event_id("E"), "Hours": 1}, 204),
        ({"EventId": event_id("E")}, 400),  # it is still to come
        ({"EventId": event_id("E"), "Hours": 1000}, 400),
        ({"EventId": "unknown"}, 404),
        ({"EventId": "unknown", "Vms": ["web-0"]}, 404),
        ({"Vms": ["web-0"]}, 204),
        ({"Vms": ["web-0", "web-3"]}, 404),  # one is watched
        ({}, 404),
        ({"Vms": ["web-0"], "Reason": ""}, 400),
        ({"Vms": ["web-0"], "Reason": " \n"}, 400),
    ],
)
def test_a_program_puts_vms_and_events_away(
    console: RunningConsole, order: dict[str, Any], status: int
) -> None:
    console.send(FleetVm("web-3").change("scheduled", event(vms=["web-3"], at=LATER), LATER))
    console.advance(1)
    ids = {vm["name"]: vm["resource_id"] for vm in read(console, "vms")["vms"]}
    given = {"Reason": "scaled in", "ResourceIds": [ids[name] for name in order.get("Vms", [])], **order}
    given.pop("Vms", None)
    people: list[dict[str, str]] = [{}, BOB, {**ANA, "Origin": ORIGIN}, {"Authorization": f"Bearer {TOKEN}"}]
    answers = [console.send_json("POST", "/api/v1/forget", given, person) for person in people]
    assert [answer.status_code for answer in answers] == [401, 403, 403, status]
    left = len(names(console)) + len(read(console, "events")["events"])
    assert left == (4 if status == 204 else 5)


def test_what_a_program_puts_away_twice_is_put_away_and_the_answer_names_what_cannot_be(
    console: RunningConsole,
) -> None:
    console.send(FleetVm("web-3").change("scheduled", event(vms=["web-3"]), LATER))
    ids = {vm["name"]: vm["resource_id"] for vm in read(console, "vms")["vms"]}
    more = {"EventId": event_id("E"), "Reason": "scaled in", "Hours": 1}

    def put_away(*names: str) -> Any:
        given = {**more, "ResourceIds": [ids[name] for name in names]}
        return console.send_json("POST", "/api/v1/forget", given, {"Authorization": f"Bearer {TOKEN}"})

    assert put_away("web-0").status_code == put_away("web-0", "web-1").status_code == 204
    assert (names(console), read(console, "events")["events"]) == (["web-2", "web-3"], [])
    refused = put_away("web-2", "web-3")
    assert refused.status_code == 404
    assert ids["web-3"] in refused.json()["error"]
    assert ids["web-2"] not in refused.json()["error"]
    assert names(console) == ["web-2", "web-3"]


def test_an_event_that_is_put_away_and_still_to_come_is_said_everywhere_and_comes_back_in_time(
    console: RunningConsole,
) -> None:
    console.send(FleetVm("web-3").change("scheduled", event(vms=["web-3"], at=LATER, minutes=180), LATER))
    assert FormOf(console, EVENT, "dismiss").post(reason="known", hours="1").status_code == 303
    front, fleet = console.page("/", ANA), console.page("/fleet", ANA)
    assert "; 1 put away, still to come</h1>" in front
    assert "event put away" in fleet
    assert "It is still to come" in console.page(EVENT, ANA)
    assert "still to come" in console.page("/away", ANA)
    assert "Put away" in console.page("/history", ANA)
    assert "imds_bridge_console_put_away 1.0" in console.page("/metrics", ANA)
    assert read(console, "events")["put_away"] == 1
    console.advance(3601)
    assert only(read(console, "events")["events"])["due"] == "later"
    assert "Nothing put away" in console.page("/away", ANA)


def test_the_form_of_an_event_that_has_started_since_puts_nothing_away(console: RunningConsole) -> None:
    vm = FleetVm("web-3")
    console.send(vm.change("scheduled", event(vms=["web-3"], at=LATER), LATER))
    form = FormOf(console, EVENT, "dismiss")
    started = event(vms=["web-3"], at=LATER, EventStatus="Started")
    console.send(vm.change("started", started, LATER + timedelta(seconds=1)))
    answer = form.post(reason="known", hours="1")
    assert (answer.status_code, "has changed" in answer.text) == (403, True)
    assert only(read(console, "events")["events"])["due"] == "started"


@pytest.mark.parametrize("wrong", [3600, -3600])
def test_what_is_heard_after_the_clock_was_set_brings_back_what_was_put_away(
    seen: Shown, wrong: float
) -> None:
    vm, one = FleetVm("web-0"), event(vms=["web-0"], at=LATER)
    seen.add(vm.heartbeat(), vm.change("scheduled", one, LATER))
    now = LATER.timestamp() + wrong
    acts = [
        dismissed(seen.event(), by="ana", now=now, why="known", hours=24),
        *forgotten(seen.vms(), by="ana", now=now),
    ]
    seen.store.add(acts, received_at=now)
    assert (seen.vms(), seen.event().due) == ([], "away")
    started = event(vms=["web-0"], at=LATER, EventStatus="Started")
    seen.add(vm.change("started", started, LATER + timedelta(seconds=9)), at=LATER + timedelta(seconds=9))
    assert (len(seen.vms()), seen.event().due) == (1, "started")


def test_a_list_that_arrives_after_the_clock_was_set_back_counts(seen: Shown) -> None:
    seen.add(FleetVm("web-0").heartbeat())
    for hours, names in ((1, ["web-8"]), (0, ["web-0", "web-9"])):
        at = (LATER + timedelta(hours=hours)).timestamp()
        place = "/subscriptions/s/resourceGroups/shop/providers/Microsoft.Compute/virtualMachines"
        vms = [{"Name": name, "ResourceId": f"{place}/{name}"} for name in names]
        seen.store.add([read_expected(json.dumps(vms).encode(), now=at)], received_at=at)
    assert sorted(vm.name for vm in seen.vms() if vm.watch == "unheard") == ["web-0", "web-9"]


def test_what_is_put_away_is_brought_back_once_by_an_approver(console: RunningConsole) -> None:
    fleet_form(console, "?status=silent").post(confirm="2", reason="scaled in")
    assert "undo" not in console.page("/away", BOB)
    form = FormOf(console, "/away", "undo")
    assert form.post().status_code == 303
    assert names(console) == ["web-0", "web-1", "web-2", "web-3"]
    assert form.post().status_code == 403  # it is back


def test_what_is_not_heard_of_for_days_is_put_away_if_the_setting_says_so(tmp_path: Path) -> None:
    clock = MovedClock(NOW.timestamp())
    with closing(Store(tmp_path / "console.db", clock=clock, away_seconds=86_400.0)) as store:
        named = FleetVm("web-1").change("scheduled", event(vms=["web-9"], minutes=60))
        store.add(received(FleetVm("web-0").heartbeat(), named), received_at=NOW.timestamp())
        for seconds, left in ((86_399, (2, 1)), (2, (0, 1)), (3600, (0, 0))):
            clock.advance(seconds)
            with store.reading() as reader:
                vms, events = rows.vms(reader, Where("id IS NOT NULL", ())), rows.open_events(reader)
            assert (len(vms), len(events)) == left


def forget_all(seen: Shown) -> None:
    now = LATER.timestamp()
    seen.store.add(forgotten(seen.vms(), by="ana", now=now), received_at=now)


@pytest.mark.parametrize("late", [-3600, 60, 3600])
def test_a_vm_with_a_wrong_clock_returns_with_its_next_event_too(seen: Shown, late: float) -> None:
    at = NOW - timedelta(seconds=late)
    seen.add(FleetVm("web-0").heartbeat(at))
    forget_all(seen)
    assert seen.vms() == []
    seen.add(FleetVm("web-0").heartbeat(at + timedelta(seconds=1)), at=LATER + timedelta(seconds=9))
    assert len(seen.vms()) == 1


def test_what_was_put_away_is_on_no_page_and_its_losses_stay_in_the_history(seen: Shown) -> None:
    vm = FleetVm("web-0")
    seen.add(vm.heartbeat(), vm.loss())
    forget_all(seen)
    assert seen.read(rows.count_vms) == {}
    losses, _ = seen.read(rows.losses_since, 0.0, rows.Filter(vm="web-0"), limit=9)
    assert [(one.kind, one.at) for one in losses] == [
        ("console.forgotten", LATER.timestamp()),
        ("bridge.loss", NOW.timestamp()),
    ]
