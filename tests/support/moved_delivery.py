"""An outbox, a sink in memory and the dispatcher between them, on a clock that is moved."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge.delivery.course import NOTHING_WAITS
from bridge.delivery.dispatcher import Dispatcher
from bridge.delivery.holding import Copies, Gathering, Holding
from bridge.events.filters import Filter
from bridge.outbox import inspect
from bridge.outbox.state_dir import StateFolder
from bridge.sinks.base import Sink
from tests.support.clock import MovedClock
from tests.support.memory_sink import MemorySink
from tests.support.outbox import TYPE, event, open_outbox
from tests.support.process import LIMIT_SECONDS

DELIVERY_TRIALS = int(os.environ.get("TEST_DELIVERY_TRIALS", "2"))  # of random receivers


class MovedDelivery:
    """Delivers to `sink`, else to one in memory, as "a"; `settings` are the dispatcher's, `others` further sinks."""

    def __init__(
        self,
        path: Path,
        *,
        max_batch: int = 1,
        others: Sequence[str] = (),
        digest_seconds: float = 0.0,
        holds_copies: bool = False,
        clock: MovedClock | None = None,
        sink: Sink | None = None,
        **settings: Any,
    ) -> None:
        self.clock = clock or MovedClock()
        self.folder = StateFolder(path)
        self.sink = MemorySink(max_batch=max_batch)
        sinks = dict.fromkeys(["a", *others], (Filter(), True))
        holding: Holding | None = Gathering(digest_seconds, self.clock) if digest_seconds else None
        holding = Copies(self.clock) if holds_copies else holding
        held = {"a": holding.until} if holding else {}
        self.outbox = open_outbox(path, sinks=sinks, clock=self.clock, held=held)
        settings = {"holding": holding, **settings}
        target = sink or self.sink
        self.dispatcher = Dispatcher("a", target, outbox=self.outbox, clock=self.clock, **settings)
        self.thread = threading.Thread(target=self.dispatcher.run, daemon=True)

    def commit(self, *names: str, type_: str = TYPE, subject: str = "", **data: Any) -> None:
        """Commit events of these names, one transaction each."""
        for name in names:
            self.outbox.commit([event(name, type_=type_, subject=subject, **data)])

    def deliver(self, *, seconds: float = 1e9) -> list[float]:
        """Do every step for `seconds`, or until nothing waits; each wait moves the clock. Return the waits."""
        waits: list[float] = []
        while (wait_seconds := self.dispatcher.step()) != NOTHING_WAITS:
            if wait_seconds is None:
                continue
            if sum(waits) + wait_seconds > seconds:
                self.clock.advance(seconds - sum(waits))
                break
            waits.append(wait_seconds)
            self.clock.advance(wait_seconds)
        return waits

    def run_to_the_end(self) -> None:
        """Run until nothing waits, if it has not begun yet."""
        self.dispatcher.stop_when_drained()
        if not self.thread.ident:
            self.thread.start()
        self.thread.join(LIMIT_SECONDS)
        assert not self.thread.is_alive()

    def received(self) -> list[str]:
        """Return the ids of what the sink has accepted."""
        return self.sink.ids()

    def dead(self) -> list[tuple[str, str, str]]:
        """Return the id, the reason and the detail of each dead letter."""
        return [(row["id"], row["reason"], row["detail"]) for row in inspect.dead_letters(self.folder)]

    def close(self) -> None:
        """End the thread, if it runs, and close the outbox."""
        self.dispatcher.stop_when_drained()
        if self.thread.ident:
            self.thread.join(LIMIT_SECONDS)
        self.outbox.close()
