"""The parts of the real process, built by its own composition root."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge.config.base import Secret
from bridge.config.models import Config, ImdsSettings
from bridge.delivery.dispatcher import Dispatcher
from bridge.events.filters import Filter
from bridge.formats.cloudevents import CloudEventsSettings
from bridge.forward.forwarder import Forwarder
from bridge.imds.client import ImdsClient
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.upkeep import KeptOutbox
from bridge.process.parts import Parts
from bridge.runtime.threads import start_thread
from bridge.runtime.time import Clock
from bridge.sinks.base import Sink
from bridge.sinks.webhook import WebhookSink
from tools.bench import sample
from tools.bench.measure import BenchError

NAME = "bench"
COMMIT_EVENTS = 1_000


class DatingImds(ImdsClient):
    """The real client; remembers when (time.monotonic()) each answer was complete."""

    def __init__(self, settings: ImdsSettings, *, clock: Clock) -> None:
        super().__init__(settings, clock=clock)
        self.answers: list[float] = []

    def document(self, **limits: Any) -> bytes:
        """Ask for the document, and note when the answer was complete."""
        body = super().document(**limits)
        self.answers.append(time.monotonic())
        return body


def webhook(url: str) -> WebhookSink:
    """Make the webhook sink."""
    return WebhookSink(_webhook_settings(url))


def _webhook_settings(url: str) -> CloudEventsSettings:
    return CloudEventsSettings(kind="webhook", url=Secret(url))


def open_outbox(folder: Path, *sinks: str) -> KeptOutbox:
    """Open the outbox in `folder`; its sinks take everything from the start."""
    defaults = Config()
    return KeptOutbox(
        StateFolder(folder),
        clock=Clock(),
        sinks={name: (Filter(), True) for name in sinks},
        max_bytes=int(defaults.max_outbox_mb * 1024 * 1024),
        retain_seconds=defaults.retain_seconds,
    )


def fill_outbox(folder: Path, size: int) -> None:
    """Fill an outbox without sinks through its own `commit`."""
    outbox = open_outbox(folder)
    try:
        for begin in range(0, size, COMMIT_EVENTS):
            events = [sample.event(number) for number in range(begin, min(size, begin + COMMIT_EVENTS))]
            if not outbox.commit(events):
                raise BenchError(f"the outbox cannot be written: {outbox.storage_error}")
    finally:
        outbox.close()


def dispatcher(name: str, sink: Sink, outbox: KeptOutbox) -> Dispatcher:
    """Make what delivers from `outbox` to `sink`."""
    return Dispatcher(
        name,
        sink,
        max_age_seconds=Config().retain_seconds,
        outbox=outbox,
        clock=Clock(),
    )


@contextmanager
def forwarder(
    folder: Path, imds_url: str, hook_url: str = "", *, polls: bool = False
) -> Iterator[tuple[Forwarder, DatingImds]]:
    """Build a forwarder that is polled by hand, or `polls` in a thread; a webhook gets a thread in any case."""
    sinks = {NAME: _webhook_settings(hook_url)} if hook_url else {}
    config = Config(state_dir=folder, imds=ImdsSettings(endpoint=imds_url), sinks=sinks)
    parts = Parts(config, "forward")
    parts.imds = imds = DatingImds(config.imds, clock=parts.clock)
    parts.identity.settle(parts.stop.wait)
    built = Forwarder(parts, config.imds)
    dispatchers = parts.dispatchers() if hook_url else []
    threads = [start_thread(NAME, one.run) for one in dispatchers]
    threads += [start_thread("poll", built.run)] if polls else []
    try:
        yield built, imds
    finally:
        parts.stop.set()
        for one in dispatchers:
            one.stop_when_drained()
        for thread in threads:
            thread.join(timeout=5)
        parts.outbox.close()
        imds.close()
