"""Simulate IMDS for the VMs of one group, as strict as the real one."""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import formatdate, parsedate_to_datetime
from functools import wraps
from typing import Any, Literal, NamedTuple, Self, TypeVar

from bridge.lab.httpd import (
    Answer,
    Fault,
    Faults,
    LabError,
    Request,
    Server,
    check_seconds,
    control,
    json_answer,
    wait_for,
)

T = TypeVar("T")

EVENTS_PATH = "/metadata/scheduledevents"
INSTANCE_PATH = "/metadata/instance"
COMPUTE_PATH = "/metadata/instance/compute"

PREVIEW = "2017-03-01"
EVENT_VERSIONS = (PREVIEW, "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01")
INSTANCE_VERSIONS = (
    "2021-02-01",
    "2021-03-01",
    "2021-05-01",
    "2021-10-01",
    "2021-11-01",
    "2021-11-15",
    "2021-12-13",
    "2023-07-01",
    "2023-11-15",
    "2024-03-15",
    "2024-07-17",
    "2025-04-07",
)
TYPE_SINCE = {"Preempt": "2017-11-01", "Terminate": "2019-01-01"}
FIELD_SINCE = {"Description": "2019-04-01", "EventSource": "2019-08-01", "DurationInSeconds": "2020-07-01"}
EVENT_TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
EARLIER_FIELD_ORDER = ("EventId", "EventType", "ResourceType", "Resources", "EventStatus", "NotBefore")

SUBSCRIPTION_ID = "00000000-0000-4000-8000-00000000001a"
RESOURCE_GROUP = "lab"
NAMES = uuid.uuid5(uuid.NAMESPACE_URL, "urn:imds-bridge:lab")
KEPT_REQUESTS = 20_000

Approvals = Literal["immediate", "hold"]


class Approval(NamedTuple):
    """Hold one approval that was answered by 200."""

    vm: str
    event_id: str  # as posted
    at: float  # time.monotonic()


@dataclass(kw_only=True)
class _Event:
    fields: dict[str, Any]  # as a document of the newest version shows them
    start_at: float | None  # time.monotonic(), as the others; None: not by itself
    complete_at: float | None = None
    impact_seconds: float | None = None  # None: stays Started until completed by hand
    approved: bool = False
    released: bool = False  # the platform is ready to start it once it is approved

    @property
    def pending(self) -> bool:
        return bool(self.fields["EventStatus"] == "Scheduled")

    @property
    def is_deletion(self) -> bool:
        return bool(self.fields["EventType"] == "Terminate")


def render_document(incarnation: int, events: Sequence[Mapping[str, Any]], version: str) -> dict[str, Any]:
    """Return the document as the api-version shows it."""
    shown = [
        _render_event(event, version)
        for event in events
        if version >= TYPE_SINCE.get(str(event["EventType"]), PREVIEW)
    ]
    number = str(incarnation) if version == PREVIEW else incarnation
    return {"DocumentIncarnation": number, "Events": shown}


def _render_event(event: Mapping[str, Any], version: str) -> dict[str, Any]:
    shown = {name: value for name, value in event.items() if version >= FIELD_SINCE.get(name, PREVIEW)}
    if version < EVENT_VERSIONS[-1]:
        first = {name: shown[name] for name in EARLIER_FIELD_ORDER if name in shown}
        shown = first | shown
    if version == PREVIEW:
        shown["Resources"] = ["_" + name for name in shown["Resources"]]
        shown["NotBefore"] = _iso_time(shown.get("NotBefore"))
    return shown


def _iso_time(not_before: Any) -> Any:
    instant = _instant(not_before)
    return not_before if instant is None else instant.strftime("%Y-%m-%dT%H:%M:%SZ")


def _instant(text: Any) -> datetime | None:
    """Return the instant that a NotBefore names, or None."""
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            instant = read(str(text))
        except ValueError:
            continue
        return instant.astimezone(UTC) if instant.tzinfo else instant.replace(tzinfo=UTC)
    return None


def compute_of(vm: str, scale_set: str) -> dict[str, Any]:
    """Return the VM's instance data, every primitive a string as the real one's."""
    group = f"/subscriptions/{SUBSCRIPTION_ID}/resourceGroups/{RESOURCE_GROUP}/providers/Microsoft.Compute"
    set_name, _, number = vm.rpartition("_")
    uniform = bool(scale_set) and set_name == scale_set and number.isalnum()
    return {
        "azEnvironment": "AzurePublicCloud",
        "location": "westeurope",
        "name": vm,
        "osType": "Linux",
        "placementGroupId": str(uuid.uuid5(NAMES, f"placement/{scale_set}")) if scale_set else "",
        "platformFaultDomain": "0",
        "platformUpdateDomain": "0",
        "resourceGroupName": RESOURCE_GROUP,
        "resourceId": (
            f"{group}/virtualMachineScaleSets/{scale_set}/virtualMachines/{number}"
            if uniform
            else f"{group}/virtualMachines/{vm}"
        ),
        "subscriptionId": SUBSCRIPTION_ID,
        "tags": "env:lab",
        "tagsList": [{"name": "env", "value": "lab"}],
        "vmId": str(uuid.uuid5(NAMES, f"vm/{vm}")),
        "vmScaleSetName": scale_set,
        "vmSize": "Standard_D2s_v5",
        "zone": "1",
    }


def event_ids_of(body: bytes) -> list[str]:
    """Return the EventIds that the body of an approval names; raise ValueError where it is malformed."""
    try:
        content = json.loads(body)
    except ValueError as error:
        raise ValueError("The body is not JSON.") from error
    starts = content.get("StartRequests") if isinstance(content, dict) else None
    if not isinstance(starts, list) or not starts:
        raise ValueError("The body needs StartRequests, a list of one or more.")
    ids = [start.get("EventId") if isinstance(start, dict) else None for start in starts]
    if not all(isinstance(event_id, str) and event_id for event_id in ids):
        raise ValueError("Each of StartRequests needs an EventId.")
    return [str(event_id) for event_id in ids]


def _refusal(status: int, message: str, **more: Any) -> Answer:
    return json_answer({"error": message, **more}, status)


class Timetable:
    """Keep the events of one group and let them start and end in time. The caller holds the lock.

    Every method that reads or changes events first does what the clock demands, so that a document never
    shows an event as Scheduled whose time has come.
    """

    def __init__(self, *, time_scale: float, approvals: Approvals, tell: Callable[[str], None]) -> None:
        self.time_scale = time_scale
        self.incarnation = 1
        self._ready = approvals == "immediate"
        self._tell = tell
        self._events: dict[str, _Event] = {}

    def schedule(
        self,
        *,
        fields: dict[str, Any],
        notice_seconds: float,
        impact_seconds: float | None,
    ) -> None:
        """Add an event; one whose EventStatus is Started starts now."""
        key = str(fields["EventId"]).casefold()
        if key in self._events:
            raise LabError(
                f"event_id given: {fields['EventId']!r}, which is in the document; expected: a new one"
            )
        event = _Event(fields=fields, start_at=None, impact_seconds=impact_seconds, released=self._ready)
        self._events[key] = event
        if event.pending:
            self._give_notice(event, notice_seconds)
            self._changed(event, f"is Scheduled, NotBefore {fields['NotBefore']}")
        else:
            self._begin(event)

    def start(self, event_id: str) -> None:
        """Start the event whether approved or not; one that has started stays so."""
        event = self._find(event_id)
        if event.pending:
            self._begin(event)

    def cancel(self, event_id: str) -> None:
        """Take a Scheduled event away."""
        event = self._find(event_id)
        if not event.pending:
            raise LabError(
                f"event given: {event_id!r}, which has started; expected: a Scheduled one, or complete it"
            )
        self._remove(event, "is canceled")

    def complete(self, event_id: str) -> None:
        """Take an event away, started or not."""
        self._remove(self._find(event_id), "is completed")

    def release(self, event_id: str) -> None:
        """Let a held event start: at once if it is approved, else as soon as it is."""
        self._find(event_id).released = True

    def change(self, event_id: str, fields: Mapping[str, Any], *, quietly: bool = False) -> None:
        """Set any field; `notice_seconds` sets NotBefore; NotBefore moves the start where it is a time."""
        event = self._find(event_id)
        if "EventId" in fields:
            raise LabError("field given: EventId; expected: any other, since an event keeps its id")
        instant = _instant(fields["NotBefore"]) if "NotBefore" in fields else None
        if "notice_seconds" in fields:
            self._give_notice(event, fields["notice_seconds"])
        elif instant is not None:
            event.start_at = time.monotonic() + instant.timestamp() - time.time()
        event.fields.update({name: value for name, value in fields.items() if name != "notice_seconds"})
        if not quietly:
            self._changed(event, f"changes: {', '.join(fields)}")

    def approve(self, vm: str, event_id: str) -> None:
        """Note an approval by the VM; one of an event that has started changes nothing."""
        event = self._find(event_id)
        if not event.approved:
            event.approved = True
            self._tell(f"{_title(event)} is approved by {vm}")

    def refusal(self, vm: str, event_id: str) -> str:
        """Return why the VM may not approve the event, or an empty text."""
        event = self._events.get(event_id.casefold())
        if event is None:
            return f"EventId {event_id} is unknown."
        own = vm.casefold() in [str(name).lstrip("_").casefold() for name in event.fields["Resources"]]
        if event.is_deletion and not own:
            return f"EventId {event_id} is the deletion of another VM."
        return ""

    def advance(self) -> None:
        """Do what the clock demands."""
        now = time.monotonic()
        for event in list(self._events.values()):
            if event.pending and self._may_start(event, now):
                self._begin(event)
            if event.complete_at is not None and event.complete_at <= now:
                self._remove(event, "is completed")

    def next_due(self) -> float | None:
        """Return when something happens by itself next, as time.monotonic()."""
        starts = [event.start_at for event in self._events.values() if event.pending]
        ends = [event.complete_at for event in self._events.values()]
        return min((at for at in starts + ends if at is not None), default=None)

    def fields(self) -> list[dict[str, Any]]:
        """Return the events as the newest version shows them."""
        return [dict(event.fields) for event in self._events.values()]

    def state(self) -> list[dict[str, Any]]:
        """Return the events with what no document shows."""
        return [
            {**event.fields, "approved": event.approved, "released": event.released}
            for event in self._events.values()
        ]

    def _may_start(self, event: _Event, now: float) -> bool:
        if event.start_at is not None and event.start_at <= now:
            return True
        if not (event.approved and event.released):
            return False
        # an unapproved deletion holds back the approved ones, which then go together
        return not event.is_deletion or all(
            other.approved for other in self._events.values() if other.pending and other.is_deletion
        )

    def _begin(self, event: _Event) -> None:
        event.fields.update(EventStatus="Started", NotBefore="")
        event.start_at = None
        if event.impact_seconds is not None:
            event.complete_at = time.monotonic() + event.impact_seconds / self.time_scale
        self._changed(event, "is Started")

    def _give_notice(self, event: _Event, notice_seconds: float) -> None:
        check_seconds("notice_seconds", notice_seconds)
        real_seconds = notice_seconds / self.time_scale
        event.start_at = time.monotonic() + real_seconds
        # whole seconds, rounded down: no event starts before the NotBefore that was shown
        event.fields["NotBefore"] = formatdate(math.floor(time.time() + real_seconds), usegmt=True)

    def _find(self, event_id: str) -> _Event:
        self.advance()
        event = self._events.get(str(event_id).casefold())
        if event is None:
            known = ", ".join(str(event.fields["EventId"]) for event in self._events.values())
            raise LabError(
                f"event given: {event_id!r}; expected one of the document: {known or 'it has none'}"
            )
        return event

    def _remove(self, event: _Event, what: str) -> None:
        del self._events[str(event.fields["EventId"]).casefold()]
        self._changed(event, what)

    def _changed(self, event: _Event, what: str) -> None:
        self.incarnation += 1
        self._tell(f"{_title(event)} {what}")


def _title(event: _Event) -> str:
    names = ", ".join(str(name) for name in event.fields["Resources"]) or "no VM"
    return f"{event.fields['EventType']} {event.fields['EventId']} of {names}"


@dataclass(kw_only=True)
class _Vm:
    name: str
    served: dict[str, Any] | bytes | None = None  # a document that stands in for the events
    recent: deque[float] = field(default_factory=deque)  # arrivals within the last lab second


class ImdsLab:
    """Serve a simulated IMDS for each VM of one group, each on its own port, and a control API.

    Every method may be called from any thread. All seconds named `notice_seconds` or `impact_seconds` are
    lab seconds, of which `time_scale` go into one real second; those of faults and waits are real.
    """

    def __init__(
        self,
        *,
        vms: Sequence[str] = ("web-0",),
        time_scale: float = 1.0,
        scale_set: str = "web",
        approvals: Approvals = "immediate",
        rate_limit: int | None = 5,
        port: int = 0,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Start to serve.

        Args:
            vms: the names of the VMs.
            time_scale: how many lab seconds go into a real one.
            scale_set: what instance data gives as vmScaleSetName; empty for none.
            approvals: whether an approved event starts immediately or is held until NotBefore or release.
            rate_limit: requests that a VM may make in any lab second; None for no limit.
            port: of the control API, the VMs on those that follow; 0 for any free ones.
            tell: gets a sentence for everything that happens to an event.
        """
        if not vms or len({name.casefold() for name in vms}) != len(vms) or not all(vms):
            raise LabError(f"vms given: {list(vms)}; expected: one or more different names")
        if not time_scale > 0 or not math.isfinite(time_scale):
            raise LabError(f"time_scale given: {time_scale!r}; expected: a number above 0")
        if approvals not in ("immediate", "hold"):
            raise LabError(f"approvals given: {approvals!r}; expected: 'immediate' or 'hold'")
        self.time_scale = time_scale
        self.scale_set = scale_set
        self._rate_limit = rate_limit
        self._changed = threading.Condition()
        self._timetable = Timetable(
            time_scale=time_scale, approvals=approvals, tell=self._tell_and_wake(tell or (lambda _: None))
        )
        self._faults = Faults()
        self._vms = {name: _Vm(name=name) for name in vms}
        self._requests: deque[Request] = deque(maxlen=KEPT_REQUESTS)
        self._approvals: list[Approval] = []
        self._closed = False
        with ExitStack() as stack:
            self._serve(stack, port)
            self._stack = stack.pop_all()

    def _serve(self, stack: ExitStack, port: int) -> None:
        server = Server("control", control(self._routes()), port=port)
        stack.callback(server.close)
        self.control_url = server.url
        self._urls: dict[str, str] = {}
        for number, name in enumerate(self._vms, start=1):
            server = Server(name, self._handle, port=port + number if port else 0)
            stack.callback(server.close)
            self._urls[name] = server.url
        keeper = threading.Thread(target=self._keep_time, name="lab-time", daemon=True)
        keeper.start()
        stack.callback(keeper.join)
        stack.callback(self._stop)

    def _stop(self) -> None:
        self._faults.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End at once, also while requests hang. A second call does nothing."""
        self._stack.close()

    # --- where it is ---

    @property
    def vms(self) -> tuple[str, ...]:
        """Return the names of the VMs."""
        return tuple(self._vms)

    def url(self, vm: str) -> str:
        """Return the base URL of the VM's IMDS."""
        return self._urls[self._vm(vm).name]

    # --- what happens ---

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
    ) -> str:
        """Add an event.

        Args:
            event_type: one of EVENT_TYPES, or any other text to see how it is borne.
            resources: names of VMs, not necessarily of this lab's; may be empty.
            notice_seconds: lab seconds until NotBefore, when it starts by itself.
            event_source: Platform or User.
            duration_seconds: what DurationInSeconds shows; -1 for unknown.
            description: may be empty.
            event_id: a new one is made where it is None.
            event_status: "Started" for one that gives no notice.
            completes: whether it goes by itself, `impact_seconds` after its start.
            impact_seconds: lab seconds.

        Returns: its EventId.
        """
        check_seconds("notice_seconds", notice_seconds)
        check_seconds("impact_seconds", impact_seconds)
        if not isinstance(resources, (list, tuple)) or not all(isinstance(name, str) for name in resources):
            raise LabError(f"resources given: {resources!r}; expected: a list of VM names")
        if not isinstance(event_type, str) or not event_type:
            raise LabError(
                f"event_type given: {event_type!r}; expected: a text such as {', '.join(EVENT_TYPES)}"
            )
        if not isinstance(event_id, (str, type(None))):
            raise LabError(f"event_id given: {event_id!r}; expected: a text or none")
        fields = {
            "EventId": event_id or str(uuid.uuid4()).upper(),
            "EventStatus": event_status,
            "EventType": event_type,
            "ResourceType": "VirtualMachine",
            "Resources": list(resources),
            "NotBefore": "",
            "Description": description,
            "EventSource": event_source,
            "DurationInSeconds": duration_seconds,
        }
        with self._changed:
            self._timetable.schedule(
                fields=fields,
                notice_seconds=notice_seconds,
                impact_seconds=impact_seconds if completes else None,
            )
        return str(fields["EventId"])

    def start(self, event_id: str) -> None:
        """Start the event now, approved or not."""
        with self._changed:
            self._timetable.start(event_id)

    def cancel(self, event_id: str) -> None:
        """Take a Scheduled event away; LabError if it has started."""
        with self._changed:
            self._timetable.cancel(event_id)

    def complete(self, event_id: str) -> None:
        """Take an event away, whatever its status."""
        with self._changed:
            self._timetable.complete(event_id)

    def release(self, event_id: str) -> None:
        """Start a held event at once if it is approved, else as soon as it is."""
        with self._changed:
            self._timetable.release(event_id)
            self._timetable.advance()

    def update(self, event_id: str, **fields: Any) -> None:
        """Set any field of the document's event, or `notice_seconds`, under a new incarnation."""
        with self._changed:
            self._timetable.change(event_id, fields)

    def change_quietly(self, event_id: str, **fields: Any) -> None:
        """Set any field under the same incarnation."""
        with self._changed:
            self._timetable.change(event_id, fields, quietly=True)
            self._changed.notify_all()

    def reset_incarnation(self, to: int = 1) -> None:
        """Let DocumentIncarnation go on from another number."""
        if not isinstance(to, int) or isinstance(to, bool):
            raise LabError(f"to given: {to!r}; expected: a whole number")
        with self._changed:
            self._timetable.incarnation = to
            self._changed.notify_all()

    def serve_document(self, document: dict[str, Any] | bytes | None, vm: str | None = None) -> None:
        """Serve exactly this document, on all VMs or one, until None clears it."""
        if not isinstance(document, (dict, bytes, type(None))):
            raise LabError(f"document given: {document!r}; expected: an object, bytes or none")
        with self._changed:
            for one in [self._vm(vm)] if vm is not None else self._vms.values():
                one.served = document
            self._changed.notify_all()

    def fault(
        self,
        kind: str | int,
        *,
        vm: str | None = None,
        count: int | None = 1,
        seconds: float | None = None,
        retry_after: str | int | None = None,
        method: str | None = "GET",
        path: str | None = None,
    ) -> None:
        """Answer the next requests wrongly, after the faults that wait before this one.

        Args:
            kind: one of FAULT_KINDS, or an HTTP status by number or name.
            vm: only this one's; None for any.
            count: how many requests; None for ever.
            seconds: real ones before the answer; 5 for `slow`, 120 for `slow_first_call`, else 0.
            retry_after: goes into the header of an HTTP status.
            method: only these; None for any.
            path: only paths that begin so, such as EVENTS_PATH.
        """
        server = self._vm(vm).name if vm is not None else None
        fault = Fault.of(
            kind, seconds=seconds, retry_after=retry_after, server=server, method=method, path=path
        )
        self._faults.add(fault, count=count)

    def clear_faults(self) -> None:
        """Forget all faults; requests that one of them holds are let go."""
        self._faults.clear()

    # --- what was seen ---

    @property
    def incarnation(self) -> int:
        """Return the DocumentIncarnation that is shown now."""
        with self._changed:
            self._timetable.advance()
            return self._timetable.incarnation

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the events as the newest api-version shows them now."""
        with self._changed:
            self._timetable.advance()
            return self._timetable.fields()

    @property
    def approvals(self) -> list[Approval]:
        """Return every approval that was answered by 200."""
        with self._changed:
            return list(self._approvals)

    def requests(self, vm: str | None = None) -> list[Request]:
        """Return the requests so far, in order of arrival; they are there before they are answered."""
        name = None if vm is None else self._vm(vm).name
        with self._changed:
            return [request for request in self._requests if name in (None, request.server)]

    def wait_for(self, predicate: Callable[[], T], timeout: float = 10) -> T:
        """Wait until the predicate holds; AssertionError with the state after `timeout` real seconds."""
        return wait_for(predicate, timeout, self._changed, lambda: json.dumps(self.state()))

    def state(self) -> dict[str, Any]:
        """Return everything that the control API shows as the state."""
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

    # --- inside ---

    def _vm(self, name: str) -> _Vm:
        if name not in self._vms:
            raise LabError(f"vm given: {name!r}; expected one of: {', '.join(self._vms)}")
        return self._vms[name]

    def _tell_and_wake(self, tell: Callable[[str], None]) -> Callable[[str], None]:
        def told(sentence: str) -> None:
            self._changed.notify_all()
            tell(sentence)

        return told

    def _keep_time(self) -> None:
        with self._changed:
            while not self._closed:
                self._timetable.advance()
                due = self._timetable.next_due()
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))

    def _routes(self) -> dict[tuple[str, str], Callable[..., object]]:
        @wraps(self.schedule)
        def schedule(**values: Any) -> dict[str, str]:
            return {"event_id": self.schedule(**values)}

        return {
            ("POST", "/schedule"): schedule,
            ("POST", "/start"): self.start,
            ("POST", "/cancel"): self.cancel,
            ("POST", "/complete"): self.complete,
            ("POST", "/release"): self.release,
            ("POST", "/update"): self.update,
            ("POST", "/change-quietly"): self.change_quietly,
            ("POST", "/fault"): self.fault,
            ("POST", "/clear-faults"): self.clear_faults,
            ("POST", "/reset"): self.reset_incarnation,
            ("POST", "/document"): self.serve_document,
            ("GET", "/state"): self.state,
            ("GET", "/requests"): lambda vm=None: [one.summary() for one in self.requests(vm)],
        }

    def _handle(self, request: Request) -> Answer:
        with self._changed:
            over_limit = self._is_over_limit(self._vms[request.server], request.at)
        if over_limit:
            answer = _refusal(429, "Too many requests.")
        else:
            answer = self._faults.apply(request, lambda: self._answer(request))
        with self._changed:
            self._requests.append(replace(request, status=answer.status))
            self._changed.notify_all()
        return answer

    def _is_over_limit(self, vm: _Vm, now: float) -> bool:
        vm.recent.append(now)
        while vm.recent[0] <= now - 1 / self.time_scale:
            vm.recent.popleft()
        return self._rate_limit is not None and len(vm.recent) > self._rate_limit

    def _answer(self, request: Request) -> Answer:
        path = request.path.rstrip("/")
        if "x-forwarded-for" in request.headers:
            return _refusal(400, "Bad request. X-Forwarded-For is refused: a proxy must not stand between.")
        if path not in (EVENTS_PATH, INSTANCE_PATH, COMPUTE_PATH):
            return _refusal(404, "Not found.")
        allowed = ("GET", "POST") if path == EVENTS_PATH else ("GET",)
        if request.method not in allowed:
            return json_answer({"error": "Method not allowed."}, 405, allow=", ".join(allowed))
        versions = EVENT_VERSIONS if path == EVENTS_PATH else INSTANCE_VERSIONS
        version = (request.parameters.get("api-version") or [""])[0]
        if version not in versions:
            newest_first = list(reversed(versions))
            return _refusal(
                400, "Bad request. A supported api-version is demanded.", **{"newest-versions": newest_first}
            )
        demanded = path != EVENTS_PATH or version != PREVIEW
        if demanded and request.headers.get("metadata", "").strip().lower() != "true":
            return _refusal(400, "Bad request. The header Metadata: true is demanded.")
        if path != EVENTS_PATH:
            compute = compute_of(request.server, self.scale_set)
            return json_answer(compute if path == COMPUTE_PATH else {"compute": compute})
        return self._document(request, version) if request.method == "GET" else self._approve(request)

    def _document(self, request: Request, version: str) -> Answer:
        with self._changed:
            self._timetable.advance()
            served = self._vms[request.server].served
            document = render_document(self._timetable.incarnation, self._timetable.fields(), version)
        if isinstance(served, bytes):
            return Answer(body=served, headers={"content-type": "application/json; charset=utf-8"})
        return json_answer(document if served is None else served)

    def _approve(self, request: Request) -> Answer:
        try:
            event_ids = event_ids_of(request.body)
        except ValueError as error:
            return _refusal(400, f"Bad request. {error}")
        with self._changed:
            self._timetable.advance()
            served_ids = _ids_in(self._vms[request.server].served)
            own_ids = [one for one in event_ids if one.casefold() not in served_ids]
            for event_id in own_ids:
                if refusal := self._timetable.refusal(request.server, event_id):
                    return _refusal(400, f"Bad request. {refusal}")
            for event_id in own_ids:
                self._timetable.approve(request.server, event_id)
            self._approvals += [Approval(request.server, event_id, request.at) for event_id in event_ids]
            self._timetable.advance()
            self._changed.notify_all()
        return Answer()


def _ids_in(document: dict[str, Any] | bytes | None) -> set[str]:
    """Return the EventIds of a served document, without case."""
    events = document.get("Events") if isinstance(document, dict) else None
    return {str(event.get("EventId")).casefold() for event in events or [] if isinstance(event, dict)}
