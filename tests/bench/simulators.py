"""The lab's simulators, each in a process of its own, so that they cost the measured process nothing."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Self

from bridge.lab.imds import EVENTS_PATH
from tests.bench.measure import BenchError
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox

VM = "web-0"
ANSWER_SECONDS = 30.0


class _Imds(ImdsLab):
    """IMDS without a limit of requests, and what the benchmark asks of it."""

    def __init__(self) -> None:
        super().__init__(vms=(VM,), rate_limit=None)

    def base_url(self) -> str:
        return self.url(VM)

    def count(self) -> int:
        """Return how many requests came."""
        return len(self.requests())

    def polls_after(self, at: float) -> list[float]:
        """Return when each request for the document came, from `at` on (time.monotonic())."""
        return [one.at for one in self.requests() if one.path == EVENTS_PATH and one.at >= at]

    def approved(self) -> dict[str, float]:
        """Return when each approval came that was answered by 200 (time.monotonic()), by EventId."""
        return {one.event_id: one.at for one in self.approvals}


class _Inbox(Inbox):
    """A receiver, and what the benchmark asks of it."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(port=port)
        self._began_at = time.monotonic()

    def began_at(self) -> float:
        """Return since when it listens (time.monotonic())."""
        return self._began_at

    def hook_url(self, path: str) -> str:
        return self.base_url + path

    def arrivals(self, path: str) -> list[tuple[float, dict[str, Any]]]:
        """Return when each request to `path` was received (time.monotonic()), and what it said."""
        return [(one.at, json.loads(one.body)) for one in self.received if one.path == path]

    def first_arrivals(self, type_: str) -> dict[str, float]:
        """Return when the first event of a type was received, by path."""
        found: dict[str, float] = {}
        for one in self.received:
            if json.loads(one.body)["type"] == type_:
                found.setdefault(one.path, one.at)
        return found

    def bodies(self, path: str) -> list[bytes]:
        return [one.body for one in self.received if one.path == path]


def _serve(connection: Connection, build: Callable[[], Any]) -> None:
    """Run a simulator and call its methods on demand, until the other end is gone."""
    with build() as simulator:
        while True:
            try:
                name, arguments, named = connection.recv()
            except (EOFError, KeyboardInterrupt):
                return
            try:
                connection.send((True, getattr(simulator, name)(*arguments, **named)))
            except Exception as error:  # noqa: BLE001 - the caller raises it
                connection.send((False, f"{type(error).__name__}: {error}"))


class Remote:
    """A simulator in another process; its methods are called as if it were here. Use as a context manager.

    The clock that dates its requests, time.monotonic(), is one for all processes on Linux.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(other_end, build), daemon=True)
        self._process.start()
        other_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def pid(self) -> int:
        """Return the id of the simulator's process."""
        assert self._process.pid is not None
        return self._process.pid

    def __call__(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call the simulator's method `name`.

        Raises:
            BenchError: it failed, or did not answer.
        """
        self._connection.send((name, arguments, named))
        if not self._connection.poll(ANSWER_SECONDS):
            raise BenchError(f"{name} had no answer from the simulator within {ANSWER_SECONDS:g} s")
        succeeded, value = self._connection.recv()
        if not succeeded:
            raise BenchError(f"{name}: {value}")
        return value


def imds() -> Remote:
    """Start a simulated IMDS."""
    return Remote(_Imds)


def inbox(port: int = 0) -> Remote:
    """Start a receiver of webhooks."""
    return Remote(partial(_Inbox, port))
