"""What becomes of events between two documents, and how sure one can be of their end: one story a line."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from bridge.imds.diff import GRACE_SECONDS, Change, Watch
from bridge.imds.document import Document, parse_document
from bridge.lab.imds import render_document
from tests.support.diff import FIRST, NOT_BEFORE, RECORDED, SECOND, Watcher, body, document, entry
from tests.support.only import only

THIRD = "0F5B4F0E-5D6D-4B2C-9A55-7C1D4A0F8E11"
REDEPLOY = "A1B6E1B8-57E5-4E5F-8C0B-6B3C6F4A2D01"
START = datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC).timestamp()

# A story's documents are told as `INCARNATION EVENT...`, with what is said of each in ENTRIES, and behind `->` what
# becomes of the events. A document is seen a second after the one before it, but for these words: `gap=` has the
# seconds, `at=` those from START, `wall=` those of the wall clock, `boot=` is the machine's boot; `restart`: by
# another process; `off`: the call turned the service on.
EVENTS = {"A": FIRST, "B": SECOND, "C": THIRD, "D": REDEPLOY, "a": FIRST.lower()}
ENTRIES: dict[str, dict[str, Any]] = {
    "started": {"status": "Started", "NotBefore": ""},
    "SCHEDULED": {"status": "SCHEDULED"},
    "postponed": {"status": "Postponed"},
    "empty": {"status": ""},
    "null": {"status": None},
    "5": {"status": 5},
    "without": {"status": ...},
    "advisory": {"status": "Advisory", "NotBefore": ""},
    "elsewhere": {"Resources": []},
    "soon": {"NotBefore": "soon"},
    "timeless": {"NotBefore": ""},
    "past": {"NotBefore": "Mon, 11 Apr 2022 21:00:00 GMT"},
    "later": {"NotBefore": "Mon, 11 Apr 2022 23:00:00 GMT"},
    "next-week": {"NotBefore": "Mon, 18 Apr 2022 22:00:00 GMT"},
}
UNREADABLE = {"null": None, "text": "unreadable", "nameless": entry(event_id=None)}
# IMDS begins anew or was off: an event that is missing has five minutes to come back.
GRACE = (("1", 2), ("restart 1", 2), ("off 8", 9), ("off restart 8", 9), ("off gap=100000 0", 1))

STORIES: dict[str, list[str]] = {
    "a new status is that transition": [
        "1 | 2 A -> scheduled A",
        "1 | 2 A.SCHEDULED -> scheduled A",
        "1 | 2 A.started -> started A",
        *(f"1 | 2 A.{unknown} -> updated A" for unknown in ("postponed", "empty", "null", "5", "without")),
        "1 A | 2 A.started -> started A",
        "1 A.started | 2 A -> updated A",
        "1 A | 2 A.postponed -> updated A",
        "1 A.started | 2 A.postponed -> updated A",
        "1 A.postponed | 2 A -> scheduled A",
        "1 A.postponed | 2 A.started -> started A",
    ],
    "events in the first document are new with the status that they have": [
        "restart 5 A B.started -> scheduled A, started B"
    ],
    "an early warning is advised whatever changes until it is scheduled or ends": [
        "6 | 7 A.advisory -> advised A | 8 A.advisory.elsewhere -> advised A | 9 A.timeless -> scheduled A",
        "7 A.advisory | 9 -> ended A Advisory",
        "7 A.advisory | restart 9 -> ended A Advisory",
    ],
    "a change under the same incarnation is a change and another incarnation alone is none": [
        "7 A | 7 A.started -> started A | 7 A.started B -> scheduled B | 8 A.started B -> | "
        '"9" A.started B -> | 9 -> completed A, canceled B | 10 A -> scheduled A',  # which has come back
    ],
    "changes come in the order of the document and ends last whatever cannot be read": [
        "1 A B | 2 null C B.started A -> scheduled C, started B | "
        "3 null D B C -> scheduled D, updated B, canceled A",
    ],
    "an event gone while scheduled is canceled without a gap": [
        f"7 A | gap={gap} {now} -> canceled A" for gap in (0.2, 1.0, 5.0) for now in (7, 8)
    ],
    "any other end of a scheduled event is uncertain and says why": [
        "7 A | restart 8 -> ended A Restart",
        *(f"7 A | gap={gap} 8 -> ended A Gap" for gap in (5.001, 60, 86_400)),
        *(f"7 A | {now} -> ended A IncarnationSkipped" for now in (9, 10, 2**70)),
        *(f"7 A | {now} -> ended A IncarnationUnknown" for now in ("...", '"eight"')),
        *(f"... A | {now} -> ended A IncarnationUnknown" for now in ("...", "8")),
        "7 A | 8 text -> ended A EntryUnreadable",
        "7 A.postponed | 8 -> ended A UnknownStatus",
        "7 A.postponed | restart 8 -> ended A UnknownStatus",
        *(f"7 A.{unknown} | 8 -> ended A NotBeforeUnknown" for unknown in ("soon", "timeless")),
        "7 A.past | 8 -> ended A NotBeforePassed",
    ],
    "an event gone after started is completed": [
        f"7 A.started | {how} {now} -> completed A" for how in ("", "restart", "gap=60") for now in (8, 20)
    ],
    "a gap and an unreadable entry affect only the first document after it": [
        "7 A B C | gap=60 9 A B C -> | 10 A B -> canceled C | "
        "11 nameless B -> ended A EntryUnreadable | 12 nameless -> canceled B",
    ],
    "an event is canceled only before its start": [
        "at=-3 7 A | 8 -> canceled A",
        "at=-1.001 7 A | 8 -> canceled A",
        "at=-1 7 A | 8 -> ended A NotBeforePassed",
        "at=0 7 A | 8 -> ended A NotBeforePassed",
    ],
    "after a jump of the clock an event is canceled only if both clocks say so": [
        "at=-2 7 A | wall=-1 8 -> canceled A",
        "at=-2 7 A | wall=0 8 -> ended A ClockJumped",
        "at=-1 7 A | wall=-1 8 -> ended A ClockJumped",
        "at=-1 7 A | wall=0 8 -> ended A NotBeforePassed",
    ],
    "an end says whether this VM has rebooted": [
        *(
            f"boot={before} 7 A{state} | restart boot={now} 8 -> {end}{rebooted}"
            for before, now, rebooted in (
                *(("a", "a", " not-rebooted"), ("a", "b", " rebooted")),
                *(("", "b", ""), ("a", "", ""), ("", "", "")),
            )
            for state, end in (("", "ended A Restart"), (".started", "completed A"))
        ),
        # It counts if it was after the last sight of an event, which may come back.
        "boot=a 7 A | restart boot=b 7 A B -> scheduled B | boot=b 8 B -> canceled A not-rebooted | "
        "restart boot=c 1 -> | boot=c gap=300 1 -> ended B Reset rebooted",
    ],
    "only a started event ends at once after a reset and others may come back": [
        f"7 A.next-week B D C.started | {how} -> completed C | "
        f"gap=100 {then} a.next-week B.started D.later -> started B, updated D | "
        f"{then + 1} B.started D.later -> canceled a"
        for how, then in GRACE
    ],
    "events that do not come back end when five minutes are over": [
        f"7 A B.postponed | {how} -> | gap=299 {then} -> | "
        f"{then} -> ended A Reset, ended B Reset | gap=1000 {then} ->"
        for how, then in GRACE
    ],
    "the five minutes continue over a restart and further documents and resets": [
        "7 A | 3 -> | restart gap=100 4 B -> scheduled B | 5 -> canceled B | gap=100 1 -> | "
        "gap=99 2 -> ended A Reset | 3 A -> scheduled A"
    ],
    "events that stay over a reset or appear with it are as ever": [
        "7 A B | 1 A C -> scheduled C | 2 -> canceled A, canceled C"
    ],
}


class Told(Watcher):
    """Sees the documents of a story; what is known in between is saved and loaded."""

    def tell(self, documents: str) -> list[str]:
        """See a document, and return what became of the events."""
        circumstances: dict[str, Any] = {}
        words = documents.split()
        while "=" in words[0] or words[0] in ("restart", "off"):
            name, _, value = words.pop(0).partition("=")
            match name:
                case "at":
                    self.at = START + float(value) - 1
                case "wall":
                    circumstances["wall"] = START + float(value)
                case "gap":
                    circumstances["after"] = float(value)
                case "boot":
                    circumstances["boot_id"] = value
                case _:
                    circumstances[{"restart": "restarted", "off": "service_was_off"}[name]] = True
        incarnation = ... if words[0] == "..." else json.loads(words[0])
        self.watch = Watch.load(json.loads(json.dumps(self.watch.dump())))
        self.see(document(incarnation, *map(event, words[1:])), **circumstances)
        return [*map(shown, self.changes)]


def event(word: str) -> Any:
    if word in UNREADABLE:
        return UNREADABLE[word]
    name, *said = word.split(".")
    fields: dict[str, Any] = {}
    for each in said:
        fields |= ENTRIES[each]
    return entry(EVENTS[name], **fields)


def shown(change: Change) -> str:
    name = next(name for name, event_id in EVENTS.items() if event_id == change.event.event_id)
    rebooted = {True: "rebooted", False: "not-rebooted", None: None}[change.vm_rebooted]
    return " ".join(filter(None, (change.kind, name, change.end_reason, rebooted)))


@pytest.mark.parametrize(
    "story",
    [pytest.param(story, id=f"{what}: {story}") for what, stories in STORIES.items() for story in stories],
)
def test_what_becomes_of_events(story: str) -> None:
    watch = Told()
    for step in story.split(" | "):
        documents, arrow, expected = step.partition("->")
        changes = watch.tell(documents)
        if arrow:
            assert ", ".join(changes) == expected.strip(), step


def test_events_are_due_when_their_five_minutes_are_over_and_not_after_they_have_ended() -> None:
    watcher = Watcher(document(7, entry()), document(1))
    assert not watcher.watch.is_due(watcher.at + GRACE_SECONDS - 1)
    assert watcher.watch.is_due(watcher.at + GRACE_SECONDS)
    watcher.see(document(1), after=GRACE_SECONDS)
    assert watcher.watch.missing == {}


def test_a_change_names_what_changed_and_what_was_before() -> None:
    watcher = Watcher(document(1, entry()), document(2, entry(status="Started")))
    change = only(watcher.changes)
    assert change.changed == ("EventStatus", "NotBefore")
    assert change.previous is not None
    assert change.previous.status == "scheduled"


CONTENTS: list[tuple[str, Any]] = [
    ("NotBefore", "Mon, 11 Apr 2022 23:00:00 GMT"),
    ("Resources", ["web-0", "web-1"]),
    ("Resources", []),
    ("DurationInSeconds", 9),
    ("EventType", "Defrost"),
    ("EventType", ...),
    ("SomethingNew", {"a": [1]}),
]


@pytest.mark.parametrize("status", ["Scheduled", "Started"])
@pytest.mark.parametrize(("name", "value"), CONTENTS)
def test_content_that_changes_while_the_status_stays_is_updated(status: str, name: str, value: Any) -> None:
    watcher = Watcher(document(1, entry(status=status)))
    assert watcher.see(document(2, entry(status=status, **{name: value}))) == [f"updated {FIRST}"]
    assert watcher.changes[0].changed == (name,)


def test_documents_that_differ_in_key_order_and_whitespace_are_the_same() -> None:
    plain = body(7, entry(Extra={"a": 1, "b": [2]}))
    whole = json.loads(plain, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    turned = json.dumps(whole, indent=3).encode()
    one, other = Watcher(parse_document(plain)), Watcher(parse_document(b"\r\n" + turned))
    assert one.watch == other.watch
    assert only(one.changes).fingerprint == only(other.changes).fingerprint


# Whole lives

PREEMPT = "B2C7F2C9-68F6-4F60-9D1C-7C4D705B3E12"
TERMINATE = "602d9444-d2cd-49c7-8624-8643e7171297"
ADVICE = "A1B2C3D4-0000-0000-0000-000000000001"
PREVIEW = "f020ba2e-3bc0-4c40-a10b-86575a9eabd5"
EXPECTED = {
    "degraded-hardware-and-preempt": [
        [f"scheduled {REDEPLOY}"],
        [f"scheduled {PREEMPT}"],
        [f"updated {REDEPLOY}", f"started {PREEMPT}"],
        [f"completed {PREEMPT}"],
        [],  # the incarnation starts again: the redeployment may come back
    ],
    "host-failure": [[], [f"started {THIRD}"], [f"completed {THIRD}"]],
    "live-migration": [[], [f"scheduled {FIRST}"], [f"started {FIRST}"], [f"completed {FIRST}"]],
    "preview-2017-03-01": [[], [f"scheduled {PREVIEW}"], [f"canceled {PREVIEW}"]],
    "rebalance-advisory": [[f"advised {ADVICE}"], [f"ended {ADVICE}"]],
    "terminate-2019-01-01": [
        [f"scheduled {TERMINATE}"],
        [f"started {TERMINATE}"],
        [f"completed {TERMINATE}"],
    ],
    "user-reboot": [[], [f"scheduled {SECOND}"], [f"ended {SECOND}"]],  # one incarnation was never seen
}


def recorded(name: str) -> list[Document]:
    path = next(path for path in RECORDED if path.stem == name)
    return [parse_document(json.dumps(each).encode()) for each in json.loads(path.read_text())["documents"]]


@pytest.mark.parametrize("name", [path.stem for path in RECORDED])
def test_a_recorded_life_has_the_expected_changes(name: str) -> None:
    documents = recorded(name)
    starts = [event.not_before for each in documents for event in each.events.values() if event.not_before]
    watcher = Watcher()
    watcher.at = min(starts, default=datetime.now(UTC)).timestamp() - 600
    assert [watcher.see(each) for each in documents] == EXPECTED[name]


def test_a_change_of_the_api_version_over_a_restart_is_an_update_at_most() -> None:
    def shown(version: str) -> bytes:
        return json.dumps(render_document(7, [entry(NotBefore=NOT_BEFORE)], version)).encode()

    watcher = Watcher(parse_document(shown("2017-03-01")))
    assert watcher.see(parse_document(shown("2020-07-01")), restarted=True) == [f"updated {FIRST}"]
    assert watcher.changes[0].changed == ("EventSource", "DurationInSeconds")
