"""What becomes of events between two documents, and how sure one can be of their end."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from bridge.imds.diff import GRACE_SECONDS, Watch
from bridge.imds.document import Document, parse_document
from bridge.lab.imds import render_document
from tests.support.diff import FIRST, NOT_BEFORE, RECORDED, SECOND, Watcher, body, document, entry
from tests.support.only import only

THIRD = "0F5B4F0E-5D6D-4B2C-9A55-7C1D4A0F8E11"
REDEPLOY = "A1B6E1B8-57E5-4E5F-8C0B-6B3C6F4A2D01"
LATER = "Mon, 11 Apr 2022 23:00:00 GMT"
NEXT_WEEK = "Mon, 18 Apr 2022 22:00:00 GMT"

# Beginnings and changes


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        (None, "Scheduled", "scheduled"),
        (None, "SCHEDULED", "scheduled"),
        (None, "Started", "started"),
        *[(None, unknown, "updated") for unknown in ("Postponed", "", None, 5, ...)],
        ("Scheduled", "Started", "started"),
        ("Started", "Scheduled", "updated"),
        ("Scheduled", "Postponed", "updated"),
        ("Started", "Postponed", "updated"),
        ("Postponed", "Scheduled", "scheduled"),
        ("Postponed", "Started", "started"),
    ],
)
def test_a_new_status_is_that_transition(before: Any, now: Any, kind: str) -> None:
    watcher = Watcher(document(1, *([entry(status=before)] if before else [])))
    assert watcher.see(document(2, entry(status=now))) == [f"{kind} {FIRST}"]


def test_events_in_the_first_document_are_new_with_the_status_that_they_have() -> None:
    first = document(5, entry(FIRST), entry(SECOND, "Started"))
    assert Watcher().see(first, restarted=True) == [f"scheduled {FIRST}", f"started {SECOND}"]


def test_a_change_names_what_changed_and_what_was_before() -> None:
    watcher = Watcher(document(1, entry()), document(2, entry(status="Started")))
    change = only(watcher.changes)
    assert change.changed == ("EventStatus", "NotBefore")
    assert change.previous is not None
    assert change.previous.status == "scheduled"


def test_an_early_warning_is_advised_whatever_changes_until_it_is_scheduled_or_ends() -> None:
    warning, _ = recorded("rebalance-advisory")
    event = only(warning.events.values())
    watcher = Watcher(document(6))
    assert watcher.see(warning) == [f"advised {event.event_id}"]
    for number, raw in enumerate(
        ({**event.raw, "Resources": []}, {**event.raw, "EventStatus": "Scheduled"}), 8
    ):
        kind = "scheduled" if raw["EventStatus"] == "Scheduled" else "advised"
        assert watcher.see(document(number, raw)) == [f"{kind} {event.event_id}"]
    for more in ({}, {"restarted": True}):
        watcher = Watcher(warning)
        assert watcher.see(document(9), **more) == [f"ended {event.event_id}"]
        assert watcher.changes[0].end_reason == "Advisory"


CONTENTS: list[tuple[str, Any]] = [
    ("NotBefore", LATER),
    ("Resources", ["web-0", "web-1"]),
    ("Resources", []),
    ("DurationInSeconds", 9),
    ("EventType", "Defrost"),
    ("EventType", ...),
    ("SomethingNew", {"a": [1]}),
]


@pytest.mark.parametrize("status", ["Scheduled", "Started"])
@pytest.mark.parametrize(("name", "value"), CONTENTS)
def test_content_that_changes_while_the_status_stays_is_updated(status: str, name: str, value: Any) -> None:
    watcher = Watcher(document(1, entry(status=status)))
    assert watcher.see(document(2, entry(status=status, **{name: value}))) == [f"updated {FIRST}"]
    assert watcher.changes[0].changed == (name,)


def test_a_change_under_the_same_incarnation_is_a_change_and_another_incarnation_alone_is_none() -> None:
    watcher = Watcher(document(7, entry()))
    assert watcher.see(document(7, entry(status="Started"))) == [f"started {FIRST}"]
    assert watcher.see(document(7, entry(status="Started"), entry(SECOND))) == [f"scheduled {SECOND}"]
    assert watcher.see(document(8, entry(status="Started"), entry(SECOND))) == []
    assert watcher.see(document("9", entry(status="Started"), entry(SECOND))) == []
    assert watcher.see(document(9)) == [f"completed {FIRST}", f"canceled {SECOND}"]
    assert watcher.see(document(10, entry())) == [f"scheduled {FIRST}"]  # which has come back after its end


def test_documents_that_differ_in_key_order_and_whitespace_are_the_same() -> None:
    plain = body(7, entry(Extra={"a": 1, "b": [2]}))
    turned = json.dumps(dict(reversed(json.loads(plain).items())), indent=3).encode()
    watch = Watcher(parse_document(plain)).watch
    assert Watcher(parse_document(b"\r\n" + turned)).watch == watch


def test_changes_come_in_the_order_of_the_document_and_ends_last_whatever_cannot_be_read() -> None:
    watcher = Watcher(document(1, entry(FIRST), entry(SECOND)))
    assert watcher.see(document(2, None, entry(THIRD), entry(SECOND, "Started"), entry(FIRST))) == [
        f"scheduled {THIRD}",
        f"started {SECOND}",
    ]
    assert watcher.see(document(3, None, entry(REDEPLOY), entry(SECOND), entry(THIRD))) == [
        f"scheduled {REDEPLOY}",
        f"updated {SECOND}",
        f"canceled {FIRST}",
    ]


# Ends


START = datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("incarnation", [7, 8], ids=["the same incarnation", "the next incarnation"])
@pytest.mark.parametrize("gap", [0.2, 1.0, 5.0])
def test_an_event_gone_while_scheduled_is_canceled_without_a_gap(incarnation: int, gap: float) -> None:
    watcher = Watcher(document(7, entry()))
    assert watcher.see(document(incarnation), after=gap) == [f"canceled {FIRST}"]
    assert watcher.changes[0].end_reason is None


@pytest.mark.parametrize(
    ("before", "now", "circumstances", "reason"),
    [
        (document(7, entry()), document(8), {"restarted": True}, "Restart"),
        *[(document(7, entry()), document(8), {"after": gap}, "Gap") for gap in (5.001, 60.0, 86_400.0)],
        *[(document(7, entry()), document(now), {}, "IncarnationSkipped") for now in (9, 10, 2**70)],
        *[(document(7, entry()), document(now), {}, "IncarnationUnknown") for now in (..., "eight")],
        *[(document(..., entry()), document(now), {}, "IncarnationUnknown") for now in (..., 8)],
        (document(7, entry()), document(8, "unreadable"), {}, "EntryUnreadable"),
        (document(7, entry(status="Postponed")), document(8), {}, "UnknownStatus"),
        (document(7, entry(status="Postponed")), document(8), {"restarted": True}, "UnknownStatus"),
        (document(7, entry(NotBefore="soon")), document(8), {}, "NotBeforeUnknown"),
        (document(7, entry(NotBefore="")), document(8), {}, "NotBeforeUnknown"),
        (document(7, entry(NotBefore="Mon, 11 Apr 2022 21:00:00 GMT")), document(8), {}, "NotBeforePassed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_other_end_of_a_scheduled_event_is_uncertain_and_says_why(
    before: Document, now: Document, circumstances: dict[str, Any], reason: str
) -> None:
    watcher = Watcher(before)
    assert watcher.see(now, **circumstances) == [f"ended {FIRST}"]
    assert watcher.changes[0].end_reason == reason


@pytest.mark.parametrize("circumstances", [{}, {"restarted": True}, {"after": 60.0}])
@pytest.mark.parametrize("incarnation", [8, 20])
def test_an_event_gone_after_started_is_completed(circumstances: dict[str, Any], incarnation: int) -> None:
    watcher = Watcher(document(7, entry(status="Started")))
    assert watcher.see(document(incarnation), **circumstances) == [f"completed {FIRST}"]
    assert watcher.changes[0].end_reason is None


def test_a_gap_and_an_unreadable_entry_affect_only_the_first_document_after_it() -> None:
    watcher = Watcher(document(7, entry(FIRST), entry(SECOND), entry(THIRD)))
    assert watcher.see(document(9, entry(FIRST), entry(SECOND), entry(THIRD)), after=60.0) == []
    assert watcher.see(document(10, entry(FIRST), entry(SECOND))) == [f"canceled {THIRD}"]
    assert watcher.see(document(11, entry(event_id=None), entry(SECOND))) == [f"ended {FIRST}"]
    assert watcher.see(document(12, entry(event_id=None))) == [f"canceled {SECOND}"]


@pytest.mark.parametrize(
    ("seconds_before_not_before", "change"),
    [(2.0, "canceled"), (1.001, "canceled"), (1.0, "ended"), (0.0, "ended")],
)
def test_an_event_is_canceled_only_before_its_start(seconds_before_not_before: float, change: str) -> None:
    watcher = Watcher()
    watcher.at = START - seconds_before_not_before - 1
    watcher.see(document(7, entry()))
    assert watcher.see(document(8)) == [f"{change} {FIRST}"]


@pytest.mark.parametrize(
    ("steady", "wall", "reason"),
    [
        (-1.0, -1.0, None),
        (-1.0, 0.0, "ClockJumped"),
        (0.0, -1.0, "ClockJumped"),
        (0.0, 0.0, "NotBeforePassed"),
    ],
)
def test_after_a_jump_of_the_clock_an_event_is_canceled_only_if_both_clocks_say_so(
    steady: float, wall: float, reason: str | None
) -> None:
    watcher = Watcher()
    watcher.at = START + steady - 2
    watcher.see(document(7, entry()))
    kind = "ended" if reason else "canceled"
    assert watcher.see(document(8), wall=START + wall) == [f"{kind} {FIRST}"]
    assert watcher.changes[0].end_reason == reason


@pytest.mark.parametrize(
    ("before", "now", "rebooted"),
    [("a", "a", False), ("a", "b", True), ("", "b", None), ("a", "", None), ("", "", None)],
)
@pytest.mark.parametrize("status", ["Scheduled", "Started"])
def test_an_end_says_whether_this_vm_has_rebooted(
    before: str, now: str, rebooted: bool | None, status: str
) -> None:
    watcher = Watcher()
    watcher.see(document(7, entry(status=status)), boot_id=before)
    watcher.watch = Watch.load(watcher.watch.dump())
    watcher.see(document(8), restarted=True, boot_id=now)
    assert [change.vm_rebooted for change in watcher.changes] == [rebooted]


def test_a_reboot_counts_if_it_was_after_the_last_sight_of_an_event_that_may_come_back() -> None:
    watcher = Watcher()
    watcher.see(document(7, entry()), boot_id="a")
    watcher.see(document(7, entry(), entry(SECOND)), boot_id="b", restarted=True)
    watcher.see(document(8, entry(SECOND)), boot_id="b")
    assert [change.vm_rebooted for change in watcher.changes] == [False]
    watcher.see(document(1), boot_id="c", restarted=True)
    watcher.watch = Watch.load(watcher.watch.dump())
    assert watcher.see(document(1), boot_id="c", after=GRACE_SECONDS) == [f"ended {SECOND}"]
    assert [change.vm_rebooted for change in watcher.changes] == [True]


# Five minutes of grace

GRACE = {
    "a reset incarnation": (document(1), {}),
    "a reset over a restart": (document(1), {"restarted": True}),
    "a first call that turned the service on": (document(8), {"service_was_off": True}),
    "a first call after a restart": (document(8), {"service_was_off": True, "restarted": True}),
    "both": (document(0), {"service_was_off": True, "after": 100_000.0}),
}
in_grace = pytest.mark.parametrize(("empty", "circumstances"), GRACE.values(), ids=GRACE.keys())


@in_grace
def test_only_a_started_event_ends_at_once_and_others_may_come_back(empty: Any, circumstances: Any) -> None:
    first, running = entry(FIRST, NotBefore=NEXT_WEEK), entry(THIRD, "Started")
    watcher = Watcher(document(7, first, entry(SECOND), entry(REDEPLOY), running))
    assert watcher.see(empty, **circumstances) == [f"completed {THIRD}"]
    assert not watcher.watch.is_due(watcher.at)
    others = (entry(SECOND, "Started"), entry(REDEPLOY, NotBefore=LATER))
    back = document(empty.incarnation + 1, {**first, "EventId": FIRST.lower()}, *others)
    assert watcher.see(back, after=100.0) == [f"started {SECOND}", f"updated {REDEPLOY}"]
    assert watcher.watch.missing == {}
    assert watcher.see(document(empty.incarnation + 2, *others)) == [f"canceled {FIRST.lower()}"]


@in_grace
def test_events_that_do_not_come_back_end_when_five_minutes_are_over(empty: Any, circumstances: Any) -> None:
    watcher = Watcher(document(7, entry(FIRST), entry(SECOND, "Postponed")))
    watcher.see(empty, **circumstances)
    assert watcher.see(empty, after=GRACE_SECONDS - 1) == []
    assert not watcher.watch.is_due(watcher.at)
    assert watcher.watch.is_due(watcher.at + 1)
    assert watcher.see(empty, after=1) == [f"ended {FIRST}", f"ended {SECOND}"]
    assert [change.end_reason for change in watcher.changes] == ["Reset", "Reset"]
    assert watcher.watch.missing == {}
    assert not watcher.watch.is_due(watcher.at + 1_000)


def test_the_five_minutes_continue_over_a_restart_and_further_documents_and_resets() -> None:
    watcher = Watcher(document(7, entry()), document(3))
    watcher.watch = Watch.load(watcher.watch.dump())
    assert watcher.see(document(4, entry(SECOND)), restarted=True, after=100.0) == [f"scheduled {SECOND}"]
    assert watcher.see(document(5), after=1.0) == [f"canceled {SECOND}"]
    assert watcher.see(document(1), after=100.0) == []  # a second reset
    assert watcher.see(document(2), after=GRACE_SECONDS - 201.0) == [f"ended {FIRST}"]
    assert watcher.see(document(3, entry())) == [f"scheduled {FIRST}"]


def test_events_that_stay_over_a_reset_or_appear_with_it_are_as_ever() -> None:
    watcher = Watcher(document(7, entry(FIRST), entry(SECOND)))
    assert watcher.see(document(1, entry(FIRST), entry(THIRD))) == [f"scheduled {THIRD}"]
    assert watcher.see(document(2)) == [f"canceled {FIRST}", f"canceled {THIRD}"]


# Whole lives

PREEMPT = "B2C7F2C9-68F6-4F60-9D1C-7C4D705B3E12"
TERMINATE = "602d9444-d2cd-49c7-8624-8643e7171297"
ADVICE = "A1B2C3D4-0000-0000-0000-000000000001"
PREVIEW = "f020ba2e-3bc0-4c40-a10b-86575a9eabd5"
EXPECTED = {
    "degraded-hardware-and-preempt": [
        [f"scheduled {REDEPLOY}"],
        [f"scheduled {PREEMPT}"],
        [f"updated {REDEPLOY}", f"started {PREEMPT}"],
        [f"completed {PREEMPT}"],
        [],  # the incarnation starts again: the redeployment may come back
    ],
    "host-failure": [[], [f"started {THIRD}"], [f"completed {THIRD}"]],
    "live-migration": [[], [f"scheduled {FIRST}"], [f"started {FIRST}"], [f"completed {FIRST}"]],
    "preview-2017-03-01": [[], [f"scheduled {PREVIEW}"], [f"canceled {PREVIEW}"]],
    "rebalance-advisory": [[f"advised {ADVICE}"], [f"ended {ADVICE}"]],
    "terminate-2019-01-01": [
        [f"scheduled {TERMINATE}"],
        [f"started {TERMINATE}"],
        [f"completed {TERMINATE}"],
    ],
    "user-reboot": [[], [f"scheduled {SECOND}"], [f"ended {SECOND}"]],  # one incarnation was never seen
}


def recorded(name: str) -> list[Document]:
    path = next(path for path in RECORDED if path.stem == name)
    return [parse_document(json.dumps(each).encode()) for each in json.loads(path.read_text())["documents"]]


@pytest.mark.parametrize("name", [path.stem for path in RECORDED])
def test_a_recorded_life_has_the_expected_changes(name: str) -> None:
    documents = recorded(name)
    starts = [event.not_before for each in documents for event in each.events.values() if event.not_before]
    watcher = Watcher()
    watcher.at = min(starts, default=datetime.now(UTC)).timestamp() - 600
    assert [watcher.see(each) for each in documents] == EXPECTED[name]


def test_the_redeployment_that_a_reset_hid_ends_after_five_minutes() -> None:
    watcher = Watcher(*recorded("degraded-hardware-and-preempt"))
    assert watcher.see(document(1), after=GRACE_SECONDS) == [f"ended {REDEPLOY}"]


def test_a_change_of_the_api_version_over_a_restart_is_an_update_at_most() -> None:
    def shown(version: str) -> bytes:
        return json.dumps(render_document(7, [entry(NotBefore=NOT_BEFORE)], version)).encode()

    watcher = Watcher(parse_document(shown("2017-03-01")))
    assert watcher.see(parse_document(shown("2020-07-01")), restarted=True) == [f"updated {FIRST}"]
    assert watcher.changes[0].changed == ("EventSource", "DurationInSeconds")
