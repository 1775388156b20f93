"""The figures of a run, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from tools.soak.checks import LOSS, key_of
from tools.soak.plan import Fault
from tools.soak.truth import Envelope, Evidence


def summary(evidence: Evidence, faults: Sequence[Fault], restarts: int) -> Iterator[str]:
    """Yield the lines: changes, faults, what each kind of sink got, losses, commands, and what the processes hold."""
    yield f"changes: {len(evidence.documents) - 1}"
    kinds = Counter(_fault_name(fault) for fault in faults)
    yield f"faults: {kinds.total()}: {_counted(kinds)}; restarts after kills and exits: {restarts}"
    sinks = [one.sinks for one in evidence.observers]
    for name, sink in (("webhooks", "hook"), ("Event Grid", "grid")):
        yield _deliveries(f"forward to {name}", [one[sink] for one in sinks])
    yield _deliveries("listen to webhooks", [*evidence.receipts.values()])
    yield _deliveries("all to the Service Bus topic", [evidence.topic])
    yield _deliveries("relay to its webhook", [evidence.relayed])
    losses = {key_of(one): one["data"] for one in evidence.topic if one["type"] == LOSS}.values()
    yield f"losses: {sum(one['Count'] or 0 for one in losses)} events, reported by {len(losses)} events"
    answers = {one["causationid"]: one["data"] for one in _receipts(evidence)}
    outcomes = Counter(f"{one['Outcome']} ({one['Reason']})" for one in answers.values())
    yield f"commands: {len(evidence.commands)}: {_counted(outcomes)}; approvals: {len(evidence.approvals)}"
    for name in sorted(evidence.before.keys() & evidence.after.keys()):
        was, now = evidence.before[name], evidence.after[name]
        yield (
            f"{name:14} {was.rss_mib:5.1f} -> {now.rss_mib:5.1f} MiB, {was.threads:2} -> {now.threads:2} threads, "
            f"{was.files:2} -> {now.files:2} files"
        )


def _fault_name(fault: Fault) -> str:
    what, _, of = fault.target.partition(" of ")
    return what if of or what in ("imds", "bus") else fault.kind


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _deliveries(name: str, sinks: Sequence[Sequence[Envelope]]) -> str:
    unique = sum(len({key_of(one) for one in sink}) for sink in sinks)
    repeated = sum(map(len, sinks)) - unique
    return f"{name}: {unique} events, {repeated} repeated"


def _receipts(evidence: Evidence) -> list[Envelope]:
    return [one for one in chain(*evidence.receipts.values()) if "causationid" in one]
