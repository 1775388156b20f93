"""`status`: what a process wrote, whether or not it still runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bridge import __version__
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.text import UNSAFE
from tests.support.cli import Call, sinks
from tests.support.imds_lab import ImdsLab
from tests.support.process import (
    COMMAND,
    LIMIT_SECONDS,
    environment,
    wait_until,
)


def live_status(config: Path, **more: Any) -> StateFolder:
    """Write a status as a running process does, with an event that starts in a quarter of an hour."""
    folder = StateFolder(config.parent / "state" / "forward")
    folder.acquire()
    soon = format_datetime(datetime.now(UTC) + timedelta(minutes=15, seconds=30), usegmt=True)
    folder.write_status(
        {
            "version": __version__,
            "role": "forward",
            "pid": os.getpid(),
            "running": True,
            "written_at": datetime.now(UTC).isoformat(),
            "vm": "web-0",
            "imds": "http://169.254.169.254",
            "last_good_at": datetime.now(UTC).isoformat(),
            "document": {
                "DocumentIncarnation": 7,
                "Events": [
                    {
                        "EventId": "4CAEA225",
                        "EventType": "Reboot",
                        "EventStatus": "Scheduled",
                        "EventSource": "User",
                        "Resources": ["web-0", "web-1"],
                        "NotBefore": soon,
                    },
                    {"EventId": "C7061BAC", "EventType": "Freeze", "EventStatus": "Started", "NotBefore": ""},
                ],
            },
            "sinks": {
                "ops": {
                    "state": "retrying",
                    "backlog": 3,
                    "oldest_waits_seconds": 65.0,
                    "last_success_at": None,
                    "next_retry_at": "2026-01-01T00:00:07.000Z",
                    "last_error": "503",
                    "last_error_at": "2026-01-01T00:00:00.000Z",
                    "dead_letters": 2,
                }
            },
            **more,
        }
    )
    return folder


@pytest.mark.parametrize(
    "damage",
    [{"role": None}, {"document": 5}, {"document": {"Events": 5}}, {"sinks": []}, {"sinks": {"ops": {}}}],
)
@pytest.mark.parametrize("form", ["--json", "--check", None])
def test_a_damaged_status_is_reported_as_such(
    call: Call, config: Path, damage: dict[str, Any], form: str | None
) -> None:
    folder = live_status(config)
    status = {**folder.load_status(), **damage}
    folder.write_status({key: value for key, value in status.items() if value is not None})
    done = call("status", *([form] if form else []), "--config", config)
    assert (done.code, "it is damaged" in done.err) == (2, True)


def test_status_shows_the_document_countdowns_and_sinks(call: Call, config: Path) -> None:
    folder = live_status(config)
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 0
    assert re.search(
        rf"imds-bridge {re.escape(__version__)}, process {os.getpid()}, updated \d+ s ago", done.out
    )
    assert "Document 7:" in done.out
    assert re.search(r"Reboot +Scheduled +in 15 min \d+ s +User +4CAEA225 +web-0, web-1", done.out)
    assert re.search(r"Freeze +Started +- +- +C7061BAC +-", done.out)
    assert re.search(
        r"ops +retrying +3 \(oldest 1 min 5 s\) +never +2 +2026-01-01T00:00:07.000Z +2026-01-01T00:00:00.000Z 503",
        done.out,
    )


def test_status_gives_the_same_as_json(call: Call, config: Path) -> None:
    folder = live_status(config)
    done = call("status", "--json", "--config", config)
    folder.release()
    assert done.code == 0
    assert done.json["running"] is True
    assert 900 < done.json["events"][0]["StartsInSeconds"] <= 930
    assert done.json["events"][1]["StartsInSeconds"] is None
    assert done.json["sinks"]["ops"]["backlog"] == 3


def test_status_of_a_process_that_cannot_receive_reports_it_and_exits_3(call: Call, config: Path) -> None:
    commands = {"from": "bus/approvals", "unsettled": 0, "last_error": "the SDK has closed its receiver"}
    folder = live_status(config, commands=commands, waiting_commands=0, dry_run=False)
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 3
    assert "0 command(s) waiting; NOT RECEIVING: the SDK has closed its receiver" in done.out


def test_status_shows_text_from_outside_with_escapes(call: Call, config: Path) -> None:
    forged = "\x1b[2J\nimds-bridge: all is well\u202e"
    document = {"DocumentIncarnation": forged, "Events": [{"EventId": forged, "EventType": forged}]}
    folder = live_status(config, vm=forged, last_error=forged, document=document)
    texts = call("status", "--config", config).out, call("status", "--json", "--config", config).out
    folder.release()
    for text in texts:
        assert not UNSAFE.search(text.replace("\n", ""))
        assert "\nimds-bridge: all is well" not in text
    assert r"VM    \u001b[2J\nimds-bridge: all is well\u202e" in texts[0]
    assert json.loads(texts[1])["vm"] == forged


def test_status_of_a_stopped_process_reports_it_and_exits_3(call: Call, config: Path) -> None:
    live_status(config, storage_error="no space", running=False).release()
    done = call("status", "--config", config)
    assert done.code == 3
    assert re.match(r"NOT RUNNING: stopped \d+ s ago", done.out)
    assert "STORE UNAVAILABLE, events are buffered in memory: no space" in done.out


def test_status_of_a_process_that_is_gone_without_a_stop_reports_it_and_exits_3(
    call: Call, config: Path
) -> None:
    live_status(config).release()
    done = call("status", "--config", config)
    assert done.code == 3
    assert re.match(r"NOT RESPONDING: the process is gone without a stop, last updated \d+ s ago", done.out)


def test_status_of_a_process_that_has_not_written_for_a_minute_reports_it_and_exits_3(
    call: Call, config: Path
) -> None:
    long_ago = datetime.now(UTC) - timedelta(seconds=61)
    folder = live_status(config, written_at=long_ago.isoformat())
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 3
    assert re.match(rf"NOT RESPONDING: process {os.getpid()} .*has not written for 1 min", done.out)


def test_status_before_the_first_start_exits_2_with_the_reason(call: Call, config: Path) -> None:
    done = call("status", "--config", config)
    assert done.code == 2
    assert "`imds-bridge forward` has never run with this state_dir" in done.err


def test_status_of_a_process_that_cannot_write_exits_2_with_the_reason(call: Call, config: Path) -> None:
    folder = live_status(config)
    (folder.path / "status.json").unlink()
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 2
    assert re.search(rf"process {os.getpid()}.* runs, but cannot write there", done.err)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\x00"])
def test_status_of_a_damaged_file_exits_2_with_the_reason(call: Call, config: Path, text: str) -> None:
    folder = live_status(config)
    (folder.path / "status.json").write_text(text)
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 2
    assert "it cannot be read: " in done.err


def test_status_without_permission_exits_2_with_the_reason(
    call: Call, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = live_status(config)
    denied = PermissionError(13, "Permission denied")  # root may read everything

    def refuse(_: StateFolder) -> NoReturn:
        raise denied

    monkeypatch.setattr(StateFolder, "load_status", refuse)
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 2
    assert "this user may not read it; use sudo" in done.err


def test_status_check_prints_only_what_needs_a_person(call: Call, config: Path) -> None:
    waiting = {
        "state": "retrying",
        "backlog": 3,
        "oldest_waits_seconds": 65.0,
        "dead_letters": 0,
        "last_error": "503",
        "last_error_at": "2026-01-01T00:00:00.000Z",
        "last_success_at": None,
    }
    folder = live_status(config, sinks={"ops": waiting})
    done = call("status", "--check", "--config", config)
    assert (done.code, done.out) == (0, "nothing needs a person\n")
    done = call("status", "--check", "--backlog-seconds", "60", "--config", config)
    folder.release()
    assert done.code == 3
    assert re.fullmatch(r"sink ops has 3 event\(s\) waiting, the oldest for 65 s: 503\n", done.out)
    done = call("status", "--check", "--config", config)
    assert done.code == 3
    assert done.out.startswith("NOT RESPONDING")


def test_status_watch_shows_it_again_until_it_is_interrupted(
    call: Call, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = live_status(config)
    waits: list[float] = []

    def interrupt_the_second(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("bridge.cli.status.time.sleep", interrupt_the_second)
    done = call("status", "--watch", "--config", config)
    folder.release()
    assert done.code == 0
    assert done.out.count("Document 7:") == 2
    assert "\x1b" not in done.out


def test_status_of_the_real_process_is_live(config: Path, lab: ImdsLab, call: Call) -> None:
    lab.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=900)
    sinks(config, lab)
    with subprocess.Popen(
        [*COMMAND, "forward", "--config", str(config)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        folder = config.parent / "state" / "forward"
        wait_until((folder / "status.json").exists)
        done = wait_until(
            lambda: (done := call("status", "--json", "--config", config)).json["events"] and done
        )
        assert (done.code, done.json["pid"], done.json["vm"]) == (0, process.pid, "web-0")
        assert done.json["sinks"]["stdout"]["state"] == "ok"
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 0
    assert call("status", "--config", config).code == 3


def test_reading_the_state_does_not_need_readable_secrets(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        f'state_dir = "{tmp_path.as_posix()}"\n[sinks.a]\nkind = "webhook"\nurl_file = "{tmp_path.as_posix()}/none"'
    )
    done = call("status", "--config", file)
    assert (done.code, f"no status in {tmp_path / 'forward'}" in done.err) == (2, True)
    assert call("check", "--config", file).code == 2
