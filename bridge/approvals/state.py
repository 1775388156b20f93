"""What the listener knows of events, of the programs that it has started and of what it owes the VM: frozen values.

A program is known by its command line: what `run` prepares and `recover` puts back is about the VM, not about a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar
from uuid import uuid4

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, TypeAdapter

from bridge.config.approvals import AutoSettings
from bridge.imds.document import ADVISORY, SCHEDULED, STARTED, Document, ScheduledEvent
from bridge.runtime.text import one_line

Argv = tuple[str, ...]
Place = str | Argv
"""What a program is for: an event, by its EventId in lower case, or the VM's work, by its own command line."""
T = TypeVar("T")
Memory = Annotated[T, Field(exclude=True)]
"""What is known only while the process runs; all else of an event and of what is owed is stored.

Why a kill may forget it is said with each field.
"""
_Event = Annotated[
    ScheduledEvent, PlainSerializer(attrgetter("raw")), PlainValidator(lambda raw: ScheduledEvent(raw=raw))
]
_Names = Annotated[frozenset[str], PlainSerializer(sorted)]
_Seconds = Annotated[
    Mapping[Argv, float],
    PlainSerializer(lambda found: [*found.items()]),
    BeforeValidator(lambda pairs: {tuple(argv): seconds for argv, seconds in pairs}),
]
OutOfWorkReason = Literal["RecoverFails", "TwoHours", "OtherVm"]

RECENT_SECONDS = 60.0
# In what was told of a stay, and what the status says of it.
UNPREPARED = "it started before its program had succeeded: look after what ran on this VM"


def titled(verb: Literal["run", "recover"], argv: Argv) -> str:
    """Name a program with its arguments, for the log and the status: what is published has none of them."""
    return one_line(f"{verb} {' '.join(argv)}")


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
        told: the receipts that rules have given for it, and that it has started unprepared.
        since: when it was seen first, in steady seconds.
        is_settled: IMDS has answered a POST of this process, and no rule sends another; after a kill a rule sends one
            more, to which IMDS gives the same answer.
        tries: those of its POST that failed, None if the last one did not; after a kill the next may be sent at once.
    """

    id: str = field(default_factory=lambda: uuid4().hex)
    approved_at: datetime | None = None
    is_posted: bool = False
    is_intended: bool = False
    told: _Names = frozenset()
    since: float = 0.0
    is_settled: Memory[bool] = False
    tries: Memory[Tries | None] = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the auto rules make of an event of this VM.

    Attributes:
        why: what it waits for, or why no rule approves it; "" for an event of other VMs.
        behind: the event that is first, where it waits for its turn.
        does: what is done now: its program is started, or its approval is POSTed.
    """

    why: str = ""
    behind: _Event | None = None
    does: Literal["", "run", "post"] = ""


@dataclass(frozen=True, kw_only=True)
class EventState:
    """An event, and what is known of it.

    Attributes:
        event: as last seen.
        stay: the one that it is in, or the last one if it has started.
        prepared: how many seconds each program took that has prepared this VM for it.
        is_begun: a program has been started for it that no `recover` puts back.
        has_turn: it may take its VMs away beside others; that is kept while it is in the document.
        unreadable: how many entries could not be read of the document that showed it last.
        sight: whether the last document shows it, may have it in an entry that cannot be read, or lacks it.
        missing_until: until when it may come back after a reset, in steady seconds; None if there was none.
        absent_at: when the last document without it was read, in steady seconds; 0 if none is known.
        next_since: since when it is next to get a turn, monotonic; None if it is not. After a kill it settles again.
        failed: the programs that have failed since; after a kill they run again at once.
        rule: the auto rule that decides about it, which each document shows.
        verdict: what that makes of it, likewise.
    """

    event: _Event
    stay: Stay
    prepared: _Seconds = field(default_factory=dict)
    is_begun: bool = False
    has_turn: bool = False
    unreadable: int = 0
    sight: Literal["shown", "unread", "missing"] = "shown"
    missing_until: float | None = None
    absent_at: float = 0.0
    next_since: Memory[float | None] = None
    failed: Memory[Mapping[Argv, Tries]] = field(default_factory=dict)
    rule: Memory[AutoSettings | None] = None
    verdict: Memory[Verdict] = Verdict()

    @property
    def is_scheduled(self) -> bool:
        """Whether the document shows it as Scheduled."""
        return self.sight == "shown" and self.event.status == SCHEDULED

    @property
    def may_be_prepared(self) -> bool:
        """Whether the document shows it as Scheduled, or as an early warning."""
        return self.is_scheduled or (self.sight == "shown" and self.event.status == ADVISORY)

    @property
    def may_be_scheduled(self) -> bool:
        """Whether it is Scheduled as far as is known, also where an entry that cannot be read may hide it."""
        return self.sight != "missing" and self.event.status == SCHEDULED

    @property
    def is_over(self) -> bool:
        """Whether a reset has ended it: one that has started does not come back."""
        return self.sight == "missing" and self.event.status == STARTED

    @property
    def run(self) -> Argv:
        """The program of its rule, () for none."""
        return self.rule.run if self.rule else ()

    @property
    def is_unprepared(self) -> bool:
        """Whether a program is to prepare this VM for it, and has not."""
        return bool(self.verdict.why and self.run) and self.run not in self.prepared

    def is_approved(self, now: datetime) -> bool:
        """Return whether IMDS approved it within the last minute, and for this stay."""
        at = self.stay.approved_at
        return at is not None and 0 <= (now - at).total_seconds() <= RECENT_SECONDS


@dataclass(frozen=True, kw_only=True)
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
    timeout_seconds: float
    began_at: float
    must_end: bool = False

    @property
    def title(self) -> str:
        """What it does, and its command line."""
        return titled("recover" if self.argv == self.recover else "run", self.argv)


@dataclass(frozen=True, kw_only=True)
class Owed:
    """That programs may have taken the VM out of work, and `recover` has not put it back since.

    Attributes:
        recover: the program that puts it back.
        since: when the first of them was started, or one of another `recover` that was owed then.
        run: the last of them, by which a rule is found whose `recover` was changed.
        boot: the boot in which that was.
        event: the last event that one was started for; None if that is lost.
        keys: the EventIds in lower case that one was started for since the VM was last put back.
        is_other_vms: another VM owed it, whose disk this one has.
        tries: how often `recover` has failed in this process, which after a kill runs it again at once; None if the
            last one did not.
        told: for which reasons `outofwork` was published; after a kill, what is still so is published once more.
        idle_since: since when no event is left for which the VM has to be out of work, monotonic; the next process
            counts from its own first try.
        held_by: the event that stands or the program that runs, which each document shows, "" for none: `recover`
            cannot be started.
    """

    recover: Argv
    since: datetime
    run: Argv = ()
    boot: str = ""
    event: _Event | None = None
    keys: _Names = frozenset()
    is_other_vms: bool = False
    tries: Memory[Tries | None] = None
    told: Memory[frozenset[OutOfWorkReason]] = frozenset()
    idle_since: Memory[float | None] = None
    held_by: Memory[str] = "until a document is read"

    @property
    def published_why(self) -> str:
        """Why it is still owed, without arguments."""
        name = f"recover {self.recover[0]}"
        return _has_failed(name, self.tries) if self.tries else f"{name} has not succeeded"

    @property
    def why(self) -> str:
        """What it waits for."""
        title = titled("recover", self.recover)
        if self.is_other_vms and not self.held_by:
            return "another VM owed it, whose disk this one has: see `imds-bridge recover --help`"
        if self.tries and self.held_by in ("", f"{title} runs"):
            return _has_failed(title, self.tries)
        return self.held_by or f"{title} runs"


def _has_failed(name: str, tries: Tries) -> str:
    return f"{name} has failed {tries.count} time(s): {tries.error}"


@dataclass(frozen=True, kw_only=True)
class State:
    """What the listener knows: changed by `step`, and by the answers of IMDS to its POSTs.

    Attributes:
        document: the last one, None before the first.
        at: when it was read, in steady seconds, by this process or the one before; 0 if that is not known.
        incarnation: of the last document that had one.
        boot: the boot in which it was read.
        events: what is known of each event by its EventId in lower case; those that are missing come last.
        absent: of events that were not stored as a whole, `absent_at`, before the first document.
        programs: those that have not ended.
        owed: what each `recover` has to put back, by its command line.
        is_lost: records were lost, and no document has been read since.
    """

    document: Document | None = None
    at: float = 0.0
    incarnation: int | None = None
    boot: str = ""
    events: Mapping[str, EventState] = field(default_factory=dict)
    absent: Mapping[str, float] = field(default_factory=dict)
    programs: Mapping[Place, Program] = field(default_factory=dict)
    owed: Mapping[Argv, Owed] = field(default_factory=dict)
    is_lost: bool = False

    @property
    def is_in_work(self) -> bool:
        """Whether no program is known to have taken this VM out of work since it was last put back."""
        is_owed = any(one.run and not one.is_other_vms for one in self.owed.values())
        is_begun = any(one.is_begun and not one.is_over for one in self.events.values())
        return self.is_lost or not (is_owed or is_begun)

    def with_stays(self, stays: Mapping[str, Stay]) -> State:
        """Return the state with other stays, by EventId in lower case."""
        new = {key: replace(self.events[key], stay=stay) for key, stay in stays.items()}
        return replace(self, events={**self.events, **new})

    def dump(self, may_be_commanded: Callable[[ScheduledEvent], bool]) -> dict[str, Any]:
        """Return what is stored, but for what is owed: events of which there is something to remember.

        Of those that a command could approve it is at least since when they are there, by which stale ones are known.
        """
        owed_for = frozenset[str]().union(*(owed.keys for owed in self.owed.values()))
        events = {
            key: one
            for key, one in self.events.items()
            if one.has_turn
            or one.verdict.why
            or one.prepared
            or one.is_begun
            or one.stay.is_posted
            or one.stay.told
            or key in owed_for
        }
        absent = {
            key: one.absent_at
            for key, one in self.events.items()
            if key not in events and may_be_commanded(one.event)
        }
        return {"boot": self.boot, "events": EVENTS.dump_python(events, mode="json"), "absent": absent}

    def dump_owed(self) -> Any:
        """Return what is stored of what is owed."""
        return OWED.dump_python((*self.owed.values(),), mode="json")


EVENTS = TypeAdapter(dict[str, EventState])
OWED = TypeAdapter(tuple[Owed, ...])
