"""The lab's simulators, each in a process of its own, so that they cost the measured process nothing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Self

from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tools.bench.measure import BenchError

VM = "web-0"
ANSWER_SECONDS = 30.0


def _serve(connection: Connection, build: Callable[[], Any]) -> None:
    """Run a simulator, call its methods and read its attributes on demand, until the other end is gone."""
    with build() as simulator:
        while True:
            try:
                name, arguments, named = connection.recv()
            except (EOFError, KeyboardInterrupt):
                return
            try:
                value = getattr(simulator, name)
                connection.send((True, value(*arguments, **named) if callable(value) else value))
            except Exception as error:  # noqa: BLE001 - the caller raises it
                connection.send((False, f"{type(error).__name__}: {error}"))


class Remote:
    """A simulator in another process, called and read as if it were here. Use as a context manager.

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
        """Call the simulator's method `name`, or read that attribute.

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
    """Start a simulated IMDS of one VM, without a limit of requests."""
    return Remote(partial(ImdsLab, vms=(VM,), rate_limit=None))


def inbox() -> Remote:
    """Start a receiver of webhooks."""
    return Remote(Inbox)


def freeze(imds: Remote, **options: Any) -> str:
    """Schedule an event for the VM; return its EventId."""
    return str(imds("schedule", event_type="Freeze", resources=[VM], notice_seconds=86_400, **options))


def bodies(inbox: Remote, path: str) -> list[tuple[float, bytes]]:
    """Return when each request to `path` came (time.monotonic()), and its body."""
    return [(one.at, one.body) for one in inbox("received") if one.path == path]


def approved(imds: Remote) -> dict[str, float]:
    """Return when each approval came that was answered by 200 (time.monotonic()), by EventId."""
    return {one.event_id: one.at for one in imds("approvals")}
