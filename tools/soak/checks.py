"""What must hold at the end; each check takes values and returns what is wrong, one sentence each.

None of them uses code of the product: what it publishes is compared with the history of the simulated IMDS.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, pairwise

from tests.support.usage import Usage
from tools.soak.truth import Document, Envelope, Event, Evidence, Observer

PREFIX = "io.imdsbridge."
EVENT, RECEIPT = f"{PREFIX}scheduledevent.", f"{PREFIX}approval."
DOCUMENT, LOSS, RECOVERED = (
    f"{PREFIX}{name}.v1" for name in ("document.changed", "bridge.loss", "imds.recovered")
)
SURE_POLLS = 3  # a document that so many answers in a row had must be published
GAP_SECONDS = 8.0  # a gap of 5 s is published; the rest is for the time between two polls, and a busy machine
APPROVABLE_TYPES, DENIED_SOURCE = ("Reboot", "Redeploy"), "User"
MORE_RSS, MORE_RSS_MIB, MORE_THREADS, MORE_FILES = 0.3, 16.0, 2, 6

Key = tuple[str, ...]


def problems(evidence: Evidence) -> list[str]:
    """Return everything that is wrong."""
    found = [evidence.problems, check_relay(evidence.topic, evidence.relayed)]
    for observer in evidence.observers:
        everything = _all_of(observer.name, observer.sinks, evidence.topic)
        found += [
            check_publisher(observer.name, observer.sinks, evidence.topic),
            check_documents(observer, everything, evidence.documents),
            check_transitions(observer.name, everything, evidence.documents, group=evidence.topic),
            check_gaps(observer, everything),
        ]
    for vm, receipts in evidence.receipts.items():
        found.append(check_publisher(f"{vm}/listen", {"hook": receipts}, evidence.topic))
    found += [
        check_group_order(evidence.observers, evidence.topic),
        check_commands(evidence),
        check_approvals(evidence.approvals, evidence.documents),
        check_usage(evidence.before, evidence.after),
    ]
    return [*chain(*found)]


# What was delivered


def key_of(envelope: Envelope) -> Key:
    """Return what identifies an event: a process's own events by epoch and number."""
    if "reporterseq" in envelope:
        return envelope["reporterepoch"], _number(int(envelope["reporterseq"]))
    return (envelope["id"],)


def _number(number: int) -> str:
    return f"{number:09}"


def check_publisher(
    name: str, sinks: Mapping[str, Sequence[Envelope]], topic: Sequence[Envelope]
) -> Iterator[str]:
    """Check that each sink has every event of a process, in its order, and always the same under one id.

    Args:
        name: the process, as `reporter`.
        sinks: what each of its own receivers accepted, in order.
        topic: the events of all processes, without duplicates.
    """
    everything = _all_of(name, sinks, topic)
    wanted, dropped = _wanted(everything), _dropped(everything)
    for reason in {one["data"]["Reason"] for one in everything if one["type"] == LOSS} - {"SizeLimit"}:
        yield f"{name} reports a loss that nothing has caused: {reason}"
    for sink, arrived in {**sinks, "bus": topic}.items():
        missing = sorted(wanted - {key_of(one) for one in arrived})
        if len(missing) > dropped[sink] + dropped[None]:
            yield f"{name}, sink {sink}: {len(missing)} events missing, {dropped[sink]} reported: {missing[:3]}"
        yield from _disorder(f"{name}, sink {sink}", _own_orders(everything), arrived)
    for sink, arrived in sinks.items():
        yield from _disorder(f"{name}, sink {sink}", _event_orders(everything, topic), arrived)
    yield from _differences(name, everything)


def _all_of(name: str, sinks: Mapping[str, Sequence[Envelope]], topic: Sequence[Envelope]) -> list[Envelope]:
    """Return what a process has delivered to its own receivers, and its own events of the topic."""
    epochs = {one["reporterepoch"] for one in chain(*sinks.values()) if "reporterseq" in one}
    own = [one for one in topic if one.get("reporter") == name or one.get("reporterepoch") in epochs]
    return [*own, *chain(*sinks.values())]


def _wanted(events: Sequence[Envelope]) -> set[Key]:
    """Return what a process must have published: what arrived anywhere, is numbered below it, or is listed."""
    numbered = {
        (epoch, _number(number))
        for epoch, last in (key_of(one) for one in events if "reporterseq" in one)
        for number in range(1, int(last) + 1)
    }
    listed = {(event_id,) for one in _documents(events) for event_id in one["data"]["CloudEventIds"]}
    return {key_of(one) for one in events} | numbered | listed


def _dropped(events: Iterable[Envelope]) -> dict[str | None, int]:
    """Return how many events each sink has lost, as reported; None: all sinks."""
    dropped: dict[str | None, int] = defaultdict(int)
    for loss in {key_of(one): one["data"] for one in events if one["type"] == LOSS}.values():
        dropped[loss["Sink"]] += loss["Count"] or 0
    return dropped


def _own_orders(events: Iterable[Envelope]) -> list[list[Key]]:
    """Return the own events of each epoch and reporter by their numbers, apart for each EventId of receipts."""
    orders: dict[Key, set[Key]] = defaultdict(set)
    for event in events:
        if "reporterseq" in event:
            about = str(event.get("correlationid", "")).lower()
            # Without instance data the name is the host's, and the promise is for each reporter.
            orders[event["reporterepoch"], event["reporter"], about].add(key_of(event))
    return [*map(sorted, orders.values())]


def _event_orders(events: Sequence[Envelope], group: Sequence[Envelope]) -> list[list[Key]]:
    """Return what a process has published of each EventId, in the order of its documents.

    Args:
        events: what its receivers got, with the documents.
        group: what any process published; an event that the process's own receivers lost may be there.
    """
    known = [one for one in (*group, *events) if one["type"].startswith(EVENT)]
    subjects = {one["id"]: str(one["correlationid"]).lower() for one in known}
    orders: dict[str, dict[Key, None]] = defaultdict(dict)
    for document in _documents(events):
        for event_id in document["data"]["CloudEventIds"]:
            if event_id in subjects:
                orders[subjects[event_id]][event_id,] = None
    return [[*keys] for keys in orders.values()]


def _documents(events: Iterable[Envelope]) -> list[Envelope]:
    found = {key_of(one): one for one in events if one["type"] == DOCUMENT}
    return sorted(found.values(), key=lambda one: int(one["data"]["DocumentIncarnation"]))


def _disorder(where: str, chains: Iterable[Sequence[Key]], arrived: Sequence[Envelope]) -> Iterator[str]:
    place = _places(arrived)
    for keys in chains:
        there = [key for key in keys if key in place]
        for first, second in pairwise(there):
            if place[first] > place[second]:
                yield f"{where}: {first} came after {second}"


def _places(arrived: Sequence[Envelope]) -> dict[Key, int]:
    place: dict[Key, int] = {}
    for number, envelope in enumerate(arrived):
        place.setdefault(key_of(envelope), number)
    return place


def _differences(where: str, envelopes: Iterable[Envelope]) -> Iterator[str]:
    texts: dict[str, set[str]] = defaultdict(set)
    for envelope in envelopes:
        texts[envelope["id"]].add(json.dumps(envelope, sort_keys=True))
    yield from (f"{where}: one id, different events: {found}" for found in texts.values() if len(found) > 1)


def check_group_order(observers: Sequence[Observer], topic: Sequence[Envelope]) -> Iterator[str]:
    """Check the order of each EventId on the topic, which keeps one of the copies that the group sends.

    Behind each event must be those that the VM whose copy it is has published before, whoever sent them.
    """
    place = _places(topic)
    sender = {key_of(one): one["data"]["Vm"]["Name"] for one in topic if one["type"].startswith(EVENT)}
    for observer in observers:
        vm, everything = observer.name.partition("/")[0], _all_of(observer.name, observer.sinks, topic)
        late = {
            (earlier, key)
            for keys in _event_orders(everything, topic)
            for number, key in enumerate(keys)
            for earlier in keys[:number]
            if sender.get(key) == vm and place.get(earlier, len(topic)) > place[key]
        }
        if len({earlier for earlier, _ in late}) > _dropped(everything)["bus"]:
            yield from (f"topic: {earlier} came after {key} of {vm}" for earlier, key in late)


def check_relay(topic: Sequence[Envelope], relayed: Sequence[Envelope]) -> Iterator[str]:
    """Check that the relay has delivered all that the topic has.

    Not its order: what a killed relay had received, Service Bus gives again only when the locks have expired.
    """
    if missing := {key_of(one) for one in topic} - {key_of(one) for one in relayed}:
        yield f"relay: {len(missing)} events missing: {sorted(missing)[:3]}"
    yield from _differences("relay", relayed)
    if any(one["type"] == LOSS and str(one["reporter"]).endswith("/relay") for one in relayed):
        yield "the relay reports a loss that nothing has caused"


# What was published


def _lost_everywhere(observer: Observer, events: Iterable[Envelope]) -> int:
    """Return how many events every sink of a process may have lost, as it reports."""
    dropped = _dropped(events)
    return min(dropped[sink] + dropped[None] for sink in (*observer.sinks, "bus"))


def check_documents(
    observer: Observer, events: Sequence[Envelope], documents: Sequence[Document]
) -> Iterator[str]:
    """Check that a process has published what IMDS showed it for long enough, and nothing else."""
    truth = {document.incarnation: document for document in documents}
    published = _documents(events)
    for envelope in published:
        shown = envelope["data"]["Document"]
        real = truth.get(shown["DocumentIncarnation"])
        if real is None or {one["EventId"]: one for one in shown["Events"]} != real.events:
            yield f"{observer.name} published a document that IMDS did not have: {shown}"
    seen = {envelope["data"]["DocumentIncarnation"] for envelope in published}
    unseen = [one for one in _surely_seen(observer, documents) if one.incarnation not in seen]
    if len(unseen) > _lost_everywhere(observer, events):
        yield f"{observer.name} did not publish {[one.incarnation for one in unseen]}, which it was sent"


def _surely_seen(observer: Observer, documents: Sequence[Document]) -> Iterator[Document]:
    ends = [*(document.since for document in documents[1:]), float("inf")]
    for document, until in zip(documents, ends, strict=True):
        for run in observer.runs:
            start, end = max(document.since, run.start), min(until, run.end)
            polls = [poll.is_clean for poll in observer.polls if start < poll.at < end]
            if any(all(polls[at : at + SURE_POLLS]) for at in range(len(polls) - SURE_POLLS + 1)):
                yield document
                break


def check_transitions(
    name: str, events: Sequence[Envelope], documents: Sequence[Document], *, group: Sequence[Envelope] = ()
) -> Iterator[str]:
    """Check that each published document came with the events that follow from it and the one before.

    Args:
        name: the process.
        events: what its receivers got.
        documents: IMDS's.
        group: what any process published; an event that the process's own receivers lost may be there.
    """
    truth = {document.incarnation: document.events for document in documents}
    by_id = {one["id"]: one for one in (*group, *events)}
    for envelope in _documents(events):
        data = envelope["data"]
        after = truth.get(data["DocumentIncarnation"], {})
        wanted = _transitions(truth.get(data["PreviousIncarnation"], {}), after)
        listed = [by_id[one] for one in data["CloudEventIds"] if one in by_id]
        found = {one["correlationid"]: one["type"].removeprefix(EVENT).removesuffix(".v1") for one in listed}
        is_right = all(kind in wanted.get(event_id, ()) for event_id, kind in found.items())
        if not is_right or len(data["CloudEventIds"]) != len(wanted):
            yield f"{name}, document {data['DocumentIncarnation']}: expected {wanted}, published {found}"
        for one in listed:
            real = after.get(one["correlationid"], {})
            if any(one["data"].get(field) != value for field, value in real.items()):
                yield f"{name}: {one['type']} differs from IMDS: {one['data']}, {real}"


def _transitions(before: Mapping[str, Event], after: Mapping[str, Event]) -> dict[str, set[str]]:
    """Return which kinds of event, one of several, may report each change."""
    found: dict[str, set[str]] = {}
    for event_id, event in after.items():
        is_new = event_id not in before or before[event_id]["EventStatus"] != event["EventStatus"]
        if is_new:
            found[event_id] = {"started" if event["EventStatus"] == "Started" else "scheduled"}
        elif before[event_id] != event:
            found[event_id] = {"updated"}
    for event_id in before.keys() - after.keys():
        is_started = before[event_id]["EventStatus"] == "Started"
        found[event_id] = {"completed"} if is_started else {"canceled", "ended"}
    return found


def check_gaps(observer: Observer, events: Sequence[Envelope]) -> Iterator[str]:
    """Check that each time without an answer of IMDS is published, except where a clock was wrong."""
    published = [
        tuple(datetime.fromisoformat(one["data"][name]).timestamp() for name in ("BlindFrom", "BlindTo"))
        for one in events
        if one["type"] == RECOVERED and one["data"]["BlindFrom"]
    ]
    clean = [poll for poll in observer.polls if poll.is_clean]
    gaps = [(last, then) for last, then in pairwise(clean) if then.at - last.at >= GAP_SECONDS]
    unreported = [
        (last, then)
        for last, then in gaps
        if not any(span.overlaps(last.at, then.at) for span in observer.unclear)
        and not any(since < then.wall and until > last.wall for since, until in published)
    ]
    if len(unreported) > _lost_everywhere(observer, events):
        seconds = [f"{then.at - last.at:.1f} s" for last, then in unreported]
        yield f"{observer.name} had no answer for {seconds} and did not report it"


# What was approved


def may_approve(vm: str, event: Event) -> bool:
    """Return whether the policy that the listeners have allows it."""
    is_allowed = event["EventType"] in APPROVABLE_TYPES and event["EventSource"] != DENIED_SOURCE
    return is_allowed and vm in event["Resources"]


def check_approvals(approvals: Iterable[tuple[str, str]], documents: Sequence[Document]) -> Iterator[str]:
    """Check that IMDS got no approval that the policy denies."""
    events = _all_events(documents)
    for vm, event_id in approvals:
        if not any(may_approve(vm, event) for event in events[event_id]):
            yield f"{vm} approved {event_id}, which the policy denies: {events[event_id][:1]}"


def check_commands(evidence: Evidence) -> Iterator[str]:
    """Check that every command has one answer, which fits the policy and what IMDS got."""
    events, approved = _all_events(evidence.documents), set(evidence.approvals)
    readable = [command for command in evidence.commands if command.event_id]
    for command in {one.id: one for one in readable}.values():
        receipts = [
            one for one in evidence.receipts.get(command.vm, ()) if one.get("causationid") == command.id
        ]
        answers = {json.dumps(one, sort_keys=True) for one in receipts}
        if len(answers) != 1:
            yield f"{command}: {len(answers)} answers: {sorted(answers)}"
            continue
        outcome, reason = receipts[0]["data"]["Outcome"], receipts[0]["data"]["Reason"]
        is_allowed = any(may_approve(command.vm, event) for event in events[command.event_id])
        has_post = (command.vm, command.event_id) in approved
        if outcome == "Accepted" and not has_post:
            yield f"{command} was accepted, but IMDS got no approval"
        if (outcome == "Accepted") > is_allowed or (reason in ("denied", "other_vm")) > (not is_allowed):
            yield f"{command} was answered {outcome}, {reason}, but the policy says: {is_allowed}"
    unreadable = {command.id for command in evidence.commands if not command.event_id}
    if unreadable != evidence.dead_letters:
        yield f"dead letters: {sorted(evidence.dead_letters)}, expected: {sorted(unreadable)}"


def _all_events(documents: Sequence[Document]) -> dict[str, list[Event]]:
    """Return each event in all its states."""
    found: dict[str, list[Event]] = defaultdict(list)
    for document in documents:
        for event_id, event in document.events.items():
            if event not in found[event_id][-1:]:
                found[event_id].append(event)
    return found


# What the processes hold


def check_usage(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> Iterator[str]:
    """Check that memory, threads and files of each process are where they were."""
    for name, was in before.items():
        now = after.get(name)
        if now is None:
            yield f"{name} does not run at the end"
        elif (
            now.rss_mib > was.rss_mib * (1 + MORE_RSS) + MORE_RSS_MIB
            or now.threads > was.threads + MORE_THREADS
            or now.files > was.files + MORE_FILES
        ):
            yield f"{name} grew: {was} before, {now} at the end"
