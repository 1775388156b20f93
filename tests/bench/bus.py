"""The lab's Service Bus in a process of its own, and the SDK's border, dated alike for bridge and bare use."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import certifi
from azure.servicebus import ServiceBusMessageBatch, ServiceBusReceiver, ServiceBusSender

from bridge.lab.httpd import Answer, HttpRequest, Server, json_answer
from tests.bench.measure import BenchError, Progress, Row, Task, apart
from tests.bench.simulators import VM, Remote
from tests.support.servicebus import ServiceBusLab
from tests.support.tls import Authority

ROUNDS = 5
ROUND_SECONDS = 120.0  # only keeps a round from hanging
TOPIC = "events"  # without subscriptions: what is sent there is counted and kept nowhere
RELAY_TOPIC = "relayed"
SESSION_QUEUE = "approvals"
TRY_SECONDS = 10.0
HOST = "127.0.0.1"
# The SDK knows no other port with TLS and an identity; whatever else has it, has it at 127.0.0.1.
TLS_HOST, TLS_PORT = "127.83.66.1", 5671
TOKEN_PATH = "/metadata/identity/oauth2/token"  # noqa: S105 - a path
TOKEN_LIFE_SECONDS = 86_400
_CONFIG = {
    "UserConfig": {
        "Namespaces": [
            {
                "Name": "bench",
                "Queues": [{"Name": SESSION_QUEUE, "Properties": {"RequiresSession": True}}],
                "Topics": [{"Name": TOPIC}, {"Name": RELAY_TOPIC, "Subscriptions": [{"Name": "chat"}]}],
            }
        ]
    }
}


class _Bus(ServiceBusLab):
    """The lab's Service Bus, and what the benchmark asks of it."""

    def __init__(self) -> None:
        super().__init__(_CONFIG)

    def address(self) -> str:
        return self.connection_string

    def enqueued(self, path: str) -> int:
        return self.entity(path).counts.enqueued

    def completed(self, path: str) -> int:
        return self.entity(path).counts.completed

    def left(self, path: str) -> int:
        """Return how many messages are still there, the dead ones included."""
        counts = self.entity(path).counts
        return counts.active + counts.dead_letters

    def faults_of_its_own(self) -> list[str]:
        return [repr(error) for error in self.failures]


def lab() -> Remote:
    """Start a simulated Service Bus."""
    return Remote(_Bus)


def check(bus: Remote) -> None:
    """Raise BenchError where the lab itself has failed: its figures would mean nothing."""
    if failures := bus("faults_of_its_own"):
        raise BenchError(f"the lab's Service Bus failed: {failures[0]}")


# --- the SDK's border ---


@dataclass(kw_only=True)
class Border:
    """What went over the SDK's border, and when each call returned, with the CPU of the process until then."""

    at: list[float] = field(default_factory=list)  # time.monotonic()
    cpu: list[float] = field(default_factory=list)  # time.process_time()
    counts: list[int] = field(default_factory=list)

    def note(self, count: int) -> None:
        self.at.append(time.monotonic())
        self.cpu.append(time.process_time())
        self.counts.append(count)

    def rate(self, begin: int, *, until: float = 0.0) -> float:
        """Return messages a second after the first `begin` calls, to the last or `until` then."""
        return sum(self.counts[begin:]) / (max(until, self.at[-1]) - self.at[begin - 1])

    def cpu_us(self, begin: int) -> float:
        """Return the CPU that the whole process spent on a message."""
        return (self.cpu[-1] - self.cpu[begin - 1]) * 1e6 / sum(self.counts[begin:])


@contextmanager
def sends() -> Iterator[Border]:
    """Date every `send_messages` of this process, whoever calls it."""
    border = Border()
    real = ServiceBusSender.send_messages

    def send(self: ServiceBusSender, message: Any, **options: Any) -> None:
        real(self, message, **options)
        border.note(len(message) if isinstance(message, ServiceBusMessageBatch) else 1)

    with patch.object(ServiceBusSender, "send_messages", send):
        yield border


@contextmanager
def completions() -> Iterator[Border]:
    """Date every `complete_message` of this process, whoever calls it."""
    border = Border()
    real = ServiceBusReceiver.complete_message

    def complete(self: ServiceBusReceiver, message: Any) -> None:
        real(self, message)
        border.note(1)

    with patch.object(ServiceBusReceiver, "complete_message", complete):
        yield border


# --- the bridge and the bare SDK in turn ---


class Done(NamedTuple):
    """What one way has done: messages a second, and CPU of each."""

    rate: float
    cpu_us: float


def compare(
    ways: Sequence[Callable[[Task], Done]],
    prepare: Callable[[int], Task],
    progress: Progress,
    *,
    name: str,
    limit: float,
    how: str,
) -> Row:
    """Let the bridge and the bare SDK do the same in turn, each in a process of its own, again and again.

    Args:
        ways: the bridge's and the bare one.
        prepare: prepares a round, of which the number is given, for one of the two.
        progress: shows the rounds.
        name: of the row.
        limit: of the bridge's rate, by the bare one.
        how: what was done.
    """
    done: dict[Callable[[Task], Done], list[Done]] = {way: [] for way in ways}
    for number in range(ROUNDS):
        progress.begin(f"{name}: round {number + 1} of {ROUNDS}")
        for way in ways if number % 2 == 0 else reversed(ways):
            done[way].append(apart(way, prepare(number), limit_seconds=ROUND_SECONDS))
    ours, theirs = done.values()
    # Side by side, whatever else runs.
    ratios = [one.rate / other.rate for one, other in zip(ours, theirs, strict=True)]
    (rate, cpu_us), (bare_rate, bare_cpu_us) = (map(median, zip(*way, strict=True)) for way in (ours, theirs))
    return Row(
        name=name,
        measured=median(ratios),
        unit="x",
        limit=limit,
        at_least=True,
        how=f"median of {ROUNDS} rounds, in turn; medians {rate:,.0f} and {bare_rate:,.0f}, {how}; "
        f"{cpu_us:.0f} and {bare_cpu_us:.0f} us of CPU each",
    )


# --- a namespace with a managed identity ---


class _Secured(_Bus):
    """The same behind TLS, with an IMDS beside it that gives tokens to the VM's identity."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._tokens = 0
        authority = Authority(folder)
        # The SDK loads those that it trusts anyway, as in life.
        authority.file.write_bytes(authority.file.read_bytes() + Path(certifi.where()).read_bytes())
        self.ca_file = authority.file
        self._front = _Tls(self.port, authority.server(host=TLS_HOST))
        self._identity = Server(VM, self._token)

    def stop(self) -> None:
        self._identity.close()
        self._front.stop()
        super().stop()

    def reached_by(self) -> dict[str, str]:
        """Return the settings of a sink or of approvals."""
        return {"namespace": TLS_HOST, "ca_file": str(self.ca_file)}

    def identity_url(self) -> str:
        return self._identity.url

    def tokens(self) -> int:
        """Return how many tokens were given."""
        return self._tokens

    def _token(self, request: HttpRequest) -> Answer:
        if request.path != TOKEN_PATH or request.headers.get("metadata") != "true":
            return Answer(status=404)
        self._tokens += 1
        return json_answer(
            {
                "access_token": "bench." + "x" * 1500,  # about as long as a real one
                "expires_in": str(TOKEN_LIFE_SECONDS),
                "expires_on": str(int(time.time()) + TOKEN_LIFE_SECONDS),
                "resource": request.parameters["resource"][0],
                "token_type": "Bearer",
            }
        )


def secured(folder: Path) -> Remote:
    """Start a simulated Service Bus behind TLS; its certificates are made anew in `folder`."""
    return Remote(partial(_Secured, folder))


class _Tls:
    """Take TLS on one port and hand it on to another."""

    def __init__(self, target: int, context: ssl.SSLContext) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, TLS_HOST, TLS_PORT, ssl=context)
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            inner_reader, inner_writer = await asyncio.open_connection(HOST, self._target)
            await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
