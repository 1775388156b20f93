"""What the real processes hold once they use Service Bus with a managed identity."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from azure.servicebus import ServiceBusClient

from tests.bench import bus, process, simulators
from tests.bench.bus_commands import command
from tests.bench.measure import BenchError, Progress, Row, memory_mib, paced, spread, wait_until
from tests.bench.simulators import Remote

CHANGES = 40
CHANGE_SECONDS = 0.25
APPROVALS = 5
APPROVAL_SECONDS = 1.1
BARE_RUNS = 5
IMPORTS = "import azure.identity, azure.servicebus, pydantic, requests, sqlite3"
TRUSTED = "bus-memory.pem"
IDENTITY = "AZURE_POD_IDENTITY_AUTHORITY_HOST"  # where azure-identity looks for IMDS


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Let both processes work for a while, and look at what they hold."""
    with bus.secured(folder / TRUSTED) as lab, simulators.imds() as imds:
        progress.begin(f"bus-memory: forward, {CHANGES} changes")
        forward, forward_peak = _forward(folder, lab, imds)
        progress.begin(f"bus-memory: listen, {APPROVALS} approvals")
        listen, listen_peak = _listen(folder, lab, imds)
        bus.check(lab)
    bare = [process.bare_imports_mib(IMPORTS) for _ in range(BARE_RUNS)]
    return [
        Row(
            name="memory of `forward` with Service Bus and managed identity, RSS",
            measured=forward,
            unit="MiB",
            limit=58,
            how="real command with a certificate more to trust, one Service Bus sink over TLS, a token from IMDS, "
            f"after {CHANGES} changes; "
            f"peak {forward_peak:.1f} MiB",
            details={"rss_mib": round(forward, 2), "peak_mib": round(forward_peak, 2)},
        ),
        Row(
            name="memory of `listen`, the same, RSS",
            measured=listen,
            unit="MiB",
            how=f"real command, commands and receipts over TLS, after {APPROVALS} approvals; "
            f"peak {listen_peak:.1f} MiB",
            details={"rss_mib": round(listen, 2), "peak_mib": round(listen_peak, 2)},
        ),
        Row(
            name="  beside them: what they import of others, RSS",
            measured=statistics.median(bare),
            unit="MiB",
            how=f"{IMPORTS.removeprefix('import ')}: median of {BARE_RUNS} processes that do nothing else",
            details={"rss_mib": spread(bare)},
        ),
    ]


def _forward(folder: Path, lab: Remote, imds: Remote) -> tuple[float, float]:
    event_id = imds("schedule", event_type="Freeze", resources=[simulators.VM], notice_seconds=86_400)
    state = folder / "bus-memory-forward"
    with _running("forward", state, lab, imds) as read_memory:
        for number in paced(CHANGES, CHANGE_SECONDS):
            imds("update", event_id, DurationInSeconds=1000 + number)
        expected = 2 * CHANGES * 3 // 4  # an event and its document each; two changes may fall into one poll
        _wait_for_events(lab, expected, limit_seconds=10)
        figures = read_memory()
    imds("complete", event_id)
    return figures


def _listen(folder: Path, lab: Remote, imds: Remote) -> tuple[float, float]:
    state = folder / "bus-memory-listen"
    before = lab("enqueued", bus.TOPIC)
    with _running("listen", state, lab, imds) as read_memory:
        with (
            ServiceBusClient.from_connection_string(lab("address"), retry_total=0) as client,
            client.get_queue_sender(bus.SESSION_QUEUE) as sender,
        ):
            for _ in paced(APPROVALS, APPROVAL_SECONDS):
                event_id = imds(
                    "schedule", event_type="Freeze", resources=[simulators.VM], notice_seconds=86_400
                )
                sender.send_messages(command(event_id), timeout=bus.TRY_SECONDS)
        _wait_for_events(lab, before + APPROVALS + 1, limit_seconds=10)  # with the heartbeat of the start
        figures = read_memory()
    if len(imds("approved")) != APPROVALS:
        raise BenchError(f"{len(imds('approved'))} of {APPROVALS} events were POSTed")
    return figures


@contextmanager
def _running(
    role: str, state: Path, lab: Remote, imds: Remote
) -> Iterator[Callable[[], tuple[float, float]]]:
    """Run the command until it has had a token; give what reads its memory, now and at its peak."""
    path = state.with_suffix(".toml")
    namespace = json.dumps(lab("namespace"))
    # A JSON string is a TOML string as well.
    path.write_text(
        f"state_dir = {json.dumps(str(state))}\n"
        f"[imds]\nendpoint = {json.dumps(imds('base_url'))}\npoll_seconds = {process.REAL_POLL_SECONDS}\n"
        f"[sinks.bench]\nkind = 'servicebus'\nnamespace = {namespace}\ntopic = '{bus.TOPIC}'\n"
        f"[approvals]\nnamespace = {namespace}\nqueue = '{bus.SESSION_QUEUE}'\nsession = '{{vm}}'\n"
        "[approvals.policy]\nallow = [{ event_type = ['Freeze'] }]\n",
        encoding="utf-8",
    )
    had = lab("tokens")
    command = [sys.executable, "-m", "tests.bench.trusting", str(state.with_name(TRUSTED))]
    with process.started(
        [*command, role, "--config", str(path)], state, {IDENTITY: lab("identity_url")}
    ) as running:

        def has_token() -> bool:
            process.check_alive(running, state)
            return bool(lab("tokens") > had)

        def read_memory() -> tuple[float, float]:
            process.check_alive(running, state)
            return memory_mib("VmRSS", running.pid), memory_mib("VmHWM", running.pid)

        wait_until(has_token, what="a token for the managed identity", limit_seconds=20)
        yield read_memory


def _wait_for_events(lab: Remote, count: int, *, limit_seconds: float) -> None:
    wait_until(
        lambda: bool(lab("enqueued", bus.TOPIC) >= count),
        what=f"event {count} on the bus",
        limit_seconds=limit_seconds,
    )
