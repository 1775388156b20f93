"""What `imds-bridge status` shows, and what it says about the health of a process.

It is read from the file that the process replaces; IMDS is never asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from bridge.errors import UsageError
from bridge.formats.text import format_duration, format_relative, table
from bridge.imds.document import ScheduledEvent, read_document
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.time import iso_utc, parse_iso

# How old IMDS's last good answer may be: one request that hangs, and then a good one, still fits.
IMDS_SECONDS = 30.0
BACKLOG_SECONDS = 300.0
FAILED_SHARE = 0.5
_BROKEN_SINKS = {"misconfigured", "gone", "rejecting"}
# A notice that waits is urgent when so little time is left.
NOTICE_SECONDS = 300.0
# The process writes every 5 s at least.
SILENT_SECONDS = 12.0

_RESPONSE_TEXTS = {
    "gone": "NOT RESPONDING: the process is gone without a stop, last updated {age} ago",
    "silent": "NOT RESPONDING: {holder} has not written for {age}; it hangs, or cannot write to the state folder",
    "stopped": "NOT RUNNING: stopped {age} ago",
}


def read_status(folder: StateFolder, now: datetime) -> dict[str, Any]:
    """Read the status that the process last wrote; add `response`, `running`, its age and each event's countdown.

    `response` is "ok", "gone" (without a stop), "silent" or "stopped"; `urgent` is what needs a person.

    Raises:
        UsageError: there is no status to read; the text says why.
    """
    holder = folder.owner()
    status = _read(folder, holder)
    try:
        shown = _complete(status, holder, now)
        shown["urgent"] = find_urgent(status, now)
        render(shown)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"no status in {folder.path}: it is damaged ({error!r}); a running process replaces it within 5 s"
        ) from error
    return shown


def _complete(status: dict[str, Any], holder: str | None, now: datetime) -> dict[str, Any]:
    age_seconds = age_of(status.get("written_at"), now)
    if holder:
        response = "ok" if age_seconds is not None and age_seconds <= SILENT_SECONDS else "silent"
    else:
        response = "gone" if status.get("running") else "stopped"
    document = read_document(status["document"]) if status.get("document") else None
    return {
        **status,
        "role": status["role"],
        "response": response,
        "holder": holder,
        "running": response == "ok",
        "age_seconds": age_seconds,
        "events": [_event(event, now) for event in document.events.values()] if document else [],
    }


def _read(folder: StateFolder, holder: str | None) -> dict[str, Any]:
    try:
        status = folder.load_status()
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
        return status
    raise UsageError(f"no status in {folder.path}: {why}")


def age_of(text: str | None, now: datetime) -> float | None:
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


def render(status: dict[str, Any]) -> list[str]:
    """Write the status for a person, in lines."""
    events = [*_events(status), *_auto(status)]
    urgent = ["", "NEEDS A PERSON:", *status["urgent"]] if status["urgent"] else []
    return [*_head(status), "", *events, *([""] if events else ()), *_sinks(status), *urgent]


def _head(status: dict[str, Any]) -> list[str]:
    age = format_duration(status["age_seconds"] or 0, exact=True)
    lines = [
        f"imds-bridge {status['version']}, process {status['pid']}, updated {age} ago"
        if status["running"]
        else _RESPONSE_TEXTS[status["response"]].format(age=age, holder=status["holder"])
    ]
    if status["role"] == "console":
        return [*lines, *_console(status)]
    if relay := status.get("relay"):
        lines.append(f"BUS   {relay['from']}, {_relay(relay)}")
    else:
        lines.append(f"VM    {status['vm'] or 'not available yet'}")
        lines.append(f"IMDS  {status['imds']}, {_imds(status)}")
        lines += [f"      {error}"] if (error := status.get("version_error")) else []
    if "commands" in status:
        dry = " (dry run: nothing is POSTed)" if status["dry_run"] else ""
        bus = _commands(status["commands"]) if status["commands"] else "none, only auto rules approve"
        lines.append(f"BUS   {bus}, {status['waiting_commands']} command(s) waiting{dry}")
    if status.get("storage_error"):
        lines.append(f"STATE STORE UNAVAILABLE, new events may be in memory only: {status['storage_error']}")
    if status.get("kept_log"):
        lines.append(f"STATE STORE GROWS: {status['kept_log']}")
    return lines


def _console(status: dict[str, Any]) -> Iterator[str]:
    """Yield what the console receives, and what keeps it from that."""
    last = status["last_event_at"] or "never"
    yield f"WEB   {status['url']}, {status['received']} event(s) received, the last {last}"
    if bus := status["bus"]:
        error = f"; NOT RECEIVING: {bus['last_error']}" if bus["last_error"] else ""
        yield f"BUS   {bus['from']}{error}"
    if status.get("storage_error"):
        yield f"STATE STORE UNAVAILABLE, senders retry: {status['storage_error']}"


def _imds(status: dict[str, Any]) -> str:
    last = age_of(status.get("last_good_at"), datetime.now(UTC))
    seen = "no answer yet"
    if last is not None:
        seen = f"last valid answer {format_duration(last, exact=True)} ago"
    words = "NO VALID ANSWER NOW" if [*_imds_faults(status, datetime.now(UTC))] else "the last request failed"
    return f"{seen}; {words}: {status['last_error']}" if status.get("last_error") else seen


def _commands(bus: dict[str, Any]) -> str:
    last = age_of(bus["looked_at"], datetime.now(UTC))
    looked = "never" if last is None else f"{format_duration(last, exact=True)} ago"
    rest = f"rests while nothing can be approved, last look {looked}" if bus["rests"] else "receives"
    return f"{bus['from']}, {f'NOT RECEIVING: {error}' if (error := bus['last_error']) else rest}"


def _relay(relay: dict[str, Any]) -> str:
    parts = [f"{relay['relayed']} event(s) relayed, the last {relay['last_event_at'] or 'never'}"]
    if relay["malformed"]:
        parts.append(f"{relay['malformed']} message(s) dead-lettered that are not events")
    if relay["uncompleted"]:
        parts.append(f"{relay['uncompleted']} event(s) stay on the bus until they are stored or delivered")
    if relay["last_error"]:
        parts.append(f"NOT RECEIVING: {relay['last_error']}")
    return "; ".join(parts)


def _events(status: dict[str, Any]) -> list[str]:
    document = status.get("document")
    if "commands" in status or "relay" in status or status["role"] == "console":
        return []
    if not document:
        return ["No document received yet."]
    if not status["events"]:
        return [f"Document {document.get('DocumentIncarnation')}: no events."]
    rows = [
        (
            str(event.get("EventType")),
            str(event.get("EventStatus")),
            _starts(event),
            str(event.get("EventSource") or "-"),
            event["EventId"],
            ", ".join(map(str, event.get("Resources") or [])) or "-",
        )
        for event in status["events"]
    ]
    header = ("EVENT", "STATUS", "STARTS", "BY", "ID", "VMS")
    return [f"Document {document.get('DocumentIncarnation')}:", *table(header, rows)]


def _auto(status: Mapping[str, Any]) -> list[str]:
    """Write whether this VM is out of work, and what the auto rules make of its events."""
    out = [f"OUT OF WORK since {one['Since']}: {one['Why']}" for one in status.get("out_of_work", ())]
    rows = [(one["EventId"], one["Why"]) for one in status.get("auto", ())]
    return [*out, *(table(("EVENT", "AUTO RULES"), rows) if rows else ())]


def _starts(event: dict[str, Any]) -> str:
    seconds = event["StartsInSeconds"]
    if seconds is None:
        return "-"
    if seconds > 0:
        return format_relative(seconds, exact=True)
    return f"{format_duration(seconds, exact=True)} overdue"


def _sinks(status: dict[str, Any]) -> list[str]:
    rows = [
        (
            name,
            sink["state"],
            _backlog(sink),
            sink["last_success_at"] or "never",
            str(sink["dead_letters"]),
            sink.get("next_retry_at") or "-",
            f"{sink['last_error_at']} {sink['last_error']}" if sink["last_error"] else "-",
        )
        for name, sink in status["sinks"].items()
    ]
    rows += [
        (name, "not configured", str(count), *"----") for name, count in status.get("left_sinks", {}).items()
    ]
    return table(("SINK", "STATE", "WAITING", "LAST SUCCESS", "DEAD", "NEXT RETRY", "LAST ERROR"), rows)


def _backlog(sink: dict[str, Any]) -> str:
    wait = sink["oldest_waits_seconds"]
    return f"{sink['backlog']} (oldest {format_duration(wait, exact=True)})" if wait else str(sink["backlog"])


def headline(status: dict[str, Any]) -> str:
    """Describe a process in one line: upcoming events, backlogs and errors."""
    sinks = [
        f"{sink['backlog']} event(s) waiting for {name} ({sink['state']})"
        for name, sink in status["sinks"].items()
        if sink["backlog"] or sink["state"] != "ok"
    ]
    return "; ".join([_summary(status), *find_unready(status, datetime.now(UTC)), *sinks])


def _summary(status: dict[str, Any]) -> str:
    if relay := status.get("relay"):
        return f"{relay['relayed']} event(s) relayed"
    vm = status["vm"] or "this VM"
    if "commands" in status:
        return f"{vm}: {status['waiting_commands']} command(s) waiting"
    events = list(read_document(status["document"]).events.values()) if status["document"] else []
    shown = [
        f"{event.raw.get('EventType')} {event.status}"
        + (f", not before {iso_utc(event.not_before)}" if event.not_before else "")
        for event in events[:3]
    ]
    more = [f"{len(events) - 3} more"] if len(events) > len(shown) else []
    return f"{vm}: " + ("; ".join(shown + more) or "no events")


# Whether a process is ready and needs a person, with the reasons in words


def find_unready(status: Mapping[str, Any], now: datetime) -> list[str]:
    """Return why a process cannot do its work now; an empty list if it can.

    Args:
        status: what the process writes to its status file.
        now: the wall clock.
    """
    faults = [*_imds_faults(status, now)]
    receiver = status.get("commands") or status.get("relay") or status.get("bus") or {}
    if reason := receiver.get("last_error"):
        faults.append(f"nothing is received from {receiver['from']}: {reason}")
    if status.get("storage_error"):
        faults.append(f"the state cannot be written: {status['storage_error']}")
    return faults


def find_urgent(status: Mapping[str, Any], now: datetime) -> list[str]:
    """Return everything that needs a person.

    Args:
        status: what the process wrote to its status file.
        now: the wall clock.
    """
    left = [
        f"{count} event(s) wait for sink {name}, which is not configured; see `imds-bridge outbox move --help`"
        for name, count in status.get("left_sinks", {}).items()
    ]
    auto = [f"event {one['EventId']}: {one['Why']}" for one in status.get("auto", ()) if one["NeedsPerson"]]
    out = [
        f"the VM is out of work since {one['Since']}: {one['Why']}"
        for one in status.get("out_of_work", ())
        if one["NeedsPerson"]
    ]
    texts = filter(None, [status.get("kept_log"), status.get("metrics_error")])
    more = [*_vague_faults(status), *_sink_faults(status, now), *left, *out, *auto, *texts]
    return [*find_unready(status, now), *more]


def _vague_faults(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield what delays notices or approvals of a process that is ready."""
    if (share := status.get("failed_share", 0)) > FAILED_SHARE:
        error = status["last_error"] or "the last request was answered"
        yield f"IMDS fails to answer {share:.0%} of the requests, so notices are seen late: {error}"
    if status.get("identity_error"):
        yield f"instance data is missing or incomplete, so approvals may wait: {status['identity_error']}"


def _imds_faults(status: Mapping[str, Any], now: datetime) -> Iterator[str]:
    if status["role"] != "forward":
        return
    last_good = parse_iso(status.get("last_good_at"))
    why = f": {status['last_error']}" if status.get("last_error") else ""
    if last_good is None:
        yield f"IMDS has given no valid answer yet{why}"
    elif (age_seconds := (now - last_good).total_seconds()) > IMDS_SECONDS:
        yield f"the last valid answer of IMDS is {age_seconds:.0f} s old{why}"


def _sink_faults(status: Mapping[str, Any], now: datetime) -> Iterator[str]:
    for name, sink in status["sinks"].items():
        if (seconds := age_of(sink.get("notice_until"), now)) is not None and seconds > -NOTICE_SECONDS:
            when = f"took effect {seconds:.0f} s ago" if seconds > 0 else f"takes effect in {-seconds:.0f} s"
            yield f"sink {name} has not delivered a notice that {when}: {sink['last_error'] or 'no answer yet'}"
        if sink["state"] in _BROKEN_SINKS:
            yield f"sink {name} is {sink['state']}: {sink['last_error']}"
        if (sink["oldest_waits_seconds"] or 0) > BACKLOG_SECONDS:
            waits = f"the oldest for {sink['oldest_waits_seconds']:.0f} s"
            yield f"sink {name} has {sink['backlog']} event(s) waiting, {waits}: {sink['last_error'] or 'no error'}"
        if sink.get("dead_letters"):
            yield (
                f"sink {name} has {sink['dead_letters']} dead letter(s); see "
                f"`imds-bridge outbox list --sink {name} --dead`"
            )
