"""The audit of a fleet: VMs with one name, late instance data, losses that were looked at, wrong clocks."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import Random

import pytest

from bridge.imds.instance import Vm
from tests.support.audit import HOUR, START, VM, Process, audit, iso, missing, run_audit
from tests.support.clock import MovedClock
from tests.support.console import shown
from tests.support.forward import Station
from tests.support.imds import WEB_0, WEB_1, ScriptedImds
from tests.support.only import only


def test_vms_with_one_name_in_two_groups_do_not_hide_each_others_death(tmp_path: Path) -> None:
    alive, dead = Process(group="shop").start().hours(96), Process(group="office").start().hours(2)
    verdict = audit(tmp_path, [*alive.events, *dead.events], "--now", iso(alive.at))
    assert (verdict.code, verdict.kinds) == (3, ["silent"])
    silent = only(verdict.of("silent"))
    assert silent["source"] == VM.format("office", "web-0")


def test_vms_of_one_source_do_not_hide_each_others_death(tmp_path: Path) -> None:
    alive, dead, late = (Process(vm_id=one).start() for one in ("a", "b", ""))
    alive.hours(9)
    late.vm_id = "C"  # its instance data came late
    late.hours(9)
    events = [*alive.events, *dead.events, *late.events]
    assert [one["epoch"] for one in audit(tmp_path, events).of("silent")] == [dead.epoch]
    assert audit(tmp_path, events, "--gone", "B").code == 0
    unknown = Process(group="other").start()  # without instance data, and no later run says that it follows
    after = Process(group="other", vm_id="a", at=START + 5 * HOUR).start().hours(3)
    assert audit(tmp_path, [*unknown.events, *after.events], "--now", iso(after.at)).code == 0


@pytest.mark.parametrize("role", ["forward", "listen"])
@pytest.mark.parametrize("is_known_later", [False, True])
def test_vms_of_one_source_without_ids_are_told_apart_by_their_reporters(
    tmp_path: Path, role: str, is_known_later: bool
) -> None:
    alive, dead = (Process(name, role=role).start(source="urn:fleet") for name in ("web-1", "web-2"))
    if is_known_later:
        alive.vm_id = "a"
    alive.hours(9)
    other = Process("web-3").start(source="urn:other").hours(9)
    events = [*alive.events, *dead.events, *other.events]
    verdict = audit(tmp_path, events)
    assert [one["epoch"] for one in verdict.of("silent")] == [dead.epoch]


def test_one_clock_that_is_days_ahead_hides_no_death_and_makes_none(tmp_path: Path) -> None:
    ahead, other = Process("web-1").start(), Process("web-2").start().hours(9)
    ahead.hours(9)
    ahead.events[-1]["time"] = iso(ahead.at + 72 * HOUR)
    dead = [Process(f"web-{number}", group="lost-region").start() for number in range(5)]
    events = [event for one in (ahead, other, *dead) for event in one.events]
    verdict = audit(tmp_path, events)
    assert {one["epoch"] for one in verdict.of("silent")} == {one.epoch for one in dead}
    assert verdict.report["silence_judged_at"] == other.events[-1]["time"].replace(".000", "")
    assert any("web-1" in one and "its clock is ahead" in one for one in verdict.report["remarks"])
    verdict = audit(tmp_path, [*ahead.events, *other.events], "--now", iso(ahead.at + 72 * HOUR))
    assert [one["source"] for one in verdict.of("silent")] == [other.source]
    verdict = audit(tmp_path, ahead.events)
    assert (verdict.code, verdict.report["silence_judged_at"]) == (0, None)
    done = run_audit("--file", tmp_path / "events.jsonl")
    assert done.out.splitlines()[-1] == (
        "audit: complete, 10 events from 1 reporters, silence not judged: give --now"
    )


@pytest.mark.parametrize("hours_ahead", [72, 400 * 24, -72])
def test_a_clock_that_was_wrong_for_one_heartbeat_hides_no_death_of_its_own_vm(
    tmp_path: Path, hours_ahead: int
) -> None:
    alive, dead = Process("web-1").start().hours(30), Process("web-2").start().hours(10)
    other = Process("web-3").start().hours(30)
    dead.events[1]["time"] = iso(START + (1 + hours_ahead) * HOUR)
    verdict = audit(tmp_path, [*alive.events, *dead.events, *other.events])
    assert [one["epoch"] for one in verdict.of("silent")] == [dead.epoch]
    assert only(verdict.of("silent"))["since"] == dead.events[-1]["time"].replace(".000", "")


@pytest.mark.parametrize("trial", range(20))
def test_wrong_clocks_of_vms_that_live_and_of_vms_that_die_change_no_verdict(trial: int) -> None:
    chance = Random(trial)  # noqa: S311 - repeatable
    for _ in range(10):
        fleet = [
            (Process(f"web-{number}").start(), chance.choice([30, chance.randrange(1, 28)]))
            for number in range(5)
        ]
        for process, hours in fleet:
            process.hours(hours)
            for event in process.events[:-1]:
                if chance.random() < 0.2:
                    event["time"] = iso(START + chance.choice([-72, 5, 72, 9600]) * HOUR)
        events = [event for process, _ in fleet for event in process.events]
        chance.shuffle(events)
        found = {one["epoch"] for one in missing(events, iso(START + 30 * HOUR)) if one["kind"] == "silent"}
        assert found == {process.epoch for process, hours in fleet if hours < 29}


@pytest.mark.parametrize("trial", range(10))
def test_each_event_that_is_removed_from_vms_of_one_source_is_found_alone_in_any_order(trial: int) -> None:
    chance = Random(trial)  # noqa: S311 - repeatable
    fleet = [
        Process(name, vm_id=one)
        for name, one in (("web-0", "a"), ("web-0", "b"), ("web-1", ""), ("web-2", ""))
    ]
    for process in fleet:
        for hours in (chance.randrange(1, 4), chance.randrange(1, 4), 9):
            process.start(source="urn:fleet").hours(hours)
        process.at = START + 16 * HOUR
        process.hours()
    events = [event for process in fleet for event in process.events]
    last = [process.events[-1] for process in fleet]  # which no heartbeat follows
    for removed in chance.choices([event for event in events if event not in last], k=50):
        rest = [event for event in events if event is not removed]
        chance.shuffle(rest)
        found = only(missing(rest, iso(START + 17 * HOUR)))
        number = int(removed["reporterseq"])
        assert (found["kind"], found["first"], found["last"]) == ("numbers", number, number)
        assert found["epoch"] == removed["reporterepoch"]


def test_vms_of_a_list_of_azure_must_have_published(tmp_path: Path) -> None:
    process = Process(group="Gr\u00f6\u00dfe").start(source=VM.format("Gr%C3%B6%C3%9Fe", "web-0"))
    exported = tmp_path / "vms"
    found, absent = VM.format("gr\u00f6\u00dfe", "WEB-0"), VM.format("shop", "never-installed")
    for text in (
        json.dumps({"data": [{"id": found}, {"id": absent}]}, ensure_ascii=False),
        f'id,name\n"{found}","a"\n{absent},b\n',
    ):
        exported.write_text(text, encoding="utf-8")
        verdict = audit(tmp_path, process.events, "--expect-list", exported)
        assert [one["reporter"] for one in verdict.of("reporter")] == [absent]
    assert audit(tmp_path, process.events, "--expect", "WEB-0/forward", "--expect", found).code == 0
    assert audit(tmp_path, process.events, "--expect", absent, "--accept", absent).code == 0
    exported.write_text("id,name\n")
    done = run_audit("--file", tmp_path / "events.jsonl", "--expect-list", exported)
    assert (done.code, "has no ARM id of a VM" in done.err) == (1, True)


def test_since_accepts_the_run_that_was_under_way_of_each_of_two_vms_with_one_name(tmp_path: Path) -> None:
    restarted, other = Process(group="office").start().hours(1), Process(group="shop").start().hours(5)
    restarted.at += HOUR
    restarted.start().hours(3)
    since = iso(START + 1.5 * HOUR)
    events = [event for event in [*other.events, *restarted.events] if event["time"] > since]
    assert audit(tmp_path, events, "--since", since).kinds == []
    assert audit(tmp_path, events).kinds == ["run", "numbers"]


def test_a_first_run_without_instance_data_is_found_under_the_name_of_the_host(tmp_path: Path) -> None:
    process = Process("vm").start(source="urn:imds-bridge:vm:vm").hours(1)
    process.start(name="web-0").hours(3)
    verdict = audit(tmp_path, process.events, "--now", iso(process.at))
    assert (verdict.code, verdict.kinds) == (0, [])


class MovingImds(ScriptedImds):
    """Answers with a part of the instance data at first, and then says that the VM has moved, every 700 s."""

    def instance(self, limit_seconds: float = 2.0) -> Vm:
        """Return what holds now."""
        super().instance(limit_seconds)
        began_at = self._moved.wall() - MovedClock().wall()
        names = [Vm(name="pool_24"), replace(WEB_0, scale_set="pool"), WEB_0, WEB_1]
        vm = names[min(int(began_at / 700), 3)]
        return replace(vm, vm_id=vm.vm_id and WEB_0.vm_id)


def test_a_vm_that_gets_another_name_has_stopped_under_the_old_one(tmp_path: Path) -> None:
    clock = MovedClock()
    station = Station(tmp_path / "state", MovingImds(clock), clock)
    while station.run(waits=3000).left:  # it ends by itself once the VM has another name
        station.restart()
    stopping, events = station.all_events()[-1], station.all_events()[:-1]
    station.close()
    assert stopping["data"]["Reason"] == "Stopping"
    assert len({event["source"] for event in events if "reporter" in event}) == 3
    verdict = audit(tmp_path, events, "--now", iso(clock.wall()))
    assert (verdict.code, verdict.kinds) == (0, [])
    with shown(tmp_path) as seen:
        for event in events:
            seen.add(json.dumps(event).encode(), at=datetime.fromisoformat(event["time"]))
        seen.clock.advance(clock.wall() - seen.clock.wall())
        found = [(vm.resource_id or vm.name, vm.watch, vm.missing) for vm in seen.vms()]
    assert sorted(found) == [
        (WEB_0.resource_id, "stopped", 0),
        (WEB_1.resource_id, "watched", 0),
        ("pool_24", "stopped", 0),
    ]


def test_a_vm_whose_arm_id_changes_its_letter_case_is_one_vm(tmp_path: Path) -> None:
    process = Process().start(forget=True).hours(1)
    process.start(source=process.source.upper(), forget=True).hours(9)
    assert audit(tmp_path, process.events, "--now", iso(process.at)).code == 0


def test_a_loss_is_missing_until_it_is_accepted(tmp_path: Path) -> None:
    process = Process().start()
    first, second = process.lose(sink="archive"), process.lose(None)
    events = process.stop().events
    assert [one["id"] for one in audit(tmp_path, events).of("loss")] == [first, second]
    assert [one["id"] for one in audit(tmp_path, events, "--accept", first).report["missing"]] == [second]
    done = audit(tmp_path, events, "--accept", first, "--accept", second)
    assert done.code == 0
    assert sum("accepted: " in note for note in done.report["remarks"]) == 2


def test_what_a_loss_leaves_behind_can_be_accepted_too(tmp_path: Path) -> None:
    process = Process().start()
    lost = only(process.change())
    gap, run = f"{process.epoch}:2-3", process.hours(2).epoch
    rest = [one for one in process.events if one["id"] != lost]
    rest = [one for one in rest if one.get("reporterseq", "")[-1:] not in ("2", "3")]
    process.start()
    whole = process.hours(1).epoch
    process.start().stop()
    rest += process.events[-2:]
    verdict = audit(tmp_path, rest)
    assert {one["id"] for one in verdict.report["missing"]} == {gap, whole}
    assert run != whole
    assert audit(tmp_path, rest, "--accept", gap, "--accept", whole).code == 0


def test_a_loss_of_a_sink_that_is_not_this_archives_is_a_note(tmp_path: Path) -> None:
    process = Process().start()
    process.lose(sink="chat")
    process.stop()
    assert audit(tmp_path, process.events, "--sink", "chat").code == 3
    done = audit(tmp_path, process.events, "--sink", "archive")
    assert done.code == 0
    assert any("sink chat" in note for note in done.report["remarks"])
    process.lose(sink=None)
    assert audit(tmp_path, process.events, "--sink", "archive").kinds == ["loss"]


def test_a_process_that_dies_beside_a_living_one_of_its_vm_is_silent(tmp_path: Path) -> None:
    forward, listen = Process().start().hours(9), Process(role="listen").start().hours(2)
    events = [*forward.events, *listen.events, *Process("web-1").start().hours(9).events]
    assert [one["reporter"] for one in audit(tmp_path, events).of("silent")] == ["web-0/listen"]
    assert audit(tmp_path, events, "--gone", "*/listen").code == 0
    assert audit(tmp_path, events, "--gone", "*/resourceGroups/shop/*").code == 0


def test_ids_that_heartbeats_list_must_have_arrived_too(tmp_path: Path) -> None:
    process = Process().start().hours(2)
    process.events[-2]["data"]["CloudEventIds"] = ["a", "b"]
    process.events[-1]["data"]["CloudEventIds"] = ["c"]
    other = Process(group="office").start()
    other.change(["a", "c"])
    assert [one["id"] for one in audit(tmp_path, [*process.events, *other.events]).report["missing"]] == ["b"]


def test_a_chain_that_forks_has_a_note_and_one_last_run(tmp_path: Path) -> None:
    process = Process().start().hours(1)
    before = (process.epoch, process.number)
    process.start().hours(1)
    process.epoch, process.number = before
    process.start().hours(5)
    verdict = audit(tmp_path, process.events, "--now", iso(process.at))
    assert verdict.code == 0
    assert any("2 runs follow it" in note for note in verdict.report["remarks"])
    assert audit(tmp_path, process.events, "--now", iso(process.at + 2 * HOUR)).kinds == ["silent"]


@pytest.mark.parametrize(
    ("name", "ids"),
    [("web-1", ("", "")), ("web-0", ("a", "b")), ("web-1", ("a", ""))],
    ids=["names", "ids", "one id"],
)
@pytest.mark.parametrize("restarts", [False, True])
def test_since_accepts_the_run_that_was_under_way_of_each_vm_of_a_source(
    tmp_path: Path, name: str, ids: tuple[str, str], restarts: bool
) -> None:
    since, events, lost = iso(START + 1.5 * HOUR), [], set()
    for process in (Process("web-0", vm_id=ids[0]), Process(name, vm_id=ids[1])):
        process.start(source="urn:fleet").hours(1 if restarts else 3)
        process.at = START + 4 * HOUR
        process.start(source="urn:fleet").hours(1)
        events += [event for event in process.events if event["time"] > since]
        lost.add(process.start(source="urn:fleet").hours(1).epoch)
        events += process.start(source="urn:fleet").hours(1).events[-2:]
    missing = audit(tmp_path, events, "--since", since).report["missing"]
    assert ({one["id"] for one in missing}, len(missing)) == (lost, 2)


def test_since_excuses_the_run_before_the_first_one_and_no_later_one(tmp_path: Path) -> None:
    process = Process().start().hours(3)
    since = iso(START + 1.5 * HOUR)
    assert audit(tmp_path, process.events, "--since", since).report["reporters"][0]["first"] == 3
    rest = [one for one in process.events if one["time"] > since]
    lost = process.start().hours(1).epoch
    rest += process.start().hours(1).events[-2:]
    missing = audit(tmp_path, reversed(rest), "--since", since).report["missing"]
    assert [one["id"] for one in missing] == [lost]
    only = process.events[-2:]
    assert audit(tmp_path, only, "--since", since).code == 0


def test_a_run_has_its_own_name_although_the_next_one_arrives_first(tmp_path: Path) -> None:
    process = Process("vm").start(source="urn:imds-bridge:vm:vm").hours(1)
    process.start(name="web-0").hours(1)
    verdict = audit(tmp_path, reversed(process.events), "--expect", "vm/forward", "--expect", "web-0/forward")
    assert verdict.code == 0
    assert [one["reporter"] for one in verdict.report["reporters"]] == ["vm/forward", "web-0/forward"]


def test_a_run_whose_heartbeats_have_not_arrived_is_silent_after_an_hour_and_not_before(
    tmp_path: Path,
) -> None:
    process = Process().start()
    process.change()
    rest = process.events[1:]
    for hours, kinds in ((1, ["numbers"]), (2, ["numbers", "silent"])):
        assert audit(tmp_path, rest, "--now", iso(START + hours * HOUR)).kinds == kinds


def test_a_run_that_goes_on_after_its_end_is_not_over(tmp_path: Path) -> None:
    process = Process().start().stop()
    now = ["--now", iso(START + 2 * HOUR)]
    assert audit(tmp_path, process.events, *now).code == 0
    process.change()
    assert audit(tmp_path, process.events, *now).kinds == ["silent"]


def test_numbers_that_a_heartbeat_names_must_have_arrived(tmp_path: Path) -> None:
    process = Process().start().hours(1)
    process.events[-1]["data"]["LastReporterSeq"] = 5
    found = only(audit(tmp_path, process.events).of("numbers"))
    assert (found["first"], found["last"]) == (3, 5)
