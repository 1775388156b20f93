"""Run what is measured in a process of its own: nothing else uses its memory, CPU or interpreter lock."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from tests.bench.measure import BenchError

Task = TypeVar("Task")
Result = TypeVar("Result")

ANSWER_SECONDS = 30.0  # to start, to end and to send the result


def run(function: Callable[[Task], Result], task: Task, *, limit_seconds: float) -> Result:
    """Call a module's function in a new process; return what it returns.

    Raises:
        BenchError: it failed, or took longer than `limit_seconds` and a little.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(there, function, task), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(limit_seconds + ANSWER_SECONDS):
            raise BenchError(f"{function.__name__}: no end within {limit_seconds + ANSWER_SECONDS:g} s")
        answer: tuple[Result, str] = here.recv()
    except EOFError:
        raise BenchError(f"{function.__name__}: its process ended without a figure") from None
    finally:
        here.close()
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()
    value, error = answer
    if error:
        raise BenchError(error)
    return value


def _send_result(connection: Connection, function: Callable[[Task], Result], task: Task) -> None:
    try:
        connection.send((function(task), ""))
    except Exception as error:  # noqa: BLE001 - the caller raises it
        connection.send((None, f"{type(error).__name__}: {error}"))
