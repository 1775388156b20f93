"""What `imds-bridge status` shows, and what it says about the health of a process.

It is read from the file that the process replaces; IMDS is never asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from bridge.contract.status import (
    NOT_KNOWN,
    BusStatus,
    ConsoleStatus,
    FlowStatus,
    ForwardStatus,
    ListenStatus,
    RelayBus,
    RelayStatus,
    SinkStatus,
    Status,
    VmStatus,
    not_known,
)
from bridge.errors import UsageError
from bridge.formats.text import format_duration, format_relative, table
from bridge.imds.document import Document, ScheduledEvent, names, read_document
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.time import iso_utc, parse_iso

# How old IMDS's last good answer may be: one request that hangs, and then a good one, still fits.
IMDS_SECONDS = 30.0
CLOCK_SECONDS = 30.0
BACKLOG_SECONDS = 300.0
FAILED_SHARE = 0.5
_BROKEN_SINKS = {"misconfigured", "gone", "rejecting"}
# A notice that waits is urgent when so little time is left.
NOTICE_SECONDS = 300.0
# The process writes every 5 s at least.
SILENT_SECONDS = 12.0

_RESPONSE_TEXTS = {
    "gone": "NOT RESPONDING: the process is gone without a stop, last updated {ago}",
    "silent": "NOT RESPONDING: {report.holder} last wrote {ago}; it hangs, or cannot write to the state folder",
    "stopped": "NOT RUNNING: stopped {ago}",
}
Response = Literal["ok", "gone", "silent", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A status, and what follows from it now; in JSON, the fields of `status` stand beside the others.

    Attributes:
        status: what the process wrote last.
        response: "ok", "gone" (without a stop), "silent" or "stopped".
        holder: who holds the state folder, None for nobody.
        running: whether the response is "ok".
        age_seconds: since the status was written, None if that is not known.
        events: those of the document, with their countdowns.
        urgent: what needs a person.
        not_known: the fields that the process did not write.
    """

    status: Status
    response: Response
    holder: str | None
    running: bool
    age_seconds: float | None
    events: Sequence[Mapping[str, Any]]
    urgent: Sequence[str]
    not_known: Sequence[str]

    @property
    def gaps(self) -> list[str]:
        """The line that names what is not known, if anything is."""
        names = ", ".join(self.not_known)
        return [f"NOT KNOWN, as a process of another version wrote the status: {names}"] if names else []


def read_report(folder: StateFolder, now: datetime) -> Report:
    """Read the status that the process last wrote.

    Raises:
        UsageError: there is no status to read; the text says why.
    """
    holder = folder.owner()
    try:
        status = folder.load_status()
        document = document_of(status)
    except FileNotFoundError:
        why = (
            f"{holder} runs, but cannot write there, or has just started"
            if holder
            else f"`imds-bridge {folder.path.name}` has never run with this state_dir, or cannot write there"
        )
    except PermissionError:
        why = "this user may not read it; use sudo, or be the service's user"
    except (OSError, ValueError) as error:
        why = f"it cannot be read: {error}; a running process replaces it within 5 s"
    else:
        age_seconds = age_of(status.written_at, now)
        is_silent = (age_seconds or 0) > SILENT_SECONDS
        without_holder: Response = "gone" if status.running else "stopped"
        response: Response = ("silent" if is_silent else "ok") if holder else without_holder
        return Report(
            status=status,
            response=response,
            holder=holder,
            running=response == "ok",
            age_seconds=age_seconds,
            events=[_event(event, now) for event in document.events.values()] if document else [],
            urgent=find_urgent(status, now),
            not_known=[*not_known(status)],
        )
    raise UsageError(f"no status in {folder.path}: {why}")


def document_of(status: Status) -> Document | None:
    """Return IMDS's last document, None if there is none or the process keeps none.

    Raises:
        ValueError: it cannot be read.
    """
    raw = status.flow.document if isinstance(status.flow, ForwardStatus) else None
    return read_document(raw) if raw else None


def age_of(text: object, now: datetime) -> float | None:
    """Return the seconds since an instant of the status file, None if it has none."""
    instant = parse_iso(text)
    return round((now - instant).total_seconds(), 1) if instant else None


def _event(event: ScheduledEvent, now: datetime) -> dict[str, Any]:
    not_before = event.not_before
    return {
        **event.raw,
        "NotBeforeUtc": iso_utc(not_before) if not_before else None,
        "StartsInSeconds": round((not_before - now).total_seconds()) if not_before else None,
    }


def render(report: Report) -> list[str]:
    """Write the status for a person, in lines."""
    events = [*_events(report), *_auto(report.status.flow)]
    urgent = ["", "NEEDS A PERSON:", *report.urgent] if report.urgent else []
    gaps = ["", *report.gaps] if report.gaps else []
    return [*_head(report), "", *events, *([""] if events else ()), *_sinks(report.status), *gaps, *urgent]


def _shown(value: object, nothing: str) -> str:
    """Write a field: `nothing` for None."""
    return nothing if value is None else str(value)


def _ago(seconds: float | None) -> str:
    return "at an unknown time" if seconds is None else f"{format_duration(seconds, exact=True)} ago"


def _head(report: Report) -> list[str]:
    status, ago = report.status, _ago(report.age_seconds)
    lines = [
        f"imds-bridge {status.version}, process {status.pid}, updated {ago}"
        if report.running
        else _RESPONSE_TEXTS[report.response].format(ago=ago, report=report)
    ]
    match status.flow:
        case ConsoleStatus() as flow:
            lines += _console(flow)
        case RelayStatus(relay=relay):
            lines.append(f"BUS   {_relay(relay) if relay else relay}")
        case flow:
            lines += _vm(flow, datetime.now(UTC))
    where = "senders retry" if isinstance(status.flow, ConsoleStatus) else "new events may be in memory only"
    if status.storage_error:
        lines.append(f"STATE STORE UNAVAILABLE, {where}: {status.storage_error}")
    if status.kept_log:
        lines.append(f"STATE STORE GROWS: {status.kept_log}")
    return lines


def _console(flow: ConsoleStatus) -> Iterator[str]:
    """Yield what the console receives, and what keeps it from that."""
    last = _shown(flow.last_event_at, "never")
    yield f"WEB   {flow.url}, {flow.received} event(s) received, the last {last}"
    if bus := flow.bus:
        error = f"; NOT RECEIVING: {bus.last_error}" if bus.last_error else ""
        yield f"BUS   {bus.from_}{error}"


def _vm(flow: ForwardStatus | ListenStatus, now: datetime) -> Iterator[str]:
    """Yield which VM it is, how IMDS answers, and what `listen` receives."""
    yield f"VM    {_shown(flow.vm, 'not available yet')}"
    last = age_of(flow.last_good_at, now)
    seen = _shown(flow.last_good_at, "no answer yet") if last is None else f"last valid answer {_ago(last)}"
    words = "NO VALID ANSWER NOW" if [*_imds_faults(flow, now)] else "the last request failed"
    yield f"IMDS  {flow.imds}, {f'{seen}; {words}: {flow.last_error}' if flow.last_error else seen}"
    if flow.version_error:
        yield f"      {flow.version_error}"
    if isinstance(flow, ListenStatus):
        dry = " (dry run: nothing is POSTed)" if flow.dry_run else ""
        none = _shown(flow.commands, "none, only auto rules approve")
        bus = _commands(flow.commands, now) if flow.commands else none
        yield f"BUS   {bus}, {flow.waiting_commands} command(s) waiting{dry}"


def _commands(bus: BusStatus, now: datetime) -> str:
    looked = "never" if bus.looked_at is None else _ago(age_of(bus.looked_at, now))
    rest = f"rests while nothing can be approved, last look {looked}" if bus.rests else "receives"
    return f"{bus.from_}, {f'NOT RECEIVING: {bus.last_error}' if bus.last_error else rest}"


def _relay(relay: RelayBus) -> str:
    last = _shown(relay.last_event_at, "never")
    parts = [f"{relay.from_}, {relay.relayed} event(s) relayed, the last {last}"]
    if relay.malformed:
        parts.append(f"{relay.malformed} message(s) dead-lettered that are not events")
    if relay.uncompleted:
        parts.append(f"{relay.uncompleted} event(s) stay on the bus until they are stored or delivered")
    if relay.last_error:
        parts.append(f"NOT RECEIVING: {relay.last_error}")
    return "; ".join(parts)


def _events(report: Report) -> list[str]:
    if not isinstance(report.status.flow, ForwardStatus):
        return []
    document = report.status.flow.document
    if not document:
        return ["No document received yet."] if document is None else []
    if not report.events:
        return [f"Document {document.get('DocumentIncarnation')}: no events."]
    rows = [
        (
            str(event.get("EventType")),
            str(event.get("EventStatus")),
            _starts(event),
            str(event.get("EventSource") or "-"),
            event["EventId"],
            ", ".join(names(event.get("Resources"))) or "-",
        )
        for event in report.events
    ]
    header = ("EVENT", "STATUS", "STARTS", "BY", "ID", "VMS")
    return [f"Document {document.get('DocumentIncarnation')}:", *table(header, rows)]


def _auto(flow: FlowStatus) -> list[str]:
    """Write whether this VM is out of work, and what the auto rules make of its events."""
    if not isinstance(flow, ListenStatus):
        return []
    out = [f"OUT OF WORK since {one.Since}: {one.Why}" for one in flow.out_of_work or ()]
    rows = [(str(one.EventId), str(one.Why)) for one in flow.auto or ()]
    return [*out, *(table(("EVENT", "AUTO RULES"), rows) if rows else ())]


def _starts(event: Mapping[str, Any]) -> str:
    seconds = event["StartsInSeconds"]
    if seconds is None:
        return "-"
    if seconds > 0:
        return format_relative(seconds, exact=True)
    return f"{format_duration(seconds, exact=True)} overdue"


def _sinks(status: Status) -> list[str]:
    rows = [
        (
            name,
            str(sink.state),
            _backlog(sink),
            _shown(sink.last_success_at, "never"),
            str(sink.dead_letters),
            _shown(sink.next_retry_at, "-"),
            f"{sink.last_error_at} {sink.last_error}" if sink.last_error else _shown(sink.last_error, "-"),
        )
        for name, sink in (status.sinks or {}).items()
    ]
    left = status.left_sinks or {}
    rows += [(name, "not configured", str(count), *"----") for name, count in left.items()]
    return table(("SINK", "STATE", "WAITING", "LAST SUCCESS", "DEAD", "NEXT RETRY", "LAST ERROR"), rows)


def _backlog(sink: SinkStatus) -> str:
    wait = sink.oldest_waits_seconds
    return f"{sink.backlog} (oldest {format_duration(wait, exact=True)})" if wait else str(sink.backlog)


def headline(status: Status) -> str:
    """Describe a process in one line: upcoming events, backlogs and errors."""
    sinks = [
        f"{sink.backlog} event(s) waiting for {name} ({sink.state})"
        for name, sink in (status.sinks or {}).items()
        if sink.backlog or sink.state != "ok"
    ]
    return "; ".join([_summary(status), *find_unready(status, datetime.now(UTC)), *sinks])


def _summary(status: Status) -> str:
    match status.flow:
        case RelayStatus(relay=RelayBus(relayed=count)):
            return f"{count} event(s) relayed"
        case ListenStatus(vm=vm, waiting_commands=count):
            return f"{vm or 'this VM'}: {count} command(s) waiting"
        case flow:
            vm = getattr(flow, "vm", "") or "this VM"
    document = document_of(status)
    events = [*document.events.values()] if document else []
    shown = [
        f"{event.raw.get('EventType')} {event.status}"
        + (f", not before {iso_utc(event.not_before)}" if event.not_before else "")
        for event in events[:3]
    ]
    more = [f"{len(events) - 3} more"] if len(events) > len(shown) else []
    return f"{vm}: " + ("; ".join(shown + more) or "no events")


# Whether a process is ready and needs a person, with the reasons in words


def find_unready(status: Status, now: datetime) -> list[str]:
    """Return why a process cannot do its work now; an empty list if it can.

    Args:
        status: what the process says of itself.
        now: the wall clock.
    """
    faults = [*_imds_faults(status.flow, now)]
    if (receiver := status.receiver) and receiver.last_error:
        faults.append(f"nothing is received from {receiver.from_}: {receiver.last_error}")
    if status.storage_error:
        faults.append(f"the state cannot be written: {status.storage_error}")
    if status.metrics_error:
        faults.append(status.metrics_error)
    return faults


def find_urgent(status: Status, now: datetime) -> list[str]:
    """Return everything that needs a person.

    Args:
        status: what the process says of itself.
        now: the wall clock.
    """
    return [*find_unready(status, now), *_vague_faults(status), *_sink_faults(status, now)]


def _vague_faults(status: Status) -> Iterator[str]:
    """Yield what a process that is ready cannot do, or does too late."""
    flow = status.flow
    if isinstance(flow, ForwardStatus) and (flow.failed_share or 0) > FAILED_SHARE:
        error = flow.last_error or "the last request was answered"
        yield f"IMDS fails to answer {flow.failed_share:.0%} of the requests, so notices are seen late: {error}"
    if isinstance(flow, VmStatus):
        yield from clock_faults(flow.clock_ahead_seconds or 0)
    if status.identity_error:
        yield f"instance data is missing or incomplete, so approvals may wait: {status.identity_error}"
    for fault in status.program_faults or ():
        yield f"a program cannot be started by this process: {fault}"
    if status.kept_log:
        yield status.kept_log
    if isinstance(flow, ListenStatus):
        yield from _listen_faults(flow)


def _listen_faults(flow: ListenStatus) -> Iterator[str]:
    if flow.dry_run:
        yield "dry run: nothing is approved and no program is run until `listen` runs without --dry-run"
    for out in flow.out_of_work or ():
        if out.NeedsPerson:
            yield f"the VM is out of work since {out.Since}: {out.Why}"
    for one in flow.auto or ():
        if one.NeedsPerson:
            yield f"event {one.EventId}: {one.Why}"


def clock_faults(ahead_seconds: float) -> Iterator[str]:
    """Yield that a VM's clock is wrong, by which commands expire, signatures are dated and notices are timed."""
    if abs(ahead_seconds) > CLOCK_SECONDS:
        side = "ahead of" if ahead_seconds > 0 else "behind"
        yield f"this VM's clock is {abs(ahead_seconds):.0f} s {side} IMDS's, and so times and deadlines are wrong"


def _imds_faults(flow: FlowStatus, now: datetime) -> Iterator[str]:
    if not isinstance(flow, VmStatus) or flow.last_good_at is NOT_KNOWN:
        return
    why = f": {flow.last_error}" if flow.last_error else ""
    age_seconds = age_of(flow.last_good_at, now)
    if age_seconds is None:
        yield f"IMDS has given no valid answer yet{why}"
    elif age_seconds > IMDS_SECONDS:
        yield f"the last valid answer of IMDS is {age_seconds:.0f} s old{why}"


def _sink_faults(status: Status, now: datetime) -> Iterator[str]:
    for name, sink in (status.sinks or {}).items():
        if (seconds := age_of(sink.notice_until, now)) is not None and seconds > -NOTICE_SECONDS:
            when = f"took effect {seconds:.0f} s ago" if seconds > 0 else f"takes effect in {-seconds:.0f} s"
            error = _shown(sink.last_error, "no answer yet")
            yield f"sink {name} has not delivered a notice that {when}: {error}"
        if sink.state in _BROKEN_SINKS:
            yield f"sink {name} is {sink.state}: {sink.last_error}"
        if (sink.oldest_waits_seconds or 0) > BACKLOG_SECONDS:
            waits = f"the oldest for {sink.oldest_waits_seconds:.0f} s"
            error = _shown(sink.last_error, "no error")
            yield f"sink {name} has {sink.backlog} event(s) waiting, {waits}: {error}"
        if sink.dead_letters:
            yield (
                f"sink {name} has {sink.dead_letters} dead letter(s); see "
                f"`imds-bridge outbox list --sink {name} --dead`"
            )
    for name, count in (status.left_sinks or {}).items():
        yield (
            f"{count} event(s) wait for sink {name}, which is not configured; see `imds-bridge outbox move --help`"
        )
