"""The audit on a recorded story, on values that nobody should send, and its exit codes."""

from __future__ import annotations

import copy
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.audit import Json, Process, audit, missing, recording, run_audit, write
from tests.support.only import only


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    return recording(tmp_path_factory.mktemp("recorded") / "state")


def test_each_event_that_is_removed_is_found_alone(recorded: list[Json]) -> None:
    assert len(recorded) > 40
    assert missing(recorded) == []
    for place, gone in enumerate(recorded):
        found = missing([*recorded[:place], *recorded[place + 1 :]])
        if place == len(recorded) - 1:  # the last Stopping, which no heartbeat follows
            assert found == []
        elif "reporterseq" in gone:
            number = int(gone["reporterseq"])
            one = only(one for one in found if one["kind"] != "event")
            expected = ("numbers", gone["reporterepoch"], number, number)
            assert (one["kind"], one["epoch"], one["first"], one["last"]) == expected
        else:
            assert [(one["kind"], one["id"]) for one in found] == [("event", gone["id"])]


def test_each_run_that_is_removed_is_found_as_far_as_a_later_one_names_it(recorded: list[Json]) -> None:
    epochs = list(dict.fromkeys(one["reporterepoch"] for one in recorded if "reporterepoch" in one))
    for epoch in epochs[:-1]:
        own = [one for one in recorded if one.get("reporterepoch") == epoch]
        found = missing([one for one in recorded if one not in own])
        runs = [(one["kind"], one["epoch"], one["last"]) for one in found if one["kind"] != "event"]
        assert runs == [("run", epoch, len(own))]
    rest = [one for one in recorded if one.get("reporterepoch") != epochs[-1]]
    assert [one["kind"] for one in missing(rest)] == []


def test_order_and_duplicates_change_nothing(recorded: list[Json]) -> None:
    rng = random.Random(1)  # noqa: S311 - repeatable
    for _ in range(80):
        shuffled = [*recorded, *rng.sample(recorded, 9)]
        rng.shuffle(shuffled)
        assert missing(shuffled) == []


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ([], 2, "give --topic and --subscription, or --file"),
        (["--file", "/no/such/file"], 1, "audit: cannot read: FileNotFoundError"),
    ],
)
def test_an_error_is_reported_with_its_exit_code(arguments: list[str], code: int, expected: str) -> None:
    done = run_audit(*arguments)
    assert (done.code, expected in done.err) == (code, True), done


# --- values that nobody should send ---

VALUES = [None, True, -1, 1.5, 10**30, "", "x", "1e3", "12 ", "\ud800", [], [1], [None], {}, {"a": 1}]


def history() -> list[Json]:
    """Return a run that follows another, with one event of each kind that the audit reads."""
    process = Process().start()
    process.change()
    process.lose(0)
    process._own("imds.recovered", BlindFrom=None, BlindTo="2026-11-20T12:16:00.500Z")
    return process.stop().start().hours(1).stop().events


@pytest.mark.parametrize("number", [None, "17", -1, 1.5, True])
def test_a_start_whose_number_of_the_run_before_is_none_cannot_be_read(tmp_path: Path, number: Any) -> None:
    events = history()
    second = only(one for one in events if one["data"].get("PreviousEpoch"))
    second["data"]["PreviousLastReporterSeq"] = number
    verdict = audit(tmp_path, events)
    assert verdict.code == 3
    assert "PreviousLastReporterSeq" in verdict.of("unreadable")[0]["what"]


@pytest.mark.parametrize(
    "at", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "yesterday", 5, None]
)
def test_a_time_that_is_none_cannot_be_read(tmp_path: Path, at: Any) -> None:
    events = history()
    events[-1]["time"] = at
    verdict = audit(tmp_path, events)
    assert (verdict.code, verdict.kinds[0]) == (3, "unreadable")


def test_no_value_of_any_property_ends_the_audit(tmp_path: Path) -> None:
    events = history()
    changed: list[Json] = []
    for event in events:
        places = [(name,) for name in event] + [("data", name) for name in event["data"]]
        for place in places:
            for value in VALUES:
                one = copy.deepcopy(event)
                (one["data"] if place[1:] else one)[place[-1]] = value
                changed.append(one)
    assert audit(tmp_path, [*events, *changed], "--state", tmp_path / "state").code == 3


@pytest.mark.parametrize("line", ["x", "[]", "1", '"a"', "null", "{}", "[" * 100_000, '{"type": 1}', "\x00"])
def test_a_line_that_is_no_event_cannot_be_read_and_can_be_accepted(tmp_path: Path, line: str) -> None:
    file = write(tmp_path / "events.jsonl", history())
    first, *others = file.read_text().splitlines()
    file.write_text("\n".join([first, line, *others, ""]))
    done = run_audit("--file", file, "--json")
    assert (done.code, done.err) == (3, "")
    found = only(json.loads(done.out)["missing"])
    assert found["kind"] == "unreadable"
    assert f"byte {len(first) + 1} of" in found["what"]
    assert run_audit("--file", file, "--accept", found["id"]).code == 0


@pytest.mark.parametrize(
    "content", [b"x\n", b"[]\n", b"null\n", b"PK\x03\x04\n" * 99, "{}\n".encode("utf-16")]
)
def test_a_file_that_begins_with_no_event_is_refused_and_changes_nothing(
    tmp_path: Path, content: bytes
) -> None:
    file, state = write(tmp_path / "events.jsonl", history()), tmp_path / "state"
    whole = file.read_bytes()
    file.write_bytes(content)
    done = run_audit("--file", file, "--state", state)
    assert (done.code, done.out) == (1, "")
    assert "is no JSON object, expected a CloudEvent in each line" in done.err
    file.write_bytes(whole)
    assert run_audit("--file", file, "--state", state).code == 0


def test_a_file_is_read_as_gzip_has_packed_it_and_one_that_was_cut_is_refused(tmp_path: Path) -> None:
    file, state = write(tmp_path / "events.jsonl", history()), tmp_path / "state"
    packed = file.with_name("events.jsonl.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    plain = run_audit("--file", file, "--json")
    assert run_audit("--file", packed, "--json").out == plain.out
    content = packed.read_bytes()
    packed.write_bytes(content[: len(content) // 2])
    assert run_audit("--file", packed, "--state", state).code == 1
    packed.write_bytes(content)
    for _ in range(2):
        assert run_audit("--file", packed, "--state", state).code == 0
