"""CloudEvents of changes: their ids, which are part of the contract, their attributes and their data."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid5

import pytest

from bridge.events import builder as events
from bridge.events.model import CloudEvent
from bridge.imds.diff import Change
from bridge.imds.document import ScheduledEvent
from bridge.imds.instance import Vm
from tests.support.diff import FIRST, NOT_BEFORE, SECOND, VM, document, entry
from tests.support.samples import reporting

AT = datetime(2022, 4, 11, 22, 11, 58, 123_000, tzinfo=UTC)
NOW: dict[str, Any] = {"at": AT, "next_number": lambda: 1}
REPORTER = events.Reporter(name="web-0", role="forward", epoch="0123456789abcdef", **NOW, vm=VM)
UNKNOWN_VM = events.Reporter(name="host 1", role="forward", epoch="0123456789abcdef", **NOW)


def seen(**fields: Any) -> ScheduledEvent:
    return ScheduledEvent(raw=entry(**fields))


def scheduled(**fields: Any) -> Change:
    return Change(kind="scheduled", event=seen(**fields))


def build(
    change: Change, *, by: events.Reporter = REPORTER, seen_before: int = 0, at: datetime = AT
) -> CloudEvent:
    return reporting(by, at).scheduled_event(change, seen_before=seen_before, incarnation=2)


def document_event(by: events.Reporter = REPORTER, *, sequence: int = 1) -> CloudEvent:
    return reporting(by, AT, sequence).document(document(2, entry()), previous=None, event_ids=[])


# Ids


def test_the_ids_of_known_changes_are_pinned_for_all_versions_of_this_program() -> None:
    started = Change(kind="started", event=seen(status="Started"), previous=seen())
    gone = seen(status="Started")
    assert [
        build(scheduled()).id,
        build(scheduled(), seen_before=1).id,
        build(started).id,
        build(Change(kind="completed", event=gone, previous=gone)).id,
        document_event().id,
    ] == [
        "17f94873-8642-5b8d-83a6-070d8696464a",
        "4f59b888-c10b-5925-bbda-2f0663252162",
        "e58a4324-9cf6-5bc5-b2cb-a9395b2e67bb",
        "6a76b67a-fa9c-5595-91d5-dc114afd4714",
        "f14c9e63-1fb3-5457-a3fa-9ac9d27a44ad",
    ]


def test_the_id_of_a_change_does_not_depend_on_vm_epoch_time_or_previous_content() -> None:
    another = replace(REPORTER, name="web-1", epoch="fedc", vm=replace(VM, scale_set="front"))
    for reporter in (
        UNKNOWN_VM,
        another,
        replace(another, role="listen", vm=None, group_source="https://example.com/"),
    ):
        later = build(scheduled(), by=reporter, at=AT + timedelta(days=3))
        assert later.id == build(scheduled()).id
    one = Change(kind="updated", event=seen(), previous=seen(Description="a"), changed=("Description",))
    other = Change(kind="updated", event=seen(), previous=seen(DurationInSeconds=9))
    assert build(one).id == build(other).id


def test_another_event_kind_content_or_occurrence_has_another_id() -> None:
    kinds: tuple[Any, ...] = ("updated", "canceled", "ended")
    contents = ({"event_id": SECOND}, {"NotBefore": "soon"}, {"Resources": ["web-1"]}, {"SomethingNew": 1})
    ids = [
        *(build(scheduled(), seen_before=count).id for count in range(3)),
        *(build(scheduled(**fields)).id for fields in contents),
        *(build(Change(kind=kind, event=seen(), previous=seen())).id for kind in kinds),
    ]
    assert len(set(ids)) == 10


def test_the_vms_own_events_have_ids_by_vm_epoch_counter_content_and_time() -> None:
    later = AT + timedelta(seconds=1)
    gaps = [("a", AT), ("a", later), ("b", AT)]
    own = [
        *(document_event(sequence=sequence) for sequence in (1, 2)),
        document_event(replace(REPORTER, epoch="another")),
        document_event(replace(REPORTER, vm=replace(VM, vm_id="another"))),
        REPORTER.document(document(2, entry()), previous=None, event_ids=["a"]),
        *(
            reporting(REPORTER, at, 1).unreachable(since=None, reason=reason, cause="NoAnswer")
            for reason, at in gaps
        ),
    ]
    assert len({event.id for event in own}) == 8
    assert document_event().id == document_event().id


def test_a_receipt_has_an_id_by_command_event_and_outcome_whatever_the_letter_case_of_the_event() -> None:
    def receipt_id(outcome: str, key: str, event_id: str) -> str:
        given: dict[str, Any] = {"command_id": "c", "resources": [], "data": {}}
        return REPORTER.receipt(outcome=outcome, key=key, event_id=event_id, **given).id

    one = receipt_id("accepted", "k", "ABC")
    assert one == receipt_id("accepted", "k", "abc")
    others = [
        receipt_id(*of) for of in (("failed", "k", "a"), ("accepted", "l", "a"), ("accepted", "k", "a"))
    ]
    assert len({one, *others}) == 4


# Attributes


@pytest.mark.parametrize("kind", ["scheduled", "started", "updated", "completed", "canceled", "ended"])
def test_the_attributes_of_a_change_name_the_event(kind: Any) -> None:
    event = build(Change(kind=kind, event=seen(), previous=seen()))
    assert event.type == f"io.imdsbridge.scheduledevent.{kind}.v1"
    assert event.dataschema == f"urn:imds-bridge:schema:scheduledevent.{kind}:1"
    assert (event.subject, event.time) == (FIRST, AT)
    assert event.extensions == {"correlationid": FIRST, "partitionkey": FIRST}


def test_the_vms_own_events_have_a_reporter_and_a_padded_counter() -> None:
    event = document_event(sequence=42)
    assert (event.type, event.subject) == ("io.imdsbridge.document.changed.v1", "web-0")
    assert event.dataschema == "urn:imds-bridge:schema:document.changed:1"
    assert event.extensions == {
        "reporter": "web-0/forward",
        "reporterepoch": "0123456789abcdef",
        "reporterseq": "000000000042",
    }


SHOP = "/subscriptions/0000/resourceGroups/shop"
SCALE_SET = f"{SHOP}/providers/Microsoft.Compute/virtualMachineScaleSets/front"
ODD = {"resource_group": "größe (1)", "resource_id": "/resourceGroups/größe (1)/x y"}
URN = "urn:imds-bridge:vm"


def of_vm(**changes: Any) -> events.Reporter:
    return replace(REPORTER, vm=replace(VM, **changes))


@pytest.mark.parametrize(
    ("reporter", "group", "vm"),
    [
        (REPORTER, SHOP, VM.resource_id),
        (of_vm(scale_set="front"), SCALE_SET, VM.resource_id),
        (
            of_vm(**ODD),
            "/subscriptions/0000/resourceGroups/gr%C3%B6%C3%9Fe%20(1)",
            "/resourceGroups/gr%C3%B6%C3%9Fe%20(1)/x%20y",
        ),
        (of_vm(subscription_id=""), f"{URN}:web-0", VM.resource_id),
        (of_vm(resource_group="", resource_id=""), f"{URN}:web-0", f"{URN}:web-0"),
        (UNKNOWN_VM, f"{URN}:host%201", f"{URN}:host%201"),
        (replace(REPORTER, group_source="urn:shop"), "urn:shop", VM.resource_id),
        (replace(REPORTER, vm_source="urn:mine"), SHOP, "urn:mine"),
    ],
)
def test_the_source_is_scale_set_group_or_vm(reporter: events.Reporter, group: str, vm: str) -> None:
    assert build(scheduled(), by=reporter).source == group
    assert document_event(reporter).source == vm


# Data of a change


def test_the_data_of_a_scheduled_event_are_the_entry_as_received_and_the_added_properties() -> None:
    raw = entry(Resources=["_WEB-0", "web-1"], SomethingNew={"a": [1]})
    event = build(Change(kind="scheduled", event=ScheduledEvent(raw=raw)))
    assert event.data == {
        **raw,
        "PreviousStatus": None,
        "Changed": [],
        "Previous": {},
        "NotBeforeUtc": "2022-04-11T22:26:58.000Z",
        "NoticeSeconds": 900,
        "DocumentIncarnation": 2,
        "AffectsThisVm": True,
        "ApprovalSession": None,
        "Vm": {
            "Name": "web-0",
            "VmId": VM.vm_id,
            "ResourceId": VM.resource_id,
            "Location": "westeurope",
            "Zone": "1",
            "ScaleSet": "",
            "Tags": {"env": "test"},
        },
    }


def test_the_data_of_an_update_have_the_previous_values() -> None:
    before = seen(Description="soon", Extra=1)
    now = seen(Description="later")
    change = Change(kind="updated", event=now, previous=before, changed=("Description", "Extra", "New"))
    previous = {"Description": "soon", "Extra": 1, "New": None}
    expected = {"PreviousStatus": "Scheduled", "Changed": [*previous], "Previous": previous}
    assert build(change).data.items() >= expected.items()


@pytest.mark.parametrize("kind", ["completed", "canceled", "ended"])
def test_an_end_has_its_own_status_and_the_last_one_as_the_previous(kind: Any) -> None:
    gone = seen()
    change = Change(kind=kind, event=gone, previous=gone, end_reason="Restart", vm_rebooted=True)
    data = build(change).data
    assert (data["EventStatus"], data["PreviousStatus"]) == (kind.capitalize(), "Scheduled")
    assert (data["Changed"], data["Previous"]) == ([], {})
    assert data.get("VmRebooted") == (None if kind == "canceled" else True)
    assert data.get("EndReason") == ("Restart" if kind == "ended" else None)
    assert gone.raw["EventStatus"] == "Scheduled"


@pytest.mark.parametrize(
    ("event_type", "completed", "ended"),
    [
        *((one, True, None) for one in ("Preempt", "Terminate")),
        *((one, False, False) for one in ("Freeze", "Reboot", "Redeploy")),
        *((one, None, None) for one in ("Defrost", None, ["Preempt"])),
    ],
)
def test_an_end_says_whether_the_vms_are_gone_and_its_id_does_not_depend_on_it(
    event_type: Any, completed: bool | None, ended: bool | None
) -> None:
    gone = seen(EventType=event_type)
    expected = {"completed": completed, "canceled": False, "ended": ended}
    for kind, is_gone in expected.items():
        change: Any = Change(kind=kind, event=gone, previous=gone)  # type: ignore[arg-type]
        event = build(change)
        assert event.data["VmIsGone"] is is_gone
        assert event.id == str(uuid5(events.NAMESPACE, f"{change.fingerprint}:0"))
    assert "VmIsGone" not in build(scheduled(EventType=event_type)).data


def test_a_not_before_that_has_passed_is_a_negative_notice_and_what_is_unknown_is_null() -> None:
    assert build(scheduled(), at=AT + timedelta(hours=1)).data["NoticeSeconds"] == 900 - 3600
    event = REPORTER.scheduled_event(scheduled(NotBefore="soon"), seen_before=0, incarnation=None)
    unknown = ("NotBeforeUtc", "NoticeSeconds", "DocumentIncarnation")
    assert [event.data[name] for name in unknown] == [None] * 3


AFFECTS: dict[bool | None, list[Any]] = {
    True: [["web-0"], ["_web-0"], ["db-1", "WEB-0"], "web-0"],
    False: [["db-1"], ["web-01", "__web-0"]],
    None: [[], "", None, ..., [5]],
}


@pytest.mark.parametrize("affects", AFFECTS)
def test_whether_this_vm_is_affected_may_be_unknown(affects: bool | None) -> None:
    for resources in AFFECTS[affects]:
        assert build(scheduled(Resources=resources)).data["AffectsThisVm"] is affects
        data = build(scheduled(Resources=resources), by=UNKNOWN_VM).data
        assert (data["AffectsThisVm"], data["Vm"]["Name"], data["Vm"]["VmId"]) == (None, "host 1", "")


def test_whether_this_vm_is_affected_depends_on_its_name_not_its_host_name() -> None:
    reporter = replace(REPORTER, name="host", vm=Vm(name="front_1"))
    assert build(scheduled(Resources=["host"]), by=reporter).data["AffectsThisVm"] is False
    assert build(scheduled(Resources=["Front_1"]), by=reporter).data["AffectsThisVm"] is True


# Data of the VM's own events


def test_a_changed_document_is_published_as_received_with_the_ids_of_its_events() -> None:
    invalid_entries = {"EventId": None, "Nonsense": [1]}
    current = document("9", entry(NotBefore=NOT_BEFORE), invalid_entries, 5, Unknown="x")
    data = dict(REPORTER.document(current, previous=document(8), event_ids=["id-1", "id-2"]).data)
    assert data.pop("Vm")["Name"] == "web-0"
    assert (
        data.items()
        >= {
            "Document": {"DocumentIncarnation": "9", "Events": [entry(), invalid_entries, 5], "Unknown": "x"},
            "CloudEventIds": ["id-1", "id-2"],
            "DocumentIncarnation": 9,
            "PreviousIncarnation": 8,
            "Unreadable": 2,
        }.items()
    )


LATER = AT + timedelta(seconds=61.5)
NEVER: dict[str, Any] = {"since": None, "cause": "NoAnswer"}


@pytest.mark.parametrize(
    ("event", "name", "data"),
    [
        (document_event(), "document.changed", {"PreviousIncarnation": None}),
        (
            reporting(REPORTER, LATER, 4).unreachable(since=AT, reason="no answer", cause="NoAnswer"),
            "imds.unreachable",
            {"Since": "2022-04-11T22:11:58.123Z", "Reason": "no answer", "Cause": "NoAnswer"},
        ),
        (
            reporting(REPORTER, LATER, 5).recovered(since=AT, cause="Restart"),
            "imds.recovered",
            {
                "BlindFrom": "2022-04-11T22:11:58.123Z",
                "BlindTo": "2022-04-11T22:12:59.623Z",
                "BlindSeconds": 61.5,
                "Cause": "Restart",
            },
        ),
        (UNKNOWN_VM.unreachable(reason="x", **NEVER), "imds.unreachable", {"Since": None}),
        (UNKNOWN_VM.recovered(**NEVER), "imds.recovered", {"BlindFrom": None, "BlindSeconds": None}),
    ],
)
def test_the_vms_own_events_say_when_and_why(event: CloudEvent, name: str, data: dict[str, Any]) -> None:
    assert event.type == f"io.imdsbridge.{name}.v1"
    assert event.data.items() >= data.items()


@pytest.mark.parametrize(
    ("resources", "session"),
    [
        (["Web-1", "web-0"], "shop.web-1"),
        (["_web-1"], "shop.web-1"),
        ([], "shop.web-0"),
        (["Großmarkt"], "shop.großmarkt"),  # as the listener and the bus spell it, too
    ],
)
def test_the_session_is_that_of_the_first_affected_vm_everywhere(resources: list[str], session: str) -> None:
    for name in ("web-0", "Web-0"):
        vm = Vm(name=name, resource_group="Shop")
        reporter = replace(REPORTER, vm=vm, session="{resource_group}.{vm}")
        assert build(scheduled(Resources=resources), by=reporter).data["ApprovalSession"] == session
