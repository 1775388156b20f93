"""Run a program without a shell, as a child of this process with a time limit."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from bridge.runtime.text import one_line, printable
from bridge.runtime.threads import extend_deadline, start_thread
from bridge.runtime.time import parse_iso

if sys.platform == "win32":
    from bridge.runtime.windows import APART, Group, may_anyone_change
else:
    from bridge.runtime.posix import APART, Group, may_anyone_change

log = logging.getLogger(__name__)

KILL_AFTER_SECONDS = 5.0  # what a program has after SIGTERM or Ctrl-Break
OUTPUT_BYTES = 4096
# What a program inherits: the rest may contain secrets, or concerns this process alone.
_INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
_OF_THE_POD = (
    *("NODE_NAME", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"),
    *("DRAIN_FORCE", "DRAIN_CORDON_ONLY", "DRAIN_EXCLUDE_FROM_LOAD_BALANCERS"),
)
_FOLDERS = ("STATE_DIRECTORY", "CREDENTIALS_DIRECTORY")  # which the process sets at its start
_OF_WINDOWS = ("SYSTEMROOT", "SYSTEMDRIVE", "PATHEXT", "COMSPEC", "TEMP", "TMP", "USERNAME", "USERPROFILE")
_SCRIPTS = (".ps1", ".py", ".cmd", ".bat")  # which Windows starts only by their interpreter
_VALUE_CHARACTERS = 32_000  # Linux takes 128 KiB, Windows 32,767 characters
_CHUNK_BYTES = 65_536
_STEP_SECONDS = 0.02
_LAST_READ_SECONDS = 1.0
_FIRST_EXCEPTION = 0xC0000000  # of Windows, where these exit codes are what signals are elsewhere


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a program ended.

    Attributes:
        code: its exit code, negative for a signal or an exception of Windows; None if it could not be started.
        ended_by: "timeout" or "stop" if it was ended, else "".
        error: why it could not be started.
        output: the end of what it wrote, without control characters.
    """

    code: int | None = None
    ended_by: str = ""
    error: str = ""
    output: str = ""

    @property
    def fault(self) -> str:
        """What went wrong, "" if it ended with 0 in its own time."""
        if self.code is None:
            return f"it cannot be started: {self.error}"
        if self.ended_by:
            is_late = self.ended_by == "timeout"
            return "it did not end in time" if is_late else "it was ended by imds-bridge"
        if self.code < 0 and sys.platform == "win32":
            return f"exit code 0x{self.code + 2**32:X}"
        if self.code < 0:
            return f"it was ended by {_signal_name(-self.code)}"
        return f"exit code {self.code}" if self.code else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Run:
    """One run of a program, in a group or a job of its own, whose processes end with it.

    `result` is None until it has ended. `end` may be called from any thread.
    """

    def __init__(
        self, command: Sequence[str], body: bytes, data: Mapping[str, Any], *, timeout_seconds: float
    ) -> None:
        """Prepare a run.

        Args:
            command: the program and its arguments.
            body: the CloudEvent, which the program gets on standard input.
            data: the event's data, from which the environment is made.
            timeout_seconds: when the program is ended.
        """
        self.result: Result | None = None
        self._command = command
        self._body = body
        self._environment = environment(data, timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._output = b""
        self._ended_by = ""
        self._is_stopped = False

    def start(self, name: str) -> None:
        """Run the program in a thread, which logs under its `name` how it ended."""
        _running.add(self)  # before the thread begins, or the end of this process would not wait for it
        try:
            start_thread(f"program {self._command[0]}", lambda: self.finish(name))
        except RuntimeError as error:  # of Python, at the limit of threads
            self._note_end(Result(error=str(error)), name)

    def end(self) -> None:
        """Have the program ended soon: by SIGTERM or Ctrl-Break, and by force a few seconds later."""
        self._is_stopped = True

    def finish(self, name: str = "") -> Result:
        """Run the program and wait for its end, which comes before that of this process; a `name` is for the log."""
        extend_deadline(self._timeout_seconds + KILL_AFTER_SECONDS)
        _running.add(self)
        try:
            result = self._wait(Group(self._popen()))
        except OSError as error:
            result = Result(error=error.strerror or str(error))
        except RuntimeError as error:  # no thread can be started that watches it
            result = Result(error=str(error))
        self._note_end(result, name)
        return result

    def _popen(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - what the configuration names, without a shell
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            **APART,
        )

    def _note_end(self, result: Result, name: str) -> None:
        if name:
            fault = result.fault
            log.log(
                logging.WARNING if fault else logging.INFO,
                *("%s has ended: %s", name, fault or "exit code 0"),
                extra={"output": result.output},
            )
        self.result = result  # last: who sees it may rely on the line in the log
        _running.discard(self)

    def _wait(self, group: Group) -> Result:
        process = group.process
        assert process.stdin  # noqa: S101 - both are pipes
        assert process.stdout  # noqa: S101
        stdin, stdout = process.stdin, process.stdout
        try:
            start_thread("program input", lambda: _write(stdin, self._body))
            reader = start_thread("program output", lambda: self._read(stdout))
        except RuntimeError:
            with contextlib.suppress(OSError), process:  # which closes the pipes, and waits for its end
                group.close()
            raise
        limit_at, kill_at = time.monotonic() + self._timeout_seconds, float("inf")
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STEP_SECONDS)
            now = time.monotonic()
            if not self._ended_by and (self._is_stopped or now >= limit_at):
                self._ended_by, kill_at = "stop" if self._is_stopped else "timeout", now + KILL_AFTER_SECONDS
                group.ask()
            if now >= kill_at:
                group.end()
        group.close()  # with what it has left behind
        reader.join(_LAST_READ_SECONDS)  # a program that escaped its group may write for ever
        output = one_line(self._output.decode("utf-8", "replace"), OUTPUT_BYTES)
        return Result(code=_signed(process.returncode), ended_by=self._ended_by, output=output)

    def _read(self, stdout: IO[bytes]) -> None:
        with contextlib.suppress(OSError), stdout:
            while self.result is None and (chunk := os.read(stdout.fileno(), _CHUNK_BYTES)):
                self._output = (self._output + chunk)[-OUTPUT_BYTES:]


_running: set[Run] = set()


@atexit.register
def _end_all() -> None:
    """Give each program its time to end: on Windows it could not outlive this process."""
    for run in list(_running):
        run.end()
    deadline = time.monotonic() + KILL_AFTER_SECONDS + _LAST_READ_SECONDS
    while _running and time.monotonic() < deadline:
        time.sleep(_STEP_SECONDS)


def _signed(code: int) -> int:
    """Return an exit code as POSIX has it: Windows writes the number of an exception as a large one."""
    return code - 2**32 if code >= _FIRST_EXCEPTION else code


def _write(stdin: IO[bytes], body: bytes) -> None:
    with contextlib.suppress(OSError), stdin:  # it may not want to read it
        stdin.write(body)


def environment(data: Mapping[str, Any], timeout_seconds: float) -> dict[str, str]:
    """Return a program's environment: little of this process's, and what it is most likely to need of an event.

    Args:
        data: of the event.
        timeout_seconds: when the program is ended; less is left until an event that is announced starts.
    """
    resources, starts_at = data.get("Resources"), parse_iso(data.get("NotBeforeUtc"))
    if starts_at and data.get("EventStatus") == "Scheduled":
        left_seconds = (starts_at - datetime.now(UTC)).total_seconds()
        timeout_seconds = max(0.0, min(timeout_seconds, left_seconds))
    values = {
        "EVENT_ID": data.get("EventId"),
        "EVENT_TYPE": data.get("EventType"),
        "EVENT_STATUS": data.get("EventStatus"),
        "NOT_BEFORE": data.get("NotBeforeUtc"),
        "SECONDS_LEFT": str(int(timeout_seconds)),
        "RESOURCES": ",".join(map(str, resources)) if isinstance(resources, list) else "",
    }
    names = (*_INHERITED, *_OF_WINDOWS, *_OF_THE_POD, *_FOLDERS)
    inherited = {name: os.environ[name] for name in names if name in os.environ}
    own = {f"IMDS_BRIDGE_{name}": printable(value, _VALUE_CHARACTERS) for name, value in values.items()}
    return {**inherited, **own}


def find_fault(command: Sequence[str]) -> str:
    """Return why a program cannot be started, or is not safe as any user could replace it; "" if it is fine."""
    program, *arguments = command
    path = Path(program)
    scripts = [
        one
        for one in map(Path, arguments)
        if sys.platform == "win32" and one.suffix.lower() in _SCRIPTS and one.is_absolute()
    ]
    try:
        for one in (path, *scripts):
            if not one.is_file():
                return f"{one}: there is no such file"
        if not os.access(path, os.X_OK):
            return f"{program}: this user may not execute it"
        for one in (path, path.resolve(), *scripts):
            for part in (one, *one.parents):
                if may_anyone_change(part, is_ancestor=part not in (one, one.parent)):
                    return f"{program}: any user may change {part}"
        return _fault_of_interpreter(path)
    except OSError as error:
        return f"{program}: {error.strerror}"


def _fault_of_interpreter(path: Path) -> str:
    """Return why a script cannot be started although it may be executed."""
    if not os.access(path, os.R_OK):  # which only a script needs
        return ""
    with path.open("rb") as file:
        head = file.read(256)  # what Linux reads of a script
    if b"\0" in head:  # a binary
        return ""
    named = re.match(rb"#![ \t]*([^ \t\n]+)[ \t]*([^ \t\n]*)", head)
    if not named:
        return f"{path}: it has no first line #! with its interpreter"
    interpreter, argument = map(os.fsdecode, named.groups())
    if not shutil.which(Path("/", interpreter)):
        return f"{path}: its interpreter {interpreter!r} does not exist or may not be executed"
    if interpreter.endswith("/env") and argument[:1] not in ("", "-") and not shutil.which(argument):
        return f"{path}: its interpreter {argument!r} is not in PATH"
    return ""
