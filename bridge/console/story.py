"""The page of one event: what happened, in the order of the reports, and what each VM saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from bridge.console.merge import OUT_OF_WORK, PREPARED, RECOVERED, resources_of
from bridge.console.received import DISMISSED, RESTORED, natural
from bridge.console.rows import EventRow, ReportRow, VmRow
from bridge.formats.text import format_duration, instant_of, join_names
from bridge.imds.document import fold_name
from bridge.runtime.json import Json
from bridge.runtime.text import sanitize

# Microsoft's minimum notice in seconds; what users set themselves is at least this for Terminate.
NOTICE_TOLERANCE_SECONDS = 5.0  # what polling takes of the notice
MINIMUM_NOTICE_SECONDS = {"Freeze": 900, "Reboot": 900, "Redeploy": 600, "Preempt": 30, "Terminate": 300}
_TITLES = {
    "scheduled": "Announced",
    "started": "Started",
    "updated": "Updated",
    "advised": "Early warning",
    "completed": "Completed",
    "canceled": "Canceled",
    "ended": "Ended",
    "approval.accepted": "Approval accepted",
    "approval.rejected": "Approval rejected",
    "approval.failed": "Approval failed",
    PREPARED: "Prepared",
    RECOVERED: "Back at work",
    OUT_OF_WORK: "Out of work",
    DISMISSED: "Put away",
    RESTORED: "Brought back",
}
Line = tuple[str | float, ...]  # texts, and times in seconds since 1970
_SHOWN_CHANGES = ("NotBefore", "Resources", "DurationInSeconds", "Description", "EventStatus", "EventType")

_SHOWN_DELAY_SECONDS = 0.05
_SHOWN_OF_PROGRAMS = 20
_OF_PROGRAMS = tuple(kind.replace(".", "-") for kind in (PREPARED, RECOVERED))


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something that happened: its style, its time, its title, who saw it, and lines of detail."""

    css: str
    at: float
    title: str
    seen_by: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Witness:
    """A VM that Azure tells of an event, or that saw it.

    Attributes:
        name: the VM's.
        vm: what is known of it, None while it has never reported.
        is_affected: whether the event names it.
        first_at: when it saw the event first, None if it did not.
        saw: what it saw, and how much later than the first VM that saw the same.
        preparation: what its program has done, "" without one.
        is_prepared: whether an approval releases a VM that is prepared.
    """

    name: str
    vm: VmRow | None
    is_affected: bool
    first_at: float | None
    saw: str
    preparation: str = ""
    is_prepared: bool = True


def story(event: EventRow, reports: Sequence[ReportRow], vms: Sequence[VmRow], now: float) -> list[Step]:
    """Return what happened to an event, in the order of time, and what it waits for."""
    steps = [*_shortened(step for report in reports if (step := _step(report)))]
    if event.is_open:
        steps.append(Step(css="waiting", at=0.0, title=_waiting(event, vms, now), seen_by="", lines=()))
    return steps


def _shortened(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield steps without what many programs did one after the other: of these, the first ones and the last."""
    for css, group in groupby(steps, key=lambda step: step.css):
        run = [*group]
        shown = _SHOWN_OF_PROGRAMS if css in _OF_PROGRAMS else len(run)
        yield from run[:shown]
        if more := len(run[shown:]):
            yield replace(run[-1], seen_by=f"the last of {more} more", lines=())


def _waiting(event: EventRow, vms: Sequence[VmRow], now: float) -> str:
    if event.state.is_overdue:
        return f"Overdue: NotBefore was {format_duration(now - (event.not_before or now))} ago, no start reported"
    if event.due == "gone":
        return "The VM is probably gone: nothing was heard of it since, and nobody reported the end"
    if event.due in ("left", "away"):
        why = "put away" if event.state.is_away else "too old, or its VMs are gone"
        return f"No longer followed: {why}; what is new brings it back"
    if event.status == "Advisory":
        return "An early warning: Azure may take this Spot VM back; nothing can be approved"
    if not event.state.is_running:
        return "Waiting for NotBefore, or an approval"
    since = f"Started {format_duration(now - (event.starts_at or now))} ago, no end reported"
    names = {fold_name(name) for name in event.resources}
    unwatched = [vm for vm in vms if vm.folded in names and vm.watch != "watched"]
    if not unwatched:
        return since
    which = "the VM is" if len(names) == 1 else f"{len(unwatched)} of {len(names)} VMs are"
    return f"{since}, {which} {unwatched[0].watch}"


def witnesses(
    event: EventRow,
    reports: Sequence[ReportRow],
    vms: Sequence[VmRow],
    prepared: Mapping[str, tuple[str, str]],
) -> list[Witness]:
    """Return every VM that Azure tells or that saw the event: the affected ones first, of them those of the filter.

    Of each of them, those that did not see it come first. What was before an event came back does not count.

    Args:
        event: the event.
        reports: of it.
        vms: that Azure tells.
        prepared: by folded name what the programs said last, as of `preparations_of`.
    """
    told = {vm.folded: vm for vm in vms}
    affected = {fold_name(name): name for name in event.resources}
    mine = {*[*affected][: event.mine]}
    names = {**{vm.folded: vm.name for vm in vms}, **affected}
    first: dict[str, float] = {}
    saw: dict[str, list[str]] = defaultdict(list)
    for report in (one for one in reports if one.at >= event.first_seen_at):
        title = _TITLES.get(report.kind.removeprefix("scheduledevent."), "")
        for name, at in report.seen_by:
            key, delay = fold_name(name), at - report.seen_by[0][1]
            names.setdefault(key, name)
            first[key] = min(first.get(key, at), at)
            saw[key].append(f"{title} +{delay:.1f} s" if delay >= _SHOWN_DELAY_SECONDS else title)
    ordered = sorted(
        names, key=lambda key: (key not in affected, key not in mine, first.get(key, 0.0), natural(key))
    )
    return [
        Witness(
            name=sanitize(names[key], 64),
            vm=told.get(key),
            is_affected=key in affected,
            first_at=first.get(key),
            saw=", ".join(saw[key]),
            preparation=_preparation(event, *prepared.get(key, ("", ""))) if key in affected else "",
            is_prepared=event.prepared is None or prepared.get(key, ("",))[0] == "prepared",
        )
        for key in ordered
    ]


def has_turn(event: EventRow) -> bool:
    """Return whether an event has a place in the order in which programs prepare their VMs."""
    waits = event.state.may_be_approved and event.state.is_followed
    return waits and event.prepared is not None and event.event_type != "Terminate"


def _preparation(event: EventRow, state: str, detail: str) -> str:
    if state or event.prepared is None:
        words = {"failed": "not prepared", "recovered": "back at work"}
        return ": ".join(filter(None, (words.get(state, state), sanitize(detail))))
    return "not yet" if event.state.may_be_approved else "not prepared"


def notice_text(event: EventRow) -> tuple[str, str]:
    """Return the notice that was given, and how it compares with Microsoft's minimum."""
    if event.notice_seconds is None:
        return "unknown", "no NotBefore was reported"
    given = format_duration(max(0.0, event.notice_seconds))
    if event.seen_late:
        return f"{given} or more", "the VM started to watch only then"
    minimum = MINIMUM_NOTICE_SECONDS.get(event.event_type)
    if minimum is None:
        return given, ""
    is_short = event.notice_seconds + NOTICE_TOLERANCE_SECONDS < minimum
    return given, f"{'less than' if is_short else 'at least'} Microsoft's {format_duration(minimum)}"


def impact_text(duration_seconds: int | None) -> str:
    """Describe DurationInSeconds."""
    if duration_seconds is None or duration_seconds < 0:
        return "unknown"
    return format_duration(duration_seconds) if duration_seconds else "none"


def _step(report: ReportRow) -> Step | None:
    kind = report.kind.removeprefix("scheduledevent.")
    title = _TITLES.get(kind)
    if title is None:
        return None
    data = report.data
    if kind in (DISMISSED, RESTORED):
        who, why = sanitize(data.get("By"), 200), sanitize(data.get("Reason"))
        return Step(css=kind, at=report.at, title=title, seen_by=f"by {who}", lines=((why,),) * bool(why))
    is_receipt = kind.startswith("approval.")
    if kind in (PREPARED, RECOVERED):
        took = data.get("DurationSeconds")
        texts = [f"The program took {format_duration(took)}"] if isinstance(took, int | float) else []
    else:
        texts = _receipt_lines(data) if is_receipt else []
    lines = [(text,) for text in texts] if is_receipt else _change_lines(kind, data)
    return Step(
        css=kind.replace(".", "-"),
        at=report.at,
        title=title,
        seen_by=f"by {sanitize(report.vm, 64)}" if is_receipt else _describe_witnesses(report),
        lines=tuple(lines),
    )


def _describe_witnesses(report: ReportRow) -> str:
    seen = report.seen_by
    if len(seen) < 2:  # noqa: PLR2004 - one VM is named
        return f"seen by {sanitize(seen[0][0] if seen else report.vm, 64) or 'a VM'}"
    spread = seen[-1][1] - seen[0][1]
    text = f"seen by {len(seen)} VMs within {spread:.1f} s"
    return f"{text}, last by {sanitize(seen[-1][0], 64)}" if spread > 1 else text


def _change_lines(kind: str, data: Mapping[str, Json]) -> list[Line]:
    lines: list[Line] = []
    if kind == "scheduled":
        impact = _value("DurationInSeconds", data.get("DurationInSeconds"))
        lines = [("NotBefore: ", _value("NotBefore", data.get("NotBefore")), "; impact: ", impact)]
    previous = data.get("Previous")
    if kind == "updated" and isinstance(previous, dict):
        lines = [
            (f"{name}: ", _value(name, previous[name]), " → ", _value(name, data.get(name)))
            for name in _SHOWN_CHANGES
            if name in previous
        ]
    if isinstance(reason := data.get("EndReason"), str):
        unknown = f"Whether it happened is unknown: {sanitize(reason, 60)}"
        lines.append(("Nothing was scheduled: it was an early warning" if reason == "Advisory" else unknown,))
    if data.get("VmRebooted") is True:
        lines.append(("The VM that reports this has rebooted",))
    return lines


def _receipt_lines(data: Mapping[str, Json]) -> list[str]:
    command = data.get("Command")
    given = command if isinstance(command, dict) else {}
    detail = sanitize(data.get("Detail"))
    lines = [f"Reason: {sanitize(data.get('Reason'), 60)}" + (f": {detail}" if detail else "")]
    if who := sanitize(given.get("RequestedBy"), 200):
        why = sanitize(given.get("Reason"))
        lines.append(f"Requested by {who}" + (f": {why}" if why else ""))
    if released := resources_of(data):
        lines.append(f"Releases {write_names(released)}")
    if data.get("DryRun") is True:
        lines.append("Only a trial: the listener runs with --dry-run")
    return lines


def write_names(values: Iterable[Json]) -> str:
    """Write up to 20 names, and how many more there are."""
    return join_names([sanitize(one, 64) for one in values], max_length=2000, max_names=20)


def _value(name: str, value: Json) -> str | float:
    """Return a property's value as a text, or a time in seconds since 1970."""
    if isinstance(value, list):
        return write_names(value) if value else "none"
    if name == "NotBefore" and (instant := instant_of(value)):
        return instant.timestamp()
    if name == "DurationInSeconds":
        return impact_text(value if isinstance(value, int) else None)
    return sanitize(value) or "nothing"
