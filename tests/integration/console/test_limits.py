"""What one client may use of the console."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from threading import Barrier, BrokenBarrierError

import pytest

from bridge.console import limits
from bridge.console.limits import BURST_SECONDS, MAX_OPEN, SHARE, Limits, TooManyRequests
from tests.support.clock import MovedClock


def use(subject: Limits, name: str, work: Callable[[], object] = str, *, times: int = 1) -> None:
    """Do work for a client, all requests at once."""

    async def ask() -> None:
        with subject.admit(name) as client:
            await subject.run(client, work)

    async def ask_all() -> None:
        await asyncio.gather(*(ask() for _ in range(times)))

    asyncio.run(ask_all())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all work take as much of a processor as a client may use at once, and a little more."""
    readings = itertools.count(step=BURST_SECONDS + SHARE)
    monkeypatch.setattr("bridge.console.limits.time.thread_time", lambda: next(readings))


@pytest.mark.usefixtures("slow")
def test_a_client_that_has_used_its_share_waits_and_nobody_else_does() -> None:
    clock = MovedClock()
    subject = Limits(clock)
    use(subject, "mallory")
    with pytest.raises(TooManyRequests) as refused, subject.admit("mallory"):
        pass
    assert refused.value.retry_after_seconds == 2  # the work, and a little for the request itself
    use(subject, "ana")
    clock.advance(1.9)
    with subject.admit("mallory"):
        pass


@pytest.mark.usefixtures("slow")
def test_work_that_fails_counts_too() -> None:
    subject = Limits(MovedClock())

    with pytest.raises(ZeroDivisionError):
        use(subject, "mallory", lambda: 1 // 0)
    with pytest.raises(TooManyRequests), subject.admit("mallory"):
        pass


def test_a_person_who_clicks_every_second_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count(step=0.1)  # a page of a large fleet
    monkeypatch.setattr("bridge.console.limits.time.thread_time", lambda: next(readings))
    clock = MovedClock()
    subject = Limits(clock)
    for _ in range(600):
        use(subject, "ana")
        clock.advance(1)


def test_a_client_has_only_so_many_open_requests() -> None:
    subject = Limits(MovedClock())
    with ExitStack() as stack:
        for _ in range(MAX_OPEN):
            stack.enter_context(subject.admit("mallory"))
        with pytest.raises(TooManyRequests), subject.admit("mallory"):
            pass
        with subject.admit("ana"):
            pass
    with subject.admit("mallory"):
        pass


def test_one_request_of_a_client_is_worked_on_at_a_time() -> None:
    meeting = Barrier(2)

    def work() -> None:
        with pytest.raises(BrokenBarrierError):
            meeting.wait(0.2)

    use(Limits(MovedClock()), "mallory", work, times=2)


def test_the_clients_that_asked_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MAX_CLIENTS", 3)
    subject = Limits(MovedClock())
    for name in ("ana", "ben", "eve", "ana", "mallory"):
        with subject.admit(name):
            pass
    assert list(subject._clients) == ["eve", "ana", "mallory"]
