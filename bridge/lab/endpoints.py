"""Answer the requests to the VMs of the simulated IMDS."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bridge.lab.faults import Faults
from bridge.lab.httpd import JSON_TYPE, KEPT_REQUESTS, Answer, HttpRequest, LabError, json_answer
from bridge.lab.rendering import (
    COMPUTE_PATH,
    EVENTS_PATH,
    compute_of,
    event_ids_of,
    ids_in,
    path_of,
    refusal_of,
    refuse,
    render_document,
    version_of,
)
from bridge.lab.timetable import Timetable


class Approval(NamedTuple):
    """Hold one approval that was answered with 200."""

    vm: str
    event_id: str  # as posted
    at: float  # time.monotonic()


@dataclass(kw_only=True)
class Vm:
    """Hold the state of one VM's endpoint."""

    name: str
    served: dict[str, Any] | bytes | None = None  # a document to serve in place of the events
    recent: deque[float] = field(default_factory=deque)  # requests within the last lab second


class Endpoints:
    """Answer and record the requests to every VM of a group. Every method may be called from any thread."""

    def __init__(
        self,
        *,
        vms: Sequence[str],
        scale_set: str,
        resource_group: str,
        rate_limit: int | None,
        timetable: Timetable,
        faults: Faults,
        changed: threading.Condition,
    ) -> None:
        """Start without requests.

        Args:
            vms: the names of the VMs.
            scale_set: vmScaleSetName in the instance data; empty for none.
            resource_group: resourceGroupName in the instance data.
            rate_limit: requests that each VM may send per lab second; None for no limit.
            timetable: the events.
            faults: what to answer wrongly.
            changed: the lock of the timetable; notified after every request.
        """
        self._scale_set = scale_set
        self._resource_group = resource_group
        self._rate_limit = rate_limit
        self._timetable = timetable
        self._faults = faults
        self._changed = changed
        self._vms = {name: Vm(name=name) for name in vms}
        self._requests: deque[HttpRequest] = deque(maxlen=KEPT_REQUESTS)
        self._approvals: list[Approval] = []

    @property
    def vms(self) -> tuple[str, ...]:
        """Return the names of the VMs."""
        return tuple(self._vms)

    def vm(self, name: str) -> Vm:
        """Return a VM; raise LabError if there is no such VM."""
        if name not in self._vms:
            raise LabError(f"vm given: {name!r}; expected one of: {', '.join(self._vms)}")
        return self._vms[name]

    def serve(self, document: dict[str, Any] | bytes | None, vm: str | None) -> None:
        """Serve exactly this document, on all VMs or one; None serves the events again."""
        with self._changed:
            for one in [self.vm(vm)] if vm is not None else self._vms.values():
                one.served = document
            self._changed.notify_all()

    @property
    def approvals(self) -> list[Approval]:
        """Return every approval that was answered with 200."""
        with self._changed:
            return list(self._approvals)

    def requests(self, vm: str | None = None) -> list[HttpRequest]:
        """Return the requests so far, in order of arrival."""
        name = None if vm is None else self.vm(vm).name
        with self._changed:
            return [request for request in self._requests if name in (None, request.server)]

    def handle(self, request: HttpRequest) -> Answer:
        """Return the answer to a request, and record it."""
        with self._changed:
            over_limit = self._is_over_limit(self._vms[request.server], request.at)
        if over_limit:
            answer = refuse(429, "Too many requests.")
        else:
            answer = self._faults.apply(request, lambda: self._answer(request))
        with self._changed:
            self._requests.append(replace(request, status=answer.status))
            self._changed.notify_all()
        return answer

    def _is_over_limit(self, vm: Vm, now: float) -> bool:
        vm.recent.append(now)
        while vm.recent[0] <= now - 1 / self._timetable.time_scale:
            vm.recent.popleft()
        return self._rate_limit is not None and len(vm.recent) > self._rate_limit

    def _answer(self, request: HttpRequest) -> Answer:
        if refusal := refusal_of(request):
            return refusal
        if path_of(request) == EVENTS_PATH:
            return self._document(request) if request.method == "GET" else self._approve(request)
        compute = compute_of(request.server, self._scale_set, self._resource_group)
        return json_answer(compute if path_of(request) == COMPUTE_PATH else {"compute": compute})

    def _document(self, request: HttpRequest) -> Answer:
        with self._changed:
            self._timetable.advance()
            served = self._vms[request.server].served
            incarnation, events = self._timetable.incarnation, self._timetable.fields()
        if isinstance(served, bytes):
            return Answer(body=served, headers={"content-type": JSON_TYPE})
        if served is not None:
            return json_answer(served)
        return json_answer(render_document(incarnation, events, version_of(request)))

    def _approve(self, request: HttpRequest) -> Answer:
        try:
            event_ids = event_ids_of(request.body)
        except ValueError as error:
            return refuse(400, f"Bad request. {error}")
        with self._changed:
            served_ids = ids_in(self._vms[request.server].served)
            own_ids = [one for one in event_ids if one.casefold() not in served_ids]
            if refusal := self._timetable.approve(request.server, own_ids):
                return refuse(400, f"Bad request. {refusal}")
            self._approvals += [Approval(request.server, event_id, request.at) for event_id in event_ids]
            self._timetable.advance()
            self._changed.notify_all()
        return Answer()
