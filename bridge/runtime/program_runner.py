"""Run one program, as a process of its own: `python -I -S program_runner.py`. It imports only the standard library.

Standard input has the job, a line of JSON. Standard output gets a line with the process id, then one with the result;
if both are the same file, they follow the job.
The program runs without a shell, in a session of its own and with a time limit; only the end of its output is kept.
Its whole process group is ended (SIGTERM, later SIGKILL) at the time limit, after a SIGTERM to the runner, and if
standard output is a pipe that no process reads any more. With a file as standard output, the program continues when
the process that wanted it has ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from base64 import b64decode
from contextlib import suppress
from typing import Any

assert sys.platform != "win32"  # noqa: S101 - type checkers then know it

OUTPUT_BYTES = 4096
_CHUNK_BYTES = 65536
_PR_SET_PDEATHSIG = 1
_LAST_READS = 16  # more than a pipe holds: a program that escaped its group may write for ever


class Run:
    """A program from start to end, for the main thread."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._limit_at = time.monotonic() + job["timeout_seconds"]
        self._kill_after_seconds = job["kill_after_seconds"]
        self._kill_at = float("inf")
        self._ended_by = ""
        self._input = memoryview(b64decode(job["stdin"]))
        self._output = b""
        self._output_size = 0
        self._poll = select.poll()
        self._signals = _watch_signals()
        self._process = subprocess.Popen(  # noqa: S603 - the program that the configuration names, without a shell
            job["command"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=job["environment"],
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - the runner has one thread
        )
        assert self._process.stdin  # noqa: S101 - both are pipes
        assert self._process.stdout  # noqa: S101
        self._stdin = self._process.stdin.fileno()
        self._stdout = self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the program; return the result."""
        self._poll.register(self._stdin, select.POLLOUT)
        self._poll.register(self._stdout, select.POLLIN)
        self._poll.register(self._signals, select.POLLIN)
        self._poll.register(sys.stdout.fileno(), 0)  # an error is reported all the same: its reader is gone
        while not self._has_ended():
            wait_seconds = max(0.0, min(self._limit_at, self._kill_at) - time.monotonic())
            for descriptor, _ in self._poll.poll(wait_seconds * 1000):
                self._handle(descriptor)
            self._enforce_limits()
        # before it is reaped, so that the group's number is still its own
        self._signal_group(signal.SIGKILL)
        for _ in range(_LAST_READS):
            self._read()
        return {
            "code": self._process.wait(),
            "ended_by": self._ended_by,
            "output": self._output.decode("utf-8", "replace"),
            "output_bytes": self._output_size,
        }

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _handle(self, descriptor: int) -> None:
        if descriptor == self._stdin:
            self._write()
        elif descriptor == self._stdout:
            self._read()
        elif descriptor == self._signals.fileno():
            if set(self._signals.recv(_CHUNK_BYTES)) & {signal.SIGTERM, signal.SIGINT}:
                self._end("stop")
        else:
            self._poll.unregister(descriptor)
            self._end("stop")

    def _write(self) -> None:
        try:
            self._input = self._input[os.write(self._stdin, self._input[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # it does not want to read it
            self._input = memoryview(b"")
        if not self._input:
            self._poll.unregister(self._stdin)
            assert self._process.stdin  # noqa: S101 - it is a pipe
            self._process.stdin.close()

    def _read(self) -> None:
        try:
            chunk = os.read(self._stdout, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            with suppress(KeyError):
                self._poll.unregister(self._stdout)
        self._output = (self._output + chunk)[-OUTPUT_BYTES:]
        self._output_size += len(chunk)

    def _enforce_limits(self) -> None:
        now = time.monotonic()
        if now >= self._limit_at:
            self._end("timeout")
        if now >= self._kill_at:
            self._signal_group(signal.SIGKILL)
            self._kill_at = now + 1.0

    def _end(self, reason: str) -> None:
        self._limit_at = float("inf")
        if not self._ended_by:
            self._ended_by = reason
            self._kill_at = time.monotonic() + self._kill_after_seconds
            self._signal_group(signal.SIGTERM)

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(OSError):  # it may have changed its user
            os.killpg(self._process.pid, number)


def _die_with_parent() -> None:
    """Have the kernel kill the program if the runner is killed: it may be run again then, and never twice at once."""
    with suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_signals() -> socket.socket:
    """Return a socket that gets the number of each signal."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return reader


def _report(line: dict[str, Any]) -> None:
    with suppress(OSError):
        os.write(sys.stdout.fileno(), json.dumps(line).encode("ascii") + b"\n")
        os.fsync(sys.stdout.fileno())


def main() -> None:
    """Run the job on standard input."""
    line = sys.stdin.buffer.readline()
    with suppress(OSError):  # a pipe; a file has room behind the job
        os.lseek(sys.stdout.fileno(), len(line), os.SEEK_SET)
    job = json.loads(line)
    _report({"pid": os.getpid()})
    try:
        result = Run(job).finish()
    except OSError as error:
        result = {"error": error.strerror or str(error)}
    _report(result)


if __name__ == "__main__":
    main()
