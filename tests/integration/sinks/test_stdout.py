"""Standard output that nothing reads, or reads slowly."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from bridge.config.sinks import StdoutSettings
from bridge.errors import Unavailable
from bridge.sinks import stdout
from bridge.sinks.stdout import StdoutSink
from tests.support.process import stored_event

PIPE_BYTES = 4096


@dataclass(frozen=True)
class Pipe:
    """A small pipe in the place of the standard output."""

    reader: int
    writer: int

    def read(self) -> bytes:
        return os.read(self.reader, 2 * PIPE_BYTES)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    made = Pipe(*os.pipe())
    fcntl.fcntl(made.writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    monkeypatch.setattr(stdout, "_descriptor", lambda: made.writer)
    monkeypatch.setattr(stdout, "WAIT_SECONDS", 0.01)
    yield made
    for descriptor in (made.reader, made.writer):
        os.close(descriptor)


@pytest.mark.usefixtures("pipe")
def test_output_that_nothing_reads_is_an_error_and_never_blocks_for_long() -> None:
    sink = StdoutSink(StdoutSettings(kind="stdout"))
    with pytest.raises(
        Unavailable, match=r"standard output cannot be written: nothing has read it for 0\.01 s"
    ):
        sink.send([stored_event(1, Filler="x" * 3 * PIPE_BYTES)])


def test_a_line_that_was_interrupted_is_finished_once_the_output_is_read(pipe: Pipe) -> None:
    sink = StdoutSink(StdoutSettings(kind="stdout"))
    event = stored_event(1, Filler="x" * 2 * PIPE_BYTES)
    received = b""
    while b"\n" not in received:
        with pytest.raises(Unavailable):
            sink.send([event])
        received += pipe.read()
    assert json.loads(received.splitlines()[0]) == json.loads(event.body)
