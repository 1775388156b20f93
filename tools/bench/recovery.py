"""How soon a notice is there once a receiver, or IMDS, is back."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from bridge.imds.client import EVENTS_PATH
from tests.support.inbox import Inbox
from tests.support.process import closed_port, wait_until
from tools.bench import parts, simulators
from tools.bench.measure import Progress, Row, percentile
from tools.bench.parts import DatingImds
from tools.bench.process import Bridge

SINKS = 100
AWAY_SECONDS = 20
FORWARDERS = 25
ROUNDS = 4
FAULTS = (500, "drop")
FAULT_SECONDS = 5
NOTICE = "io.imdsbridge.scheduledevent.scheduled.v1"
LIMIT_SECONDS = 60


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Let many sinks miss their receiver, and many forwarders miss IMDS."""
    return [_receiver_back(folder, progress), _imds_back(folder, progress)]


def _receiver_back(folder: Path, progress: Progress) -> Row:
    progress.begin(f"recovery: {SINKS} sinks, their receiver away for {AWAY_SECONDS} s")
    with simulators.imds() as imds, ExitStack() as stack:
        with closed_port() as url:
            hooks = {f"s{number}": {"kind": "webhook", "url": f"{url}/{number}"} for number in range(SINKS)}
            settings = {"imds": {"endpoint": imds("url", simulators.VM)}, "sinks": hooks}
            running = stack.enter_context(Bridge(folder / "receiver-back", settings))
            running.until(lambda: imds("requests"), limit_seconds=LIMIT_SECONDS)
            imds("schedule", event_type="Preempt", resources=[simulators.VM], notice_seconds=60)
            time.sleep(AWAY_SECONDS)
            running.check_alive()
        inbox = stack.enter_context(simulators.Remote(partial(_DatedInbox, int(url.rpartition(":")[2]))))
        back_at: float = inbox("began_at")
        running.until(lambda: len(_arrivals(inbox)) == SINKS, limit_seconds=LIMIT_SECONDS)
        arrivals = _arrivals(inbox)
    return _row(
        "receiver back after 20 s to fresh notice delivered, p99",
        [at - back_at for at in arrivals.values()],
        f"{SINKS} webhook sinks of one real process, each with its own waits; connections are refused for "
        f"{AWAY_SECONDS} s, from before the notice on",
        limit_seconds=2,
    )


class _DatedInbox(Inbox):
    """A receiver that knows since when it listens (time.monotonic())."""

    def __init__(self, port: int) -> None:
        super().__init__(port=port)
        self.began_at = time.monotonic()


def _arrivals(inbox: simulators.Remote) -> dict[str, float]:
    """Return when the notice was first received, by path."""
    found: dict[str, float] = {}
    for one in inbox("received"):
        if json.loads(one.body)["type"] == NOTICE:
            found.setdefault(one.path, one.at)
    return found


def _imds_back(folder: Path, progress: Progress) -> Row:
    progress.begin(f"recovery: {FORWARDERS} forwarders, IMDS failing {ROUNDS} times")
    logging.getLogger("bridge").setLevel(logging.ERROR)  # every failure would be a line
    delays: list[float] = []
    with simulators.imds() as imds, _forwarders(folder, imds("url", simulators.VM)) as clients:
        for number in range(ROUNDS):
            began_at = time.monotonic()
            _wait_for_answers(clients, began_at)
            imds("fault", FAULTS[number % len(FAULTS)], count=None, path=EVENTS_PATH)
            time.sleep(FAULT_SECONDS + number / ROUNDS)
            imds("schedule", event_type="Preempt", resources=[simulators.VM], notice_seconds=60)
            imds("clear_faults")
            back_at = time.monotonic()
            _wait_for_answers(clients, back_at)
            delays += [next(at for at in one.answers if at > back_at) - back_at for one in clients]
            progress.step(f"{number + 1} of {ROUNDS}")
    return _row(
        "IMDS back to notice seen, p99",
        delays,
        f"{FORWARDERS} forwarders in one process, each polling once a second, spread over it; IMDS "
        f"answers 500 or drops connections for {FAULT_SECONDS} s, {ROUNDS} times; until its answer is read",
        limit_seconds=1,
    )


def _wait_for_answers(clients: Sequence[DatingImds], since: float) -> None:
    wait_until(
        lambda: all(one.answers and one.answers[-1] > since for one in clients),
        timeout_seconds=LIMIT_SECONDS,
    )


@contextmanager
def _forwarders(folder: Path, imds_url: str) -> Iterator[list[DatingImds]]:
    """Run forwarders, each in a thread, whose polls are spread over a second; give their clients."""
    with ExitStack() as stack:
        clients = []
        for number in range(FORWARDERS):
            state = folder / f"imds-back-{number}"
            clients.append(stack.enter_context(parts.forwarder(state, imds_url, polls=True))[1])
            time.sleep(1 / FORWARDERS)
        yield clients


def _row(name: str, delays: Sequence[float], how: str, *, limit_seconds: float) -> Row:
    return Row(
        name,
        percentile(delays, 99) * 1000,
        "ms",
        f"{how}; {len(delays)} trials, median {percentile(delays, 50) * 1000:.0f} ms, "
        f"longest {max(delays) * 1000:.0f} ms",
        limit=limit_seconds * 1000,
    )
