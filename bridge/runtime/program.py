"""Start programs without a shell, wait for them or leave them running, and read how they ended; POSIX only."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

from bridge.runtime.text import one_line, printable
from bridge.runtime.threads import extend_deadline

KILL_AFTER_SECONDS = 5.0  # what a program has after SIGTERM
# What a program inherits: the rest may contain secrets, or concerns this process alone.
_INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
_VALUE_CHARACTERS = 32_000  # Linux takes 128 KiB
RESULT_BYTES = 32 * 1024  # the room that a result needs at most, its 4 KiB of output escaped
_SPARE_SECONDS = 10.0  # what a busy machine may add
RUNNER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("program_runner.py")))


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a program ended.

    Attributes:
        code: its exit code, negative for the number of a signal; None if it could not be started.
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
            return "it did not end in time" if is_late else "it was ended with imds-bridge"
        if self.code < 0:
            return f"it was ended by {_signal_name(-self.code)}"
        return f"exit code {self.code}" if self.code else ""


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def encode_job(
    command: Sequence[str], body: bytes, data: Mapping[str, Any], *, timeout_seconds: float
) -> bytes:
    """Write what the runner has to do.

    Args:
        command: the program and its arguments.
        body: the CloudEvent, which the program gets on standard input.
        data: the event's data, from which the environment is made.
        timeout_seconds: when the program is ended.
    """
    job = {
        "command": list(command),
        "stdin": b64encode(body).decode("ascii"),
        "environment": environment(data),
        "timeout_seconds": timeout_seconds,
        "kill_after_seconds": KILL_AFTER_SECONDS,
    }
    return json.dumps(job).encode("ascii") + b"\n"


def environment(data: Mapping[str, Any]) -> dict[str, str]:
    """Return a program's environment: little of this process's, and what it is most likely to need of an event."""
    resources = data.get("Resources")
    values = {
        "EVENT_ID": data.get("EventId"),
        "EVENT_TYPE": data.get("EventType"),
        "EVENT_STATUS": data.get("EventStatus"),
        "NOT_BEFORE": data.get("NotBeforeUtc"),
        "RESOURCES": ",".join(map(str, resources)) if isinstance(resources, list) else "",
    }
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    own = {f"IMDS_BRIDGE_{name}": printable(value, _VALUE_CHARACTERS) for name, value in values.items()}
    return {**inherited, **own}


def run(job: bytes, *, timeout_seconds: float) -> Result:
    """Run a job and wait for its end; the program is ended if this process ends.

    Args:
        job: from `encode_job`.
        timeout_seconds: the job's.
    """
    limit_seconds = timeout_seconds + KILL_AFTER_SECONDS + _SPARE_SECONDS
    extend_deadline(limit_seconds)
    try:
        done = subprocess.run(  # noqa: S603 - a script of ours
            RUNNER,
            input=job,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
            timeout=limit_seconds,
            check=False,
        )
    except OSError as error:
        return Result(error=error.strerror or str(error))
    except subprocess.TimeoutExpired:
        return Result(code=-1, ended_by="timeout")
    return _result(_read_lines(done.stdout)) or Result(error="its runner ended unexpectedly")


class DetachedRun:
    """A program that continues if this process ends, with everything about it in a file.

    The file is locked as long as the runner lives: so a later process sees whether the program still runs, and a file
    without a lock and without a result is of a run that was interrupted. For one thread.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runner: subprocess.Popen[bytes] | None = None
        self._result: Result | None = None

    def start(self, job: bytes) -> None:
        """Start the program; the job is on the disk before.

        Raises:
            OSError: the disk or the system does not allow it, or an earlier run has not ended.
        """
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(file)
            os.ftruncate(file, 0)
            # The runner writes its result over the blanks: without it the program would run again.
            text = job + b" " * RESULT_BYTES
            if os.write(file, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
            os.lseek(file, 0, os.SEEK_SET)
            # the runner has the lock with the descriptor, and its program has neither
            self._runner = subprocess.Popen(  # noqa: S603 - a script of ours
                RUNNER, stdin=file, stdout=file, cwd="/", start_new_session=True
            )
        finally:
            os.close(file)
        self._result = None

    def result(self) -> Result | None:
        """Return how it ended, None if that is not known or its end was this process's wish."""
        if self._result is None and not self.is_running():
            found = _result(self._lines())
            self._result = found if found and found.ended_by != "stop" else None
        return self._result

    def is_running(self) -> bool:
        """Return whether the program, or one that an earlier process started, has not ended."""
        try:
            file = os.open(self.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            _lock(file)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        if self._runner:
            self._runner.wait()  # it has let go of the lock, so it is about to end
            self._runner = None
        return False

    def end(self) -> None:
        """Ask the runner to end the program soon, if it runs; may be repeated."""
        if not self.is_running():
            return
        pid = self._runner.pid if self._runner else self._lines().get("pid")
        if isinstance(pid, int) and pid > 1:  # any other would be a group of processes, or all
            with contextlib.suppress(OSError, OverflowError):
                os.kill(pid, SIGTERM)  # it is the runner's, as no other process has its lock

    def forget(self, *, older_than_seconds: float) -> bool:
        """Remove the file of a run that has ended long ago; return whether it is gone."""
        try:
            is_old = time.time() - self.path.stat().st_mtime > older_than_seconds
            if is_old and not self.is_running():
                self.path.unlink()
                return True
        except OSError:
            return not self.path.exists()
        return False

    def _lines(self) -> dict[str, Any]:
        try:
            return _read_lines(self.path.read_bytes())
        except OSError:
            return {}


def _lock(file: int) -> None:
    """Lock a file until its descriptor is closed everywhere.

    Raises:
        BlockingIOError: it is locked.
    """
    if sys.platform != "win32":  # where the configuration refuses programs
        import fcntl  # noqa: PLC0415

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _read_lines(text: bytes) -> dict[str, Any]:
    """Merge the lines of a runner; one that was not written to its end does not count."""
    merged: dict[str, Any] = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # the disk may have changed it
            merged |= json.loads(line)
    return merged


def _result(lines: Mapping[str, Any]) -> Result | None:
    if "code" not in lines and "error" not in lines:
        return None
    code, ended_by = lines.get("code"), lines.get("ended_by", "")
    error, output = lines.get("error", ""), lines.get("output", "")
    texts = (ended_by, error, output)
    if not isinstance(code, int | None) or not all(isinstance(text, str) for text in texts):
        return None
    return Result(code=code, ended_by=ended_by, error=error, output=one_line(output))


def find_fault(program: str) -> str:
    """Return why a program cannot be started, or is not safe as any user could replace it; "" if it is fine."""
    path = Path(program)
    try:
        if not path.is_file():
            return f"{program}: there is no such file"
        if not os.access(path, os.X_OK):
            return f"{program}: this user may not execute it"
        real = path.resolve()
        writable = next((part for part in (*path.parents, real, *real.parents) if _is_anyones(part)), None)
    except OSError as error:
        return f"{program}: {error.strerror}"
    return f"{program}: any user may change {writable}" if writable else ""


def _is_anyones(path: Path) -> bool:
    mode = path.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not (path.is_dir() and mode & stat.S_ISVTX)
