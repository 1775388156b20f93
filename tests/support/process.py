"""What tests of whole processes share: configuration files, the process itself, its outbox, waiting."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from uuid import NAMESPACE_URL, uuid5

from bridge.events.model import StoredEvent, order_key

T = TypeVar("T")

LIMIT_SECONDS = 60.0  # what a slow machine may take for anything
COMMAND = [sys.executable, "-m", "bridge"]


def wait_until(
    predicate: Callable[[], T | None],
    *,
    timeout_seconds: float = LIMIT_SECONDS,
    describe: Callable[[], object] = str,
    apart_seconds: float = 0.0,
) -> T:
    """Wait until the predicate returns something true, and return it; `describe` tells what there was instead.

    The pause between two looks, `apart_seconds` at least, grows with the wait and with what a look takes: what waits
    for another process leaves it the machine.
    """
    began = looked = time.monotonic()
    while not (value := predicate()):
        now = time.monotonic()
        assert now - began < timeout_seconds, f"not within {timeout_seconds:g} s: {describe()}"
        time.sleep(max(apart_seconds, 0.001, min((now - began) / 10, 0.02), 4 * (now - looked)))
        looked = time.monotonic()
    return value


def toml(settings: Mapping[str, Any]) -> str:
    """Write settings as TOML; tables become inline tables, so the order does not matter."""
    return "".join(f"{_toml_value(name)} = {_toml_value(value)}\n" for name, value in settings.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_toml_value(key)} = {_toml_value(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without what would change settings or routes, and with `extra`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith("IMDS_BRIDGE__") and not name.lower().endswith("_proxy")
    }
    return {**kept, **(extra or {})}


def completed(
    *command: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    given: str = "",
    limit_seconds: float = LIMIT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its exit code; `given` is what it can read."""
    return subprocess.run(
        [str(word) for word in command],
        env=env,
        cwd=cwd,
        input=given,
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )


def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of imds-bridge to its end."""
    return completed(*COMMAND, *arguments, env=environment(env))


class Forward:
    """`imds-bridge forward`, or another role, as a process of its own; killed at the end of the `with` if it runs."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        role: Literal["forward", "listen", "relay"] = "forward",
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Name its files: `folder` gets the configuration, the log and the state; `options` are of the command."""
        self.folder = folder
        self.state = folder / "state" / role
        self.config = folder / "config.toml"
        self.log = folder / "log.jsonl"
        self.output = folder / "stdout.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        given = {"state_dir": folder / "state", "log_format": "json", **(settings or {})}
        self.config.write_text(toml(given))
        self._command = [*COMMAND, role, "--config", str(self.config), *options]
        self._environment = environment(env)
        self._stdout = stdout
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it; its log goes on where an earlier run ended."""
        output, log = self.output.open("ab"), self.log.open("ab")
        with output, log:
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output if self._stdout is None else self._stdout,
                stderr=log,
            )
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, error: object, *_: object) -> None:
        self.kill()
        if error:
            print(self)  # pytest shows it

    def kill(self) -> None:
        """End it by SIGKILL, if it runs."""
        if self.process and self.process.poll() is None:
            self.process.kill()
        if self.process:
            self.process.wait(LIMIT_SECONDS)
            if self.process.stdout:
                self.process.stdout.close()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """Return its exit code once it has ended."""
        assert self.process is not None
        return self.process.wait(LIMIT_SECONDS)

    def stop(self) -> int:
        """End it by SIGTERM; return its exit code."""
        self.signal()
        return self.wait()

    def lines(self) -> list[dict[str, Any]]:
        """Return its log, one dictionary a line."""
        return _json_lines(self.log)

    def printed(self) -> list[dict[str, Any]]:
        """Return what it has printed so far, one event a line."""
        return _json_lines(self.output)

    def wait_for_log(self, text: str) -> dict[str, Any]:
        """Return the first log line whose message holds `text`."""
        return wait_until(
            lambda: next((line for line in self.lines() if text in line["message"]), None),
            describe=lambda: f"no {text!r} in {self.log.read_text()}",
        )

    def status(self) -> dict[str, Any]:
        """Return what the process last wrote for `imds-bridge status`."""
        path = self.state / "status.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def current_status(self) -> dict[str, Any]:
        """Return the same, or nothing if it was an earlier process."""
        status = self.status()
        return status if self.process and status.get("pid") == self.process.pid else {}

    def backlog(self) -> int:
        """Return how many deliveries wait, by what this very process last wrote."""
        return sum(sink["backlog"] for sink in self.current_status().get("sinks", {}).values())

    def wait_for_status(self, predicate: Callable[[dict[str, Any]], T | None]) -> T:
        """Wait until this very process has written what the predicate asks for."""

        def found() -> T | None:
            status = self.current_status()
            return predicate(status) if status else None

        return wait_until(found, describe=self.status)

    def __repr__(self) -> str:
        return f"{self._command}, log:\n{self.log.read_text() if self.log.exists() else ''}"


def _json_lines(file: Path) -> list[dict[str, Any]]:
    """Read a file's lines; one that a kill has cut off is left out."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def stored_event(
    number: int,
    *,
    type_: str = "io.imdsbridge.scheduledevent.scheduled.v1",
    subject: str = "4CAEA225-A741-474D-A72E-428C86FCD853",
    **data: Any,
) -> StoredEvent:
    """Make an event as the outbox gives it; `data` goes into its data."""
    event_id = str(uuid5(NAMESPACE_URL, f"urn:test:{number}"))
    envelope = {
        "specversion": "1.0",
        "id": event_id,
        "source": "/subscriptions/s/resourceGroups/lab",
        "type": type_,
        "subject": subject,
        "time": "2026-01-02T03:04:05.678Z",
        "dataschema": "urn:imds-bridge:schema:scheduledevent.scheduled:1",
        "datacontenttype": "application/json",
        "data": {"EventId": subject, "EventType": "Reboot", **data},
    }
    body = json.dumps(envelope, separators=(",", ":")).encode("ascii")
    return StoredEvent(seq=number, id=event_id, type=type_, stored_at=0.0, body=body)


def by_order_key(envelopes: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the ids of events in their order, apart for each EventId and reporter; a repeated one counts once."""
    ids: dict[str, dict[str, None]] = defaultdict(dict)
    for envelope in envelopes:
        ids[order_key(envelope)][envelope["id"]] = None
    return {key: list(found) for key, found in ids.items()}


def kills(few: int) -> int:
    """Return how many processes a test kills: `few`, or more where TEST_KILLS says so."""
    return max(few, int(os.environ.get("TEST_KILLS", "0")))


def random_instants() -> random.Random:
    """Choose a seed unless TEST_KILL_SEED gives one, and print it: pytest shows that when a test fails."""
    seed = int(os.environ.get("TEST_KILL_SEED", random.SystemRandom().randrange(2**32)))
    print(f"TEST_KILL_SEED={seed} chooses the same instants and faults again")
    return random.Random(seed)  # noqa: S311 - it shall be repeatable


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What an outbox holds: events as (seq, id, type, body), the state, (sink, seq) that wait, dead letters."""

    events: list[tuple[int, str, str, bytes]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    waiting: list[tuple[str, int]] = field(default_factory=list)
    dead: list[tuple[str, str, str, str]] = field(default_factory=list)


def read_outbox(state: Path) -> Stored:
    """Read the outbox in the folder `state`, also beside the process that uses it."""
    path = state / "outbox.db"
    if not path.exists() or path.stat().st_size == 0:
        return Stored()
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=LIMIT_SECONDS)) as database:
        ask = database.execute
        if not ask("PRAGMA user_version").fetchone()[0]:
            return Stored()
        records = ask("SELECT key, value FROM record WHERE kind = 'state'").fetchall()
        return Stored(
            events=ask("SELECT seq, id, type, body FROM event ORDER BY seq").fetchall(),
            state={key: json.loads(value) for key, value in records},
            waiting=ask("SELECT sink, seq FROM waiting ORDER BY seq").fetchall(),
            dead=ask("SELECT sink, id, reason, detail FROM dead_letter").fetchall(),
        )


@contextmanager
def closed_port() -> Iterator[str]:
    """Yield a URL that refuses every connection, and whose port stays reserved."""
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def dead_port() -> Iterator[int]:
    """Yield a port that answers no connection: its queue of waiting ones is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as held, ExitStack() as stack:
        for _ in range(3):
            waiting = stack.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(held.getsockname())
        yield int(held.getsockname()[1])


Serve = Callable[["RawServer", socket.socket], None]


class RawServer:
    """A TCP server on `address` that answers exactly as `serve` does, one thread a connection.

    `serve` gets the socket; what it raises because the peer left is passed over. With a `tls` context the
    handshake comes first. `requests` holds the head of each request that `read_head` took.
    """

    def __init__(
        self, serve: Serve, *, tls: ssl.SSLContext | None = None, address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        self._serve = serve
        self._tls = tls
        self._listener = socket.create_server(address)
        self.port = int(self._listener.getsockname()[1])
        self.url = f"{'https' if tls else 'http'}://{address[0]}:{self.port}"
        self._open: list[socket.socket] = []
        self.connections = 0
        # How many first connections lose all that comes, as at a NAT, and how many bytes that was, for `forwarding`.
        self.forgotten = self.lost_bytes = 0
        self.requests: list[str] = []
        self.ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def read_head(self, connection: socket.socket) -> bool:
        """Read a request; keep its head; return whether there was one."""
        text = b""
        while b"\r\n\r\n" not in text:
            if not (more := connection.recv(65536)):
                return False
            text += more
        head, _, body = text.partition(b"\r\n\r\n")
        self.requests.append(head.decode("latin-1"))
        length = re.search(rb"(?i)content-length: (\d+)", head)
        missing = (int(length[1]) if length else 0) - len(body)
        while missing > 0:
            if not (more := connection.recv(65536)):  # else its thread would take the machine from the others
                return False
            missing -= len(more)
        return True

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                threading.Thread(target=self._run, args=[connection], daemon=True).start()

    def _run(self, plain: socket.socket) -> None:
        with suppress(OSError, ValueError), plain:
            if not self._tls:
                self._serve(self, plain)
                return
            with self._tls.wrap_socket(plain, server_side=True) as secured:
                self._serve(self, secured)


def answering(*answers: bytes) -> Serve:
    """Answer request after request on a connection with `answers` in turn, then over and over the last."""

    def serve(server: RawServer, connection: socket.socket) -> None:
        while server.read_head(connection):
            connection.sendall(answers[min(len(server.requests), len(answers)) - 1])

    return serve


def dripping(beginning: bytes, drop: bytes) -> Serve:
    """Answer with `beginning` and then with `drop` ten times a second, without end."""

    def serve(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        connection.sendall(beginning)
        while not server.ended.wait(0.1):
            connection.sendall(drop)

    return serve


def silent(server: RawServer, _: socket.socket) -> None:
    """Say nothing at all."""
    server.ended.wait()
