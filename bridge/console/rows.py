"""What the pages read from the store: its rows, and the filters that stand in an address."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from importlib.resources import files
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlencode

from pydantic import Field

from bridge.console.merge import RECEIPTS, MaybeTime, ScheduledEvent
from bridge.console.received import scope_id
from bridge.console.state import DUES, State
from bridge.events.envelope import decode_event
from bridge.formats.text import format_duration, plural
from bridge.imds.document import fold_name
from bridge.runtime.json import Json

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
MAX_NAMES = 5000  # among which the nearest one is looked for
MAX_CHARACTERS = 200
MAX_VALUES = 20  # of a filter that may stand there more than once
PREPARATIONS = ("unprepared", "failed", "waiting", "prepared")
UNWATCHED = ("unreachable", "silent", "unknown", "unheard")
WATCHES = ("watched", *UNWATCHED, "stopped", "gone")
INDEXED = "kind NOT IN ('bridge.heartbeat', 'document.changed')"  # the condition of the index by kind
_IN_SCOPE = f"zone, location, min(urgency, iif(watch IN {UNWATCHED}, 5, 9)), natural, folded, resource_id"
_PAGE = files("bridge.console").joinpath("page.sql").read_text("utf-8")
_BY_PLACE = f'ORDER BY "group", subscription, scope, {_IN_SCOPE}'
_URGENCY = (
    "ORDER BY (SELECT urgency FROM current WHERE current.key = event_now.key), ifnull(starts_at, 0), key"
)


class Where(NamedTuple):
    """A condition, and the values of its marks."""

    condition: str
    values: tuple[Any, ...]

    def __and__(self, other: Where) -> Where:
        return Where(f"{self.condition} AND {other.condition}", (*self.values, *other.values))


@dataclass(frozen=True, slots=True)
class EventRow(ScheduledEvent):
    """An event at this moment; of `mine_first`, `mine` counts the VMs of the filter."""

    starts_at: Annotated[MaybeTime, Field(description="Of a started event, when it started.")] = None
    due: Annotated[
        str, Field(description=f"One of {', '.join(DUES)}, ended, away: put away, left: no longer followed.")
    ] = ""
    key: Annotated[str, Field(exclude=True)] = ""
    seen: Annotated[int, Field(description="How many of `resources` are known to have seen it.")] = 0
    seen_by_others: Annotated[int, Field(description="How many others, known within the hour.")] = 0
    seen_late: Annotated[
        bool,
        Field(description="The forwarder that saw it first had just started: Azure's notice was longer."),
    ] = False
    prepared: Annotated[
        int | None,
        Field(
            description="How many of `resources` a program has prepared; null if none has one for this type."
        ),
    ] = None
    heard: Annotated[float, Field(exclude=True)] = field(default=0.0, compare=False)
    mine: Annotated[int, Field(exclude=True)] = 0

    @property
    def state(self) -> State:
        """What it is."""
        return State(self.due, self.status, self.starts_at, self.duration_seconds)

    @property
    def vms(self) -> str:
        """How many VMs it names."""
        total = len(self.resources)
        return f"{f'{self.mine} of ' * (0 < self.mine < total)}{plural(total, 'VM')}"


class OpenRow(NamedTuple):
    """What of an open event is read for all of them; `resources` is a JSON list."""

    key: str
    due: str
    starts_at: float | None
    event_type: str
    event_source: str
    subscription: str
    group: str
    status: str
    duration_seconds: int | None
    prepared: int | None
    resources: str
    notice_seconds: float | None = None
    approval: str = ""
    scope: str = ""

    @property
    def kind(self) -> tuple[str, ...]:
        """What the events of a wave have in common."""
        return self.event_type, self.event_source, self.subscription, self.group

    @property
    def state(self) -> State:
        """What it is."""
        return State(self.due, self.status, self.starts_at, self.duration_seconds)


@dataclass(frozen=True, slots=True)
class VmRow:
    """A VM at this moment, or one that an open event names or that is expected, and that has never reported."""

    name: str
    subscription: str = ""
    group: str = ""
    zone: str = ""
    location: str = ""
    watch: Annotated[str, Field(description=f"Who watches it: one of {', '.join(WATCHES)}.")] = "watched"
    event_id: Annotated[str | None, Field(description="Of the most urgent open event that names it.")] = None
    event_type: str = ""
    event_status: str = ""
    starts_at: MaybeTime = None
    due: str = ""
    preparation: Annotated[
        str,
        Field(description=f"For that event: one of {', '.join(PREPARATIONS)}; blank without programs."),
    ] = ""
    version: Annotated[str, Field(description="Of imds-bridge.")] = ""
    alive_at: Annotated[MaybeTime, Field(description="The last report.")] = None
    unreachable_since: Annotated[MaybeTime, Field(description="Since when it cannot reach IMDS.")] = None
    waiting: Annotated[int, Field(description="Events that it has not delivered to some sink.")] = 0
    missing: Annotated[int, Field(description="Events that it published and that have not arrived.")] = 0
    doubled_at: Annotated[MaybeTime, Field(description="When two forwarders of it last ran at once.")] = None
    resource_id: str = ""
    heard: Annotated[float, Field(exclude=True)] = field(default=0.0, compare=False)
    scope: Annotated[int | None, Field(exclude=True)] = None
    folded: Annotated[str, Field(exclude=True)] = ""
    key: Annotated[str, Field(exclude=True)] = ""
    event: Annotated[str, Field(exclude=True)] = ""

    def describe_watch(self, now: float) -> str:
        """Say since when nobody watches it, "" if somebody does."""
        if self.watch == "unreachable":
            return f"no IMDS {format_duration(now - (self.unreachable_since or now))}"
        words = {
            "watched": "",
            "unknown": "never reported",
            "unheard": "never heard",
            "gone": "probably gone",
        }
        since = f"{self.watch} {format_duration(now - (self.alive_at or now))}"
        return words.get(self.watch, since)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRow:
    """One CloudEvent about an EventId, with the VMs that saw it: name and time of each, the first one first."""

    kind: str
    at: float
    vm: str
    body: bytes
    seen_by: tuple[tuple[str, float], ...] = ()
    key: str = ""

    @property
    def event(self) -> dict[str, Json]:
        """The CloudEvent, decoded; {} if the disk has changed it."""
        try:
            return decode_event(self.body)
        except ValueError:
            return {}

    @property
    def data(self) -> Mapping[str, Json]:
        """The event's data, {} if it is not an object."""
        data = self.event.get("data")
        return data if isinstance(data, dict) else {}


@dataclass(frozen=True, kw_only=True)
class Filter:
    """What to show; "" and () show all. `vm` is a part of a VM's name or the beginning of an EventId."""

    type: str = field(default="", metadata={"example": "Reboot"})
    status: str = field(default="", metadata={"example": "Scheduled"})
    due: str = field(default="", metadata={"example": "1h"})
    source: str = field(default="", metadata={"example": "Platform"})
    vm: str = field(default="", metadata={"example": "web-0"})
    subscription: str = field(default="", metadata={"example": "8d10da13-8125-4ba9-a717-bf7490507b3d"})
    group: tuple[str, ...] = field(default=(), metadata={"example": "shop"})
    tag: tuple[str, ...] = field(default=(), metadata={"example": "env=prod"})

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the value of everything that is chosen."""
        for one in fields(self):
            value = getattr(self, one.name)
            yield from ((one.name, part) for part in ((value,) if isinstance(value, str) else value) if part)

    def only(self, *names: str) -> Filter:
        """Return the filter without its other parts."""
        return Filter(**{name: getattr(self, name) for name in names})

    def __bool__(self) -> bool:
        return any(True for _ in self.parts())

    def query(self, *, without: tuple[str, str] | None = None, **changes: str) -> str:
        """Return the filter, with changes, as the end of an address: `?type=Reboot`, "" if there is none."""
        kept = [part for part in self.parts() if part != without and part[0] not in changes]
        encoded = urlencode([*kept, *((name, value) for name, value in changes.items() if value)])
        return f"?{encoded}" if encoded else ""

    def of_events(self) -> Where:
        """Return the filter as a condition on `event_now`; the status of open events is also Open."""
        found = [
            *self._equal({"event_type": self.type, "event_source": self.source, "due": self.due}),
            *self._place(),
        ]
        if self.status:
            found.append(Where(f"lower(?) IN (lower(status), lower({OUTCOME}))", (self.status,)))
        if wanted := fold_name(self.vm):
            found.append(Where("(instr(key, ?) = 1 OR instr(names, ?))", (wanted, wanted)))
        if self.tag:
            condition, values = self.of_named()
            found.append(Where(f"key IN (SELECT key FROM affected WHERE {condition})", values))  # noqa: S608 - constants
        return _all_of(found)

    def of_named(self) -> Where:
        """Return the filter as a condition on `affected`, the VMs that events name."""
        found = [
            Where(f"affected.place IN (SELECT place FROM vm WHERE {tagged.condition})", tagged.values)  # noqa: S608 - constants
            for tagged in self._tagged()
        ]
        if wanted := fold_name(self.vm):
            found.append(Where("(instr(affected.key, ?) = 1 OR instr(affected.folded, ?))", (wanted, wanted)))
        return _all_of(found)

    def of_vms(self) -> Where:
        """Return the filter as a condition on `vm_state` or `vm`.

        The status, of `vm_state` only, is one of WATCHES or PREPARATIONS, of an event, or a summary.
        """
        found = []
        if place := self._place():
            where = _all_of(place)
            found.append(Where(f"scope IN (SELECT id FROM scope WHERE {where.condition})", where.values))  # noqa: S608 - constants
        if self.status:
            unwatched = f"iif(watch IN {UNWATCHED}, 'unwatched', '')"
            words = f"watch, lower(event), preparation, {unwatched}, iif(since IS NULL, '', 'outofwork')"
            found.append(Where(f"lower(?) IN ({words})", (self.status,)))
        if wanted := fold_name(self.vm):
            found.append(Where(f"(place IN ({_OF_VM}) OR place IN ({_OF_NAMED}))", (wanted, wanted)))
        return _all_of([*found, *self._tagged()])

    def _tagged(self) -> list[Where]:
        """Return conditions on the tags of `vm` or `vm_state`; of VMs without any, none is true."""
        return [
            Where("tags IN (SELECT id FROM tagged WHERE instr(tags, ?))", (_tag(tag),)) for tag in self.tag
        ]

    def _place(self) -> list[Where]:
        found = self._equal({"subscription": self.subscription})
        if self.group:
            marks, values = ", ".join("?" * len(self.group)), tuple(group.lower() for group in self.group)
            resource_group = """substr("group", 1, instr("group" || '/', '/') - 1)"""
            found.append(Where(f'("group" IN ({marks}) OR {resource_group} IN ({marks}))', values * 2))
        return found

    @staticmethod
    def _equal(columns: Mapping[str, str]) -> list[Where]:
        return [Where(f"lower({column}) = lower(?)", (value,)) for column, value in columns.items() if value]


def read_filter(query: Sequence[tuple[str, str]]) -> Filter:
    """Read a filter from the parts of an address; others of them do not matter."""
    found: dict[str, Any] = {}
    for one in fields(Filter):
        values = [value.strip()[:MAX_CHARACTERS] for name, value in query if name == one.name]
        if isinstance(one.default, tuple):
            found[one.name] = tuple(dict.fromkeys(filter(None, values[:MAX_VALUES])))
        elif values:
            found[one.name] = values[0]
    return Filter(**found)


EVERY = Filter()
OF_PLACE = ("vm", "subscription", "group", "tag")  # what chooses VMs
_CURRENT = Where("key IN (SELECT key FROM current)", ())
DECIDING = "kind IN ('scheduledevent.updated', 'approval.prepared', 'approval.recovered'), at DESC, n"
_OF_VM, _OF_NAMED = (f"SELECT place FROM {table} WHERE instr(folded, ?)" for table in ("vm", "named"))  # noqa: S608 - constants
OUTCOME = (
    "iif(NOT is_open, status, CASE due WHEN 'left' THEN 'Ended' WHEN 'away' THEN 'Put away' ELSE 'Open' END)"
)


def every_open(store: sqlite3.Connection, wanted: Filter) -> list[OpenRow]:
    """Return all events that are current, the most urgent first."""
    where, names = wanted.of_events(), ", ".join(f'"{name}"' for name in OpenRow._fields)
    found = store.execute(
        f"SELECT {names} FROM open_now WHERE {where.condition} ORDER BY urgency, ifnull(starts_at, 0), key",  # noqa: S608 - constants
        where.values,
    )
    return [*map(OpenRow._make, found)]


def events_of(store: sqlite3.Connection, keys: Sequence[str]) -> list[EventRow]:
    """Return some events."""
    return _events(store, Where("key IN (SELECT value FROM json_each(?))", (json.dumps(keys),)))


def open_events(
    store: sqlite3.Connection, wanted: Where | Filter = EVERY, order: str = _URGENCY, **part: int
) -> list[EventRow]:
    """Return the events that are current, the most urgent first: at most `limit` after the first `offset`."""
    where = _CURRENT & (wanted.of_events() if isinstance(wanted, Filter) else wanted)
    # Who has seen an event is counted only for those that are returned.
    keys = f"SELECT key FROM event_now WHERE {where.condition} {order} {_part(**part)}"  # noqa: S608 - constants
    return _events(store, Where(f"key IN ({keys})", where.values), order)


def ended_events(store: sqlite3.Connection, since: float, wanted: Filter, *, limit: int) -> list[EventRow]:
    """Return the events that ended after a time, the last one first."""
    where = Where("ended_at > ?", (since,)) & wanted.of_events()
    return _events(store, where, f"ORDER BY ended_at DESC LIMIT {limit}")


def events_since(store: sqlite3.Connection, since: float, wanted: Filter, **part: int) -> Iterator[EventRow]:
    """Yield the events that were first seen after a time, the last one first; `part` as of `open_events`."""
    where = Where("first_seen_at > ?", (since,)) & wanted.of_events()
    return map(_event_row, _select(store, where, f"ORDER BY first_seen_at DESC {_part(**part)}"))


def find_event(store: sqlite3.Connection, event_id: str) -> EventRow | None:
    """Return one event, None if it is not known."""
    return next(iter(events_of(store, [event_id.lower()])), None)


def count_due(store: sqlite3.Connection, wanted: Filter) -> dict[str, tuple[int, int, int]]:
    """Count the current events by when they are due, those of users, and the VMs of the filter that they name."""
    where = wanted.of_events()
    events = store.execute(
        "SELECT due, count(*), sum(event_source = 'User') FROM open_now "  # noqa: S608 - constants
        f"WHERE {where.condition} GROUP BY 1",
        where.values,
    )
    named = where & wanted.of_named()
    vms = store.execute(
        "SELECT due, count(DISTINCT place) FROM open_now CROSS JOIN affected USING (key) "  # noqa: S608 - constants
        f"WHERE {named.condition} GROUP BY 1",
        named.values,
    )
    counts = dict(map(tuple, vms))
    return {due: (count, users, counts.get(due, 0)) for due, count, users in events}


def count_types(store: sqlite3.Connection) -> list[tuple[str, str, int]]:
    """Count the current events by type and status."""
    query = "SELECT event_type, status, count(*) FROM open_now GROUP BY 1, 2"
    return [*map(tuple, store.execute(query))]


def mine_first(store: sqlite3.Connection, events: Iterable[EventRow], wanted: Filter) -> list[EventRow]:
    """Return events that name the VMs first that a filter chooses by name or tag; without these, it chooses all."""
    events, where, found = [*events], wanted.of_named(), []
    keys = json.dumps([event.key for event in events])
    query = "SELECT key, folded FROM affected WHERE key IN (SELECT value FROM json_each(?))"
    mine = {*map(tuple, store.execute(f"{query} AND {where.condition}", (keys, *where.values)))}
    for event in events:
        order = {name: (event.key, fold_name(name)) not in mine for name in event.resources}
        names = tuple(sorted(event.resources, key=order.__getitem__))
        found.append(replace(event, resources=names, mine=len(order) - sum(order.values())))
    return found


def vms(
    store: sqlite3.Connection, where: Where | Filter = EVERY, order: str = _BY_PLACE, **part: int
) -> list[VmRow]:
    """Return VMs, web-9 before web-10, or in another order; all of them, or a `part` as of `open_events`."""
    where = where.of_vms() if isinstance(where, Filter) else where
    if part and order == _BY_PLACE:
        given = {"columns": _VM_COLUMNS, "where": where.condition, "order": _IN_SCOPE, "offset": 0, **part}
        found = store.execute(_PAGE.format(**given), where.values * 2)
    else:
        query = f"SELECT {_VM_COLUMNS} FROM vm_now WHERE {where.condition} {order} {_part(**part)}"  # noqa: S608 - constants
        found = store.execute(query, where.values)
    return [VmRow(*row) for row in found]


def vms_of(store: sqlite3.Connection, event: EventRow) -> list[VmRow]:
    """Return the VMs that Azure tells of an event and that have reported: its scale set, else those that it names."""
    of_event = Where("place IN (SELECT place FROM affected WHERE key = ?)", (event.key,))
    if event.scale_set:
        of_event = Where("scope = ?", (scope_id(event.scope),))
    return vms(store, of_event & Where("id IS NOT NULL AND watch <> 'unheard'", ()))


def count_vms(store: sqlite3.Connection, wanted: Filter = EVERY) -> Counter[str]:
    """Count VMs by every status that a filter may name, those that are unwatched and have an event, and all by "".

    Beside them are the sums of what waits on VMs, and of what is missing.
    """
    where, found = wanted.of_vms(), Counter[str]()
    columns = "watch, event, preparation, iif(since IS NULL, '', 'outofwork')"
    query = (
        f"SELECT {columns}, count(*), sum(waiting), sum(missing) FROM vm_state "  # noqa: S608 - constants
        f"WHERE {where.condition} GROUP BY 1, 2, 3, 4"
    )
    for watch, event, preparation, work, count, waiting, missing in store.execute(query, where.values):
        unwatched = ("unwatched", "unwatched with event" if event else "") if watch in UNWATCHED else ()
        states = dict.fromkeys((watch, event, preparation, work, *unwatched, ""), count)
        found.update(states, to_deliver=waiting, missing=missing)
    return +found  # no zeros


def preparations_of(store: sqlite3.Connection, key: str) -> dict[str, tuple[str, str]]:
    """Return by folded name what the programs of VMs said last about an event: the state, and a detail or ""."""
    query = "SELECT folded, state, detail FROM readiness WHERE key = ?"
    return {folded: (state, detail) for folded, state, detail in store.execute(query, (key,))}


def ahead_of(store: sqlite3.Connection, event: EventRow) -> tuple[int, int, float | None]:
    """Count what comes before an event in the order of turns: events, their VMs, and when about the last is over.

    The order is that of VMs that read one document: what has started, then by NotBefore and EventId.
    """
    query = """
    SELECT count(*), ifnull(sum(vms), 0),
        max(ifnull(starts_at, 0) + max(0, ifnull(duration_seconds, 0)))
    FROM open_now WHERE scope = ?1 AND key <> ?2 AND event_type <> 'Terminate' AND (event = 'Started'
        OR status = 'Scheduled' AND event_type IN program AND (ifnull(not_before, 0), key) < (ifnull(?3, 0), ?2))
    """
    return tuple(store.execute(query, (event.scope, event.key, event.not_before)).fetchone())


def groups_of(store: sqlite3.Connection) -> tuple[list[str], list[str]]:
    """Return all groups, also without their scale sets, and the subscriptions if there are two or more."""
    rows = store.execute('SELECT DISTINCT "group", subscription FROM scope ORDER BY 1, 2').fetchall()
    subscriptions = sorted({subscription for _, subscription in rows if subscription})
    groups = sorted({name for group, _ in rows for name in (group, group.partition("/")[0]) if name})
    return groups, subscriptions if len(subscriptions) > 1 else []


def tags_of(store: sqlite3.Connection) -> list[str]:
    """Return the tags of VMs, those that stand beside most others first."""
    rows = store.execute("SELECT tags FROM tagged")
    found = Counter(tag for (tags,) in rows for tag in tags.split("\n")[1:-1])
    return [tag for tag, _ in found.most_common()]


def names_unlike(store: sqlite3.Connection, wanted: Filter) -> list[str]:
    """Return the names of all VMs if neither one of them nor an event matches a filter, else none."""
    if count_vms(store, wanted) or any(events_since(store, 0.0, wanted, limit=1)):
        return []
    return [name for (name,) in store.execute("SELECT folded FROM vm LIMIT ?", (MAX_NAMES,))]


def unknown_values(wanted: Filter, known: Mapping[str, Sequence[str]]) -> list[tuple[str, str, str]]:
    """Return what a filter asks for that is not among the known values: the key, the value, and the nearest or ""."""
    found = []
    for name, given in wanted.parts():
        value, values = _folded(given), {one.casefold(): one for one in known.get(name, ())}
        if values and value not in values:
            nearest = get_close_matches(value, values, 1, 0.5)
            found.append((name, given, values[nearest[0]] if nearest else ""))
    return found


def reports_of(
    store: sqlite3.Connection,
    key: str,
    *,
    order: str = "at, n",
    after: int = 0,
    limit: int = 500,
    offset: int = 0,
) -> list[ReportRow]:
    """Return the CloudEvents about an event in the order of their times, with the VMs that saw each.

    With the order DECIDING, those that decide its state come first, and the newest: only others are left out. With
    the order `n`, in that of their arrival, those after the `after`th.
    """
    chosen = "SELECT * FROM event WHERE event_id = ? AND event_id <> '' AND n > ?"
    shown = "n" if order == "n" else "at, n"
    rows = store.execute(
        "SELECT n, kind, at, body, sighting, ifnull(vm.name, '') AS vm "  # noqa: S608 - constants
        f"FROM ({chosen} ORDER BY {order} LIMIT ? OFFSET ?) AS one LEFT JOIN vm ON vm.id = one.vm ORDER BY {shown}",
        (key, after, limit, offset),
    ).fetchall()
    seen = (
        "SELECT ifnull(vm.name, ''), sighting.at FROM sighting LEFT JOIN vm ON vm.id = sighting.vm "
        "WHERE sighting.id = ? ORDER BY sighting.at"
    )
    return [
        ReportRow(
            kind=row["kind"],
            at=row["at"],
            vm=row["vm"],
            body=row["body"],
            seen_by=tuple(map(tuple, store.execute(seen, (row["sighting"],)))),
            key=str(row["n"]),
        )
        for row in rows
    ]


def count(store: sqlite3.Connection, table: str, where: Where) -> int:
    """Count the rows of a table or view for which a condition is true."""
    query = f"SELECT count(*) FROM {table} WHERE {where.condition}"  # noqa: S608 - constants
    return int(store.execute(query, where.values).fetchone()[0])


def bodies_of_event(store: sqlite3.Connection, key: str) -> list[bytes]:
    """Return every CloudEvent about an event as received, in the order of their times."""
    rows = store.execute(
        "SELECT body FROM event WHERE event_id = ? AND event_id <> '' ORDER BY at, n", (key,)
    )
    return [bytes(body) for (body,) in rows]


def count_receipts(store: sqlite3.Connection, since: float, wanted: Filter) -> list[tuple[str, str, int]]:
    """Count the receipts after a time for some events, by kind and reason."""
    where = wanted.of_events()
    chosen = f"event_id IN (SELECT key FROM event_now WHERE {where.condition})" if wanted else "1"  # noqa: S608 - constants
    rows = store.execute(
        f"SELECT kind, reason, count(*) FROM event WHERE kind IN {RECEIPTS} AND at > ? AND {INDEXED} "  # noqa: S608 - constants
        f"AND {chosen} GROUP BY 1, 2 ORDER BY 1, 3 DESC",
        (since, *where.values),
    )
    return [(kind, reason, count) for kind, reason, count in rows]


def count_prepared(store: sqlite3.Connection, since: float, wanted: Filter) -> tuple[int, int]:
    """Count the VMs of events that started after a time: those that were prepared before the start, and all.

    Both are 0 as long as no VM was ever prepared: then no event needs to be read.
    """
    where = Where("started_at > ?", (since,)) & wanted.of_events()
    row = store.execute(
        "SELECT count(iif(prepared_at <= started_at, 1, NULL)), count(*) "  # noqa: S608 - constants
        "FROM (SELECT 1 FROM preparation WHERE prepared_at LIMIT 1) CROSS JOIN event_now "
        f"JOIN affected USING (key) LEFT JOIN readiness USING (key, folded) WHERE {where.condition}",
        where.values,
    ).fetchone()
    return row[0], row[1]


def losses_since(
    store: sqlite3.Connection, since: float, wanted: Filter, *, limit: int
) -> tuple[list[ReportRow], int]:
    """Return the newest events of some VMs that say that others were lost, IMDS was not watched, or VMs put away.

    VMs that were put away together are one row. VMs that have left the lists count, too. The number is that of all.
    """
    where = wanted.only(*OF_PLACE).of_vms()
    chosen = f"event.vm IN (SELECT id FROM vm WHERE {where.condition})" if wanted else "1"  # noqa: S608 - constants
    found = (
        "WHERE kind IN ('bridge.loss', 'imds.recovered', 'console.forgotten') "
        f"AND event.at > ? AND {INDEXED} AND {chosen} "
        "GROUP BY event.at, iif(kind = 'console.forgotten', reason, event.n)"
    )
    rows = store.execute(
        "SELECT kind, event.at, ifnull(group_concat(vm.name, ', '), '') AS vm, body "  # noqa: S608 - constants
        f"FROM event LEFT JOIN vm ON vm.id = event.vm {found} ORDER BY event.at DESC LIMIT ?",
        (since, *where.values, limit),
    )
    total = store.execute(f"SELECT 1 FROM event {found}", (since, *where.values)).fetchall()  # noqa: S608 - constants
    return [ReportRow(**dict(row)) for row in rows], len(total)


def notes(store: sqlite3.Connection) -> dict[str, Any]:
    """Return what was noted of the whole store, by name.

    `damaged`: when a damaged store was moved aside and where it is; `first_at` and `last_at`: when the first and the
    last event was received; `listed` and `listed_at`: how many VMs are expected, and since when; `upgraded_at`: until
    when an earlier version wrote it; `ahead`: by how many seconds the VMs' clocks are ahead, None if the console's is
    right.
    """
    query = "SELECT name, value FROM meta UNION ALL SELECT 'ahead', json_quote(ahead) FROM clock_now"
    return {name: json.loads(value) for name, value in store.execute(query)}


_RESOURCES, *_BOOLEANS = (
    [one.name for one in fields(EventRow)].index(name) for name in ("resources", "is_open", "seen_late")
)
_EVENT_COLUMNS, _VM_COLUMNS = (
    ", ".join(f'"{one.name}"' for one in fields(model) if one.name != "mine") for model in (EventRow, VmRow)
)


def _select(store: sqlite3.Connection, where: Where, more: str) -> sqlite3.Cursor:
    return store.execute(
        f"SELECT {_EVENT_COLUMNS} FROM event_now WHERE {where.condition} {more}",  # noqa: S608 - constants
        where.values,
    )


def _events(store: sqlite3.Connection, where: Where, more: str = "") -> list[EventRow]:
    return [_event_row(row) for row in _select(store, where, more)]


def _event_row(row: sqlite3.Row) -> EventRow:
    values = [*row]
    values[_RESOURCES] = tuple(json.loads(values[_RESOURCES]))
    for place in _BOOLEANS:
        values[place] = bool(values[place])
    return EventRow(*values)  # by place: there are thousands


def _part(*, limit: int = -1, offset: int = 0) -> str:
    return f"LIMIT {limit} OFFSET {offset}"


def _tag(given: str) -> str:
    return f"\n{_folded(given)}\n"


def _folded(given: str) -> str:
    return " ".join(given.casefold().split())


def _all_of(conditions: Sequence[Where]) -> Where:
    found = Where("1", ())
    for condition in conditions:
        found &= condition
    return found
