"""From a command put on the bus to its POST at IMDS, without waiting for anybody's limit."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

import requests
from azure.servicebus import ServiceBusClient

from bridge.approvals.approver import READ_EVERY_SECONDS
from bridge.imds.client import EVENTS_PATH
from tests.support.process import wait_until
from tools.bench import bus, simulators
from tools.bench.measure import BenchError, Progress, Row, paced, percentile
from tools.bench.process import Bridge
from tools.bench.simulators import Remote

WARM_UP = 3


class Pace(NamedTuple):
    """How far commands are apart, and how many are rated."""

    seconds: float
    commands: int


# At the first pace a delayed command would make those after it wait for the listener's share of IMDS's limit, too; at
# the second one each is alone. With an auto rule the document is read every second: it is young and lacks the event.
PACES = (Pace(READ_EVERY_SECONDS + 0.1, commands=50), Pace(4.0, commands=20))
AUTO: Mapping[str, Mapping[str, Any]] = {
    "": {},
    ", with an auto rule": {"auto": [{"event_type": ["Preempt"]}]},
}
MEDIAN_MS, LONGEST_MS = 15.0, 400.0
BARE = Pace(0.1, commands=50)
IMPACT_SECONDS = 0.5  # then the event goes, and the document stays as small as in life
API_VERSION = {"api-version": "2020-07-01"}


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Schedule an event and send its approval, at each pace; then the same with nothing but the SDK."""
    with bus.lab() as lab, simulators.imds() as imds:
        address, url = lab("connection_string"), imds("url", simulators.VM)
        found: list[Row] = []
        for number, (what, auto) in enumerate(AUTO.items()):
            with Bridge(folder / str(number), _settings(url, address, auto), role="listen") as listener:
                listener.until(lambda: lab("receivers", bus.QUEUE))
                for pace in PACES:
                    found += _rows(pace, what, _send(address, imds, pace, progress))
                listener.check_alive()
            wait_until(lambda: not lab("receivers", bus.QUEUE))
        with Remote(partial(_Bare, address, url)) as bare:
            wait_until(lambda: lab("receivers", bus.QUEUE))
            theirs = _send(address, imds, BARE, progress)
            if error := bare("error"):
                raise BenchError(f"the bare receiver failed: {error}")
    how = f"median of {BARE.commands}, {BARE.seconds:g} s apart: the SDK and requests.Session, nothing is judged"
    return [*found, Row("  beside it: a bare receiver, GET and POST", median(theirs), "ms", how)]


def _rows(pace: Pace, what: str, took: list[float]) -> list[Row]:
    name = f"a command put on the bus to its POST at IMDS, one every {pace.seconds:g} s{what}"
    how = (
        f"median of {pace.commands}, each for a new event; from before the SDK's send to the request at the "
    )
    how += f"simulator, by the real `imds-bridge listen`; 90th percentile {percentile(took, 90):.1f}"
    return [
        Row(name, median(took), "ms", how, limit=MEDIAN_MS),
        Row("  the longest of them", max(took), "ms", "as above", limit=LONGEST_MS),
    ]


def _send(address: str, imds: Remote, pace: Pace, progress: Progress) -> list[float]:
    """Send commands, each for a new event; return the milliseconds until each was POSTed."""
    count = WARM_UP + pace.commands
    progress.begin(f"approve-latency: {count} commands, {pace.seconds:g} s apart")
    sent_at: dict[str, float] = {}
    with bus.sending(address) as sender:
        for number in paced(count, pace.seconds):
            event_id = simulators.freeze(imds, completes=True, impact_seconds=IMPACT_SECONDS)
            message = bus.approval(event_id)
            sent_at[event_id] = time.monotonic()
            sender.send_messages(message, timeout=bus.TRY_SECONDS)
            progress.step(f"{number} of {count}")
        wait_until(lambda: sent_at.keys() <= simulators.approved(imds).keys(), apart_seconds=0.1)
    posted_at = simulators.approved(imds)
    return [(posted_at[event_id] - at) * 1000 for event_id, at in list(sent_at.items())[WARM_UP:]]


def _settings(imds_url: str, address: str, auto: Mapping[str, Any]) -> Mapping[str, Any]:
    policy = {"allow": [{"event_type": ["Freeze"]}]}
    queue = {"connection_string": address, "queue": bus.QUEUE, "session": "{vm}"}
    return {
        "imds": {"endpoint": imds_url},
        "sinks": {"bench": {"kind": "servicebus", "connection_string": address, "topic": bus.TOPIC}},
        "approvals": {**queue, "policy": policy, **auto},
    }


class _Bare:
    """Receive, ask for the document, POST and complete, with the SDK and requests and nothing else."""

    def __init__(self, address: str, imds_url: str) -> None:
        self._address = address
        self._url = imds_url + EVENTS_PATH
        self.error = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bare", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=4)

    def _run(self) -> None:
        try:
            self._receive()
        except Exception as error:  # noqa: BLE001 - the main thread asks for it
            self.error = f"{type(error).__name__}: {error}"

    def _receive(self) -> None:
        with (
            ServiceBusClient.from_connection_string(self._address, retry_total=0) as client,
            client.get_queue_receiver(bus.QUEUE, session_id=simulators.VM) as receiver,
            requests.Session() as session,
        ):
            session.headers["Metadata"] = "true"
            while not self._stop.is_set():
                for message in receiver.receive_messages(max_message_count=1, max_wait_time=1):
                    self._start(session, json.loads(str(message)))
                    receiver.complete_message(message)

    def _start(self, session: requests.Session, given: dict[str, Any]) -> None:
        (event_id,) = given["data"]["EventIds"]
        document = session.get(self._url, params=API_VERSION, timeout=bus.TRY_SECONDS).json()
        if event_id not in {event["EventId"] for event in document["Events"]}:
            raise BenchError(f"{event_id} does not stand in the document")
        body = {"StartRequests": [{"EventId": event_id}]}
        session.post(self._url, params=API_VERSION, json=body, timeout=bus.TRY_SECONDS).raise_for_status()
