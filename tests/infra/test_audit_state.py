"""The audit that remembers: it reads only what is new, and says what a whole one says."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random

import pytest

from infra.consumers.audit.audit import Audit, read_file
from tests.support.audit import START, Done, Json, Process, fleet, iso, recording, run_audit, tampered, write

TRIALS = int(os.environ.get("TEST_AUDIT_TRIALS", "30"))
SEED = int(os.environ.get("TEST_AUDIT_SEED", "0")) or int.from_bytes(os.urandom(4))


def verdict(file: Path, state: Path | None, since: float | None) -> Json:
    """Return all that the verdict of an audit depends on."""
    with closing(Audit(state, since)) as audit:
        read_file(audit, file)
        missing = audit.missing(None, [], ["web-0/forward"])
        audit.save()
        return {"missing": missing, "events": audit.events, "duplicates": audit.duplicates}


def again(file: Path, *arguments: str) -> Done:
    """Audit a file with the state beside it."""
    return run_audit("--file", file, "--state", file.parent / "state", *arguments)


@pytest.mark.parametrize("trial", range(TRIALS))
def test_an_audit_of_what_is_new_finds_what_a_whole_one_finds_at_every_prefix(
    tmp_path: Path, trial: int
) -> None:
    rng = Random(f"{SEED}/{trial}")  # noqa: S311 - repeatable
    events = tampered(rng, fleet() if trial % 4 else recording(tmp_path / "recording"))
    content = b"".join(json.dumps(one).encode() + b"\n" for one in [*events, {"type": 1}, *events[:5]])
    since = rng.choice([None, START + 3600])
    file, position = tmp_path / "archive.jsonl", 0
    while position < len(content):
        position = min(len(content), position + rng.randrange(1, len(content) // 4))
        file.write_bytes(content[:position])
        new, whole = (verdict(file, state, since) for state in (tmp_path / "state", None))
        assert new == whole, f"TEST_AUDIT_SEED={SEED}"


def test_a_second_audit_reads_nothing_again(tmp_path: Path) -> None:
    process = Process().start().hours(1)
    file = write(tmp_path / "archive.jsonl", process.events)
    first, second = (json.loads(again(file, "--json").out) for _ in range(2))
    assert (first["events"], len(first["reporters"])) == (2, 1)
    assert (second["events"], second["duplicates"], second["reporters"]) == (2, 0, [])
    write(file, process.start().events)
    third = json.loads(again(file, "--json").out)
    assert (third["events"], third["missing"]) == (3, [])
    assert any("was killed after number 2" in note for note in third["remarks"])


def test_a_loss_stays_missing_in_later_audits_until_it_is_accepted(tmp_path: Path) -> None:
    process = Process().start()
    name = process.lose()
    file = write(tmp_path / "archive.jsonl", process.events)
    for accepted, code in (([], 3), ([], 3), ([f"--accept={name}"], 0)):
        assert again(file, *accepted).code == code
    listed = tmp_path / "accepted.txt"
    listed.write_text(f"--accept={name}\n")
    assert again(file, f"@{listed}").code == 0


def test_a_last_line_that_is_being_written_is_left_for_the_next_audit(tmp_path: Path) -> None:
    process = Process().start().hours(1)
    file = write(tmp_path / "archive.jsonl", process.events)
    whole = file.read_bytes()
    for size, events in ((-50, 1), (-1, 2), (None, 2)):
        file.write_bytes(whole[:size])
        done = again(file)
        assert done.code == 0
        assert f"complete, {events} events" in done.out
        assert ("is not complete: it was left out" in done.out) == (events == 1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [("short\n", "is not the file that the state has read"), ("x" * 9999, "is not the file")],
)
def test_another_file_in_the_place_of_one_that_was_read_is_refused(
    tmp_path: Path, content: str, expected: str
) -> None:
    file = write(tmp_path / "archive.jsonl", Process().start().events)
    assert again(file).code == 0
    file.write_text(content)
    done = again(file)
    assert (done.code, done.out) == (1, "")
    assert expected in done.err


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_file_that_was_written_anew_with_one_event_missing_is_refused(tmp_path: Path, version: int) -> None:
    process, state = Process().start().hours(9), tmp_path / "state"
    file = write(tmp_path / "archive.jsonl", process.events)
    assert again(file).code == 0
    content = file.read_bytes()
    if version < 3:  # as this program kept it once
        with closing(sqlite3.connect(state)) as database:
            database.execute("ALTER TABLE runs DROP COLUMN heartbeat")
            if version == 1:
                database.execute("UPDATE inputs SET tail = ?", (content[-64:],))
                database.execute("ALTER TABLE runs DROP COLUMN vm_id")
            database.execute(f"PRAGMA user_version = {version}")
            database.commit()
        assert again(file).code == 0
    lines = content.splitlines(keepends=True)
    lines[3] = b" " * (len(lines[3]) - 1) + b"\n"
    file.write_bytes(b"".join(lines))
    done = again(file)
    assert (done.code, done.out) == (1, "")
    assert "is not the file that the state has read" in done.err


def test_a_file_for_each_day_is_read_with_one_state(tmp_path: Path) -> None:
    process = Process().start().hours(1)
    first = write(tmp_path / "1.jsonl", process.events)
    assert again(first).code == 0
    second = write(tmp_path / "2.jsonl", process.hours(2).events[2:])
    done = again(second)
    assert done.code == 0
    assert "complete, 4 events" in done.out


def test_a_state_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    file, state = write(tmp_path / "archive.jsonl", Process().start().events), tmp_path / "state"
    state.write_text("this is the archive, given as the state by mistake" * 100)
    done = again(file)
    assert (done.code, "not a database" in done.err) == (1, True)
    state.unlink()
    since = ["--since", iso(START - 60)]
    assert again(file, *since).code == 0
    assert again(file).code == 0
    done = again(file, "--since", iso(START))
    assert (done.code, "was begun with --since 2026-11-20T11:59:00Z" in done.err) == (2, True)


def test_an_audit_that_fails_leaves_the_state_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0.0))
    file, state = write(tmp_path / "archive.jsonl", Process().start().events), tmp_path / "state"
    with closing(Audit(state)) as audit:
        read_file(audit, file)
        audit.store()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            Audit(state)
    done = again(file)
    assert "complete, 1 events" in done.out
