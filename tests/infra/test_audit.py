"""The audit on a recorded story, and its exit codes."""

from __future__ import annotations

import random

import pytest

from tests.support.audit import Json, missing, recording, run_audit
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
    for _ in range(20):
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
