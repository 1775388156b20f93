"""A trial of what every process does first: events are stored, and written as each sink sends them."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge.config.sinks import SinkSettings
from bridge.delivery.dispatcher import Dispatcher
from bridge.errors import DeliveryError, Rejected, StateError
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.formats.samples import samples
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.upkeep import KeptOutbox
from bridge.process.parts import build_sinks
from bridge.runtime.time import Clock
from bridge.sinks.base import RequestPreview, Sink

MAX_BYTES = 64 * 1024 * 1024


def try_to_deliver(beside: Path, settings: Mapping[str, SinkSettings]) -> dict[str, str]:
    """Store a sample of every type of event, and let each sink write those that it takes; nothing is sent.

    Args:
        beside: a folder on the disk to try; nothing stays in it.
        settings: of the sinks, by their names.

    Returns:
        The sinks that cannot write an event, and why.

    Raises:
        ConfigError: a sink cannot be built.
        OSError: the disk does not allow it.
        StateError: an event cannot be stored, or not be taken from what is stored.
    """
    with ExitStack() as stack:
        sinks = {name: stack.enter_context(closing(sink)) for name, sink in build_sinks(settings).items()}
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="check-", dir=beside)))
        _give_to_owner_of(beside, scratch)
        stack.enter_context(_without_log())
        try:
            return _deliver(scratch, settings, sinks)
        except OSError:
            raise
        except Exception as error:
            is_clear = isinstance(error, StateError)
            raise StateError(str(error) if is_clear else f"{type(error).__name__}: {error}") from error


def runs_on() -> str:
    """Return the versions that decide whether an event can be stored."""
    return f"Python {sys.version.split()[0]} and SQLite {sqlite3.sqlite_version}"


@dataclass(eq=False)
class _Written(Sink):
    """A sink that writes its requests, and sends none."""

    sink: Sink
    knows_duplicates = True

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Write the request."""
        try:
            self.preview(*events)
        except DeliveryError:
            raise
        except Exception as error:
            raise Rejected(f"{type(error).__name__}: {error}") from error

    def check(self) -> str:
        """Check the sink."""
        return self.sink.check()

    def preview(self, event: StoredEvent) -> RequestPreview:
        """Return what the sink would send."""
        return self.sink.preview(event)


def _deliver(
    scratch: Path, settings: Mapping[str, SinkSettings], sinks: Mapping[str, Sink]
) -> dict[str, str]:
    clock, faults = Clock(), {}
    wanted = {name: (Filter(types=one.types), False) for name, one in settings.items()}
    folder = StateFolder(scratch / "outbox")
    with closing(
        KeptOutbox(folder, clock=clock, sinks=wanted, max_bytes=MAX_BYTES, retain_seconds=0.0)
    ) as outbox:
        outbox.commit(samples(clock.now()))
        for name, sink in sinks.items():
            written = _Written(sink)
            dispatcher = Dispatcher(name, written, max_age_seconds=math.inf, outbox=outbox, clock=clock)
            while dispatcher.step() is None:
                pass
            if error := dispatcher.status().last_error:
                faults[name] = error
            if left := outbox.backlog(name)[0]:
                raise StateError(f"{left} events still wait for sink {name}")
        outbox.prune()
        if outbox.storage_error:
            raise StateError(outbox.storage_error)
    return faults


def _give_to_owner_of(folder: Path, made: Path) -> None:
    """Let the service's own user delete what was made, should this process be killed before it does."""
    if sys.platform != "win32" and os.geteuid() == 0:
        owner = folder.stat()
        os.chown(made, owner.st_uid, owner.st_gid)


@contextmanager
def _without_log() -> Iterator[None]:
    """Log nothing: what is wrong is returned."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)
