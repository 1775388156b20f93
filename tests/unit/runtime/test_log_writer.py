"""The log writer: it never blocks who logs, drops what has no space, and writes what it can at the end."""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from bridge.runtime import log as log_module
from bridge.runtime.log import LogWriter

LIMIT_SECONDS = 30.0  # of a hang


class Pipe(io.RawIOBase):
    """A raw stream whose writes block while it is not read, and take at most `chunk` bytes."""

    def __init__(self, chunk: int = 1_000_000) -> None:
        super().__init__()
        self._chunk = chunk
        self.is_read = threading.Event()
        self.entered = threading.Event()
        self.text = b""
        self.error: OSError | None = None
        self.would_block = False

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int | None:  # type: ignore[override] # bytes are all that it gets
        self.entered.set()
        assert self.is_read.wait(LIMIT_SECONDS)
        if self.error:
            raise self.error
        if self.would_block:
            return None
        self.text += data[: self._chunk]
        return len(data[: self._chunk])

    @property
    def lines(self) -> list[str]:
        return self.text.decode().splitlines()


@contextmanager
def writer(pipe: Pipe, max_lines: int = 5) -> Iterator[LogWriter]:
    yield LogWriter(
        io.TextIOWrapper(io.BufferedWriter(cast("io.RawIOBase", pipe)), encoding="utf-8"), max_lines=max_lines
    )
    pipe.is_read.set()


@pytest.mark.parametrize(
    ("level", "mark"),
    [
        (logging.DEBUG, "<7>"),
        (logging.INFO, "<6>"),
        (logging.WARNING, "<4>"),
        (logging.ERROR, "<3>"),
        (logging.CRITICAL, "<2>"),
    ],
)
def test_each_line_tells_the_journal_and_nobody_else_how_serious_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: int, mark: str
) -> None:
    for number, expected in ((0, f"{mark}one\n{mark}two\n"), (1, "one\ntwo\n")):
        with (tmp_path / "log").open("w+") as stream:
            status = os.fstat(stream.fileno())
            monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + number}")
            handler = LogWriter(stream)
            handler.handle(logging.LogRecord("test", level, "", 0, "one\ntwo", None, None))
            handler.flush()
            assert (tmp_path / "log").read_text() == expected


def log(handler: LogWriter, text: str, *args: object) -> None:
    handler.handle(logging.LogRecord("test", logging.INFO, "", 0, text, args, None))


def fill(handler: LogWriter, pipe: Pipe, lines: int) -> None:
    """Log until the writer blocks in its first line and the others wait or are dropped."""
    log(handler, "line 0")
    assert pipe.entered.wait(LIMIT_SECONDS)
    for number in range(1, lines):
        log(handler, f"line {number}")


def test_lines_are_written_in_order_and_one_longer_than_a_write_is_written_whole() -> None:
    pipe = Pipe(chunk=3)
    pipe.is_read.set()
    with writer(pipe, max_lines=100) as handler:
        for number in range(50):
            log(handler, f"äöü {number}")
        handler.flush()
        assert pipe.lines == [f"äöü {number}" for number in range(50)]


def test_while_nothing_reads_lines_wait_and_further_ones_are_dropped() -> None:
    pipe = Pipe()
    with writer(pipe, max_lines=5) as handler:
        fill(handler, pipe, 20)  # which would hang if it waited for the pipe
        assert pipe.lines == []
        pipe.is_read.set()
        handler.flush()
        log(handler, "after")
        handler.flush()
        assert pipe.lines == [*(f"line {number}" for number in range(6)), "after"]


def test_the_end_does_not_wait_for_a_stream_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "FLUSH_SECONDS", 0.01)
    pipe = Pipe()
    with writer(pipe) as handler:
        fill(handler, pipe, 20)
        handler.acquire()  # as logging.shutdown does
        handler.flush()
        handler.release()
        assert pipe.lines == []


@pytest.mark.parametrize(("error", "would_block"), [(BrokenPipeError(), False), (None, True)])
def test_what_cannot_be_written_or_formatted_ends_nothing(error: OSError | None, would_block: bool) -> None:
    pipe = Pipe()
    pipe.is_read.set()
    pipe.error, pipe.would_block = error, would_block
    with writer(pipe) as handler:
        log(handler, "lost")
        handler.flush()
        pipe.error, pipe.would_block = None, False
        log(handler, "%d", "cannot be formatted")
        log(handler, "kept")
        handler.flush()
        assert pipe.lines == ["kept"]


def test_without_a_stream_lines_are_dropped() -> None:
    handler = LogWriter(None)
    log(handler, "nowhere")
    handler.flush()
