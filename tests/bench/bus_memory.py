"""What the real processes hold once they use Service Bus with a managed identity."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from azure.servicebus import ServiceBusClient

from tests.bench import bus, simulators
from tests.bench.bus_commands import command
from tests.bench.measure import BenchError, Progress, Row, paced
from tests.bench.process import REAL_POLL_SECONDS, Bridge, bare_imports_mib
from tests.bench.simulators import Remote

CHANGES = 40
CHANGE_SECONDS = 0.25
APPROVALS = 5
APPROVAL_SECONDS = 1.1
BARE_RUNS = 5
IMPORTS = "import azure.identity, azure.servicebus, pydantic, requests, sqlite3"
IDENTITY = "AZURE_POD_IDENTITY_AUTHORITY_HOST"  # where azure-identity looks for IMDS


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Let both processes work for a while, and look at what they hold."""
    with bus.secured(folder) as lab, simulators.imds() as imds:
        progress.begin(f"bus-memory: forward, {CHANGES} changes")
        forward, forward_peak = _forward(folder, lab, imds)
        progress.begin(f"bus-memory: listen, {APPROVALS} approvals")
        listen, listen_peak = _listen(folder, lab, imds)
        bus.check(lab)
    bare = [bare_imports_mib(IMPORTS) for _ in range(BARE_RUNS)]
    return [
        Row(
            name="memory of `forward` with Service Bus and managed identity, RSS",
            measured=forward,
            unit="MiB",
            limit=60,
            how="real command, one Service Bus sink over TLS, a token from IMDS, "
            f"after {CHANGES} changes; "
            f"peak {forward_peak:.1f} MiB",
        ),
        Row(
            name="memory of `listen`, the same, RSS",
            measured=listen,
            unit="MiB",
            how=f"real command, commands and receipts over TLS, after {APPROVALS} approvals; "
            f"peak {listen_peak:.1f} MiB",
        ),
        Row(
            name="  beside them: what they import of others, RSS",
            measured=statistics.median(bare),
            unit="MiB",
            how=f"{IMPORTS.removeprefix('import ')}: median of {BARE_RUNS} processes that do nothing else",
        ),
    ]


def _forward(folder: Path, lab: Remote, imds: Remote) -> tuple[float, float]:
    event_id = imds("schedule", event_type="Freeze", resources=[simulators.VM], notice_seconds=86_400)
    with _running("forward", folder, lab, imds) as process:
        for number in paced(CHANGES, CHANGE_SECONDS):
            imds("update", event_id, DurationInSeconds=1000 + number)
        expected = 2 * CHANGES * 3 // 4  # an event and its document each; two changes may fall into one poll
        process.until(lambda: lab("enqueued", bus.TOPIC) >= expected)
        figures = process.memory()
    imds("complete", event_id)
    return figures


def _listen(folder: Path, lab: Remote, imds: Remote) -> tuple[float, float]:
    before = lab("enqueued", bus.TOPIC)
    with _running("listen", folder, lab, imds) as process:
        with (
            ServiceBusClient.from_connection_string(lab("address"), retry_total=0) as client,
            client.get_queue_sender(bus.SESSION_QUEUE) as sender,
        ):
            for _ in paced(APPROVALS, APPROVAL_SECONDS):
                event_id = imds(
                    "schedule", event_type="Freeze", resources=[simulators.VM], notice_seconds=86_400
                )
                sender.send_messages(command(event_id), timeout=bus.TRY_SECONDS)
        # With the heartbeat of the start.
        process.until(lambda: lab("enqueued", bus.TOPIC) > before + APPROVALS)
        figures = process.memory()
    if len(imds("approved")) != APPROVALS:
        raise BenchError(f"{len(imds('approved'))} of {APPROVALS} events were POSTed")
    return figures


@contextmanager
def _running(role: Literal["forward", "listen"], folder: Path, lab: Remote, imds: Remote) -> Iterator[Bridge]:
    """Run the command once it has had a token."""
    namespace = lab("reached_by")
    approvals = {**namespace, "queue": bus.SESSION_QUEUE, "session": "{vm}"}
    settings = {
        "imds": {"endpoint": imds("base_url"), "poll_seconds": REAL_POLL_SECONDS},
        "sinks": {"bench": {"kind": "servicebus", "topic": bus.TOPIC, **namespace}},
        "approvals": {**approvals, "policy": {"allow": [{"event_type": ["Freeze"]}]}},
    }
    had = lab("tokens")
    with Bridge(folder / role, settings, role=role, env={IDENTITY: lab("identity_url")}) as process:
        process.until(lambda: lab("tokens") > had)
        yield process
