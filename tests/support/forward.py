"""One VM with its forwarder, its state and its clock, on any IMDS."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from bridge.config.models import ImdsSettings
from bridge.events.filters import Filter
from bridge.forward.forwarder import Forwarder
from bridge.imds.client import ImdsClient
from bridge.imds.instance import Vm
from bridge.outbox.state_dir import StateFolder
from bridge.process.identity import VmIdentity
from bridge.process.parts import Parts
from bridge.runtime.threads import Stop
from bridge.runtime.time import iso_utc
from tests.support.clock import MovedClock
from tests.support.diff import BEFORE_START, envelope_of, faults_of
from tests.support.imds import WEB_0, ScriptedImds
from tests.support.outbox import committed, open_outbox

DAY = 86_400.0
HOUR = 3_600.0


class CountedStop(Stop):
    """Is set after a number of waits, each of which moves the clock instead of lasting."""

    def __init__(self, clock: MovedClock, waits: int) -> None:
        super().__init__()
        self.clock = clock
        self.left = waits
        self.waited: list[float] = []

    def wait(self, seconds: float | None) -> bool:
        if self.left == 0:
            return True
        self.left -= 1
        self.waited.append(seconds or 0.0)
        self.clock.advance(max(0.0, seconds or 0.0))
        return False


class Station:
    """One VM with its forwarder, its state on disk and its clock."""

    def __init__(self, folder: Path, imds: ImdsClient, clock: MovedClock) -> None:
        self.folder = folder
        self.imds = imds
        self.clock = clock
        self.settings, self.is_fleet = ImdsSettings(), False
        self.boot_id = "boot"
        self._read = 0
        self._checked: dict[bytes, dict[str, Any]] = {}
        self.start()

    def start(self) -> None:
        """Start a process on the state."""
        self._state_folder = StateFolder(self.folder)
        sinks = {"all": (Filter(), True)}
        self.outbox = open_outbox(self.folder, sinks=sinks, clock=self.clock, retain_seconds=7 * DAY)
        self.identity = VmIdentity(
            "forward", imds=self.imds, outbox=self.outbox, clock=self.clock, boot_id=self.boot_id
        )
        self.identity.settle(self._wait)
        self.forwarder = self._forwarder(Stop())

    def _wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def close(self) -> None:
        self.outbox.close()

    def restart(self, *, after: float = 0.0) -> None:
        """End as kill -9 would, and start again later, with another monotonic clock."""
        self.close()
        self.clock.advance(after)
        self.clock.reboot()
        self.start()

    def poll(self, *, after: float = 1.0) -> float | None:
        """Poll once, a second later."""
        self.clock.advance(after)
        return self.forwarder.poll()

    def poll_for(self, seconds: int) -> None:
        """Poll once a second for so long."""
        for _ in range(seconds):
            self.poll()

    def run(self, *, waits: int) -> CountedStop:
        """Let the loop run for a number of polls, and the last one."""
        stop = CountedStop(self.clock, waits)
        self.forwarder = self._forwarder(stop)
        self.forwarder.run()
        return stop

    def all_events(self) -> list[dict[str, Any]]:
        """Return every event that was committed, each a valid CloudEvent."""
        bodies = committed(self.outbox)
        for body in bodies:
            if body not in self._checked:
                self._checked[body] = envelope_of(body)
                assert faults_of(self._checked[body]) == []
        return [self._checked[body] for body in bodies]

    def events(self) -> list[dict[str, Any]]:
        """Return the events that were committed since the last call."""
        envelopes = self.all_events()
        new = envelopes[self._read :]
        self._read = len(envelopes)
        return new

    def story(self) -> list[str]:
        """Return the names of the events that were committed since the last call."""
        return [name_of(envelope) for envelope in self.events()]

    def forget(self) -> None:
        """Let `events` return the first event again, after the state was moved aside."""
        self._read = 0

    def settle(self) -> str:
        """Poll once, pass over what was committed so far, and return the time of the answer."""
        self.poll()
        self.events()
        return self.now()

    def published(self, *, after: float = 1.0) -> list[dict[str, Any]]:
        """Poll once, and return the events since the last call."""
        self.poll(after=after)
        return self.events()

    def polled(self, *, after: float = 1.0) -> list[str]:
        """Poll once, and return the names of the events since the last call."""
        self.poll(after=after)
        return self.story()

    def now(self) -> str:
        return iso_utc(self.clock.now())

    def _forwarder(self, stop: Stop) -> Forwarder:
        parts = parts_of(
            imds=self.imds,
            outbox=self.outbox,
            folder=self._state_folder,
            clock=self.clock,
            stop=stop,
            identity=self.identity,
            boot_id=self.boot_id,
        )
        return Forwarder(parts, self.settings, is_fleet=self.is_fleet)


class Scripted(Station):
    """A station on a scripted IMDS."""

    imds: ScriptedImds

    def __init__(self, folder: Path, vm: Vm = WEB_0) -> None:
        clock = MovedClock(BEFORE_START)
        super().__init__(folder, ScriptedImds(clock, vm=vm), clock)


def parts_of(**parts: Any) -> Parts:
    """Return what a process has, as far as its test needs it."""
    return cast("Parts", SimpleNamespace(**parts))


def name_of(envelope: dict[str, Any]) -> str:
    """Return the type in short, with the EventId of a scheduled event."""
    name = str(envelope["type"]).removeprefix("io.imdsbridge.").removesuffix(".v1")
    return name if "reporterseq" in envelope else f"{name} {envelope['subject']}"
