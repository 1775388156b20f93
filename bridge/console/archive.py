"""`console import` and `console export`: make a store again of an archive, and of what only the console knew."""

from __future__ import annotations

import sqlite3
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import chain, repeat
from operator import attrgetter
from pathlib import Path

from bridge.console import expected
from bridge.console.received import EXPECTED, OF_PEOPLE, OWN_PREFIX, Received, own_event, read_event
from bridge.console.store import VERSION, Store, connect_to_read
from bridge.console.tables import get_meta
from bridge.contract.types import TYPE_PREFIX
from bridge.errors import StateError
from bridge.events.envelope import check_event, decoder
from bridge.runtime.json import read_object

BATCH_EVENTS = 1000  # are committed at a time
MAX_FAULTS = 10  # are told; the others are counted
_LISTED = """
SELECT vm.name, resource_id, scale_set, zone, location, tagged.tags
FROM vm JOIN scope ON scope.id = vm.scope JOIN tagged ON tagged.id = vm.tags WHERE {}
ORDER BY natural, vm.id
"""
_OWN = "SELECT body FROM event WHERE kind IN (?, ?, ?) ORDER BY n"


def import_events(
    store: Store,
    lines: Iterable[tuple[str, bytes]],
    *,
    own: Iterable[tuple[str, bytes]] = (),
    now: float,
    tell: Callable[[str], None],
) -> Counter[str]:
    """Add the events of archives and exports, each as if it had arrived at its own time.

    Args:
        store: may have some of them.
        lines: where each is, and a CloudEvent; what only a console writes is ignored: anybody may send an archive.
        own: the same of files that a console has exported.
        now: seconds since 1970, the time of events that have none.
        tell: is given what is wrong with the first lines that cannot be read; the others are added all the same.

    Returns:
        How many lines were `new`, `known`, `ignored` (of other programs) and `unreadable`.

    Raises:
        sqlite3.Error: as of `Store.add`; what was added before stays.
    """
    counts = Counter[str]()
    batch, notes, lists = list[Received](), list[Received](), list[Received]()
    for (place, line), is_own in chain(zip(lines, repeat(False)), zip(own, repeat(True))):
        try:
            event = _read(line, now, is_own=is_own) if line.strip() else None
        except ValueError as error:
            counts["unreadable"] += 1
            if counts["unreadable"] <= MAX_FAULTS:
                tell(f"{place}: {error}")
            continue
        if event is None:
            counts["ignored"] += 1
        else:
            kept = lists if event.kind == EXPECTED else notes if event.kind in OF_PEOPLE else batch
            kept.append(event)
        if len(batch) == BATCH_EVENTS:
            _add(store, batch, counts)
            batch = []
    # Only what is known can be put away, and who has left a list is remembered of VMs that were heard alone.
    for events in (batch, notes, sorted(lists, key=attrgetter("at"))):
        _add(store, events, counts)
    return counts


def _read(line: bytes, now: float, *, is_own: bool) -> Received | None:
    """Read one line; None if it is no event of imds-bridge.

    Raises:
        ValueError: it is not a CloudEvent.
    """
    body = line.strip().removeprefix(BOM_UTF8)  # as programs of Windows begin a file
    # an export has more of each expected VM than the list that was sent
    given = read_object(body, max_bytes=len(body), decoder=decoder)
    check_event(given)
    if not given["type"].startswith(TYPE_PREFIX) or (not is_own and given["type"].startswith(OWN_PREFIX)):
        return None
    event = read_event(given, body, now=now)
    if event.kind == EXPECTED:
        expected.check(event.data.get("Vms"))
    return event


def _add(store: Store, events: list[Received], counts: Counter[str]) -> None:
    added = store.add(events, received_at=None)
    counts["known"] += added.repeated
    counts["new"] += len(events) - added.repeated


def export_own(path: Path) -> Iterator[bytes]:
    """Yield what no archive has, an event in each line: the list of expected VMs, and what people have put away.

    The console that writes the store may run.

    Raises:
        StateError: there is no store of this version.
    """
    try:
        with closing(connect_to_read(path)) as store:
            version = store.execute("PRAGMA user_version").fetchone()[0]
            if version != VERSION:
                raise StateError(f"{path} is of another version; start this version's console on it once")
            store.execute("BEGIN")
            listed_at = get_meta(store, "listed_at")
            for wanted in ("expected <> 0", "expected = 1") if listed_at else ():  # who has left it was on it
                vms = [*map(_listed, store.execute(_LISTED.format(wanted)))]
                yield own_event(EXPECTED, {"Vms": vms}, now=listed_at).body
            yield from (body for (body,) in store.execute(_OWN, OF_PEOPLE))
    except sqlite3.Error as error:
        raise StateError(f"{path} cannot be read: {error}") from error


def _listed(row: tuple[str, ...]) -> dict[str, object]:
    name, resource_id, scale_set, zone, location, tags = row
    pairs = (line.partition("=") for line in tags.split("\n") if line)
    return {
        "Name": name,
        "ResourceId": resource_id,
        "ScaleSet": scale_set or None,
        "Zone": zone or None,
        "Location": location or None,
        "Tags": {tag: value for tag, _, value in pairs} or None,
    }
