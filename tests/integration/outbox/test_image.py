"""A file is read beside the process that writes it, and a log that ends too early is noticed."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import closing
from pathlib import Path

import pytest

from bridge.events.filters import Filter
from bridge.outbox import image as image_module
from bridge.outbox import sqlite
from bridge.outbox.image import frame_starts, has_lost_commits, log_of, read_log
from tests.support.outbox import commit, event, kill, open_outbox, rows, waiting

SINKS = {"a": (Filter(), True)}
COMMITS = 1500  # enough for the log to begin again several times
QUERY = """
SELECT (SELECT COUNT(*) FROM event), (SELECT value FROM meta WHERE key = 'watch'), integrity_check
FROM pragma_integrity_check
"""


def test_a_file_is_read_as_a_commit_left_it_while_a_process_commits_and_checkpoints(tmp_path: Path) -> None:
    seen: list[tuple[int, str, str]] = []
    with closing(open_outbox(tmp_path)) as outbox:
        outbox.commit([event("first a"), event("first b")], meta={"watch": "0"})

        def write() -> None:
            for number in range(1, COMMITS):
                pair = [event(f"{number} {half}", size=600) for half in "ab"]
                outbox.commit(pair, meta={"watch": str(number)})

        writer = threading.Thread(target=write)
        writer.start()
        while writer.is_alive():
            seen += rows(tmp_path, QUERY)
        writer.join()
    assert {text for *_, text in seen} == {"ok"}
    assert [events for events, *_ in seen] == [2 * int(watch) + 2 for _, watch, _ in seen]
    assert [events for events, *_ in seen] == sorted(events for events, *_ in seen)


def test_a_kill_between_two_writes_to_the_log_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite writes the header of each frame, and then its page."""
    monkeypatch.setattr(sqlite, "LOG_LIMIT_BYTES", 64 * 1024)
    folder, torn = tmp_path / "0", tmp_path / "torn.db"
    outbox = open_outbox(folder)
    tried = 0
    for number in range(100):
        before = read_log(folder / "outbox.db")
        if number % 2:
            commit(outbox, str(number), size=2000)
        else:
            outbox.set_meta({"watch": str(number)}, synced=True)  # a commit of one page
        after = read_log(folder / "outbox.db")
        for start in (start for start in frame_starts(after) if after[: start + 24] != before[: start + 24]):
            shutil.copyfile(folder / "outbox.db", torn)
            log_of(torn).write_bytes(after[: start + 24] + before[start + 24 :])
            assert not has_lost_commits(torn), (number, start)
            tried += 1
        if number % 6 == 1 and after:
            folder = kill(outbox, folder, tmp_path / str(number))
            os.truncate(
                log_of(folder / "outbox.db"), frame_starts(after)[-1]
            )  # the last frame was not written
            outbox = open_outbox(folder)
    outbox.close()
    assert tried > 100


def test_a_copy_that_the_log_began_again_under_is_made_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
        copyfile = shutil.copyfile
        copies: list[Path] = []

        def copy_and_checkpoint(source: Path, target: Path) -> None:
            copyfile(source, target)
            copies.append(target)
            if len(copies) == 1:
                outbox._storage.database._connection.execute("PRAGMA wal_checkpoint(RESTART)")
                commit(outbox, "2")

        monkeypatch.setattr(shutil, "copyfile", copy_and_checkpoint)
        assert rows(tmp_path, "SELECT id FROM event") == [("1",), ("2",)]
        assert len(copies) == 2


def killed(path: Path) -> Path:
    """Return the file of a process that was killed with events in its log."""
    outbox = open_outbox(path / "state", sinks=SINKS)
    commit(outbox, "1", "2", "3", size=5000)
    return kill(outbox, path / "state", path / "image") / "outbox.db"


@pytest.mark.parametrize("place", [3, 16, 20, 25], ids=["magic", "first salt", "second salt", "checksum"])
def test_a_log_whose_header_is_damaged_is_salvaged(tmp_path: Path, place: int) -> None:
    file = killed(tmp_path)
    log = bytearray(log_of(file).read_bytes())
    log[place] ^= 4
    log_of(file).write_bytes(log)
    with closing(open_outbox(file.parent, sinks=SINKS)) as outbox:
        assert waiting(outbox) == ["1", "2", "3"]
        assert [loss.reason for loss in outbox.losses()] == ["Damage"]


@pytest.mark.parametrize(("frame", "left"), [(0, ["1", "2", "3"]), (-1, ["1", "2"])], ids=["first", "last"])
def test_a_log_with_a_zeroed_sector_is_a_loss(tmp_path: Path, frame: int, left: list[str]) -> None:
    file = killed(tmp_path)
    place = frame_starts(read_log(file))[frame] // 512 * 512
    with log_of(file).open("r+b") as log:
        log.seek(place)
        log.write(bytes(512))
    with closing(open_outbox(file.parent, sinks=SINKS)) as outbox:
        assert waiting(outbox) == left
        assert [loss.reason for loss in outbox.losses()] == ["Damage"]


def test_a_log_of_which_only_the_last_page_is_damaged_is_a_loss(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path / "state", sinks=SINKS)
    commit(outbox, "1")
    outbox.set_meta({"watch": "2"}, synced=True)  # a commit of one page
    file = kill(outbox, tmp_path / "state", tmp_path / "image") / "outbox.db"
    log = bytearray(log_of(file).read_bytes())
    log[-1] ^= 1
    log_of(file).write_bytes(log)
    with closing(open_outbox(file.parent, sinks=SINKS)) as outbox:
        assert waiting(outbox) == ["1"]
        assert [loss.reason for loss in outbox.losses()] == ["Damage"]


def test_a_short_log_beside_a_large_file_is_not_taken_for_damage(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path / "state", sinks=SINKS)) as outbox:
        commit(outbox, *map(str, range(50)), size=9000)
    outbox = open_outbox(tmp_path / "state", sinks=SINKS)
    commit(outbox, "last")
    file = kill(outbox, tmp_path / "state", tmp_path / "image") / "outbox.db"
    with closing(open_outbox(file.parent, sinks=SINKS)) as outbox:
        assert outbox.losses() == []
        assert waiting(outbox)[-1] == "last"


@pytest.mark.parametrize("bytes_left", [0, 100, 4095])
def test_a_file_that_is_cut_off_beside_its_log_is_salvaged(tmp_path: Path, bytes_left: int) -> None:
    file = killed(tmp_path)
    file.write_bytes(file.read_bytes()[:bytes_left])
    with closing(open_outbox(file.parent, sinks=SINKS)) as outbox:
        assert waiting(outbox) == ["1", "2", "3"]
        assert [loss.reason for loss in outbox.losses()] == ["Damage"]


def test_a_start_does_not_depend_on_a_place_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = killed(tmp_path)
    monkeypatch.setattr(image_module, "_MEMORY_FOLDER", tmp_path / "none")
    monkeypatch.setattr(image_module, "TemporaryDirectory", no_room)
    with closing(open_outbox(file.parent, sinks=SINKS)) as outbox:
        assert outbox.storage_error is None
        assert waiting(outbox) == ["1", "2", "3"]


def no_room(**_: object) -> None:
    raise OSError(28, "No space left on device")
