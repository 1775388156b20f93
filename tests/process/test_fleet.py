"""Many VMs of one group see the same change: the topic with duplicate detection holds it once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bridge.config.models import Config, ImdsSettings
from bridge.events.filters import Filter
from bridge.imds.client import ImdsClient
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.threads import Stop, start_thread
from bridge.runtime.time import Clock
from bridge.service.dispatcher import Dispatcher
from bridge.service.forwarder import Forwarder
from bridge.service.identity import VmIdentity
from bridge.sinks.servicebus import ServiceBusSink
from tests.support.forward import parts_of
from tests.support.imds_lab import ImdsLab
from tests.support.process import wait_until
from tests.support.servicebus import ServiceBusLab
from tests.support.sink import TOPIC, entities, settings

VMS = [f"web-{number}" for number in range(50)]
POLL_SECONDS = 1.0  # of each VM; short, because the test waits for polls
LIMIT_SECONDS = 60.0
TYPES = ("io.imdsbridge.document.*", "io.imdsbridge.scheduledevent.*")
DOCUMENT = "io.imdsbridge.document.changed.v1"
EVENT = "io.imdsbridge.scheduledevent."


class Member:
    """A forwarder with all that `imds-bridge forward` gives it, on threads of this process."""

    def __init__(self, folder: Path, imds_url: str, bus: ServiceBusLab) -> None:
        clock, self._stop = Clock(), Stop()
        config = Config(imds=ImdsSettings(endpoint=imds_url, poll_seconds=POLL_SECONDS))
        wanted = Filter(types=TYPES)
        state = StateFolder(folder)
        self._outbox = Outbox(
            state,
            clock=clock,
            sinks={"bus": (wanted, True)},
            max_bytes=2**24,
            retain_seconds=60.0,
        )
        self._imds = imds = ImdsClient(config.imds, clock=clock)
        identity = VmIdentity(config, "forward", imds=imds, outbox=self._outbox, clock=clock)
        identity.settle(self._stop.wait)
        parts = parts_of(
            config=config,
            imds=imds,
            identity=identity,
            outbox=self._outbox,
            folder=state,
            clock=clock,
            stop=self._stop,
            boot_id="",
        )
        self._forwarder = Forwarder(parts)
        self._dispatcher = Dispatcher(
            "bus",
            ServiceBusSink(settings(bus, topic=TOPIC, timeout_seconds=20.0)),
            max_age_seconds=3600.0,
            outbox=self._outbox,
            clock=clock,
        )
        self._poll = start_thread("poll", self._forwarder.run)
        self._send = start_thread("send", self._dispatcher.run)

    def ask_to_stop(self) -> None:
        self._stop.set()

    def stop(self) -> None:
        self._poll.join(LIMIT_SECONDS)
        self._dispatcher.stop_when_drained()
        self._send.join(LIMIT_SECONDS)
        assert not self._poll.is_alive()
        assert not self._send.is_alive()
        self._outbox.close()
        self._imds.close()

    def status(self) -> dict[str, Any]:
        return self._dispatcher.status()


@pytest.fixture
def imds() -> Iterator[ImdsLab]:
    with ImdsLab(vms=VMS, rate_limit=None) as lab:
        yield lab


def test_fifty_forwarders_publish_each_event_once_and_each_its_own_document(
    imds: ImdsLab, tmp_path: Path
) -> None:
    with ServiceBusLab(entities(RequiresDuplicateDetection=True)) as bus:
        topic, stored = bus.entity(TOPIC), bus.entity(f"{TOPIC}/Subscriptions/all")
        with ExitStack() as stack:
            members = [Member(tmp_path / name, imds.url(name), bus) for name in VMS]
            for member in members:
                stack.callback(member.stop)
            for member in members:
                stack.callback(member.ask_to_stop)

            def documents() -> Counter[str]:
                return Counter(
                    message.application_properties["cloudEvents_reporter"]
                    for message in stored.messages
                    if message.subject == DOCUMENT
                )

            def wait_for_documents(each: int) -> None:
                wait_until(
                    lambda: (
                        topic.counts.enqueued >= each * len(VMS)
                        and all(documents()[f"{name}/forward"] >= each for name in VMS)
                    ),
                    timeout_seconds=LIMIT_SECONDS,
                    describe=lambda: [documents(), *(member.status() for member in members[:3])],
                )

            wait_for_documents(1)  # everybody has its baseline
            first = imds.schedule(event_type="Reboot", resources=VMS[:3], notice_seconds=86_400)
            wait_for_documents(2)
            second = imds.schedule(event_type="Freeze", resources=VMS[3:5], notice_seconds=86_400)
            wait_for_documents(3)
        messages = stored.messages
        counts = topic.counts
        assert bus.failures == ()
    assert len({message.message_id for message in messages}) == len(messages)
    events = [message for message in messages if (message.subject or "").startswith(EVENT)]
    assert [message.correlation_id.lower() for message in events if message.correlation_id] == [
        first.lower(),
        second.lower(),
    ]
    assert {message.subject for message in events} == {f"{EVENT}scheduled.v1"}
    reporters = Counter(
        message.application_properties["cloudEvents_reporter"]
        for message in messages
        if message.subject == DOCUMENT
    )
    assert reporters == {f"{name}/forward": 3 for name in VMS}
    assert counts.duplicates >= 2 * (len(VMS) - 1)
    listed = [
        identity
        for message in messages
        if message.subject == DOCUMENT
        for identity in _strings(json.loads(message.body)["data"])
    ]
    for message in events:  # an audit finds each copy that was dropped: every document names the event
        assert listed.count(message.message_id) == len(VMS)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, str):
        yield value
