"""Faults: the wrong answers that the simulators give on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Self

from bridge.lab.httpd import NO_ANSWER, Answer, HttpRequest, LabError, check_seconds, json_answer

HUGE_BODY_BYTES = 5 * 1024 * 1024

FAULT_KINDS = (
    "slow",
    "slow_first_call",
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
    """Describe one kind of wrong answer, and the requests it applies to; None in a filter matches all."""

    kind: str
    status: int = 500
    seconds: float = 0.0  # real seconds before the answer
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

        Args:
            kind: one of FAULT_KINDS, or a status.
            seconds: real seconds before the answer; None: 5 for `slow`, 120 for `slow_first_call`, else 0.
            rest: the other fields.
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

    def matches(self, request: HttpRequest) -> bool:
        """Return whether this fault applies to the request."""
        return (
            self.server in (None, request.server)
            and self.method in (None, request.method)
            and (self.path is None or request.path.startswith(self.path))
        )

    def answer(self, right: Callable[[], Answer]) -> Answer:
        """Return the wrong answer; only the kinds that process the request call `right`."""
        return replace(self._wrong(right), delay_seconds=self.seconds)

    def _wrong(self, right: Callable[[], Answer]) -> Answer:
        match self.kind:
            case "slow" | "slow_first_call":
                return right()
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
    left: int | None  # None: without limit
    on_at: float | None = None  # slow_first_call: when the service is turned on

    def hand_out(self, at: float) -> Fault | None:
        """Return the fault for a request that arrived at `at`; None once the service is turned on."""
        if self.fault.kind != "slow_first_call":
            self.left = None if self.left is None else self.left - 1
            return self.fault
        # the first call turns the service on; calls that arrive meanwhile wait for the remaining time
        self.on_at = self.on_at or at + self.fault.seconds
        if at < self.on_at:
            return replace(self.fault, seconds=self.on_at - at)
        self.left = 0
        return None


class Faults:
    """Keep faults in order and apply the first that matches to each request. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: list[_Queued] = []
        self._cleared = threading.Event()
        self._closed = False

    def add(self, fault: Fault, *, count: int | None = 1) -> None:
        """Queue the fault for `count` requests; None for no limit."""
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise LabError(
                f"count given: {count!r}; expected: a whole number from 1 up, or none for no limit"
            )
        with self._lock:
            self._queue.append(_Queued(fault=fault, left=count))

    def clear(self) -> None:
        """Remove all faults and answer every request that one of them delays."""
        with self._lock:
            self._queue.clear()
            self._cleared.set()
            if not self._closed:
                self._cleared = threading.Event()

    def close(self) -> None:
        """Remove all faults and accept no more: no request is delayed from now on."""
        with self._lock:
            self._closed = True
        self.clear()

    def apply(self, request: HttpRequest, right: Callable[[], Answer]) -> Answer:
        """Return the right answer, or that of the first fault that matches."""
        with self._lock:
            fault = None if self._closed else self._take(request)
            interrupt = self._cleared
        return right() if fault is None else replace(fault.answer(right), interrupt=interrupt)

    def _take(self, request: HttpRequest) -> Fault | None:
        for queued in [one for one in self._queue if one.fault.matches(request)]:
            fault = queued.hand_out(request.at)
            if queued.left == 0:
                self._queue.remove(queued)
            if fault is not None:
                return fault
        return None
