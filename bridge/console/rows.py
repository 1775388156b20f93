"""What the pages read from the store: its rows, and the filters that stand in an address."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlencode

from pydantic import Field

from bridge.console.merge import MaybeTime, ScheduledEvent
from bridge.console.tables import COLUMNS
from bridge.events.envelope import decode_event
from bridge.formats.text import format_duration
from bridge.imds.document import fold_name
from bridge.runtime.json import Json

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
MAX_OPEN = 5000
MAX_CHARACTERS = 200
MAX_VALUES = 20  # of a filter that may stand there more than once
DUES = ("overdue", "started", "1h", "later")
UNWATCHED = ("unreachable", "silent", "stopped")
WATCHES = ("watched", *UNWATCHED, "unknown")
_RECEIPTS = "'approval.accepted', 'approval.rejected', 'approval.failed'"
_INDEXED = "kind NOT IN ('bridge.heartbeat', 'document.changed')"  # the condition of the index by kind
_BY_PLACE = 'ORDER BY "group", scope, zone, location, natural'
_URGENCY = "due <> 'overdue', due <> 'started', ifnull(starts_at, 0), key"


class Where(NamedTuple):
    """A condition, and the values of its marks."""

    condition: str
    values: tuple[Any, ...]

    def __and__(self, other: Where) -> Where:
        return Where(f"{self.condition} AND {other.condition}", (*self.values, *other.values))


@dataclass(frozen=True, slots=True)
class EventRow(ScheduledEvent):
    """An event at this moment."""

    starts_at: Annotated[MaybeTime, Field(description="Of a started event, when it started.")] = None
    due: Annotated[str, Field(description=f"One of {', '.join(DUES)}, ended.")] = ""
    key: Annotated[str, Field(exclude=True)] = ""

    @property
    def vms(self) -> str:
        """How many VMs it names."""
        return f"{len(self.resources)} VM{'s' * (len(self.resources) != 1)}"


@dataclass(frozen=True, slots=True)
class VmRow:
    """A VM at this moment, or one that an open event names and that has never reported."""

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
    version: Annotated[str, Field(description="Of imds-bridge.")] = ""
    alive_at: Annotated[MaybeTime, Field(description="The last report.")] = None
    unreachable_since: Annotated[MaybeTime, Field(description="Since when it cannot reach IMDS.")] = None
    waiting: Annotated[int, Field(description="Events that it has not delivered to some sink.")] = 0
    missing: Annotated[int, Field(description="Events that it published and that have not arrived.")] = 0
    resource_id: str = ""
    scope: Annotated[str, Field(exclude=True)] = ""
    folded: Annotated[str, Field(exclude=True)] = ""

    @property
    def state(self) -> str:
        """The state in one word: that of its event, else who watches it; quiet if all is well."""
        if self.event_id is not None and self.watch != "unknown":
            return "Started" if self.event_status == "Started" else "Scheduled"
        return "quiet" if self.watch == "watched" else self.watch

    def describe_watch(self, now: float) -> str:
        """Say since when nobody watches it, "" if somebody does."""
        if self.watch == "unreachable":
            return f"no IMDS {format_duration(now - (self.unreachable_since or now))}"
        if self.watch == "unknown":
            return "never reported"
        return (
            "" if self.watch == "watched" else f"{self.watch} {format_duration(now - (self.alive_at or now))}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRow:
    """One CloudEvent about an EventId, with the VMs that saw it: name and time of each, the first one first."""

    kind: str
    at: float
    vm: str
    body: bytes
    seen_by: tuple[tuple[str, float], ...] = ()

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
            found.append(Where("? IN (status, iif(is_open, 'Open', ''))", (self.status,)))
        if wanted := fold_name(self.vm):
            found.append(Where("(instr(key, ?) = 1 OR instr(names, ?))", (wanted, wanted)))
        tagged = (
            "EXISTS (SELECT 1 FROM json_each(names) AS one CROSS JOIN vm ON vm.folded = one.value "
            "AND vm.scope = event_now.scope WHERE instr(vm.tags, ?))"
        )
        found += [Where(tagged, (_tag(tag),)) for tag in self.tag]
        return _all_of(found)

    def of_vms(self) -> Where:
        """Return the filter as a condition on `vm_now`; the status is one of WATCHES, of an event, or a summary."""
        found = self._place()
        if self.status:
            unwatched = "iif(watch IN ('unreachable', 'silent', 'stopped'), 'unwatched', '')"
            quiet = "iif(watch = 'watched' AND event_id IS NULL, 'quiet', '')"
            event = "iif(event_id IS NULL, '', iif(event_status = 'Started', 'Started', 'Scheduled'))"
            found.append(Where(f"? IN (watch, {event}, {unwatched}, {quiet})", (self.status,)))
        if wanted := fold_name(self.vm):
            found.append(Where("instr(folded, ?)", (wanted,)))
        return _all_of([*found, *(Where("instr(tags, ?)", (_tag(tag),)) for tag in self.tag)])

    def _place(self) -> list[Where]:
        found = self._equal({"subscription": self.subscription.lower()})
        if self.group:
            found.append(Where(f'"group" IN ({", ".join("?" * len(self.group))})', self.group))
        return found

    @staticmethod
    def _equal(columns: Mapping[str, str]) -> list[Where]:
        return [Where(f"{column} = ?", (value,)) for column, value in columns.items() if value]


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
NOT_WATCHED = Where("watch IN ('unreachable', 'silent', 'stopped')", ())
_CURRENT = Where("is_current", ())


def open_events(store: sqlite3.Connection, wanted: Filter = EVERY) -> list[EventRow]:
    """Return the events that are current, the most urgent first."""
    return _events(store, _CURRENT & wanted.of_events(), f"ORDER BY {_URGENCY} LIMIT {MAX_OPEN}")


def ended_events(store: sqlite3.Connection, since: float, wanted: Filter, *, limit: int) -> list[EventRow]:
    """Return the events that ended after a time, the last one first."""
    where = Where("ended_at > ?", (since,)) & wanted.of_events()
    return _events(store, where, f"ORDER BY ended_at DESC LIMIT {limit}")


def events_since(
    store: sqlite3.Connection, since: float, wanted: Filter, *, limit: int = -1, offset: int = 0
) -> Iterator[EventRow]:
    """Yield the events that were first seen after a time, the last one first; all of them without a limit."""
    where = Where("first_seen_at > ?", (since,)) & wanted.of_events()
    return map(
        _event_row, _select(store, where, f"ORDER BY first_seen_at DESC LIMIT {limit} OFFSET {offset}")
    )


def find_event(store: sqlite3.Connection, event_id: str) -> EventRow | None:
    """Return one event, None if it is not known."""
    return next(iter(_events(store, Where("key = ?", (event_id.lower(),)))), None)


def count_due(store: sqlite3.Connection, wanted: Filter) -> dict[str, tuple[int, int, int]]:
    """Count the current events by when they are due, those of them that users caused, and the VMs that they name."""
    where = _CURRENT & wanted.of_events()
    events = store.execute(
        "SELECT due, count(*), sum(event_source = 'User') FROM event_now "  # noqa: S608 - constants
        f"WHERE {where.condition} GROUP BY 1",
        where.values,
    )
    vms = store.execute(
        "SELECT due, count(DISTINCT affected.scope || char(10) || folded) FROM event_now JOIN affected USING (key) "  # noqa: S608 - constants
        f"WHERE {where.condition} GROUP BY 1",
        where.values,
    )
    named = dict(map(tuple, vms))
    return {due: (count, users, named.get(due, 0)) for due, count, users in events}


def count_seen(store: sqlite3.Connection, events: Iterable[EventRow]) -> dict[str, tuple[int, int]]:
    """Count by key the VMs that saw an event, and those that Azure tells: its scale set, else those that it names."""
    found = {}
    for event in events:
        row = store.execute(
            "SELECT count(DISTINCT sighting.vm) FROM event JOIN sighting ON sighting.id = event.sighting "
            "WHERE event.event_id = ? AND event.event_id <> '' AND event.kind LIKE 'scheduledevent.%'",
            (event.key,),
        ).fetchone()
        expected = len(event.resources)
        if event.scale_set:
            rows = store.execute("SELECT count(*) FROM vm WHERE scope = ?", (event.scope,))
            expected = max(expected, rows.fetchone()[0])
        found[event.key] = row[0], max(expected, row[0])
    return found


def vms(store: sqlite3.Connection, where: Where | Filter = EVERY, *, more: str = _BY_PLACE) -> list[VmRow]:
    """Return VMs, web-9 before web-10, or in the order that `more` says."""
    where = where.of_vms() if isinstance(where, Filter) else where
    rows = store.execute(
        f"SELECT {_VM_COLUMNS} FROM vm_now WHERE {where.condition} "  # noqa: S608 - constants
        f"{more}",
        where.values,
    )
    return [VmRow(*row) for row in rows]


def vms_of(store: sqlite3.Connection, event: EventRow) -> list[VmRow]:
    """Return the VMs that Azure tells of an event and that have reported: its scale set, else those that it names."""
    names = json.dumps([fold_name(name) for name in event.resources])
    of_event = Where("scope = ? AND watch <> 'unknown'", (event.scope,))
    if not event.scale_set:
        of_event &= Where("folded IN (SELECT value FROM json_each(?))", (names,))
    return vms(store, of_event)


def count_vms(store: sqlite3.Connection, wanted: Filter = EVERY) -> list[tuple[str, bool, int]]:
    """Count VMs by who watches them and by whether an event names them."""
    where = wanted.of_vms()
    rows = store.execute(
        f"SELECT watch, event_id IS NOT NULL, count(*) FROM vm_now WHERE {where.condition} GROUP BY 1, 2",  # noqa: S608 - constants
        where.values,
    )
    return [(watch, bool(has_event), count) for watch, has_event, count in rows]


def groups_of(store: sqlite3.Connection) -> tuple[list[str], list[str]]:
    """Return the names of all groups, and the subscriptions if there are two or more."""
    rows = store.execute('SELECT DISTINCT "group", subscription FROM vm ORDER BY 1, 2').fetchall()
    subscriptions = sorted({subscription for _, subscription in rows if subscription})
    groups = list(dict.fromkeys(group for group, _ in rows if group))
    return groups, subscriptions if len(subscriptions) > 1 else []


def tags_of(store: sqlite3.Connection, *, limit: int = 200) -> list[str]:
    """Return tags of VMs, to choose from."""
    rows = store.execute("SELECT DISTINCT tags FROM vm WHERE tags <> '' LIMIT ?", (limit,))
    return sorted({tag for (tags,) in rows for tag in tags.split("\n") if tag})[:limit]


def reports_of(store: sqlite3.Connection, key: str, *, limit: int = 500) -> list[ReportRow]:
    """Return the CloudEvents about an event in the order of their times, with the VMs that saw each."""
    rows = store.execute(
        "SELECT event.kind, event.at, event.body, event.sighting, ifnull(vm.name, '') AS vm FROM event "
        "LEFT JOIN vm ON vm.id = event.vm WHERE event.event_id = ? AND event.event_id <> '' "
        "ORDER BY event.at, event.n LIMIT ?",
        (key, limit),
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
        )
        for row in rows
    ]


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
        f"SELECT kind, reason, count(*) FROM event WHERE kind IN ({_RECEIPTS}) AND at > ? AND {_INDEXED} "  # noqa: S608 - constants
        f"AND {chosen} GROUP BY 1, 2 ORDER BY 1, 3 DESC",
        (since, *where.values),
    )
    return [(kind, reason, count) for kind, reason, count in rows]


def losses_since(store: sqlite3.Connection, since: float, wanted: Filter, *, limit: int) -> list[ReportRow]:
    """Return the newest events of some VMs that say that others were lost, or that IMDS was not watched."""
    where = wanted.of_vms()
    chosen = f"vm IN (SELECT id FROM vm_now WHERE {where.condition})" if wanted else "1"  # noqa: S608 - constants
    rows = store.execute(
        "SELECT kind, event.at, ifnull(vm.name, '') AS vm, body FROM event LEFT JOIN vm ON vm.id = event.vm "  # noqa: S608 - constants
        f"WHERE kind IN ('bridge.loss', 'imds.recovered') AND event.at > ? AND {_INDEXED} "
        f"AND {chosen} ORDER BY event.at DESC LIMIT ?",
        (since, *where.values, limit),
    )
    return [ReportRow(**dict(row)) for row in rows]


def damage_note(store: sqlite3.Connection) -> dict[str, Any] | None:
    """Return when a damaged store was moved aside and where it is; None if none was."""
    row = store.execute("SELECT value FROM meta WHERE name = 'damaged'").fetchone()
    return dict(json.loads(row[0])) if row else None


def received_from_to(store: sqlite3.Connection) -> tuple[float | None, float | None]:
    """Return when the oldest event that is kept was received, and the last one."""
    first = store.execute("SELECT min(received_at) FROM event").fetchone()[0]
    last = store.execute("SELECT received_at FROM event ORDER BY n DESC LIMIT 1").fetchone()
    return first, last[0] if last else None


_RESOURCES, _IS_OPEN = (
    [one.name for one in fields(EventRow)].index(name) for name in ("resources", "is_open")
)
_VM_COLUMNS = ", ".join(f'"{one.name}"' for one in fields(VmRow))


def _select(store: sqlite3.Connection, where: Where, more: str) -> sqlite3.Cursor:
    return store.execute(
        f"SELECT {COLUMNS}, starts_at, due, key FROM event_now WHERE {where.condition} {more}",  # noqa: S608 - constants
        where.values,
    )


def _events(store: sqlite3.Connection, where: Where, more: str = "") -> list[EventRow]:
    return [_event_row(row) for row in _select(store, where, more)]


def _event_row(row: sqlite3.Row) -> EventRow:
    values = [*row]
    values[_RESOURCES] = tuple(json.loads(values[_RESOURCES]))
    values[_IS_OPEN] = bool(values[_IS_OPEN])
    return EventRow(*values)  # by place: there are thousands


def _tag(given: str) -> str:
    return f"\n{' '.join(given.casefold().split())}\n"


def _all_of(conditions: Sequence[Where]) -> Where:
    found = Where("1", ())
    for condition in conditions:
        found &= condition
    return found
