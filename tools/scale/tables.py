"""The tables of docs/architecture.md, "10,000 VMs", from formulas and from the simulation.

Limits and prices are those of the sources that the page names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge.delivery.holding import HOLD_SECONDS
from bridge.sinks.servicebus import REST_SECONDS
from tools.scale.simulation import (
    COLD_SECONDS,
    CONNECTIONS,
    CREDITS_A_SECOND,
    EVENTS,
    GROUP,
    HOUR,
    KEPT,
    MINUTE,
    RESERVED,
    ROLES,
    SUBSCRIPTIONS,
    VMS,
    Fleet,
    simulate,
)

DASH = "\N{EN DASH}"  # as the other pages write it
HOURS = 730  # of a month
EVENTS_A_MONTH, CHANGES = 15_000, 3
HEARTBEAT_BYTES, DOCUMENT_BYTES, EVENT_BYTES = 1_900, 3_700, 2_500  # a document with 5 events
LOOK_SECONDS = 5.0  # a listener's connection for one look, assumed
LOOK_OPERATIONS = 2  # opening the session, an empty receive: neither confirmed

BASE_PRICE, FREE_MILLIONS = 9.81, 13
OPERATION_PRICES = (
    (2_500, 0.20),
    (100, 0.50),
    (FREE_MILLIONS, 0.80),
)  # above so many millions, for a million
UNIT_PRICE, GRID_PRICE = 677.08, 0.60


@dataclass(frozen=True, kw_only=True)
class Month:
    """What a fleet sends in a month, in messages."""

    documents: str = "named"
    scope: str = "all"

    @property
    def heartbeats(self) -> int:
        """Return the heartbeats of all processes."""
        return VMS * ROLES * HOURS

    @property
    def changes(self) -> int:
        """Return the changes, each of which has one event on the topic."""
        return EVENTS_A_MONTH * CHANGES

    @property
    def copies(self) -> int:
        """Return the copies of events that duplicate detection drops."""
        return self.changes * (GROUP - 1) if self.scope == "all" else 0

    @property
    def document_messages(self) -> int:
        """Return the events that describe a whole document."""
        return self.changes * (GROUP if self.documents == "all" else 1)

    @property
    def kept(self) -> int:
        """Return the messages that the topic keeps."""
        return self.heartbeats + self.document_messages + self.changes

    @property
    def sent(self) -> int:
        """Return what is sent to the topic, with copies."""
        return self.kept + self.copies

    @property
    def operations(self) -> int:
        """Return the operations that are billed."""
        return self.sent + 2 * SUBSCRIPTIONS * self.kept

    @property
    def unconfirmed(self) -> int:
        """Return further operations, if opening links and sessions and empty receives are billed."""
        senders = self.heartbeats + self.changes * (GROUP if self.copies else 1)
        return senders + VMS * HOURS * LOOK_OPERATIONS

    @property
    def credits(self) -> int:
        """Return the credits of one change."""
        documents = GROUP if self.documents == "all" else 1
        return (1 + documents) * KEPT + (GROUP - 1 if self.scope == "all" else 0)


def standard_price(operations: int) -> float:
    """Return the price of a Standard namespace, without connections above 1,000."""
    left, price = operations / 1e6, BASE_PRICE
    for above, each in OPERATION_PRICES:
        if left > above:
            price += (left - above) * each
            left = above
    return price


FLEETS: Mapping[str, Month] = {
    'the defaults (`documents = "all"`)': Month(documents="all"),
    '`documents = "named"`': Month(),
    '`documents = "named"`, sink with `scope = "self"`': Month(scope="self"),
}


def messages() -> str:
    """Return what the VMs send."""
    rows = [
        [
            "heartbeat, hourly, of `forward` and `listen`",
            f"{HEARTBEAT_BYTES:,}",
            *[_millions(one.heartbeats) for one in FLEETS.values()],
        ],
        [
            "`document.changed`",
            "2,300 with one event, 3,700 with 5",
            *[_millions(one.document_messages) for one in FLEETS.values()],
        ],
        [
            "`scheduledevent.*`, kept",
            f"{EVENT_BYTES:,}",
            *[_millions(one.changes) for one in FLEETS.values()],
        ],
        [
            f"{DASH} copies that duplicate detection drops",
            f"{EVENT_BYTES:,}",
            *[_millions(one.copies) for one in FLEETS.values()],
        ],
        [
            "operations, with receiving and completing",
            "",
            *[_millions(one.operations) for one in FLEETS.values()],
        ],
        ["credits of one change", "", *[f"{one.credits}" for one in FLEETS.values()]],
        ["Standard, a month", "", *[f"**${standard_price(one.operations):.0f}**" for one in FLEETS.values()]],
        [
            f"{DASH} if opening and empty receives are billed",
            "",
            *[f"${standard_price(one.operations + one.unconfirmed):.0f}" for one in FLEETS.values()],
        ],
    ]
    return _table(["a month", "bytes of one", *FLEETS], rows)


def limits() -> str:
    """Return what is needed at rest and by the formulas, and what is accepted."""
    month = Month()
    cold = sum(COLD_SECONDS) / 2
    rest = (VMS * ROLES * (cold + REST_SECONDS) + VMS * LOOK_SECONDS) / HOUR
    spent = VMS * (ROLES * KEPT + LOOK_OPERATIONS) / HOUR
    into = EVENTS * (GROUP * EVENT_BYTES + DOCUMENT_BYTES) / MINUTE / 1e6
    out = EVENTS * SUBSCRIPTIONS * (EVENT_BYTES + DOCUMENT_BYTES) / MINUTE / 1e6
    day = month.kept / HOURS * 24
    size = (month.heartbeats * HEARTBEAT_BYTES + month.changes * (DOCUMENT_BYTES + EVENT_BYTES)) / HOURS * 24
    rows = [
        [
            "AMQP connections of a namespace, also Premium",
            "5,000 [1]",
            f"at rest {rest:.0f}; bad minute: below",
            "fits",
        ],
        [
            "credits of a Standard namespace: each message sent, received or compared with a filter",
            "1,000 a second [2]",
            f"at rest {spent:.0f}; bad minute, without a hold, {EVENTS * month.credits / MINUTE:.0f} on average, "
            f'with `scope = "self"` {EVENTS * Month(scope="self").credits / MINUTE:.0f}, '
            f"by default {EVENTS * Month(documents='all').credits / MINUTE:,.0f}",
            "below",
        ],
        [
            "receive requests at a time on a queue",
            "5,000 [1][2]",
            f"{EVENTS} listeners whose VM has an event",
            "fits",
        ],
        [
            "throughput of Premium",
            "about 4 MB a second for each messaging unit [3], less with sessions and duplicate detection",
            f"bad minute: {into:.1f} in, {out:.1f} MB a second out",
            "one unit",
        ],
        [
            "size of a topic; window of duplicate detection",
            "5 GB [1]; 7 days [4]",
            f"{size / 1e9:.1f} GB a day; 1 day (Bicep), {day:,.0f} ids",
            f"fits; a reader may be down for {5e9 / size:.0f} days",
        ],
        [
            "sessions of a queue (session states; no other limit is published)",
            "1,000,000 [1]",
            f"{VMS:,}",
            "fits",
        ],
        [
            "subscriptions of a topic; SQL and correlation filters",
            "2,000; 2,000 and 100,000 [1]",
            f"{SUBSCRIPTIONS}",
            "fits; a subscription for each VM does not",
        ],
        [
            "Event Grid custom topic, in",
            "5,000 events or 5 MB a second [6]",
            f"bad minute: {EVENTS * (GROUP + 1) / MINUTE:.0f}, {into:.1f} MB a second",
            "fits",
        ],
        [
            "Event Grid namespace, each of at most 40 throughput units",
            "1,000 events or 1 MB a second in, 2,000 or 2 MB out [6]",
            f"bad minute: {into:.1f} MB a second in, {into * SUBSCRIPTIONS:.1f} out",
            "3 units",
        ],
    ]
    return _table(["limit", "published", "needed", "verdict"], rows)


SIMULATED: Mapping[str, Fleet] = {
    '`documents = "named"`': Fleet(hold_seconds=HOLD_SECONDS),
    f"{DASH} if copies were not held": Fleet(),
    '`documents = "named"`, sink with `scope = "self"`': Fleet(scope="self"),
}


def minute() -> str:
    """Return what a namespace and the named VMs see in a bad minute, and with all events in one second."""
    rows = []
    for name, fleet in SIMULATED.items():
        for when, spread in (("a minute", MINUTE), ("one second", 1.0)):
            seen = simulate(fleet, spread_seconds=spread)
            rows.append(
                [
                    f"{name}, within {when}",
                    f"{seen.connections:,}",
                    f"{seen.refused:,}",
                    f"{seen.peak_credits:,}",
                    f"{seen.throttled:,}",
                    " / ".join(f"{one:.1f}" for one in seen.notice) + " s",
                    DASH if spread < MINUTE else "yes" if seen.is_within_reserve else "**no**",
                ]
            )
    head = ["500 events", "connections, peak", "refused", "credits a second, peak", "throttled sends"]
    return _table([*head, "notice of a named VM, median / p99 / longest", "30 % left"], rows)


def options() -> str:
    """Return the prices of the ways to do it."""
    named, alone = Month(), Month(scope="self")
    price = standard_price(named.operations)
    publications = alone.sent * (1 + SUBSCRIPTIONS) / 1e6
    grid = GRID_PRICE * publications
    rows = [
        [
            'Standard, one namespace, `documents = "named"`',
            f"**${price:.0f}**: base 10, operations {price - BASE_PRICE:.0f}",
            "credits: 500 events with less than 15 minutes of notice, or one of many VMs",
        ],
        [
            f'{DASH} sink with `scope = "self"`',
            f"**${standard_price(alone.operations):.0f}**",
            "nothing of this, but see above",
        ],
        [
            "Premium, one namespace of one unit",
            f"**${UNIT_PRICE:.0f}**",
            "connections; it has no credits",
        ],
        [
            'Event Grid custom topic, `scope = "self"`, and a Standard queue for the commands',
            f"**${grid + BASE_PRICE:.0f}**: {publications:.0f} million operations {grid:.0f}, base 10",
            "events may be late; no duplicate detection",
        ],
        [
            'webhooks to the console, `scope = "self"`',
            "its machine",
            "its rate; [measured](benchmarks.md#figures): 7,966 events a second in batches on loopback",
        ],
    ]
    return _table(["option", "a month", "breaks first"], rows)


def tables() -> Sequence[str]:
    """Return every table of the page, in its order."""
    reserve = (
        f"{RESERVED * CONNECTIONS:,.0f} connections and {RESERVED * CREDITS_A_SECOND:,.0f} credits a second"
    )
    assert reserve == "3,500 connections and 700 credits a second"
    return messages(), limits(), minute(), options()


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f} million" if number >= 1e5 else f"{number:,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("|  |", "| |")
