"""Files on Windows: those that another program keeps from being opened, and paths with a prefix; also under Wine."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, Forward

pytestmark = pytest.mark.skipif(sys.platform != "win32", reason="only Windows keeps files from being opened")

VM = "web-0"


def settings(imds: ImdsLab, inbox: Inbox, **more: Any) -> dict[str, Any]:
    sink = {"kind": "webhook", "url": inbox.url, "types": ["io.imdsbridge.*"], "from_start": True}
    return {"imds": {"endpoint": imds.url(VM), "poll_seconds": 0.2}, "sinks": {"inbox": sink}, **more}


def types(inbox: Inbox) -> list[str]:
    return [event["type"].removeprefix("io.imdsbridge.").removesuffix(".v1") for event in inbox.events()]


@contextmanager
def held(file: Path, share: int) -> Iterator[None]:
    """Hold a file open, and allow others only what `share` says: 0 nothing, 1 to read."""
    if sys.platform == "win32":
        import _winapi  # noqa: PLC0415 - Windows alone has it

        kernel = ctypes.WinDLL("kernel32")
        kernel.CreateFileW.restype = ctypes.c_void_p
        handle = kernel.CreateFileW(str(file), 0x80000000, share, None, 3, 0, None)
        assert handle is not None
        try:
            yield
        finally:
            _winapi.CloseHandle(handle)
    else:
        raise AssertionError


@pytest.mark.parametrize("share", [0, 1])
def test_a_file_that_is_held_while_the_service_starts_loses_no_end_and_is_not_damaged(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path, share: int
) -> None:
    forward = Forward(tmp_path, settings(imds, inbox))
    with forward:
        gone = imds.schedule(event_type="Reboot", resources=[VM], notice_seconds=900)
        inbox.wait_for(lambda: "scheduledevent.scheduled" in types(inbox), LIMIT_SECONDS)
        forward.kill()
        imds.cancel(gone)
        with held(forward.state / "outbox.db", share):
            forward.start()
            threading.Event().wait(4)
        inbox.wait_for(lambda: "scheduledevent.ended" in types(inbox), LIMIT_SECONDS)
        imds.schedule(event_type="Freeze", resources=[VM], notice_seconds=900)
        inbox.wait_for(lambda: types(inbox).count("scheduledevent.scheduled") == 2, LIMIT_SECONDS)
    assert "bridge.loss" not in types(inbox)
    assert "damaged" not in forward.log.read_text(encoding="utf-8")
    assert not [*forward.state.glob("outbox.db.*")]


def test_a_state_folder_may_have_the_prefix_of_long_paths(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    folder = Path(rf"\\?\{tmp_path}") / ("long" * 30) / ("path" * 30)
    forward = Forward(tmp_path, settings(imds, inbox, state_dir=folder))
    forward.state = folder / "forward"
    with forward:
        imds.schedule(event_type="Reboot", resources=[VM], notice_seconds=900)
        inbox.wait_for(lambda: "scheduledevent.scheduled" in types(inbox), LIMIT_SECONDS)
        assert forward.wait_for_status(lambda status: status)["storage_error"] is None
    assert (forward.state / "outbox.db").stat().st_size
