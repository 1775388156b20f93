"""When the listener receives, and what becomes of commands that were sent while it rested."""

from __future__ import annotations

import math
import os
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge.approvals import inbox
from bridge.approvals.state import EventState
from bridge.process import bridge_events
from tests.support.listener import ListenerRig, MakeListener, command_body

SCHEDULES = int(os.environ.get("TEST_REST_SCHEDULES", "2"))
pytestmark = pytest.mark.timeout(max(120, 10 * SCHEDULES))
SEED = int(os.environ.get("TEST_REST_SEED", "0")) or (
    1 if os.environ.get("CI") else random.randrange(10**9)  # noqa: S311 - no secret
)
STEP_SECONDS = 0.5


@pytest.fixture
def resting(make_listener: MakeListener, monkeypatch: pytest.MonkeyPatch) -> ListenerRig:
    """Return a listener that rests, with its next look half an hour away."""
    return rest(make_listener, monkeypatch)


def rest(make_listener: MakeListener, monkeypatch: pytest.MonkeyPatch, **approvals: Any) -> ListenerRig:
    """Make a listener and let it come to its rest."""
    monkeypatch.setattr(inbox, "AWAIT_SECONDS", 4.0)
    monkeypatch.setattr(bridge_events, "HEARTBEAT_EVERY_SECONDS", 1800.0)
    rig = make_listener(grace_seconds=30, **approvals)
    rig.run(6.0)
    assert rig.receiver.rests
    return rig


def decided(rig: ListenerRig) -> dict[str, tuple[str, str]]:
    """Return outcome and reason of each command, by its id."""
    return {
        receipt["causationid"]: (receipt["data"]["Outcome"], receipt["data"]["Reason"])
        for receipt in rig.receipts()
    }


def test_commands_are_received_for_ten_minutes_after_the_start_and_after_an_event_of_this_vm(
    rig: ListenerRig,
) -> None:
    def rests(after: float) -> bool:
        rig.run(after)
        return rig.receiver.rests

    assert (rests(590.0), rests(20.0)) == (False, True)
    rig.imds.schedule("web-0", event_id="e-1")
    assert (rests(1.0), rests(700.0)) == (False, False)
    rig.imds.remove("e-1")
    assert (rests(590.0), rests(20.0)) == (False, True)


@pytest.mark.parametrize("scope", ["self", "group"])
def test_only_what_a_command_could_approve_ends_the_rest(
    make_listener: MakeListener, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    rig = rest(make_listener, monkeypatch, policy={"allow": [{}], "scope": scope})
    rig.announce("web-0", EventStatus="Started", wait=1.0)
    assert rig.receiver.rests
    rig.announce("web-1", wait=1.0)
    assert rig.receiver.rests == (scope == "self")


def test_while_imds_does_not_answer_commands_are_received(resting: ListenerRig) -> None:
    resting.imds.fail(500)
    resting.run(3.0)
    assert not resting.receiver.rests


def test_a_command_that_waits_is_decided_when_its_event_appears(resting: ListenerRig) -> None:
    resting.clock.advance(1.0)
    resting.send("e-1", id="early", wait=20.0)
    assert resting.receipts() == []
    resting.announce(event_id="e-1", wait=1.5)
    assert decided(resting) == {"early": ("Accepted", "approved")}


def test_a_command_that_is_older_than_its_event_by_more_than_the_grace_period_is_refused(
    resting: ListenerRig,
) -> None:
    resting.send("e-1", id="stale", wait=40.0)
    resting.announce(event_id="e-1", wait=1.5)
    assert decided(resting) == {"stale": ("Rejected", "unknown_event")}
    assert resting.imds.approved == []
    assert "before this VM's document had the event" in resting.receipts()[0]["data"]["Detail"]
    resting.send("e-1", id="fresh", wait=1.0)
    assert decided(resting)["fresh"] == ("Accepted", "approved")


def test_a_change_of_the_event_makes_no_command_stale(resting: ListenerRig) -> None:
    resting.announce(event_id="e-1", wait=100.0)
    resting.receiver.disconnect()
    resting.send("e-1", id="c")
    resting.change("e-1", NotBefore="Mon, 19 Jan 2037 23:26:58 GMT", wait=1.0)
    assert decided(resting) == {"c": ("Accepted", "approved")}


def test_after_a_restart_a_command_counts_for_an_event_of_the_first_document(resting: ListenerRig) -> None:
    resting.send("e-1", id="c")
    resting.clock.advance(100.0)
    resting.imds.schedule(event_id="e-1")
    resting.restart()
    resting.run(1.0)
    assert decided(resting) == {"c": ("Accepted", "approved")}


@pytest.mark.parametrize(
    ("ahead_seconds", "expected"),
    [(-600, ("Accepted", "approved")), (600, ("Rejected", "unknown_event"))],
    ids=["slow", "fast"],
)
def test_a_wrong_clock_shifts_what_is_stale_by_as_much(
    resting: ListenerRig, ahead_seconds: float, expected: tuple[str, str]
) -> None:
    """A command that came with its event, 10 s before it, and one sent 5 minutes before it, by a wrong clock."""
    before = 10.0 if ahead_seconds > 0 else 300.0
    sent_at = resting.clock.now() - timedelta(seconds=ahead_seconds)
    resting.queue.send(command_body("e-1", id="c"), message_id="c", enqueued_at=sent_at)
    resting.run(before)
    resting.announce(event_id="e-1", wait=1.5)
    assert decided(resting) == {"c": expected}


def test_a_clock_ahead_refuses_no_command_that_comes_while_commands_are_received(
    resting: ListenerRig,
) -> None:
    resting.announce(event_id="e-1", wait=10.0)
    sent_at = resting.clock.now() - timedelta(seconds=600)
    resting.queue.send(command_body("e-1", id="c"), message_id="c", enqueued_at=sent_at)
    resting.run(1.0)
    assert decided(resting) == {"c": ("Accepted", "approved")}


@pytest.mark.parametrize(
    ("expires_in", "reason"), [(None, "unknown_event"), (600, "expired")], ids=["never expires", "expires"]
)
def test_each_heartbeat_looks_once_and_answers_a_command_for_no_event(
    resting: ListenerRig, expires_in: float | None, reason: str
) -> None:
    expires_at = resting.in_seconds(expires_in) if expires_in else None
    resting.send("unknown", id="c", ExpiresAt=expires_at, wait=1500.0)
    assert resting.receipts() == []
    resting.run(400.0)
    assert (decided(resting), resting.receiver.rests) == ({"c": ("Rejected", reason)}, True)


def test_a_look_goes_on_until_the_queue_is_empty(resting: ListenerRig) -> None:
    for number in range(300):
        resting.queue.send(b"no command", message_id=f"m-{number}")
    resting.run(1900.0)
    assert len(resting.queue.dead_letters) == 300


def test_a_command_for_another_vm_is_answered_ten_minutes_after_a_look(resting: ListenerRig) -> None:
    resting.send("e-1", id="c", Vm="web-9", wait=2600.0)
    assert decided(resting) == {"c": ("Rejected", "other_vm")}
    assert resting.receiver.rests


def test_a_look_that_fails_is_repeated_and_a_heartbeat_tells_the_last_one(resting: ListenerRig) -> None:
    looked_at = resting.receiver.status().looked_at
    resting.receiver.last_error = "the role is missing"
    resting.send("unknown", id="c", wait=1900.0)
    heartbeat = [event for event in resting.events() if event["type"].endswith("heartbeat.v1")][-1]
    told = heartbeat["data"]["LookedAt"], heartbeat["data"]["LookError"]
    assert (told, resting.receipts()) == ((looked_at, "the role is missing"), [])
    resting.receiver.last_error = ""
    resting.run(1.0)
    assert decided(resting) == {"c": ("Rejected", "unknown_event")}


# A listener that rests decides as one that always receives


def play(folder: Path, seed: int, *, await_seconds: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let a quarter of an hour pass: events come, change and go, and commands are sent before, at and after them."""
    monkeypatch.setattr(inbox, "AWAIT_SECONDS", await_seconds)
    monkeypatch.setattr(bridge_events, "HEARTBEAT_EVERY_SECONDS", 240.0)
    at_random = random.Random(seed)  # noqa: S311 - no secret
    steps: dict[int, list[tuple[str, str]]] = {}
    for number in range(25):
        begin = at_random.randrange(120, 1600)
        end = begin + at_random.randrange(20, 600)
        steps.setdefault(begin, []).append(("schedule", f"e-{number}"))
        steps.setdefault(begin + 9, []).append(("change", f"e-{number}"))
        steps.setdefault(end, []).append(("remove", f"e-{number}"))
        for _ in range(at_random.randrange(3)):
            # not within two seconds of what decides: the grace period of 30 s, and the end
            sent = begin - at_random.choice([*range(5, 56), *range(66, 400), *range(-15, -5)])
            steps.setdefault(max(10, sent), []).append(("send", f"e-{number}"))
    for _ in range(8):
        steps.setdefault(at_random.randrange(120, 2700), []).append(("kill", ""))
    rig = ListenerRig(folder, grace_seconds=30)
    for step in range(2800):
        for kind, event_id in steps.get(step, ()):
            if kind == "schedule":
                rig.imds.schedule(at_random.choice(["web-0", "web-0", "web-1"]), event_id=event_id)
            elif kind == "change":
                rig.imds.change(event_id, NotBefore=rig.in_seconds(900))
            elif kind == "remove":
                rig.imds.remove(event_id)
            elif kind == "kill":
                rig.restart()
            else:
                rig.send(event_id, id=f"{event_id}-{step}")
        rig.run()
        rig.clock.advance(STEP_SECONDS)
    found = {**decided(rig), "approved": sorted(rig.imds.approved)}
    rig.close()
    return found


def test_a_listener_that_rests_decides_as_one_that_always_receives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = set()
    for seed in range(SEED, SEED + SCHEDULES):
        always = play(tmp_path / f"always-{seed}", seed, await_seconds=math.inf, monkeypatch=monkeypatch)
        rests = play(tmp_path / f"rests-{seed}", seed, await_seconds=3.0, monkeypatch=monkeypatch)
        assert rests == always, f"TEST_REST_SEED={seed}"
        outcomes |= {one for key, one in always.items() if key != "approved"}
    if SCHEDULES >= 10:  # of a few, none may come so far
        assert outcomes >= {("Accepted", "approved"), ("Rejected", "unknown_event")}


def test_the_schedules_show_a_listener_without_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = play(tmp_path / "always", 1, await_seconds=math.inf, monkeypatch=monkeypatch)
    monkeypatch.setattr(
        "bridge.approvals.step.EventState", lambda **given: EventState(**{**given, "absent_at": 0.0})
    )
    assert play(tmp_path / "rests", 1, await_seconds=3.0, monkeypatch=monkeypatch) != always
