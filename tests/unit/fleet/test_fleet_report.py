"""The plan of a run, and its judgment: a good one passes, and each single defect is found."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("posix: proton has no wheel for Windows", allow_module_level=True)

from tests.support.usage import Usage
from tools.fleet.plan import NOTICE_SECONDS, plan
from tools.fleet.report import END, NOTICES, RECEIPT, Envelope, Evidence, Window, problems, summary
from tools.fleet.simulators import Load

PLAN = plan(4, 1, seed=1)
COMMAND = "command-1"
APPROVED = next(one for one in PLAN.notices if one.is_approved)
OTHER = next(one for one in PLAN.notices if not one.is_approved)


def envelope(name: str, type_: str, subject: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "type": type_,
        "subject": subject,
        "time": "2026-11-20T13:00:00.500Z",
        "data": {},
        **more,
    }


def counted(
    reporter: str, number: int, type_: str = "io.imdsbridge.bridge.heartbeat.v1", **more: Any
) -> dict[str, Any]:
    data = {"LastReporterSeq": number, "Reason": "Stopping", **more.pop("data", {})}
    counter = {"reporter": reporter, "reporterepoch": f"run-of-{reporter}", "reporterseq": f"{number:020}"}
    return envelope(f"{reporter}-{number}", type_, reporter, data=data, source=reporter, **counter, **more)


def load(senders: float) -> Load:
    return Load(
        connections={"senders": (senders, 9), "listeners": (20.0, 20)},
        stored=3,
        copies=2,
        cold_sends=4,
        credits=23,
        peak_credits=8,
    )


def good() -> Evidence:
    stored = [
        envelope(f"{one.event_id}-{kind}", kind, one.event_id)
        for one in PLAN.notices
        for kind in (NOTICES[0], END)
    ]
    listener = f"{APPROVED.vms[0].name}/listen"
    receipt = {"data": {"Outcome": "Accepted"}, "causationid": COMMAND}
    stored += [
        *(counted(f"{vm.name}/forward", 1) for vm in PLAN.vms),
        counted(listener, 1, f"{RECEIPT}accepted.v1", **receipt),
        counted(listener, 2),
    ]
    used = {
        "web-000/forward": Usage(cpu_seconds=1.0, rss_mib=50, pss_mib=30),
        "bus": Usage(cpu_seconds=2, rss_mib=40, pss_mib=40),
    }
    later = {name: replace(one, cpu_seconds=one.cpu_seconds + 0.3) for name, one in used.items()}
    window = Window(seconds=30, before=used, after=later)
    return Evidence(
        plan=PLAN,
        appeared={one.event_id: 1795179600.0 for one in PLAN.notices},
        stored=stored,
        stored_at={one["id"]: 1795179600.75 for one in stored},
        relayed=stored,
        visible={one.event_id: 1795179601.0 for one in PLAN.notices},
        console={one.event_id: "Completed" for one in PLAN.notices},
        console_vms=[{"name": vm.name, "missing": 0} for vm in PLAN.vms],
        commands={COMMAND: APPROVED.event_id},
        approved=[(APPROVED.vms[0].name, APPROVED.event_id)],
        bus={"stored": len(stored), "duplicates": 3, "connections": 6, "dead_letters": 0, "failures": 0},
        calm=window,
        storm=window,
        loads={"at rest": load(4.9), "storm": load(12.0)},
        exits=[],
        seconds={"calm": 30.0},
        page_seconds=[0.03],
    )


def without(name: str, kind: str = "") -> list[Envelope]:
    return [one for one in good().stored if not one["id"].startswith(name) or kind not in one["type"]]


def test_every_vm_has_an_event_and_a_third_is_killed_the_same_for_the_same_seed() -> None:
    made = plan(200, 20, seed=1)
    own = [one for one in made.notices if len(one.vms) == 1]
    assert {one.vms[0].name for one in own} == {vm.name for vm in made.vms}
    assert len({one.event_id for one in made.notices}) == len(made.notices) == 204
    assert {one.event_type for one in own} == {*NOTICE_SECONDS}
    assert sum(one.is_approved for one in made.notices) == 20
    assert len({vm.name for _, vm in made.kills}) == 66
    assert made == plan(200, 20, seed=1) != plan(200, 20, seed=2)


def test_a_good_run_has_no_problems() -> None:
    assert problems(good()) == []


def bus(**figures: int) -> Mapping[str, int]:
    return {**good().bus, **figures}


NO_NOTICE, NO_END = without(OTHER.event_id, "scheduled.v1"), without(OTHER.event_id, "completed")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ({"stored": NO_NOTICE}, "is not on the topic"),
        ({"relayed": NO_NOTICE}, "is not on the relay's receiver"),
        ({"visible": {}}, "is not on the page"),
        ({"stored": NO_END}, f"the end of {OTHER.event_id} is not on the topic"),
        ({"relayed": NO_END}, "is not on the relay's receiver"),
        ({"stored": [*good().stored, good().stored[0]]}, "doubled"),
        ({"stored": without("web-000/listen-1")}, "numbers 1 to 1"),
        ({"stored": without("db-000/forward")}, "db-000/forward: no event has arrived"),
        ({"commands": {}}, "approved without a command"),
        ({"approved": []}, "was never approved"),
        ({"stored": without("web-000/listen-1")}, "has the receipts []"),
        ({"console_vms": []}, "does not know web-000"),
        ({"console_vms": [{"name": "web-000", "missing": 2}]}, "misses 2 events of web-000"),
        ({"console": {}}, "as None, expected Completed"),
        ({"exits": ["web-000/forward exited with 1"]}, "exited with 1"),
        ({"bus": bus(failures=1)}, "the simulated bus failed"),
        ({"loads": {"at rest": load(5.0)}}, "senders hold 5.0 connections at rest"),
        ({"bus": bus(dead_letters=1)}, "1 commands are dead letters"),
    ],
)
def test_each_defect_is_found(damage: dict[str, Any], expected: str) -> None:
    found = problems(replace(good(), **damage))
    assert any(expected in one for one in found), found


def test_the_load_of_the_bus_is_reported() -> None:
    (at_rest, storm) = [line for line in summary(good()) if line.startswith("bus, ")]
    assert at_rest == (
        "bus, at rest: senders 4.90 connections (at most 9), listeners 20.00 connections (at most 20), 4 cold sends; "
        "3 messages kept, 2 copies dropped, 23 credits (at most 8 within a second)"
    )
    assert storm.startswith("bus, storm: senders 12.00")


def test_an_event_that_a_document_lists_and_that_has_not_arrived_is_found() -> None:
    listing = counted(
        "db-000/forward", 2, "io.imdsbridge.document.changed.v1", data={"CloudEventIds": ["gone"]}
    )
    found = problems(replace(good(), stored=[*good().stored, json.loads(json.dumps(listing))]))
    assert found == ["audit: CloudEvent gone, listed by event 2 of db-000/forward run-of-db-000/forward"]


def test_a_reporter_that_begins_twice_is_found_and_one_that_was_killed_is_not() -> None:
    def started(epoch: str, before: str | None) -> dict[str, Any]:
        data = {
            "Reason": "Started",
            "PreviousEpoch": before,
            "PreviousLastReporterSeq": 1 if before else None,
        }
        return {**counted("db-000/forward", 1, data=data), "id": epoch, "reporterepoch": epoch}

    others = [one for one in good().stored if one.get("reporter") != "db-000/forward"]
    stopped = {**counted("db-000/forward", 2), "reporterepoch": "b"}
    chain = [*others, started("a", None), started("b", "a"), stopped]
    assert problems(replace(good(), stored=chain)) == []
    twice = [*others, started("a", None), started("b", None), stopped]
    assert "audit: db-000/forward: 2 chains" in problems(replace(good(), stored=twice))
