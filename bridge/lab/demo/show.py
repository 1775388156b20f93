"""Show the console with a simulated fleet, at 60 times the speed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import requests
from pydantic import ValidationError

from bridge.config.console import ConsoleSettings
from bridge.config.models import Config
from bridge.console.process import Console
from bridge.errors import UsageError
from bridge.lab.demo.fleet import SimulatedFleet
from bridge.runtime.text import show
from bridge.runtime.threads import Signals, start_thread
from bridge.runtime.time import Clock

SPEED = 60.0
STEP_SECONDS = 0.25
_BATCH = 500
_SEND_SECONDS = 30.0
_STOP_SECONDS = 10.0
_CONTENT_TYPE = "application/cloudevents-batch+json"


class FastClock(Clock):
    """A clock that stands at the machine's time until `begin`, and then runs faster."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._started_at = time.time()
        self._from: float | None = None
        super().__init__()

    def wall(self) -> float:
        """Return the time in seconds since 1970."""
        return self._started_at + self.monotonic()

    def begin(self) -> None:
        """Let time pass."""
        self._from = time.monotonic()

    def monotonic(self) -> float:
        """Return the seconds since the beginning."""
        return 0.0 if self._from is None else (time.monotonic() - self._from) * self._speed


def show_console(*, listen: str, minutes: float) -> int:
    """Play the fleet into a console, until a signal or for some minutes; return the exit code.

    Args:
        listen: the console's address, on this machine.
        minutes: real ones.

    Raises:
        UsageError: the address cannot be listened on, or others could reach it.
    """
    settings = _settings(listen)
    with tempfile.TemporaryDirectory(prefix="imds-bridge-console-") as folder, Signals() as signals:
        clock = FastClock(SPEED)
        console = Console(Config(state_dir=Path(folder), console=settings), clock=clock)
        threads = [start_thread(name, loop) for name, loop in console.loops().items()]
        try:
            _play(console, clock, signals, minutes)
        finally:
            console.end()
            for thread in threads:
                thread.join(_STOP_SECONDS)
            console.close()
    return 0


def _settings(listen: str) -> ConsoleSettings:
    try:
        return ConsoleSettings(listen=listen)
    except ValidationError as error:
        raise UsageError(
            f"demo: {listen} given; expected a loopback address and a port, such as 127.0.0.1:8080"
        ) from error


def _play(console: Console, clock: FastClock, signals: Signals, minutes: float) -> None:
    fleet = SimulatedFleet(clock.wall())
    session = requests.Session()
    session.trust_env = False  # no proxy of the environment stands before this machine
    _send(session, console.address, fleet.advance(clock.wall()))
    clock.begin()
    show(
        f"The console is on {console.address}",
        "60 simulated VMs in three groups; an hour passes in a minute.",
        f"Ctrl-C ends it, or it ends after {minutes:g} minutes.",
    )
    ends_at = time.monotonic() + minutes * 60
    while time.monotonic() < ends_at and signals.wait(STEP_SECONDS) is None:
        _send(session, console.address, fleet.advance(clock.wall()))


def _send(session: requests.Session, address: str, bodies: Sequence[bytes]) -> None:
    """Send events as a webhook sink does."""
    for start in range(0, len(bodies), _BATCH):
        body = b"[" + b",".join(bodies[start : start + _BATCH]) + b"]"
        response = session.post(
            f"{address}/ingest", data=body, headers={"Content-Type": _CONTENT_TYPE}, timeout=_SEND_SECONDS
        )
        response.raise_for_status()
