"""Simulate IMDS for the VMs of one group, as strict as the real service, with a control API."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, Self

from bridge.lab import rendering
from bridge.lab.httpd import (
    KEPT_REQUESTS,
    Answer,
    Fault,
    Faults,
    HttpRequest,
    LabError,
    Server,
    check_seconds,
    control,
    json_answer,
)
from bridge.lab.rendering import (
    COMPUTE_PATH,
    EVENT_TYPES,
    EVENT_VERSIONS,
    EVENTS_PATH,
    INSTANCE_PATH,
    event_fields,
    path_of,
    refuse,
    render_document,
)
from bridge.lab.timetable import Timetable

__all__ = ["COMPUTE_PATH", "EVENTS_PATH", "EVENT_TYPES", "EVENT_VERSIONS", "INSTANCE_PATH", "render_document"]


class Approval(NamedTuple):
    """Hold one approval that was answered with 200."""

    vm: str
    event_id: str  # as posted
    at: float  # time.monotonic()


class ImdsLab:
    """Serve a simulated IMDS for each VM of one group, each on its own port, and a control API.

    Every method may be called from any thread. `notice_seconds` and `impact_seconds` are lab seconds, of which
    `time_scale` pass in one real second; faults and timeouts use real seconds.
    """

    fault_class = Fault

    def __init__(
        self,
        *,
        vms: Sequence[str] = ("web-0",),
        time_scale: float = 1.0,
        scale_set: str = "web",
        resource_group: str = rendering.RESOURCE_GROUP,
        rate_limit: int | None = 5,
        port: int = 0,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start the servers.

        Args:
            vms: the names of the VMs.
            time_scale: how many lab seconds pass in one real second.
            scale_set: vmScaleSetName in the instance data; empty for none.
            resource_group: resourceGroupName in the instance data.
            rate_limit: requests that each VM may send per lab second; None for no limit.
            port: of the control API; the VMs get the ports that follow. 0 for any free ports.
            report: called with a sentence for everything that happens to an event.
        """
        if not vms or len({name.casefold() for name in vms}) != len(vms) or not all(vms):
            raise LabError(f"vms given: {list(vms)}; expected: one or more different names")
        if not time_scale > 0 or not math.isfinite(time_scale):
            raise LabError(f"time_scale given: {time_scale!r}; expected: a number above 0")
        self.time_scale = time_scale
        self.vms = tuple(vms)
        self._group = (scale_set, resource_group)
        self._rate_limit = rate_limit
        self._report = report
        self._changed = threading.Condition()
        self._timetable = Timetable(time_scale, self._report_and_notify)
        self._faults = Faults()
        self._recent: dict[str, deque[float]] = {name: deque() for name in vms}  # requests of the last second
        self._requests: deque[HttpRequest] = deque(maxlen=KEPT_REQUESTS)
        self._approvals: list[Approval] = []
        self._described: dict[str, dict[str, Any]] = {}
        self._closed = False
        with ExitStack() as stack:
            self._serve(stack, port)
            self._stack = stack.pop_all()

    def _serve(self, stack: ExitStack, port: int) -> None:
        server = Server("control", control(self._routes()), port=port)
        stack.callback(server.close)
        self.control_url = server.url
        self._urls: dict[str, str] = {}
        for number, name in enumerate(self.vms, start=1):
            server = Server(name, self._handle, port=port + number if port else 0)
            stack.callback(server.close)
            self._urls[name] = server.url
        keeper = threading.Thread(target=self._keep_time, name="lab-time", daemon=True)
        keeper.start()
        stack.callback(keeper.join)
        stack.callback(self._stop)

    def _stop(self) -> None:
        self._faults.clear()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop immediately, even while requests hang. A second call does nothing."""
        self._stack.close()

    def url(self, vm: str) -> str:
        """Return the base URL of the VM's IMDS; raise LabError if there is no such VM."""
        if vm not in self._urls:
            raise LabError(f"vm given: {vm!r}; expected one of: {', '.join(self.vms)}")
        return self._urls[vm]

    # --- events ---

    def schedule(
        self,
        *,
        event_type: str,
        resources: Sequence[str],
        notice_seconds: float = 900,
        event_source: str = "Platform",
        duration_seconds: int = -1,
        description: str = "",
        event_id: str | None = None,
        event_status: str = "Scheduled",
        completes: bool = False,
        impact_seconds: float = 10,
        hold: bool = False,
    ) -> str:
        """Add an event.

        Args:
            event_type: one of EVENT_TYPES, or any other text to test an unknown type.
            resources: names of VMs, which need not belong to this lab; may be empty.
            notice_seconds: lab seconds until NotBefore, when it starts without an approval.
            event_source: Platform or User.
            duration_seconds: the value of DurationInSeconds; -1 for unknown.
            description: may be empty.
            event_id: None to generate one.
            event_status: "Started" for an event without notice, "Advisory" for an early warning.
            completes: whether it completes on its own, `impact_seconds` after its start.
            impact_seconds: lab seconds.
            hold: whether an approval starts it only after `release`.

        Returns: its EventId.
        """
        check_seconds("notice_seconds", notice_seconds)
        check_seconds("impact_seconds", impact_seconds)
        fields = event_fields(
            event_id=event_id,
            event_type=event_type,
            event_status=event_status,
            resources=resources,
            description=description,
            event_source=event_source,
            duration_seconds=duration_seconds,
        )
        with self._changed:
            impact = impact_seconds if completes else None
            self._timetable.schedule(fields, notice_seconds=notice_seconds, impact_seconds=impact, hold=hold)
        return str(fields["EventId"])

    def start(self, event_id: str) -> None:
        """Start the event now, approved or not."""
        with self._changed:
            self._timetable.start(event_id)

    def cancel(self, event_id: str) -> None:
        """Cancel a Scheduled event; raise LabError if it has started."""
        with self._changed:
            self._timetable.cancel(event_id)

    def complete(self, event_id: str) -> None:
        """Complete an event, whatever its status."""
        with self._changed:
            self._timetable.complete(event_id)

    def release(self, event_id: str) -> None:
        """Stop holding an event: start it now if it is approved, else when it is approved."""
        with self._changed:
            self._timetable.release(event_id)

    def update(self, event_id: str, **fields: Any) -> None:
        """Set fields of an event, or `notice_seconds`, and increase DocumentIncarnation."""
        with self._changed:
            self._timetable.change(event_id, fields)

    def describe(self, vm: str, properties: dict[str, Any]) -> None:
        """Answer with other instance data of a VM, in place of what an earlier call gave.

        Args:
            vm: the name of the VM, which its address keeps.
            properties: by the names of instance data; None leaves one out.
        """
        self.url(vm)
        self._described = {**self._described, vm: properties}

    def fault(
        self, kind: str | int, *, count: int | None = 1, method: str | None = "GET", **values: Any
    ) -> None:
        """Answer the next requests wrongly, after the faults that are already queued.

        Args:
            kind: see `Fault.of`.
            count: the number of requests; None for no limit.
            method: only requests with this method; None for any.
            values: the other fields of Fault, such as vm or path, a prefix.
        """
        if values.get("vm") is not None:
            self.url(values["vm"])
        self._faults.add(self.fault_class.of(kind, method=method, **values), count=count)

    def clear_faults(self) -> None:
        """Remove all faults; requests that one of them delays are answered."""
        self._faults.clear()

    # --- what happened ---

    @property
    def incarnation(self) -> int:
        """Return the current DocumentIncarnation."""
        with self._changed:
            self._timetable.advance()
            return self._timetable.incarnation

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the current events as the newest api-version shows them."""
        with self._changed:
            self._timetable.advance()
            return self._timetable.fields()

    @property
    def approvals(self) -> list[Approval]:
        """Return every approval that was answered with 200."""
        with self._changed:
            return list(self._approvals)

    def requests(self, vm: str | None = None) -> list[HttpRequest]:
        """Return the requests so far, in order of arrival; each is recorded before its answer is sent."""
        with self._changed:
            return [request for request in self._requests if vm in (None, request.server)]

    def state(self) -> dict[str, Any]:
        """Return the state as the control API shows it."""
        with self._changed:
            self._timetable.advance()
            return {
                "incarnation": self._timetable.incarnation,
                "time_scale": self.time_scale,
                "events": self._timetable.state(),
                "vms": dict(self._urls),
                "approvals": [{"vm": one.vm, "event_id": one.event_id} for one in self._approvals],
                "requests": len(self._requests),
            }

    # --- requests ---

    def _handle(self, request: HttpRequest) -> Answer:
        if self._is_over_limit(self._recent[request.server], request.at):
            answer = refuse(429, "Too many requests.")
        else:
            answer = self._faults.apply(request, lambda: self._answer(request))
        with self._changed:
            self._requests.append(replace(request, status=answer.status))
            self._changed.notify_all()
        return answer

    def _is_over_limit(self, recent: deque[float], now: float) -> bool:
        with self._changed:
            recent.append(now)
            while recent[0] <= now - 1 / self.time_scale:
                recent.popleft()
            return self._rate_limit is not None and len(recent) > self._rate_limit

    def _answer(self, request: HttpRequest) -> Answer:
        if refusal := rendering.refusal_of(request):
            return refusal
        if path_of(request) == EVENTS_PATH:
            return self._document(request) if request.method == "GET" else self._approve(request)
        whole = rendering.compute_of(request.server, *self._group) | self._described.get(request.server, {})
        compute = {name: value for name, value in whole.items() if value is not None}
        return json_answer(compute if path_of(request) == COMPUTE_PATH else {"compute": compute})

    def _document(self, request: HttpRequest) -> Answer:
        with self._changed:
            self._timetable.advance()
            incarnation, events = self._timetable.incarnation, self._timetable.fields()
        return json_answer(render_document(incarnation, events, rendering.version_of(request)))

    def _approve(self, request: HttpRequest) -> Answer:
        try:
            event_ids = rendering.event_ids_of(request.body)
        except ValueError as error:
            return refuse(400, f"Bad request. {error}")
        with self._changed:
            if refusal := self._timetable.approve(request.server, self._own(event_ids)):
                return refuse(400, f"Bad request. {refusal}")
            self._approvals += [Approval(request.server, event_id, request.at) for event_id in event_ids]
            self._timetable.advance()
            self._changed.notify_all()
        return Answer()

    def _own(self, event_ids: list[str]) -> list[str]:
        """Return the ids that this lab's own events have to have."""
        return event_ids

    # --- internals ---

    def _report_and_notify(self, sentence: str) -> None:
        self._changed.notify_all()
        self._report(sentence)

    def _keep_time(self) -> None:
        with self._changed:
            while not self._closed:
                self._timetable.advance()
                due = self._timetable.next_due()
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))

    def _routes(self) -> dict[tuple[str, str], Callable[..., object]]:
        """Return what the commands of `imds-bridge lab` ask for."""
        by_id = (self.start, self.cancel, self.complete, self.release)
        return {
            ("POST", "/schedule"): lambda **values: {"event_id": self.schedule(**values)},
            **{("POST", f"/{one.__name__}"): one for one in by_id},
            ("POST", "/describe"): self.describe,
            ("POST", "/fault"): self.fault,
            ("POST", "/clear-faults"): self.clear_faults,
            ("GET", "/state"): self.state,
        }
