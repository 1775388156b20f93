"""VMs that a program lists: those of which nothing was ever heard are not watched."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import requests

from bridge.console import expected
from bridge.console.expected import read_expected
from bridge.console.forget import dismissed, forgotten
from bridge.contract.types import TYPE_PREFIX
from tests.support.console import (
    ANA,
    NOW,
    ORIGIN,
    SUBSCRIPTION,
    TOKEN,
    FleetVm,
    RunningConsole,
    Shown,
    behind_proxy,
    console_at,
    event,
    received,
    signed_in,
)
from tests.support.only import only

BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def console(tmp_path: Path) -> Iterator[RunningConsole]:
    with console_at(tmp_path, **behind_proxy(approver_groups=["ops"])) as running:
        yield running


def listed(name: str, group: str = "shop", **more: Any) -> dict[str, Any]:
    """Return a VM as Azure Resource Graph lists it: what a VM does not have is null."""
    place = f"/subscriptions/{SUBSCRIPTION}/resourcegroups/{group}/providers/microsoft.compute"
    empty = {"ScaleSet": None, "Zone": None, "Tags": None, "Location": "westeurope"}
    return {"Name": name, "ResourceId": f"{place}/virtualmachines/{name}", **empty, **more}


def expect(seen: Shown, *vms: dict[str, Any]) -> None:
    now = seen.clock.wall()
    seen.store.add([read_expected(json.dumps(vms).encode(), now=now)], received_at=now)


def watches(seen: Shown, **wanted: Any) -> dict[str, str]:
    return {vm.name: vm.watch for vm in seen.vms(**wanted)}


def put(console: RunningConsole, body: object, headers: dict[str, str]) -> requests.Response:
    return console.send_json("PUT", "/api/v1/expected", body, headers)


def test_a_vm_that_is_expected_is_never_heard_until_it_reports(seen: Shown) -> None:
    seen.add(FleetVm("web-0").heartbeat())
    expect(seen, listed("web-0"), listed("web-1"), listed("web-2"))
    assert watches(seen) == {"web-0": "watched", "web-1": "unheard", "web-2": "unheard"}
    assert watches(seen, status="unwatched") == {"web-1": "unheard", "web-2": "unheard"}
    seen.add(FleetVm("web-1").heartbeat())
    assert watches(seen, status="unheard") == {"web-2": "unheard"}
    row = only(seen.vms(status="unheard"))
    assert (row.alive_at, row.describe_watch(seen.clock.wall())) == (None, "never heard")


def test_the_next_list_replaces_the_last_one_and_touches_no_vm_that_has_reported_until_it_is_silent(
    seen: Shown,
) -> None:
    expect(seen, listed("web-0"), listed("web-1"))
    seen.add(FleetVm("web-1").heartbeat())
    expect(seen, listed("web-2"))
    assert watches(seen) == {"web-1": "watched", "web-2": "unheard"}
    seen.store.prune(seen.clock.wall())
    seen.clock.advance(3901)
    assert watches(seen) == {"web-2": "unheard"}


def test_a_long_list_is_not_held_in_several_copies(seen: Shown) -> None:
    body, now = json.dumps([listed(f"web-{number}") for number in range(5000)]).encode(), seen.clock.wall()
    tracemalloc.start()
    try:
        seen.store.add([read_expected(body, now=now)], received_at=now)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(body)
    finally:
        tracemalloc.stop()
    assert len(seen.vms(status="unheard")) == 5000


@pytest.mark.parametrize("life", ["deleted", "stopped", "forgotten", "silent"])
def test_who_is_expected_and_not_heard_is_not_watched_whatever_was_known_before(
    seen: Shown, life: str
) -> None:
    """A list that is older than the end of a VM does not count against it: else every scale-in would alarm."""
    vm = FleetVm("web-0")
    expect(seen, listed("web-0"))
    seen.add(vm.heartbeat(reason="Stopping" if life == "stopped" else "Hourly"))
    if life == "deleted":
        seen.add(vm.change("scheduled", event(type="Terminate", minutes=1)))
    seen.clock.advance(2 * 3600)
    if life == "forgotten":
        note = forgotten(seen.vms(), by="ana", now=seen.clock.wall())
        seen.store.add(note, received_at=seen.clock.wall())
    assert [*watches(seen).values()] == {"deleted": ["gone"], "forgotten": []}.get(life, [life])
    seen.clock.advance(1)
    expect(seen, listed("web-0"))
    assert watches(seen, status="unwatched") == {"web-0": "silent"}
    seen.clock.advance(30 * 86_400)
    expect(seen, listed("web-0"))
    assert watches(seen, status="unwatched") == {"web-0": "silent"}
    expect(seen)
    assert watches(seen) == {}


def test_expected_vms_are_chosen_by_group_and_tag_and_offered_by_the_filters(seen: Shown) -> None:
    expect(seen, listed("web-0", Tags={"Team": "Zeta"}), listed("db-0", group="data"))
    assert [*watches(seen, tag=("team=zeta",))] == ["web-0"]
    assert [*watches(seen, group=("data",))] == ["db-0"]


def test_a_vm_reports_its_scale_set_where_the_list_did_not_name_it(seen: Shown) -> None:
    expect(seen, listed("web_0"))
    seen.add(FleetVm("web_0", scale_set="web").heartbeat())
    assert [vm.group for vm in seen.vms()] == ["shop/web"]


def test_a_program_lists_vms_and_page_api_and_metric_count_those_never_heard(console: RunningConsole) -> None:
    console.send(FleetVm("web-0").heartbeat())
    assert put(console, [listed("web-0"), listed("web-1")], BEARER).status_code == 204
    assert "; 1 VM not watched" in console.page("/", ANA)
    fleet = console.page("/fleet", ANA)
    assert ("never heard" in fleet, "2 VMs are expected, by the list of " in fleet) == (True, True)
    vms = console.get("/api/v1/vms?status=unheard", ANA).json()["vms"]
    assert [vm["name"] for vm in vms] == ["web-1"]
    assert 'console_vms{state="unheard"} 1.0' in console.page("/metrics", BEARER)
    console.send(FleetVm("web-1").heartbeat(NOW + timedelta(seconds=1)))
    assert 'console_vms{state="unheard"} 0.0' in console.page("/metrics", BEARER)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (BEARER, 204),
        (ANA, 204),
        ({**ANA, "Authorization": "Bearer of-the-sign-in"}, 204),
        (signed_in("bob"), 403),
        ({**ANA, "Origin": ORIGIN}, 403),
        ({**BEARER, "Origin": "https://evil.example"}, 403),
        ({"Authorization": "Bearer wrong"}, 401),
        ({}, 401),
    ],
)
def test_only_a_program_with_the_token_or_an_approvers_sign_in_lists_vms(
    console: RunningConsole, headers: dict[str, str], status: int
) -> None:
    assert put(console, [listed("web-0")], headers).status_code == status
    assert len(console.get("/api/v1/vms", ANA).json()["vms"]) == (status == 204)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"no JSON", "the body: Invalid JSON: "),
        ({"vms": []}, "the body: Input should be a valid list"),
        ([listed("web-0"), {"Name": "web-1"}], "1.ResourceId: Field required"),
        ([listed("web-0", ResourceId="web-0")], "0.ResourceId: String should match pattern"),
        (b" " * 1001, "expected at most 1000 bytes"),
    ],
)
def test_what_is_no_list_of_vms_is_refused_and_the_last_list_stays(
    console: RunningConsole, monkeypatch: pytest.MonkeyPatch, body: object, error: str
) -> None:
    monkeypatch.setattr(expected, "MAX_BYTES", 1000)
    assert put(console, [listed("web-9")], BEARER).status_code == 204
    answer = put(console, body, BEARER)
    assert answer.status_code == (413 if error.startswith("expected") else 400)
    assert answer.json()["error"].startswith(error)
    assert [vm["name"] for vm in console.get("/api/v1/vms", ANA).json()["vms"]] == ["web-9"]


def test_on_a_loopback_address_without_sign_in_everybody_lists_vms(tmp_path: Path) -> None:
    with console_at(tmp_path) as running:
        assert put(running, [listed("web-0")], {}).status_code == 204


@pytest.mark.parametrize("name", ["expected", "forgotten", "dismissed"])
def test_a_sender_of_events_lists_no_vms_and_puts_nothing_away(seen: Shown, name: str) -> None:
    seen.add(FleetVm("web-0").heartbeat(), FleetVm("web-0").change("scheduled", event()))
    own = [
        read_expected(b"[]", now=0),
        *forgotten(seen.vms(), by="ana", now=0),
        dismissed(seen.event(), by="ana", now=0, why="scaled in", hours=1),
    ]
    note = only(one.body for one in own if f"{TYPE_PREFIX}console.{name}.v1" in one.body.decode())
    assert received(note) == []
