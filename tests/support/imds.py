"""IMDS in memory: documents that a test sets, events that it schedules and ends, and answers that take time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import ImdsError
from bridge.imds.client import ImdsClient
from bridge.imds.instance import Vm
from bridge.runtime.json import Json
from bridge.runtime.time import Clock
from tests.support.clock import MovedClock
from tests.support.diff import FIRST, VM, entry

WEB_0 = VM
WEB_1 = replace(
    VM, name="web-1", vm_id="22222222-bd52-4150-9748-7190aae1ff21", resource_id=f"{VM.resource_id[:-1]}1"
)


@dataclass(frozen=True, kw_only=True)
class ImdsCall:
    """A call as it was made: the method's name and its arguments."""

    method: str
    timeout_seconds: float | None = None
    event_ids: tuple[str, ...] = ()
    incarnation: Json = None


@dataclass(kw_only=True)
class _Fault:
    error: ImdsError
    methods: tuple[str, ...]
    left: int | None


class ImdsDouble(ImdsClient):
    """Answers with a document, instance data and faults that a test sets, and records every call.

    `calls` has every call, `approved` the EventIds of the approvals that did not fail.

    Args:
        vm: the instance data.
    """

    def __init__(self, *, vm: Vm = WEB_0) -> None:
        self.base, self._fallback = "http://imds.invalid", None
        self.clock, self._dated = Clock(), ("", 0.0)
        self.vm = vm
        self.calls: list[ImdsCall] = []
        self.approved: list[str] = []
        self._faults: list[_Fault] = []
        self._body = b""
        self.serve({"DocumentIncarnation": 1, "Events": []})

    def serve(self, document: Mapping[str, Json] | bytes) -> None:
        """Answer with this document from now on; bytes are sent as they are."""
        self._body = document if isinstance(document, bytes) else json.dumps(document).encode()

    def fail(
        self,
        error: ImdsError | int,
        *,
        methods: Sequence[str] = ("document", "instance", "approve"),
        count: int | None = None,
    ) -> None:
        """Let calls fail from now on.

        Args:
            error: what they raise, or the status that IMDS answers.
            methods: the names of the methods that fail.
            count: how many calls fail; None for every call until `restore`.
        """
        if isinstance(error, int):
            error = ImdsError(f"IMDS at {self.base} answered {error}", status=error)
        self._faults.append(_Fault(error=error, methods=tuple(methods), left=count))

    def restore(self) -> None:
        """End all faults."""
        self._faults.clear()

    def document(
        self, *, timeout_seconds: float | None = None, waiting: Callable[[], object] | None = None
    ) -> bytes:
        """Return the document that was set."""
        del waiting  # there is always an answer, or a fault
        self._record(ImdsCall(method="document", timeout_seconds=timeout_seconds))
        return self._body

    def instance(self, limit_seconds: float = 2.0) -> Vm:
        """Return the instance data that was set."""
        self._record(ImdsCall(method="instance", timeout_seconds=limit_seconds))
        return self.vm

    def approve(self, event_ids: Sequence[str], *, incarnation: Json, limit_seconds: float = 10.0) -> None:
        """Record an approval."""
        del limit_seconds  # there is always an answer, or a fault
        self._record(ImdsCall(method="approve", event_ids=tuple(event_ids), incarnation=incarnation))
        self.approved += event_ids

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _record(self, call: ImdsCall) -> None:
        self.calls.append(call)
        for fault in self._faults:
            if call.method in fault.methods and fault.left != 0:
                fault.left = None if fault.left is None else fault.left - 1
                raise fault.error


class ScriptedImds(ImdsDouble):
    """A double whose events a test schedules, starts and ends.

    `asked` has the monotonic times of all requests for the document, `lags` the seconds that the next answers take on
    the clock.
    """

    def __init__(self, clock: MovedClock, *, vm: Vm = WEB_0) -> None:
        super().__init__(vm=vm)
        self._moved = clock
        self.asked: list[float] = []
        self.lags: list[float] = []
        self.incarnation = 1
        self._events: dict[str, dict[str, Any]] = {}

    def schedule(self, event_id: str = FIRST, **fields: Any) -> None:
        """Announce an event."""
        self._events[event_id] = entry(event_id, **fields)
        self._publish()

    def start(self, event_id: str = FIRST) -> None:
        """Start an event."""
        self.update(event_id, EventStatus="Started", NotBefore="")

    def update(self, event_id: str = FIRST, **fields: Any) -> None:
        """Change an event."""
        self._events[event_id].update(fields)
        self._publish()

    def end(self, *event_ids: str) -> None:
        """Remove events from the document: those that have started are completed, the others canceled."""
        for event_id in event_ids or [FIRST]:
            del self._events[event_id]
        self._publish()

    def serve_events(self) -> None:
        """Answer with the events again, after other documents."""
        self.serve({"DocumentIncarnation": self.incarnation, "Events": list(self._events.values())})

    def document(
        self, *, timeout_seconds: float | None = None, waiting: Callable[[], object] | None = None
    ) -> bytes:
        """Answer after the next lag."""
        self.asked.append(self._moved.monotonic())
        lag = self.lags.pop(0) if self.lags else 0.0
        try:
            return super().document(timeout_seconds=timeout_seconds)
        finally:
            for _ in range(int(lag)):
                self._moved.advance(1.0)
                if waiting:
                    waiting()
            self._moved.advance(lag % 1)

    def _publish(self) -> None:
        self.incarnation += 1
        self.serve_events()
