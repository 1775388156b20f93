"""Judge a run, and write its figures."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from infra.consumers.audit.audit import Audit, sentence
from tests.support.usage import Usage
from tools.fleet.plan import STORM_SECONDS, Plan
from tools.fleet.simulators import Load

Envelope = Mapping[str, Any]

EVENT, RECEIPT = "io.imdsbridge.scheduledevent.", "io.imdsbridge.approval."
NOTICES = (f"{EVENT}scheduled.v1", f"{EVENT}started.v1")
END = f"{EVENT}completed.v1"

MAX_CONNECTIONS = 5  # of all VMs at rest, on average
# Whose connections count: "listeners" as well in a run that waits for ten minutes, after which they rest.
RESTING = ("senders",)


@dataclass(frozen=True, kw_only=True)
class Window:
    """What processes used within a time.

    Attributes:
        seconds: its length.
        before, after: by the process's name.
    """

    seconds: float
    before: Mapping[str, Usage]
    after: Mapping[str, Usage]

    def cpu(self, name: str) -> float | None:
        """Return the share of a core that a process has used; None if it did not run all the time."""
        if name not in self.before or name not in self.after:
            return None
        used = self.after[name].cpu_seconds - self.before[name].cpu_seconds
        return used / self.seconds if used >= 0 else None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of a run.

    Attributes:
        appeared: when each event was added to the documents, in seconds since 1970, by EventId.
        stored: what the topic has stored, in order.
        stored_at: when the topic stored each id, in seconds since 1970.
        relayed: what the relay has delivered.
        visible: when each EventId was on the page, in seconds since 1970.
        console: the status of each event in the console at the end, by EventId.
        console_vms: the VMs as the console's API shows them while all run.
        commands: the EventId of each command, by its id.
        approved: VM and EventId of each approval that IMDS has accepted.
        bus: the broker's figures.
        calm, storm: what the processes used.
        loads: what the VMs did to the bus, "at rest" and in the "storm".
        exits: processes that ended unasked, or badly.
        seconds: how long each part took.
        page_seconds: how long each fetch of the page took.
    """

    plan: Plan
    appeared: Mapping[str, float]
    stored: Sequence[Envelope]
    stored_at: Mapping[str, float]
    relayed: Sequence[Envelope]
    visible: Mapping[str, float]
    console: Mapping[str, str]
    console_vms: Sequence[Mapping[str, Any]]
    commands: Mapping[str, str]
    approved: Sequence[tuple[str, str]]
    bus: Mapping[str, int]
    calm: Window
    storm: Window
    loads: Mapping[str, Load]
    exits: Sequence[str]
    seconds: Mapping[str, float]
    page_seconds: Sequence[float]


def problems(evidence: Evidence) -> list[str]:
    """Return what is lost, doubled or wrong; nothing if all is correct."""
    return [
        *lost_notices(evidence),
        *_lost_ends(evidence),
        *_doubled(evidence),
        *_incomplete(evidence),
        *_wrong_approvals(evidence),
        *_wrong_console(evidence),
        *_not_resting(evidence),
        *evidence.exits,
        *([f"the simulated bus failed {evidence.bus['failures']} times"] if evidence.bus["failures"] else []),
    ]


def lost_notices(evidence: Evidence) -> Iterator[str]:
    """Yield each event of which somebody has no notice."""
    arrived = {
        "the topic": _subjects(evidence.stored, *NOTICES),
        "the relay's receiver": _subjects(evidence.relayed, *NOTICES),
        "the page": set(evidence.visible),
    }
    for notice in evidence.plan.notices:
        for where, found in arrived.items():
            if notice.event_id not in found:
                yield f"lost: {notice.event_type} {notice.event_id} of {notice.vms[0].name} is not on {where}"


def _lost_ends(evidence: Evidence) -> Iterator[str]:
    for where, envelopes in (("the topic", evidence.stored), ("the relay's receiver", evidence.relayed)):
        ended = _subjects(envelopes, END)
        for notice in evidence.plan.notices:
            if notice.event_id not in ended:
                yield f"lost: the end of {notice.event_id} is not on {where}"


def _doubled(evidence: Evidence) -> Iterator[str]:
    for event_id, count in Counter(one["id"] for one in evidence.stored).items():
        if count > 1:
            yield f"doubled: {event_id} is {count} times on the topic"


def _incomplete(evidence: Evidence) -> Iterator[str]:
    """Audit the topic as an operator would: gapless numbers, and every event that a document lists."""
    with closing(Audit()) as audit:
        for number, envelope in enumerate(evidence.stored):
            audit.add(json.dumps(envelope).encode(), f"message {number}")
        expected = [f"{vm.name}/forward" for vm in evidence.plan.vms]
        expected += [f"{vm.name}/listen" for vm in evidence.plan.vms if vm.listens]
        for one in audit.missing(
            max((run.last_at for run in audit.runs.values()), default=0.0), [], expected
        ):
            yield f"audit: {sentence(one)}"
        # Each process began once with an empty state and keeps it: its runs are one chain, and kills are no fault.
        beginnings = Counter(
            run.reporter for run in audit.runs.values() if run.started and run.previous is None
        )
        yield from (f"audit: {name}: {count} chains" for name, count in beginnings.items() if count > 1)
        normal = ("without a run before it", "was killed after number")
        yield from (
            f"audit: {one}"
            for one in audit.remarks()
            if one not in audit.notes and not any(text in one for text in normal)
        )


def _wrong_approvals(evidence: Evidence) -> Iterator[str]:
    receipts: dict[str, set[tuple[str, str]]] = {}
    for one in evidence.stored:
        if one["type"].startswith(RECEIPT):
            receipts.setdefault(one["causationid"], set()).add((one["id"], one["data"]["Outcome"]))
    for command, event_id in evidence.commands.items():
        outcomes = [outcome for _, outcome in receipts.get(command, ())]
        if outcomes != ["Accepted"]:
            yield f"the command for {event_id} has the receipts {outcomes}, expected one: Accepted"
    asked = set(evidence.commands.values())
    posted = {event_id for _, event_id in evidence.approved}
    yield from (f"{event_id} was approved without a command" for event_id in posted - asked)
    yield from (f"{event_id} was never approved" for event_id in asked - posted)
    if dead := evidence.bus["dead_letters"]:
        yield f"{dead} commands are dead letters"


def _wrong_console(evidence: Evidence) -> Iterator[str]:
    known = {vm["name"] for vm in evidence.console_vms}
    yield from (f"the console does not know {vm.name}" for vm in evidence.plan.vms if vm.name not in known)
    for vm in evidence.console_vms:
        if vm["missing"]:
            yield f"the console misses {vm['missing']} events of {vm['name']}"
    for notice in evidence.plan.notices:
        if (status := evidence.console.get(notice.event_id)) != "Completed":
            yield f"the console shows {notice.event_id} as {status}, expected Completed"


def _not_resting(evidence: Evidence) -> Iterator[str]:
    mean = sum(evidence.loads["at rest"].connections[kind][0] for kind in RESTING)
    if mean >= MAX_CONNECTIONS:
        yield (
            f"{' and '.join(RESTING)} hold {mean:.1f} connections at rest, expected fewer than {MAX_CONNECTIONS}"
        )


def _subjects(envelopes: Sequence[Envelope], *types: str) -> set[str]:
    return {str(one["subject"]).upper() for one in envelopes if one["type"] in types}


def summary(evidence: Evidence) -> Iterator[str]:
    """Yield the figures, one a line."""
    plan, bus = evidence.plan, evidence.bus
    shared = sum(len(one.vms) > 1 for one in plan.notices)
    yield (
        f"fleet: {len(plan.vms)} forwarders, {sum(vm.listens for vm in plan.vms)} listeners, relay, console; "
        f"{bus['connections']} connections to one bus"
    )
    yield (
        f"storm: {len(plan.notices)} events in {STORM_SECONDS:.0f} s, {shared} of them in all documents of a group; "
        f"{len(plan.kills)} VMs killed with -9 meanwhile"
    )
    yield f"notices lost: {len([*lost_notices(evidence)])}"
    doubled, repeated = (
        len([*_doubled(evidence)]),
        len(evidence.relayed) - len({one["id"] for one in evidence.relayed}),
    )
    yield (
        f"duplicates: {bus['duplicates']} copies dropped by duplicate detection, {doubled} left on the topic; "
        f"{repeated} repeated by the relay (at least once)"
    )
    yield f"the topic stored {bus['stored']} events; the relay delivered {len(evidence.relayed)}"
    yield f"commands: {len(evidence.commands)}, approvals accepted by IMDS: {len(evidence.approved)}"
    yield from _latencies(evidence)
    yield from _loads(evidence)
    yield f"page Now, fetched {len(evidence.page_seconds)} times: {_spread(evidence.page_seconds)}"
    for name, window in (("calm", evidence.calm), ("storm", evidence.storm)):
        yield from _costs(name, window)
    yield "took: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in evidence.seconds.items())


def _loads(evidence: Evidence) -> Iterator[str]:
    for when, load in evidence.loads.items():
        connections = ", ".join(
            f"{kind} {mean:.2f} connections (at most {most})"
            for kind, (mean, most) in load.connections.items()
        )
        yield (
            f"bus, {when}: {connections}, {load.cold_sends} cold sends; {load.stored} messages kept, {load.copies} "
            f"copies dropped, {load.credits} credits (at most {load.peak_credits} within a second)"
        )


def _latencies(evidence: Evidence) -> Iterator[str]:
    seen: dict[str, float] = {}
    stored: dict[str, float] = {}
    for one in evidence.stored:
        if one["type"] in NOTICES and one["subject"].upper() not in seen:
            seen[one["subject"].upper()] = datetime.fromisoformat(one["time"]).timestamp()
            stored[one["subject"].upper()] = evidence.stored_at[one["id"]]
    killed = {vm.name for _, vm in evidence.plan.kills}
    for name, is_killed in (("VMs that were not killed", False), ("VMs that were killed", True)):
        ids = [
            one.event_id
            for one in evidence.plan.notices
            if len(one.vms) == 1
            and (one.vms[0].name in killed) == is_killed
            and one.event_id in seen
            and one.event_id in evidence.visible
        ]
        if ids:
            yield f"{name}:"
            yield f"  IMDS to seen: {_spread([seen[one] - evidence.appeared[one] for one in ids])}"
            yield f"  seen to topic: {_spread([stored[one] - seen[one] for one in ids])}"
            yield f"  seen to visible: {_spread([evidence.visible[one] - seen[one] for one in ids])}"


def _costs(name: str, window: Window) -> Iterator[str]:
    yield f"{name}, {window.seconds:.0f} s:"
    for kind in ("forward", "listen"):
        members = [one for one in window.after if one.endswith(f"/{kind}")]
        cpu = [1000 * used for one in members if (used := window.cpu(one)) is not None]
        if cpu:
            yield (
                f"  {kind}: {statistics.median(cpu):.1f} ms CPU a second in the median ({sum(cpu) / 1000:.2f} cores "
                f"for {len(cpu)}), RSS {_median_of(window, members, 'rss_mib'):.1f} MiB, "
                f"PSS {_median_of(window, members, 'pss_mib'):.1f} MiB"
            )
    for service in ("relay", "console", "bus"):
        used = window.cpu(service)
        if used is not None:
            yield f"  {service}: {used:.2f} cores, RSS {window.after[service].rss_mib:.1f} MiB"
    simulators = [window.cpu(one) or 0 for one in window.after if one.startswith("IMDS of ")]
    yield f"  simulated IMDS, all groups: {sum(simulators):.2f} cores"


def _median_of(window: Window, names: Sequence[str], what: str) -> float:
    return float(statistics.median(getattr(window.after[name], what) for name in names))


def _spread(seconds: Sequence[float]) -> str:
    values = sorted(seconds)
    p99 = values[math.ceil(0.99 * len(values)) - 1]
    return f"median {statistics.median(values):.2f} s, p99 {p99:.2f} s ({len(values)})"
