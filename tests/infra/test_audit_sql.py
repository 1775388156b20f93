"""The audit as SQL on DuckDB: its verdict is that of audit.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from random import Random

import duckdb
import pytest

from infra.consumers.audit.audit import seconds
from tests.support.audit import HOUR, START, Json, fleet, iso, missing, recording, tampered, write
from tests.support.consumers import CONSUMERS

TRIALS = int(os.environ.get("TEST_AUDIT_TRIALS", "30"))
SEED = int(os.environ.get("TEST_AUDIT_SEED", "0")) or int.from_bytes(os.urandom(4))
FOLDER = CONSUMERS / "audit"

Items = set[tuple[str, str, str]]


def by_sql(file: Path, checked_at: str | None = None) -> Items:
    """Return what the SQL finds in a file: the kind, id and epoch of each."""
    load, query = ((FOLDER / name).read_text(encoding="utf-8") for name in ("load-duckdb.sql", "audit.sql"))
    if checked_at:
        query = query.replace("CAST(NULL AS DOUBLE) AS checked_at", f"{seconds(checked_at)} AS checked_at")
    with duckdb.connect() as database:
        database.execute(load.replace("'events.jsonl'", f"'{file}'"))
        rows = database.execute(query).fetchall()
    assert len(rows) == len(set(rows))
    return {(kind, name, "" if kind == "event" else epoch) for kind, name, _, epoch in rows}


def by_script(events: Iterable[Json], checked_at: str | None = None) -> Items:
    """Return what audit.py finds."""
    return {
        (one["kind"], one.get("id") or one["source"].lower(), "" if one["kind"] == "event" else one["epoch"])
        for one in missing(events, checked_at)
    }


@pytest.mark.parametrize("trial", range(TRIALS))
def test_the_sql_finds_what_the_script_finds(tmp_path: Path, trial: int) -> None:
    rng = Random(f"{SEED}/{trial}")  # noqa: S311 - repeatable
    events = tampered(rng, fleet() if trial % 4 else recording(tmp_path / "recording"))
    file = write(tmp_path / "events.jsonl", events)
    for checked_at in (None, iso(START + rng.randrange(100) * HOUR)):
        assert by_sql(file, checked_at) == by_script(events, checked_at), f"TEST_AUDIT_SEED={SEED}"


def test_what_is_tampered_with_is_found_at_all(tmp_path: Path) -> None:
    events = fleet()
    epoch = next(one["data"]["PreviousEpoch"] for one in events if one["data"].get("PreviousEpoch"))
    (listed, *_) = next(one["data"]["CloudEventIds"] for one in events if "CloudEventIds" in one["data"])
    rest = [one for one in events if one.get("reporterepoch") != epoch and one["id"] != listed]
    rest = [one for one in rest if one.get("reporterseq") != "000000000002"]
    found = by_sql(write(tmp_path / "events.jsonl", rest), iso(START + 400 * HOUR))
    assert {kind for kind, _, _ in found} == {"run", "numbers", "silent", "event", "loss"}


@pytest.mark.parametrize(
    "line", ["x", "[]", "5", '{"data": 5}', '{"data": {"CloudEventIds": "a"}}', '{"type":']
)
def test_the_loader_fails_on_a_line_that_it_cannot_read(tmp_path: Path, line: str) -> None:
    file = write(tmp_path / "events.jsonl", fleet())
    file.write_text(f"{file.read_text()}{line}\n")
    with pytest.raises(duckdb.Error):
        by_sql(file)


def malformed() -> Iterable[tuple[str, Json]]:
    events = fleet()
    second = next(one for one in events if one["data"].get("PreviousEpoch"))
    yield "PreviousLastReporterSeq", {**second, "data": {**second["data"], "PreviousLastReporterSeq": None}}
    yield "LastReporterSeq", {**second, "data": {**second["data"], "LastReporterSeq": -1}}
    yield from (
        (name, {**second, name: None}) for name in ("type", "id", "source", "reporterepoch", "time", "data")
    )
    yield "reporterseq", {**second, "reporterseq": "x"}
    yield "number", {**second, "reporterseq": "000000000000"}


@pytest.mark.parametrize(("name", "event"), [*malformed()])
def test_a_malformed_event_is_unreadable_for_both(tmp_path: Path, name: str, event: Json) -> None:
    events = [*fleet(), event]
    assert "unreadable" in {one["kind"] for one in missing(events)}
    found = by_sql(write(tmp_path / "events.jsonl", events))
    assert "unreadable" in {kind for kind, _, _ in found}, (name, json.dumps(event))
