"""What `imds-bridge outbox` does with the file of a process that runs beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bridge.errors import StateError, UsageError
from bridge.outbox import inspect as ledger
from bridge.outbox.outbox import EXPIRED, OVERFLOW, REJECTED, Outbox, dead_letter
from bridge.outbox.state_dir import StateFolder
from tests.support.outbox import ALL, commit, kill, open_outbox, waiting

OTHER_PROCESS = """
import json, sys
from pathlib import Path
from bridge.outbox import inspect
from bridge.outbox.state_dir import StateFolder

path, function, *arguments = sys.argv[1:]
print(json.dumps(getattr(inspect, function)(StateFolder(Path(path)), *map(json.loads, arguments))))
"""


def beside(path: Path, function: str, *arguments: object) -> object:
    """Call a function of the ledger in another process."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(path), function, *map(json.dumps, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def add_dead_letter(outbox: Outbox, reason: str = REJECTED, *, keep: bool = True, sink: str = "a") -> None:
    generation, page = outbox.pending(sink, 1)
    letter = dead_letter(sink, page[0], reason, f"it was {reason}", page[0].stored_at, keep=keep)
    outbox.acknowledge(sink, generation, page, dead_lettered=letter)


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    """Give an outbox in use, with one event that waits and three dead letters, one of them without its body."""
    with closing(open_outbox(tmp_path)) as made:
        commit(made, "1", "2", "3", "4")
        add_dead_letter(made)
        add_dead_letter(made, EXPIRED)
        add_dead_letter(made, OVERFLOW, keep=False)
        yield made


def test_the_newest_events_are_listed_beside_a_running_process(tmp_path: Path, outbox: Outbox) -> None:
    listed = beside(tmp_path, "newest", 3)
    assert isinstance(listed, list)
    assert [(event["seq"], event["id"]) for event in listed] == [(2, "2"), (3, "3"), (4, "4")]
    assert listed[0]["stored_at"] == "2027-01-15T08:00:00.000Z"
    assert listed[0]["bytes"] == len(outbox.pending("a", 1)[1][0].body)


def test_dead_letters_are_listed_with_their_reason(tmp_path: Path, outbox: Outbox) -> None:
    listed = beside(tmp_path, "dead_letters")
    assert isinstance(listed, list)
    assert [(d["sink"], d["id"], d["reason"], d["detail"], d["can_be_sent"], d["retry"]) for d in listed] == [
        ("a", "1", REJECTED, "it was rejected", True, False),
        ("a", "2", EXPIRED, "it was expired", True, False),
        ("a", "3", OVERFLOW, "it was overflow", False, False),
    ]
    assert beside(tmp_path, "dead_letters", "other") == []
    assert waiting(outbox) == ["4"]


def test_a_dead_letter_marked_by_another_process_is_given_out_at_once_and_settled(
    tmp_path: Path, outbox: Outbox
) -> None:
    first, second, without_body = (d["number"] for d in ledger.dead_letters(StateFolder(tmp_path)))
    assert beside(tmp_path, "mark", "mark-retry", [first, second, without_body, 99]) == 2
    assert [d["retry"] for d in ledger.dead_letters(StateFolder(tmp_path))] == [True, True, False]
    outbox.recover()
    assert [(number, event.id) for number, event in outbox.retries("a", 10)] == [(first, "1"), (second, "2")]
    outbox.settle_retry(first)
    outbox.settle_retry(second, detail="400 again")
    left = ledger.dead_letters(StateFolder(tmp_path))
    assert [(d["id"], d["retry"], d["detail"]) for d in left] == [
        ("2", False, "400 again"),
        ("3", False, "it was overflow"),
    ]


def test_a_dead_letter_dropped_by_another_process_is_gone(tmp_path: Path, outbox: Outbox) -> None:
    numbers = [d["number"] for d in ledger.dead_letters(StateFolder(tmp_path))]
    assert beside(tmp_path, "mark", "drop-dead-letter", numbers[:2]) == 2
    assert [d["number"] for d in ledger.dead_letters(StateFolder(tmp_path))] == numbers[2:]
    outbox.recover()
    assert outbox.dead_letter_counts() == {"a": 1}
    assert outbox.storage_error is None
    commit(outbox, "5")
    assert waiting(outbox) == ["4", "5"]


def test_an_event_is_shown_by_its_id_and_by_its_number(tmp_path: Path, outbox: Outbox) -> None:
    assert outbox.storage_error is None
    folder = StateFolder(tmp_path)
    assert ledger.show(folder, "2")["id"] == "2"
    assert beside(tmp_path, "show", "4") == ledger.show(folder, "4")


def test_an_event_that_is_left_only_as_a_dead_letter_is_shown_too(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, sinks={**ALL, "b": ALL["a"]}, retain_seconds=0)) as outbox:
        outbox.commit([], meta={})
        commit(outbox, "with body")
        add_dead_letter(outbox)
        add_dead_letter(outbox, OVERFLOW, keep=False, sink="b")
        outbox._clock.advance(1)  # type: ignore[attr-defined]
        outbox.prune()
        assert ledger.newest(StateFolder(tmp_path), 5) == []
        assert ledger.show(StateFolder(tmp_path), "with body")["id"] == "with body"


@pytest.mark.parametrize("which", ["nothing", "\u00b2", "9" * 30, "-1", ""])
def test_an_event_that_is_not_there_is_a_mistake_in_the_call(
    tmp_path: Path, outbox: Outbox, which: str
) -> None:
    assert outbox.storage_error is None
    with pytest.raises(UsageError, match="no such event"):
        ledger.show(StateFolder(tmp_path), which)


def test_a_folder_without_an_outbox_is_a_mistake_in_the_call(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no outbox"):
        ledger.newest(StateFolder(tmp_path), 1)


def test_looking_changes_no_file_of_a_process_that_was_stopped_or_killed(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path / "run")
    commit(outbox, "1")
    killed = kill(outbox, tmp_path / "run", tmp_path / "killed")
    for path in (tmp_path / "run", killed):
        files = [path / name for name in ("outbox.db", "outbox.db-wal") if (path / name).exists()]
        before = [file.read_bytes() for file in files]
        assert [event["id"] for event in ledger.newest(StateFolder(path), 5)] == ["1"]
        assert [file.read_bytes() for file in files] == before
        with closing(open_outbox(path)) as outbox:
            assert waiting(outbox) == ["1"]


def test_dead_letters_are_marked_while_no_process_runs_and_sent_after_the_next_start(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
        add_dead_letter(outbox)
    assert ledger.mark(StateFolder(tmp_path), "mark-retry", [1]) == 1
    with closing(open_outbox(tmp_path)) as outbox:
        outbox.recover()
        assert [event.id for _, event in outbox.retries("a", 10)] == ["1"]


@pytest.mark.parametrize("content", [b"nonsense" * 2000, b""])
def test_a_file_that_cannot_be_used_is_said_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "outbox.db").write_bytes(content)
    for call in (
        lambda folder: ledger.newest(folder, 1),
        lambda folder: ledger.mark(folder, "mark-retry", [1]),
    ):
        with pytest.raises(StateError, match=r"outbox\.db"):
            call(StateFolder(tmp_path))
    assert (tmp_path / "outbox.db").read_bytes() == content


def test_a_file_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    (tmp_path / "outbox.db").mkdir()
    with pytest.raises(StateError, match=r"outbox\.db: "):
        ledger.newest(StateFolder(tmp_path), 1)


def test_a_folder_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    path = tmp_path / "state"
    open_outbox(path).close()
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(StateError, match="you may not read it"):
            ledger.newest(StateFolder(path), 1)
    finally:
        os.seteuid(user)
        path.chmod(0o700)
