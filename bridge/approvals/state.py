"""What the listener knows of events, of the programs that it has started and of what it owes the VM: frozen values.

A program is known by its command line: what `run` prepares and `recover` puts back is about the VM, not about a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass, replace
from datetime import datetime
from typing import Any, Literal, TypeVar
from uuid import uuid4

from bridge.config.approvals import AutoSettings
from bridge.imds.document import SCHEDULED, Document, ScheduledEvent
from bridge.runtime.time import iso_utc, parse_iso

Argv = tuple[str, ...]
Place = tuple[str, ...]
"""What a program is for: ("run", the EventId in lower case), or ("recover", its command line)."""
T = TypeVar("T")

RECENT_SECONDS = 60.0
LOAD = "load"  # in the metadata of a field that is stored: what reads its value


def place_of_run(key: str) -> Place:
    """Return the place of the program that prepares for an EventId in lower case."""
    return ("run", key)


def place_of_recover(recover: Argv) -> Place:
    """Return the place of a program that puts the VM back to work."""
    return ("recover", *recover)


def _same(value: Any) -> Any:
    return value


def _event(raw: Any) -> ScheduledEvent | None:
    return raw and ScheduledEvent(raw=raw)


def _seconds(pairs: Any) -> Mapping[Argv, float]:
    return {tuple(run): seconds for run, seconds in pairs}


def dump(value: Any) -> Any:
    """Return what is stored of a value: of the fields of a dataclass those that are declared so."""
    match value:
        case ScheduledEvent():
            return value.raw
        case datetime():
            return iso_utc(value)
        case tuple() | frozenset():
            return sorted(value) if isinstance(value, frozenset) else list(value)
        case Mapping():
            return [[dump(key), dump(one)] for key, one in value.items()]
    if not is_dataclass(value):
        return value
    return {one.name: dump(getattr(value, one.name)) for one in fields(value) if LOAD in one.metadata}


def load(kind: Callable[..., T], stored: Mapping[str, Any], **more: Any) -> T:
    """Return what `dump` wrote of a dataclass; `more` are fields that are not stored."""
    loads = {one.name: one.metadata[LOAD] for one in fields(kind) if LOAD in one.metadata}  # type: ignore[arg-type]
    return kind(**{name: read(stored[name]) for name, read in loads.items()}, **more)


@dataclass(frozen=True, kw_only=True)
class Tries:
    """What has failed: how often, why the last time, and when it is tried again (monotonic)."""

    error: str
    next_at: float
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Stay:
    """The time in which an event is Scheduled with one content: a decision counts for that alone.

    Attributes:
        id: differs for each stay, also for one of the same content.
        approved_at: when IMDS approved it, None if this VM has not asked for that.
        is_posted: it may have been POSTed, for a command or a rule.
        is_intended: it may have been POSTed for a rule, and the outcome is not known.
        told: the receipts that rules have given for it.
        since: when this process saw it first, monotonic.
        is_settled: IMDS has answered a POST of this process, and no rule sends another.
        tries: those of its POST that failed, None if the last one did not.
    """

    id: str = field(default_factory=lambda: uuid4().hex, metadata={LOAD: str})
    approved_at: datetime | None = field(default=None, metadata={LOAD: parse_iso})
    is_posted: bool = field(default=False, metadata={LOAD: bool})
    is_intended: bool = field(default=False, metadata={LOAD: bool})
    told: frozenset[str] = field(default=frozenset(), metadata={LOAD: frozenset})
    since: float
    is_settled: bool = False
    tries: Tries | None = None


@dataclass(frozen=True, kw_only=True)
class EventState:
    """An event, and what is known of it.

    Attributes:
        event: as last seen.
        stay: the one that it is in, or the last one if it has started.
        boot: the boot in which it was shown last.
        unreadable: how many entries of the document that showed it last could not be read.
        sight: whether the document shows it, may have it in an entry that cannot be read, or lacks it.
        missing_until: until when it may come back after a reset, in steady seconds; None if there was none.
        has_turn: it may take its VMs away beside others; that is kept while it is in the document.
        prepared: how many seconds each program took that has prepared this VM for it.
        absent_at: when the last document without it was read, monotonic.
        next_since: since when it is next to get a turn, monotonic; None if it is not.
        failed: the programs that have failed since.
        rule: the auto rule that decides about it.
        why: what it waits for, or why no rule approves it; "" for an event of other VMs.
        behind: the event that is first, where it waits for its turn.
        is_due: its program is to be started.
        may_post: a rule approves it now.
    """

    event: ScheduledEvent = field(metadata={LOAD: _event})
    stay: Stay
    boot: str = field(metadata={LOAD: str})
    unreadable: int = field(default=0, metadata={LOAD: int})
    sight: Literal["shown", "unread", "missing"] = field(default="shown", metadata={LOAD: _same})
    missing_until: float | None = field(default=None, metadata={LOAD: _same})
    has_turn: bool = field(default=False, metadata={LOAD: bool})
    prepared: Mapping[Argv, float] = field(default_factory=dict, metadata={LOAD: _seconds})
    absent_at: float
    next_since: float | None = None
    failed: Mapping[Argv, Tries] = field(default_factory=dict)
    rule: AutoSettings | None = None
    why: str = ""
    behind: ScheduledEvent | None = None
    is_due: bool = False
    may_post: bool = False

    @property
    def is_scheduled(self) -> bool:
        """Whether the document shows it as Scheduled."""
        return self.sight == "shown" and self.event.status == SCHEDULED

    @property
    def run(self) -> Argv:
        """The program of its rule, () for none."""
        return self.rule.run if self.rule else ()

    @property
    def is_unprepared(self) -> bool:
        """Whether a program is to prepare this VM for it, and has not."""
        return bool(self.why and self.run) and self.run not in self.prepared

    def is_approved(self, now: datetime) -> bool:
        """Return whether IMDS approved it within the last minute, and for this stay."""
        at = self.stay.approved_at
        return at is not None and 0 <= (now - at).total_seconds() <= RECENT_SECONDS


@dataclass(frozen=True)
class Program:
    """A program that has been started and has not ended.

    Attributes:
        argv: its command line.
        recover: that of the program which puts back what this one may change; its own if it is that.
        event: as it was when the program was started; of `recover`, the last one, None if that is not known.
        timeout_seconds: how long it may run.
        began_at: when it was started, monotonic.
        must_end: it has been asked to end.
    """

    argv: Argv
    recover: Argv
    event: ScheduledEvent | None
    _: KW_ONLY
    timeout_seconds: float
    began_at: float
    must_end: bool = False


OutOfWorkReason = Literal["RecoverFails", "TwoHours", "OtherVm"]


@dataclass(frozen=True, kw_only=True)
class Owed:
    """That programs may have taken the VM out of work, and `recover` has not put it back since.

    Attributes:
        recover: the program that puts it back.
        since: when the first of them was started.
        run: the last of them, by which a rule is found whose `recover` was changed.
        boot: the boot in which that was.
        event: the last event that one was started for; None if that is lost.
        keys: the EventIds in lower case that one was started for since the last recovery began.
        is_lost: keys were lost: all events of this VM in the next document are among them.
        is_other_vms: another VM owed it, whose disk this one has.
        tries: how often `recover` has failed in this process; None if the last one did not.
        told: for which reasons `outofwork` was published.
        idle_since: since when no event is left for which the VM has to be out of work, monotonic.
        is_held: an event stands or a program runs.
        why: what it waits for.
    """

    recover: Argv = field(metadata={LOAD: tuple})
    since: datetime = field(metadata={LOAD: parse_iso})
    run: Argv = field(default=(), metadata={LOAD: tuple})
    boot: str = field(default="", metadata={LOAD: str})
    event: ScheduledEvent | None = field(default=None, metadata={LOAD: _event})
    keys: frozenset[str] = field(default=frozenset(), metadata={LOAD: frozenset})
    is_lost: bool = field(default=False, metadata={LOAD: bool})
    is_other_vms: bool = field(default=False, metadata={LOAD: bool})
    tries: Tries | None = None
    told: frozenset[OutOfWorkReason] = frozenset()
    idle_since: float | None = None
    is_held: bool = True
    why: str = "until a document is read"


@dataclass(frozen=True, kw_only=True)
class State:
    """What the listener knows: changed by `step`, and by the answers of IMDS to its POSTs.

    Attributes:
        document: the last one, None before the first.
        read_at: when it was read, monotonic.
        incarnation: of the last document that had one.
        events: what is known of each event by its EventId in lower case; those that are missing come last.
        programs: those that have not ended.
        owed: what each `recover` has to put back, by its command line.
    """

    document: Document | None = None
    read_at: float = -math.inf
    incarnation: int | None = None
    events: Mapping[str, EventState] = field(default_factory=dict)
    programs: Mapping[Place, Program] = field(default_factory=dict)
    owed: Mapping[Argv, Owed] = field(default_factory=dict)

    def with_stays(self, changes: Mapping[str, Mapping[str, Any]]) -> State:
        """Return the state with attributes of stays changed, by EventId in lower case."""
        new = {
            key: replace(self.events[key], stay=replace(self.events[key].stay, **given))
            for key, given in changes.items()
        }
        return replace(self, events={**self.events, **new})

    def dump_events(self) -> list[Any]:
        """Return what is stored of events, as far as there is something to remember."""
        owed_for = frozenset[str]().union(*(owed.keys for owed in self.owed.values()))
        return [
            [dump(one), dump(one.stay)]
            for key, one in self.events.items()
            if one.has_turn or one.prepared or one.stay.is_posted or one.stay.told or key in owed_for
        ]

    def dump_owed(self) -> list[Any]:
        """Return what is stored of what is owed."""
        return [dump(owed) for owed in self.owed.values()]
