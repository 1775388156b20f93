"""The way from the outbox to a receiver: a sink with the real outbox and dispatcher before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from bridge.config.loader import load
from bridge.config.sinks import SinkSettings
from bridge.errors import HungError
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox import inspect as ledger
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.time import Clock
from bridge.service.dispatcher import NOTHING_WAITS, Dispatcher
from bridge.sinks.base import Sink
from tests.support.outbox import open_outbox
from tests.support.process import LIMIT_SECONDS, toml, wait_until


def read_settings(folder: Path, **given: Any) -> SinkSettings:
    """Read a sink's settings as the command does: from a file in `folder`."""
    file = folder / "config.toml"
    file.write_text(toml({"sinks": {"ops": given}}))
    return load(file, {}).sinks["ops"]


class Delivery:
    """An outbox in `folder`, and a dispatcher between it and a sink.

    Attributes:
        ids: the ids of what was committed.
        pauses: how long the dispatcher waited after failures.
    """

    def __init__(self, folder: Path, target: Sink) -> None:
        self.outbox = open_outbox(folder, sinks={"ops": (Filter(), True)}, clock=Clock())
        self.ids: list[str] = []
        self.pauses: list[float] = []
        self._folder = StateFolder(folder)
        self.dispatcher = Dispatcher("ops", target, max_age_seconds=1e9, outbox=self.outbox, clock=Clock())
        self.dispatcher._pause = self._pause  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with suppress(HungError):
            self.dispatcher.run()

    def _pause(self, seconds: float) -> None:
        if seconds != NOTHING_WAITS:
            self.pauses.append(seconds)
        Dispatcher._pause(self.dispatcher, seconds)

    def commit(self, *events: StoredEvent) -> None:
        """Commit events in one transaction."""
        self.ids += [event.id for event in events]
        self.outbox.commit([(event, event.body) for event in events])

    def status(self, name: str) -> Any:
        """Return one of the values of the dispatcher's status."""
        return self.dispatcher.status()[name]

    def backlog(self) -> int:
        """Return how many events wait."""
        return self.outbox.backlog("ops")[0]

    def dead(self) -> list[str]:
        """Return the ids of the dead letters."""
        return [row["id"] for row in ledger.dead_letters(self._folder)]

    def wait_for_all(self) -> None:
        """Wait until nothing waits."""
        wait_until(lambda: self.backlog() == 0, describe=self.dispatcher.status)

    def finish(self) -> None:
        """Deliver all that waits, and end."""
        self.dispatcher.stop_when_drained()
        self.thread.join(LIMIT_SECONDS)
        assert not self.thread.is_alive()


@contextmanager
def running(folder: Path, target: Sink, *events: StoredEvent) -> Iterator[Delivery]:
    """Deliver events from an outbox; at the end, wait until nothing waits."""
    delivery = Delivery(folder, target)
    with closing(delivery.outbox):
        delivery.commit(*events)
        delivery.thread.start()
        try:
            yield delivery
        finally:
            delivery.finish()
