"""Log lines are one JSON object each, or text for a terminal, and hold no secret."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.runtime import log as log_module
from bridge.runtime import text as runtime_text
from bridge.runtime.log import JsonFormatter, LogWriter, TextFormatter, flush, set_up
from bridge.runtime.text import UNSAFE, redact, register_secret, register_token
from tests.support.diff import steady

LIMIT_SECONDS = 30.0  # of a hang
SECRET = 'se"cret\\with\nquotes'  # noqa: S105 - made up


@pytest.fixture(autouse=True)
def forget_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_text, "_secrets", set())


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine take longer for the last lines than the end of a process may."""
    monkeypatch.setattr(log_module, "FLUSH_SECONDS", LIMIT_SECONDS)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Give the root logger back as it was."""
    root, urllib3 = logging.getLogger(), logging.getLogger("urllib3")
    before = root.handlers[:], root.level, urllib3.level
    yield root
    root.handlers[:], root.level = before[0], before[1]
    urllib3.setLevel(before[2])


def record(message: str, *args: object, error: Exception | None = None, **extra: object) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("bridge.test", logging.WARNING, __file__, 1, message, args, info)
    vars(made).update(extra)
    return made


def json_line(*args: Any, **extra: Any) -> dict[str, Any]:
    text = JsonFormatter().format(record(*args, **extra))
    assert "\n" not in text
    line: dict[str, Any] = json.loads(text)
    return line


def test_a_line_holds_time_level_message_and_extra_fields() -> None:
    line = json_line("sink %s: %d", "ops", 5, failures=3, waiting={"ops": 1}, changed=("a", "b"))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "message": "sink ops: 5",
        "failures": 3,
        "waiting": {"ops": 1},
        "changed": ["a", "b"],
    }


def test_an_error_is_logged_with_its_traceback() -> None:
    try:
        int("what happened")
    except ValueError as error:
        line = json_line("thread ended", error=error)
    assert "ValueError: invalid literal for int() with base 10: 'what happened'" in line["error"]
    assert "test_log.py" in line["error"]


def test_a_registered_secret_appears_nowhere_in_a_line() -> None:
    register_secret(SECRET)
    line = json_line(
        "sent %s",
        SECRET,
        error=ValueError(SECRET),
        plain=SECRET,
        deep={"a": [SECRET], SECRET: 1},
        other=object(),
    )
    text = json.dumps(line)
    assert "se\\" not in text
    assert "cret" not in text
    assert line["message"] == "sent ***"
    assert line["deep"] == {"a": ["***"], "***": 1}


@pytest.mark.parametrize(
    ("secrets", "text", "shown"),
    [
        ([SECRET], json.dumps({"you sent": SECRET}), '{"you sent": "***"}'),
        (["first-secret\nsecond-secret\nx"], "first-secret, second-secret and x", "***, *** and x"),
        (["secret", "secret-and-more"], "secret-and-more secret", "*** ***"),
        ([], "GET https://example.org/a?sig=abc&x=1 failed", "GET https://example.org/a?*** failed"),
        ([], 'to "http://example.org?sig=abc", again', 'to "http://example.org?***", again'),
        ([], '{"a": "<a href=\\"https://x/?sig=1\\">"}', '{"a": "<a href=\\"https://x/?***\\">"}'),
        ([], "https://example.org/a is fine", "https://example.org/a is fine"),
        ([], "Authorization: Bearer abc.def-ghi", "Authorization: Bearer ***"),
        ([], "SharedAccessKey abc=", "SharedAccessKey ***"),
        # A quadratic search would take minutes, which the time limit of a test ends.
        pytest.param([], "http://" * 40_000, "http://" * 40_000, id="beginnings of URLs"),
    ],
)
def test_secrets_queries_and_tokens_are_never_shown(secrets: list[str], text: str, shown: str) -> None:
    for secret in secrets:
        register_secret(secret)
    assert redact(text) == shown


def test_tokens_that_are_replaced_by_others_are_forgotten_in_time() -> None:
    for number in range(1000):
        register_token(f"token-number-{number:04d}")
    assert redact("token-number-0999") == "***"
    assert redact("token-number-0001") == "token-number-0001"


@pytest.mark.parametrize(
    "text", ['say "https://x/?a=1"', "https://x/?a=\\", 'https://x/?a="\\"', "\ud800 \x00 €"]
)
def test_a_line_stays_json_whatever_is_redacted(text: str) -> None:
    register_secret("whatever")
    assert json_line("%s", text, extra={"sent": [text]})["level"] == "warning"


def test_a_terminal_gets_text_without_secrets() -> None:
    register_secret("secret-token")
    made = record("sent %s", "secret-token", error=ValueError("secret-token"), sink="ops")
    text = TextFormatter().format(made)
    assert text[2] == ":"
    assert "warning sent ***  [sink=ops]\n    ValueError: ***" in text


@steady
@given(
    message=st.text(), field=st.text(), error=st.text().map(ValueError), style=st.sampled_from([True, False])
)
def test_text_from_outside_controls_nothing(message: str, field: str, error: ValueError, style: bool) -> None:
    made = record("%s", message, error=error, from_outside=field)
    first, *rest = (JsonFormatter() if style else TextFormatter()).format(made).split("\n")
    assert not UNSAFE.search(first)
    assert not any(UNSAFE.search(line) for line in rest)
    assert all(line.startswith("    ") for line in rest)


@pytest.mark.parametrize(
    ("style", "terminal", "as_json"),
    [("auto", True, False), ("auto", False, True), ("json", True, True), ("text", False, False)],
)
def test_a_terminal_gets_text_and_everything_else_json_and_no_library_logs_urls(
    monkeypatch: pytest.MonkeyPatch, root: logging.Logger, style: str, terminal: bool, as_json: bool
) -> None:
    output = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(output, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", output)
    set_up(level="info", style=style)
    logging.getLogger("bridge.x").info("sent")
    logging.getLogger("bridge.x").debug("not sent")
    logging.getLogger("apprise").warning("not sent")
    flush()
    written = output.buffer.getvalue().decode()
    assert written.startswith("{") is as_json
    assert written.count("sent") == 1
    assert root.level == logging.INFO
    set_up(level="debug", style=style)
    assert root.level == logging.DEBUG
    assert not logging.getLogger("urllib3.connectionpool").isEnabledFor(logging.WARNING)


# The log writer never blocks who logs, drops what has no space, and writes what it can at the end


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


MARKS = {"DEBUG": "<7>", "INFO": "<6>", "WARNING": "<4>", "ERROR": "<3>", "CRITICAL": "<2>"}


@pytest.mark.parametrize(("level", "mark"), MARKS.items())
def test_each_line_tells_the_journal_and_nobody_else_how_serious_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: str, mark: str
) -> None:
    for number, expected in ((0, f"{mark}one\n{mark}two\n"), (1, "one\ntwo\n")):
        with (tmp_path / "log").open("w+") as stream:
            status = os.fstat(stream.fileno())
            monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + number}")
            handler = LogWriter(stream)
            handler.handle(logging.LogRecord("test", getattr(logging, level), "", 0, "one\ntwo", None, None))
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
