"""Faults: how the simulators answer wrongly, on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Self

from bridge.lab.httpd import NO_ANSWER, Answer, LabError, Request, check_seconds, json_answer

HUGE_BODY_BYTES = 5 * 1024 * 1024

FAULT_KINDS = (
    "slow",
    "slow_first_call",
    "drip",
    "timeout",
    "drop",
    "lost_answer",
    "empty",
    "garbage",
    "junk_prefix",
    "huge",
    "redirect",
    "status",
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Say how one request, or several, are answered wrongly; None in a filter takes all."""

    kind: str
    status: int = 500
    seconds: float = 0.0  # real ones, before the answer
    retry_after: str | int | None = None
    body: bytes = b""
    server: str | None = None
    method: str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise LabError(
                f"fault kind given: {self.kind!r}; expected: an HTTP status or {', '.join(FAULT_KINDS)}"
            )
        check_seconds("seconds", self.seconds)

    @classmethod
    def of(cls, kind: str | int, *, seconds: float | None = None, **rest: Any) -> Self:
        """Return the fault for a kind, a status number or a status name such as `gone`.

        Slow kinds take 5 seconds where none are given, the slow first call 120.
        """
        text = str(kind).strip().lower().replace("-", "_").replace(" ", "_")
        if text.upper() in HTTPStatus.__members__:
            text = str(int(HTTPStatus[text.upper()]))
        if text.isdigit():
            if not 200 <= int(text) <= 599:  # noqa: PLR2004 - final HTTP statuses
                raise LabError(f"fault status given: {text}; expected: 200 to 599")
            text, rest["status"] = "status", int(text)
        if seconds is None:
            seconds = {"slow": 5.0, "slow_first_call": 120.0}.get(text, 0.0)
        return cls(kind=text, seconds=seconds, **rest)

    def takes(self, request: Request) -> bool:
        """Tell whether this fault is meant for the request."""
        return (
            self.server in (None, request.server)
            and self.method in (None, request.method)
            and (self.path is None or request.path.startswith(self.path))
        )

    def answer(self, right: Callable[[], Answer]) -> Answer:
        """Return the wrong answer; `right` is called only by the kinds that process the request."""
        return replace(self._wrong(right), delay_seconds=self.seconds)

    def _wrong(self, right: Callable[[], Answer]) -> Answer:
        match self.kind:
            case "slow" | "slow_first_call":
                return right()
            case "drip":
                return replace(right(), drip=True)
            case "lost_answer":
                return replace(right(), drop=True)
            case "junk_prefix":
                answer = right()
                return replace(answer, body=b"\x00junk " + answer.body)
            case "timeout":
                return Answer(status=NO_ANSWER, hang=True)
            case "drop":
                return Answer(status=NO_ANSWER, drop=True)
            case "empty":
                return Answer()
            case "garbage":
                page = b"<html><body>Service busy</body></html>"
                return Answer(body=page, headers={"content-type": "text/html"})
            case "huge":
                filler = "x" * HUGE_BODY_BYTES
                return json_answer({"DocumentIncarnation": 1, "Events": [], "Filler": filler})
            case _:
                return self._status_answer()

    def _status_answer(self) -> Answer:
        status = 302 if self.kind == "redirect" else self.status
        headers = {"content-type": "text/plain"} if self.body else {}
        if 300 <= status < 400:  # noqa: PLR2004 - the class of redirects
            headers["location"] = "/redirected"
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        return Answer(status=status, body=self.body, headers=headers)


@dataclass(kw_only=True)
class _Queued:
    fault: Fault
    left: int | None  # None: for ever
    on_at: float | None = None  # slow_first_call: when the service is on

    def hand_out(self, at: float) -> Fault | None:
        """Return the fault for a request that came then; None once the service is on."""
        if self.fault.kind != "slow_first_call":
            self.left = None if self.left is None else self.left - 1
            return self.fault
        # the first call turns the service on; those that come meanwhile wait for the rest
        self.on_at = self.on_at or at + self.fault.seconds
        if at < self.on_at:
            return replace(self.fault, seconds=self.on_at - at)
        self.left = 0
        return None


class Faults:
    """Keep faults in order and hand one to each request they are meant for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: list[_Queued] = []
        self._cleared = threading.Event()
        self._closed = False

    def add(self, fault: Fault, *, count: int | None = 1) -> None:
        """Queue the fault for `count` requests; None is for ever."""
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise LabError(f"count given: {count!r}; expected: a whole number from 1 up, or none for ever")
        with self._lock:
            self._queue.append(_Queued(fault=fault, left=count))

    def clear(self) -> None:
        """Forget all faults and let go of every request that one of them holds."""
        with self._lock:
            self._queue.clear()
            self._cleared.set()
            if not self._closed:
                self._cleared = threading.Event()

    def close(self) -> None:
        """Clear for good: no request is held from now on."""
        with self._lock:
            self._closed = True
        self.clear()

    def apply(self, request: Request, right: Callable[[], Answer]) -> Answer:
        """Return the right answer, or the wrong one that is due."""
        with self._lock:
            fault = None if self._closed else self._take(request)
            interrupt = self._cleared
        return right() if fault is None else replace(fault.answer(right), interrupt=interrupt)

    def _take(self, request: Request) -> Fault | None:
        for queued in [one for one in self._queue if one.fault.takes(request)]:
            fault = queued.hand_out(request.at)
            if queued.left == 0:
                self._queue.remove(queued)
            if fault is not None:
                return fault
        return None
