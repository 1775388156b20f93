"""The order of each EventId's events through the relay to a webhook, beside processes that use the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from azure.servicebus import ServiceBusMessage

from tools.bench import bus, simulators
from tools.bench.measure import Progress, Row, paced
from tools.bench.process import Bridge

EVENT_IDS = 1_000
STATES = ("scheduled", "started", "completed")
PER_SECOND = 300
TOGETHER = 6  # are sent in one call, so that the sender keeps the pace beside the others
BURNERS = 2
LIMIT_SECONDS = 300.0


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Send three states of each EventId, and compare the order in which the webhook gets them."""
    path = f"{bus.RELAY_TOPIC}/Subscriptions/{bus.SUBSCRIPTION}"
    with bus.lab() as lab, simulators.inbox() as inbox, _burning():
        address = lab("connection_string")
        source = {"connection_string": address, "topic": bus.RELAY_TOPIC, "subscription": bus.SUBSCRIPTION}
        sink = {"kind": "webhook", "url": inbox("base_url") + "/hook"}
        with Bridge(folder / "relay", {"relay": source, "sinks": {"bench": sink}}, role="relay") as relay:
            relay.until(lambda: lab("receivers", path))
            _send(address, progress)
            relay.until(
                lambda: len(simulators.bodies(inbox, "/hook")) >= EVENT_IDS * len(STATES),
                limit_seconds=LIMIT_SECONDS,
                apart_seconds=0.5,
            )
        came: dict[str, list[str]] = defaultdict(list)
        for _, body in simulators.bodies(inbox, "/hook"):
            event = json.loads(body)
            came[event["subject"]].append(event["type"])
    wrong = sum(states != sorted(states, key=STATES.index) for states in came.values())
    return [
        Row(
            f"EventIds out of order through the relay, of {EVENT_IDS:,}",
            wrong,
            "",
            f"{len(STATES)} events each, {PER_SECOND} events a second, to a webhook, beside {BURNERS} processes "
            "that use the CPU",
            limit=0,
        )
    ]


def _messages() -> Iterator[ServiceBusMessage]:
    """Make the messages, so that each EventId's follow each other closely and mixed with others."""
    for number in range(EVENT_IDS + len(STATES) - 1):
        for place, state in enumerate(STATES):
            if 0 <= number - place < EVENT_IDS:
                yield _message(f"event-{number - place}", state)


def _message(subject: str, state: str) -> ServiceBusMessage:
    event = {
        "specversion": "1.0",
        "id": f"{subject}-{state}",
        "source": "/bench",
        "type": state,
        "subject": subject,
    }
    return ServiceBusMessage(json.dumps({**event, "data": {}}), message_id=str(event["id"]))


def _send(address: str, progress: Progress) -> None:
    messages = list(_messages())
    progress.begin(f"relay-order: {len(messages)} events, {PER_SECOND} a second")
    with bus.sending(address, bus.RELAY_TOPIC) as sender:
        for number in paced(len(messages) // TOGETHER, TOGETHER / PER_SECOND):
            group = messages[number * TOGETHER : (number + 1) * TOGETHER]
            sender.send_messages(group, timeout=bus.TRY_SECONDS)


@contextmanager
def _burning() -> Iterator[None]:
    """Keep the CPU busy beside what is measured."""
    burners: Sequence[subprocess.Popen[bytes]] = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BURNERS)
    ]
    try:
        yield
    finally:
        for one in burners:
            one.kill()
            one.wait()
