"""Calls of a library that can block: who waits for it, who is left behind, and when it is too much."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from bridge.errors import HungError
from bridge.runtime.worker import Worker
from tests.support.process import LIMIT_SECONDS, wait_until

SHORT = 0.05


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Let go of what hangs at the end, if not before."""
    event = threading.Event()
    yield event
    event.set()


def alive(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def fail(error: BaseException) -> None:
    raise error


def hang(worker: Worker, gate: threading.Event) -> HungError:
    with pytest.raises(HungError) as raised:
        worker.call(gate.wait, limit_seconds=SHORT)
    return raised.value


def test_a_call_returns_or_raises_the_functions_result() -> None:
    worker = Worker("w-result")
    assert worker.call(lambda: 7, limit_seconds=LIMIT_SECONDS) == 7
    for error in (ZeroDivisionError(), SystemExit(1), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            worker.call(partial(fail, error), limit_seconds=LIMIT_SECONDS)
    assert worker.call(lambda: 8, limit_seconds=LIMIT_SECONDS) == 8
    wait_until(lambda: alive("w-result") == 0)


def test_a_call_that_hangs_is_left_behind_and_the_next_one_runs_at_once(gate: threading.Event) -> None:
    worker = Worker("w-hang")
    error = hang(worker, gate)
    assert not error.final
    assert "w-hang" in str(error)
    assert worker.call(lambda: 7, limit_seconds=LIMIT_SECONDS) == 7
    assert not gate.is_set()
    gate.set()
    wait_until(lambda: alive("w-hang") == 0)


def test_a_call_that_returns_late_cleans_up_on_its_own_thread_which_ends(gate: threading.Event) -> None:
    worker, ran = Worker("w-late"), threading.Event()
    with pytest.raises(HungError):
        worker.call(gate.wait, limit_seconds=SHORT, afterwards=ran.set)
    assert not ran.is_set()
    gate.set()
    assert ran.wait(LIMIT_SECONDS)
    wait_until(lambda: alive("w-late") == 0)


def test_each_later_call_tries_again_to_end_one_that_hangs(gate: threading.Event) -> None:
    worker, tries = Worker("w-abort", max_hung=2), 0

    def abort() -> None:
        nonlocal tries
        tries += 1
        if tries > 1:  # the first time there is nothing to be ended yet
            gate.set()

    with pytest.raises(HungError):
        worker.call(gate.wait, limit_seconds=SHORT, abort=abort)
    assert (tries, alive("w-abort")) == (1, 1)
    assert worker.call(lambda: 7, limit_seconds=LIMIT_SECONDS) == 7
    wait_until(lambda: alive("w-abort") == 0)
    assert worker.call(lambda: 8, limit_seconds=LIMIT_SECONDS) == 8
    assert tries == 2


def test_too_many_hung_calls_are_final(gate: threading.Event) -> None:
    worker = Worker("w-final", max_hung=3)
    assert [hang(worker, gate).final for _ in range(3)] == [False, False, True]
    with pytest.raises(HungError) as raised:
        worker.call(lambda: 7, limit_seconds=LIMIT_SECONDS)
    assert raised.value.final


def test_calls_that_returned_late_do_not_count_as_hung() -> None:
    worker = Worker("w-back", max_hung=2)
    for _ in range(6):
        gate = threading.Event()
        assert not hang(worker, gate).final
        gate.set()
        wait_until(lambda: alive("w-back") == 0)


def test_a_last_call_runs_without_a_wait_and_counts_as_hung_after_its_limit(gate: threading.Event) -> None:
    worker = Worker("w-last", max_hung=3)
    worker.leave(gate.wait, limit_seconds=LIMIT_SECONDS)
    assert worker.call(lambda: 7, limit_seconds=LIMIT_SECONDS) == 7
    assert alive("w-last") >= 1

    def refused() -> bool:
        try:
            worker.call(lambda: 7, limit_seconds=LIMIT_SECONDS)
        except HungError as error:
            return error.final
        return False

    for _ in range(3):
        worker.leave(gate.wait, limit_seconds=SHORT)
    wait_until(refused)
    gate.set()
    wait_until(lambda: not refused())
    wait_until(lambda: alive("w-last") == 0)
