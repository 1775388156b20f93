"""What tests of the webhook sink share: sinks as the command builds them, and their failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bridge.config.loader import load
from bridge.config.models import Config
from bridge.config.sinks import WebhookSettings
from bridge.errors import DeliveryError
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox import inspect as ledger
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.time import Clock
from bridge.service.dispatcher import Dispatcher
from bridge.sinks.webhook import WebhookSink
from tests.support.outbox import open_outbox
from tests.support.process import LIMIT_SECONDS, stored_event, toml

EVENT = stored_event(1, Description='100% "quoted" \ud800 €')
ROUTING_KEY = "0123456789abcdef0123456789abcdef"  # of the length that PagerDuty asks for
NEEDED: dict[str, dict[str, Any]] = {
    "pagerduty": {"routing_key": ROUTING_KEY},
    "template": {"template": {"text": "{{ data.EventType }}"}},
}


def settings(tmp_path: Path, url: str, **more: Any) -> WebhookSettings:
    """Read settings as the command does: from a file."""
    file = tmp_path / "config.toml"
    given = {"kind": "webhook", **({} if "url_file" in more else {"url": url}), **more}
    file.write_text(toml({"sinks": {"ops": given}}))
    loaded: Config = load(file, {})
    (read,) = loaded.sinks.values()
    assert isinstance(read, WebhookSettings)
    return read


def sink(tmp_path: Path, url: str, *, clock: Clock | None = None, **more: Any) -> WebhookSink:
    """Build a sink; a format for people gets what it needs."""
    needed = NEEDED.get(str(more.get("format")), {})
    given = {name: value for name, value in needed.items() if f"{name}_file" not in more}
    return WebhookSink(settings(tmp_path, url, **{**given, **more}), clock=clock)


def failure(sink: WebhookSink, *events: StoredEvent) -> DeliveryError:
    """Send what is refused, and return the error."""
    with pytest.raises(DeliveryError) as raised:
        sink.send(events or [EVENT])
    return raised.value


class Rig:
    """A dispatcher between an outbox and a webhook."""

    def __init__(self, folder: Path, target: WebhookSink) -> None:
        self.folder = StateFolder(folder)
        clock = Clock()
        self.outbox = open_outbox(folder, sinks={"ops": (Filter(), True)}, clock=clock)
        self.dispatcher = Dispatcher("ops", target, max_age_seconds=3600.0, outbox=self.outbox, clock=clock)
        self.thread = threading.Thread(target=self.dispatcher.run, daemon=True)

    def dead(self) -> list[str]:
        """Return the ids of the dead letters."""
        return [row["id"] for row in ledger.dead_letters(self.folder)]

    def finish(self) -> None:
        """Wait until nothing waits any more."""
        self.dispatcher.stop_when_drained()
        self.thread.join(LIMIT_SECONDS)
        assert not self.thread.is_alive()


@contextmanager
def running(folder: Path, target: WebhookSink, *events: StoredEvent) -> Iterator[Rig]:
    """Deliver events from an outbox."""
    rig = Rig(folder, target)
    rig.outbox.commit([(event, event.body) for event in events])
    rig.thread.start()
    try:
        yield rig
    finally:
        rig.dispatcher.stop_when_drained()
        rig.thread.join(LIMIT_SECONDS)
        rig.outbox.close()
