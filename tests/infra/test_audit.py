"""The audit as a process: on the lab's bus with real forwarders, and on exported events."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from tests.support.bus import Sender, command
from tests.support.clock import MovedClock
from tests.support.consumers import ALL, APPROVALS, TOPIC, Listen, bus_config, run_script, settings
from tests.support.forward import Station
from tests.support.imds import ScriptedImds
from tests.support.imds_lab import ImdsLab
from tests.support.outbox import failing_disk
from tests.support.paths import ROOT
from tests.support.process import Forward, wait_until
from tests.support.servicebus import ServiceBusLab

PREFIX = "io.imdsbridge."
SPEC = spec_from_file_location("audit_script", ROOT / "infra/consumers/audit/audit.py")
assert SPEC
assert SPEC.loader
script = sys.modules["audit_script"] = module_from_spec(SPEC)
SPEC.loader.exec_module(script)
EPOCH = "0123456789abcdef0123456789abcdef"
BUS = ["--topic", TOPIC, "--subscription", ALL]

Json = dict[str, Any]


def audit(*arguments: str | Path, connection_string: str = "") -> tuple[int, str]:
    env = {"SERVICEBUS_CONNECTION_STRING": connection_string} if connection_string else {}
    done = run_script("audit/audit.py", *arguments, env=env)
    assert done.stderr == ""
    return done.returncode, done.stdout


def audit_lines(folder: Path, lines: list[Json], *arguments: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines of the report on some events."""
    file = folder / "events.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, report = audit("--file", file, *arguments)
    return code, report.splitlines()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceBusLab, list[Json]]]:
    """Return the bus and its events after two VMs of a group have had a few events and stopped."""
    folder = tmp_path_factory.mktemp("story")
    with ExitStack() as stack:
        imds = stack.enter_context(ImdsLab(vms=("web-0", "web-1"), rate_limit=None))
        bus = stack.enter_context(ServiceBusLab(bus_config()))
        topic, subscription = bus.entity(TOPIC), bus.entity(f"{TOPIC}/Subscriptions/{ALL}")
        forwards = [Forward(folder / vm, settings(imds, bus, vm)) for vm in ("web-0", "web-1")]
        listen = Listen(folder / "listen", settings(imds, bus))
        processes = [stack.enter_context(process) for process in (*forwards, listen)]

        def wait_for(kind: str, count: int) -> None:
            def found() -> bool:
                return (
                    sum(message.subject == f"{PREFIX}{kind}.v1" for message in subscription.messages) >= count
                )

            wait_until(found, describe=lambda: processes)

        wait_for("document.changed", 2)
        event = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)
        wait_for("document.changed", 4)
        sender = stack.enter_context(Sender(bus, APPROVALS))
        sender.send(command(event, session="lab.web-0"))
        wait_for("approval.accepted", 1)
        wait_for("document.changed", 6)
        sender.send(command(event, session="lab.web-0", Vm="web-9"))
        wait_for("approval.rejected", 1)
        imds.complete(event)
        wait_for("document.changed", 8)
        wait_for("bridge.heartbeat", 3)
        for process in processes:
            assert process.stop() == 0, process
        wait_for("bridge.heartbeat", 6)
        assert topic.counts.duplicates >= 3  # one copy of each scheduledevent is left
        assert bus.failures == ()
        yield bus, [json.loads(message.body) for message in subscription.messages]


def last_of(lines: list[Json], kind: str) -> Json:
    return [line for line in lines if line["type"] == f"{PREFIX}{kind}.v1"][-1]


def own_event(number: int, kind: str, **data: Any) -> Json:
    """Return one of db-0's own events, an hour after the one before; `at` and the like override attributes."""
    attributes: Json = {
        name: data.pop(name) for name in ("reporter", "reporterepoch", "time") if name in data
    }
    at = datetime.now(UTC).replace(hour=0) + timedelta(hours=number)
    return {
        "specversion": "1.0",
        "id": f"{attributes.get('reporter', '')}{attributes.get('reporterepoch', '')}{number}",
        "type": f"{PREFIX}{kind}.v1",
        "time": at.isoformat(),
        "reporter": "db-0/forward",
        "reporterepoch": EPOCH,
        "reporterseq": f"{number:012d}",
        **attributes,
        "data": data,
    }


def heartbeat(number: int, reason: str = "Hourly", **more: Any) -> Json:
    return own_event(number, "bridge.heartbeat", Reason=reason, LastReporterSeq=number, **more)


def test_behind_duplicate_detection_two_vms_and_a_listener_are_complete(
    story: tuple[ServiceBusLab, list[Json]],
) -> None:
    bus, lines = story
    expected = f"audit: complete, {len(lines)} events from 3 reporters"
    for _ in range(2):  # peeking changes nothing
        code, report = audit(*BUS, connection_string=bus.connection_string)
        assert (code, report.splitlines()[-1]) == (0, expected), report
    scheduled = [line["id"] for line in lines if ".scheduledevent." in line["type"]]
    assert len(scheduled) == len(set(scheduled)) == 3
    code, report = audit(*BUS, "--json", connection_string=bus.connection_string)
    summary = json.loads(report)
    assert (summary["complete"], summary["duplicates"], summary["missing"]) == (True, 0, [])
    assert [row["reporter"] for row in summary["reporters"]] == [
        "web-0/forward",
        "web-0/listen",
        "web-1/forward",
    ]
    assert {row["first"] for row in summary["reporters"]} == {1}


@pytest.mark.parametrize(
    "kind",
    [
        "document.changed",
        "scheduledevent.scheduled",
        "scheduledevent.started",
        "scheduledevent.completed",
        "approval.accepted",
        "approval.rejected",
    ],
)
def test_a_message_that_is_missing_is_named(
    tmp_path: Path, story: tuple[ServiceBusLab, list[Json]], kind: str
) -> None:
    _, lines = story
    gone = last_of(lines, kind)
    documents = [line for line in lines if gone["id"] in line["data"].get("CloudEventIds", ())]
    code, report = audit_lines(tmp_path, [line for line in lines if line is not gone])
    named = [line for line in report if line.startswith("missing: ")]
    if documents:
        first = documents[0]
        expected = (
            f"CloudEvent {gone['id']}, listed by document {int(first['reporterseq'])} of {first['reporter']}"
        )
        assert named == [f"missing: {expected} {first['reporterepoch']}"]
    else:
        number = int(gone["reporterseq"])
        expected = f"missing: {gone['reporter']} {gone['reporterepoch']}: numbers {number} to {number}"
        assert named == [expected]
    total = f"{len(lines) - 1} events from 3 reporters"
    assert (code, report[-1]) == (3, f"audit: INCOMPLETE, 1 missing of {total}")


def test_duplicates_are_counted_and_change_nothing(
    tmp_path: Path, story: tuple[ServiceBusLab, list[Json]]
) -> None:
    _, lines = story
    code, report = audit_lines(tmp_path, [*lines, *reversed(lines)])
    assert code == 0
    assert f"note: {len(lines)} duplicates" in report


# One event, or one run, that is missing


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    """Return the events of four runs of a forwarder: stopped, killed, killed after a failure of the disk, stopped."""
    clock = MovedClock()
    imds = ScriptedImds(clock)
    station = Station(tmp_path_factory.mktemp("recorded") / "state", imds, clock)
    with failing_disk() as disk:
        for number in range(4):
            imds.schedule(f"event-{number}")
            station.identity.emit_started()
            for change in (imds.start, imds.end):
                station.poll_for(3)
                change(f"event-{number}")
            if number == 2:
                disk.fail()
            station.poll_for(3)
            clock.advance(3600)
            station.identity.emit_heartbeat()
            station.poll()
            if number == 2:
                disk.recover()
                station.outbox.recover()
            if number in (0, 3):
                station.identity.emit_stopping()
            station.restart(after=1)
    lines = station.all_events()
    station.close()
    return lines


def found_in(lines: list[Json], *, since: str = "") -> list[Json]:
    """Return what the audit of some events finds missing."""
    audit_ = script.Audit(since=script.seconds(since) if since else 0.0)
    for number, line in enumerate(lines):
        audit_.add(json.dumps(line).encode(), f"event {number}")
    found: list[Json] = audit_.missing(audit_.latest, [], [])
    return found


def test_each_event_that_is_removed_is_found_alone(recorded: list[Json]) -> None:
    assert len(recorded) > 40
    assert found_in(recorded) == []
    for place, gone in enumerate(recorded):
        found = found_in([*recorded[:place], *recorded[place + 1 :]])
        if (
            place == len(recorded) - 1
        ):  # the Stopping heartbeat of the last run: what follows the last heartbeat
            assert found == []
        elif "reporterseq" in gone:
            number = int(gone["reporterseq"])
            (one,) = [one for one in found if one["kind"] != "event"]
            assert (one["kind"], one["epoch"], one["first"], one["last"]) == (
                *("numbers", gone["reporterepoch"]),
                *(number, number),
            )
        else:
            assert [(one["kind"], one["id"]) for one in found] == [("event", gone["id"])]


def test_each_run_that_is_removed_is_found_as_far_as_a_later_one_names_it(recorded: list[Json]) -> None:
    epochs = list(dict.fromkeys(one["reporterepoch"] for one in recorded if "reporterepoch" in one))
    for epoch in epochs[:-1]:
        own = [one for one in recorded if one.get("reporterepoch") == epoch]
        found = found_in([one for one in recorded if one not in own])
        runs = [(one["kind"], one["epoch"], one["last"]) for one in found if one["kind"] != "event"]
        assert runs == [("run", epoch, len(own))]
    rest = [one for one in recorded if one.get("reporterepoch") != epochs[-1]]
    assert [one["kind"] for one in found_in(rest)] == []


def test_order_and_duplicates_change_nothing(recorded: list[Json]) -> None:
    rng = random.Random(1)  # noqa: S311 - repeatable
    for _ in range(20):
        shuffled = [*recorded, *rng.sample(recorded, 9)]
        rng.shuffle(shuffled)
        assert found_in(shuffled) == []


def test_runs_that_were_killed_are_named(tmp_path: Path, recorded: list[Json]) -> None:
    code, report = audit_lines(tmp_path, recorded)
    assert code == 0
    epochs = list(dict.fromkeys(one["reporterepoch"] for one in recorded if "reporterepoch" in one))
    lasts = [sum(one.get("reporterepoch") == epoch for one in recorded) for epoch in epochs]
    assert [line for line in report if "was killed" in line] == [
        f"note: web-0/forward {epoch}: was killed after number {last}"
        for epoch, last in zip(epochs[1:3], lasts[1:3], strict=True)
    ]
    assert (
        f"note: web-0/forward {epochs[0]}: started about {started_at(recorded)} without a run before it"
        in report
    )


def started_at(lines: list[Json]) -> str:
    return str(script.iso(script.seconds(lines[0]["time"])))


def test_a_restored_copy_is_noted_and_no_false_alarm(tmp_path: Path, recorded: list[Json]) -> None:
    epochs = list(dict.fromkeys(one["reporterepoch"] for one in recorded if "reporterepoch" in one))
    restored = []
    for one in recorded:
        if (
            one.get("reporterepoch") == epochs[3]
        ):  # it goes on after the first run, as from a copy of its state
            first_last = sum(line.get("reporterepoch") == epochs[0] for line in recorded)
            data = {**one["data"]}
            if data.get("Reason") == "Started":
                data |= {"PreviousEpoch": epochs[0], "PreviousLastReporterSeq": first_last}
            restored.append({**one, "data": data})
        else:
            restored.append(one)
    code, report = audit_lines(tmp_path, restored)
    assert code == 0, report
    assert any(f"{epochs[0]}: 2 runs follow it" in line for line in report)
    assert any(f"{epochs[2]}: no run follows it" in line for line in report)


def test_a_jump_of_the_clock_is_no_loss(tmp_path: Path, recorded: list[Json]) -> None:
    epochs = list(dict.fromkeys(one["reporterepoch"] for one in recorded if "reporterepoch" in one))
    jumped = [
        {**one, "time": one["time"].replace("2027-", "2020-")}
        if one.get("reporterepoch") == epochs[2]
        else one
        for one in recorded
    ]
    assert jumped != recorded
    assert audit_lines(tmp_path, jumped)[0] == 0


def test_since_leaves_out_what_was_under_way_and_nothing_later(recorded: list[Json]) -> None:
    epochs = list(dict.fromkeys(one["reporterepoch"] for one in recorded if "reporterepoch" in one))
    second = [one for one in recorded if one.get("reporterepoch") == epochs[1]]
    since = second[2]["time"]
    late = [one for one in recorded if one["time"] >= since]
    assert found_in(late) != []
    assert found_in(late, since=since) == []
    assert found_in([one for one in late if one is not second[4]], since=since) != []
    gone = [one for one in late if one.get("reporterepoch") != epochs[2]]
    assert [one["epoch"] for one in found_in(gone, since=since) if one["kind"] == "run"] == [epochs[2]]


def test_a_kill_in_memory_mode_is_reported_by_the_run_after_it(tmp_path: Path) -> None:
    clock = MovedClock()
    imds = ScriptedImds(clock)
    station = Station(tmp_path / "state", imds, clock)
    with failing_disk() as disk:
        station.run(waits=1)
        station.restart(after=1)
        station.identity.emit_started()
        station.poll()
        before = station.all_events()
        disk.fail()
        imds.schedule()
        station.poll()
        lost = station.all_events()[len(before) :]
        disk.recover()
        shutil.copytree(station.folder, tmp_path / "killed")
        station.close()
    again = Station(tmp_path / "killed", imds, clock)
    again.run(waits=1)
    lines = again.all_events()
    again.close()
    assert lost
    (found,) = found_in(lines)
    assert (found["kind"], found["count"]) == ("loss", None)
    code, report = audit_lines(tmp_path, lines)
    assert (code, sum("was killed after number" in line for line in report)) == (3, 1)


# Numbers


def test_numbers_known_only_from_a_heartbeat_are_missing(tmp_path: Path) -> None:
    late = heartbeat(3)
    late["data"]["LastReporterSeq"] = 5
    _, report = audit_lines(tmp_path, [late])
    assert f"missing: db-0/forward {EPOCH}: numbers 1 to 2" in report
    assert f"missing: db-0/forward {EPOCH}: numbers 4 to 5" in report


def test_numbers_may_come_in_any_order(tmp_path: Path) -> None:
    numbers = [4, 2, 9, 7, 8, 1, 3, 6, 2, 5]
    code, report = audit_lines(tmp_path, [heartbeat(number) for number in numbers])
    assert (code, report[-1]) == (0, "audit: complete, 9 events from 1 reporters")
    assert "note: 1 duplicates" in report


def test_a_reporter_without_heartbeats_is_missing_unless_it_stopped_or_is_known_to_be_gone(
    tmp_path: Path,
) -> None:
    lines = [heartbeat(1), *(heartbeat(number, reporter="web-0/forward") for number in (1, 2, 3, 4))]
    code, report = audit_lines(tmp_path, lines)
    assert code == 3
    assert sum(line.startswith(f"missing: db-0/forward {EPOCH}: no heartbeat since") for line in report) == 1
    assert audit_lines(tmp_path, lines, "--gone", "db-*")[0] == 0
    assert audit_lines(tmp_path, [*lines, heartbeat(2, "Stopping")])[0] == 0
    assert (
        audit_lines(tmp_path, [*lines, heartbeat(2, "Stopping"), heartbeat(3)], "--now", "2100-01-01")[0] == 3
    )


def test_since_ignores_earlier_numbers_but_knows_earlier_events(tmp_path: Path) -> None:
    at = "2026-01-02T03:04:05Z"
    listing = own_event(4, "document.changed", CloudEventIds=["a"], time="2026-01-02T03:04:06Z")
    old = own_event(2, "document.changed", CloudEventIds=["b"], time="2026-01-02T03:00:00Z")
    copy = {"type": f"{PREFIX}scheduledevent.scheduled.v1", "id": "a", "time": "2026-01-02T03:04:04Z"}
    assert audit_lines(tmp_path, [old, copy, listing])[0] == 3
    assert audit_lines(tmp_path, [old, copy, listing], "--since", at)[0] == 0


def test_a_time_without_imds_is_noted(tmp_path: Path) -> None:
    recovered = own_event(
        2, "imds.recovered", BlindFrom="2026-01-01T00:00:00Z", BlindTo="2026-01-01T00:05:00Z"
    )
    code, report = audit_lines(tmp_path, [heartbeat(1), recovered])
    assert code == 0
    assert (
        "note: db-0/forward could not reach IMDS from 2026-01-01T00:00:00Z to 2026-01-01T00:05:00Z" in report
    )


def test_a_loss_makes_it_incomplete_unless_nothing_was_lost(tmp_path: Path) -> None:
    times = {"OldestTime": "2026-01-01T00:00:00Z", "NewestTime": None}
    none = own_event(2, "bridge.loss", Reason="StateFolderGone", Count=0, Sink=None, **times)
    assert audit_lines(tmp_path, [heartbeat(1), none])[0] == 0
    some = own_event(2, "bridge.loss", Reason="SizeLimit", Count=3, Sink="ops", **times)
    code, report = audit_lines(tmp_path, [heartbeat(1), some])
    assert code == 3
    lost = "3 events lost from 2026-01-01T00:00:00Z to unknown (SizeLimit; sink ops)"
    assert f"missing: db-0/forward {EPOCH}: {lost}" in report


def test_what_cannot_be_read_and_who_is_not_there_make_it_incomplete(tmp_path: Path) -> None:
    odd = {"type": f"{PREFIX}bridge.heartbeat.v1", "reporter": "db-0/forward"}
    code, report = audit_lines(tmp_path, [heartbeat(1), odd, {"type": f"{PREFIX}bridge.test.v1", "data": {}}])
    assert (code, report[-2]) == (3, "missing: cannot be read: event 2: KeyError('reporterepoch')")
    code, report = audit_lines(tmp_path, [heartbeat(1), {**heartbeat(1), "reporterseq": "-1"}])
    assert (code, report[-2]) == (3, "missing: cannot be read: event 2: ValueError('reporterseq -1')")
    code, report = audit_lines(tmp_path, [heartbeat(1)], "--expect", "db-1/forward")
    assert (code, report[-2]) == (3, "missing: db-1/forward: no event has arrived")
    code, report = audit_lines(tmp_path, [])
    assert (code, report[-1]) == (3, "audit: INCOMPLETE, nothing was read: 0 events from 0 reporters")


def test_consumed_messages_are_in_the_archive_and_the_whole_archive_is_audited(tmp_path: Path) -> None:
    archive, at = tmp_path / "archive.jsonl", datetime.now(UTC).isoformat()
    with ServiceBusLab(bus_config()) as bus:
        for numbers in ([1, 2], [3]):
            put(bus, [heartbeat(number, time=at) for number in numbers])
            code, report = audit(*BUS, "--consume", archive, connection_string=bus.connection_string)
            assert (code, bus.entity(f"{TOPIC}/Subscriptions/{ALL}").counts.active) == (0, 0)
    assert report.splitlines()[-1] == "audit: complete, 3 events from 1 reporters"
    assert len(archive.read_text().splitlines()) == 3


def put(bus: ServiceBusLab, events: list[Json]) -> None:
    with (
        ServiceBusClient.from_connection_string(bus.connection_string) as client,
        client.get_topic_sender(TOPIC) as sender,
    ):
        messages = [
            ServiceBusMessage(json.dumps(event, indent=1), message_id=event["id"]) for event in events
        ]
        sender.send_messages(messages, timeout=30)


@pytest.mark.parametrize(
    ("arguments", "env", "code", "expected"),
    [
        ([], {}, 2, "give --topic and --subscription, or --file"),
        (BUS, {}, 2, "give --namespace, or SERVICEBUS_CONNECTION_STRING"),
        (BUS, {"SERVICEBUS_CONNECTION_STRING": "x"}, 1, "audit: cannot read: ValueError: Connection string"),
        (["--file", "/no/such/file"], {}, 1, "audit: cannot read: FileNotFoundError"),
    ],
)
def test_an_error_is_reported_with_its_exit_code(
    arguments: list[str], env: dict[str, str], code: int, expected: str
) -> None:
    done = run_script("audit/audit.py", *arguments, env=env)
    assert done.returncode == code
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
