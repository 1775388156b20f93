"""The order of each EventId's events through the relay to a webhook, beside processes that use the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from azure.servicebus import ServiceBusClient, ServiceBusMessage

from tests.bench import bus, process, simulators
from tests.bench.measure import Progress, Row, paced, wait_until
from tests.bench.simulators import Remote

EVENT_IDS = 1_000
STATES = ("scheduled", "started", "completed")
PER_SECOND = 300
TOGETHER = 6  # are sent in one call, so that the sender keeps the pace beside the others
BURNERS = 2
LIMIT_SECONDS = 60.0
SUBSCRIPTION = "chat"


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Send three states of each EventId, and compare the order in which the webhook gets them."""
    path = f"{bus.RELAY_TOPIC}/Subscriptions/{SUBSCRIPTION}"
    with bus.lab() as lab, simulators.inbox() as inbox, _burning():
        state = folder / "relay-order"
        config = _config(state, lab("address"), inbox)
        with process.running("relay", config, state) as relay:
            wait_until(lambda: bool(lab("receivers", path)), what="the relay", limit_seconds=20)
            _send(lab("address"), progress)

            def all_arrived() -> bool:
                process.check_alive(relay, state)
                return len(inbox("bodies", "/hook")) >= EVENT_IDS * len(STATES)

            wait_until(all_arrived, what="every event", limit_seconds=LIMIT_SECONDS, every_seconds=0.5)
        came: dict[str, list[str]] = defaultdict(list)
        for body in inbox("bodies", "/hook"):
            event = json.loads(body)
            came[event["subject"]].append(event["type"])
        bus.check(lab)
    wrong = sum(states != sorted(states, key=STATES.index) for states in came.values())
    last = sum(states[-1] != STATES[-1] for states in came.values())
    return [
        Row(
            name=f"EventIds out of order through the relay, of {EVENT_IDS:,}",
            measured=wrong,
            unit="",
            limit=0,
            how=f"{len(STATES)} events each, {PER_SECOND} events a second, to a webhook, beside {BURNERS} processes "
            f"that use the CPU; for {last} of them the last event was not the last state",
            details={"wrong_at_the_end": last},
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
    with (
        ServiceBusClient.from_connection_string(address, retry_total=0) as client,
        client.get_topic_sender(bus.RELAY_TOPIC) as sender,
    ):
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


def _config(state: Path, address: str, inbox: Remote) -> Path:
    path = state.with_suffix(".toml")
    path.write_text(
        f"state_dir = {json.dumps(str(state))}\n"
        f"[sinks.bench]\nkind = 'webhook'\nurl = {json.dumps(inbox('hook_url', '/hook'))}\n"
        f"[relay]\nconnection_string = {json.dumps(address)}\n"
        f"topic = '{bus.RELAY_TOPIC}'\nsubscription = '{SUBSCRIPTION}'\n",
        encoding="utf-8",
    )
    return path
