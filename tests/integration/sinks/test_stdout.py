"""Standard output that nothing reads, or reads slowly, or that takes a part of a line."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.errors import Unavailable
from bridge.sinks import stdout
from bridge.sinks.stdout import StdoutSettings, StdoutSink
from tests.support.process import stored_event

PIPE_BYTES = 4096
EVENTS = [stored_event(number) for number in range(2)]


@pytest.fixture
def sink() -> StdoutSink:
    return StdoutSink(StdoutSettings(kind="stdout"))


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Put a small pipe in the place of the standard output; return its end to read from."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    monkeypatch.setattr(stdout, "_descriptor", lambda: writer)
    monkeypatch.setattr(stdout, "WAIT_SECONDS", 0.01)
    yield reader
    os.close(reader)
    os.close(writer)


def test_a_line_that_is_read_slowly_is_an_error_until_it_is_read_and_then_whole(
    reader: int, sink: StdoutSink
) -> None:
    event = stored_event(1, Filler="x" * 2 * PIPE_BYTES)
    received = b""
    while b"\n" not in received:
        with pytest.raises(Unavailable, match=r"cannot be written: nothing has read it for 0\.01 s"):
            sink.send([event])
        received += os.read(reader, 2 * PIPE_BYTES)
    assert json.loads(received.splitlines()[0]) == event.envelope


@pytest.mark.usefixtures("reader")
def test_a_check_finds_an_output_that_is_closed(sink: StdoutSink, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sink.check() == "standard output is open"
    monkeypatch.setattr(stdout, "_descriptor", lambda: -1)
    with pytest.raises(Unavailable, match="cannot be written"):
        sink.check()


def test_a_line_that_broke_off_is_ended_before_the_event_is_written_again(
    sink: StdoutSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "output"
    write = os.write
    with file.open("wb") as output:
        monkeypatch.setattr(stdout, "_descriptor", output.fileno)
        for room in (0, 10, 1, 0, 5):
            left = iter([room])

            def fill(descriptor: int, text: bytes, left: Iterator[int] = left) -> int:
                if (part := next(left, 0)) == 0:
                    raise OSError(28, "No space left on device")
                return write(descriptor, text[:part])

            monkeypatch.setattr(os, "write", fill)
            with pytest.raises(Unavailable, match="No space left on device"):
                sink.send(EVENTS[:1])
        monkeypatch.setattr(os, "write", write)
        sink.send(EVENTS[:1])
        sink.send(EVENTS[1:])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [EVENTS[0].envelope, EVENTS[0].envelope, EVENTS[1].envelope]
