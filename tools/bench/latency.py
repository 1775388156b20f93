"""From a change in IMDS to the webhook received, without the wait for the next poll."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import requests

from bridge.formats.cloudevents import CONTENT_TYPE
from bridge.forward.forwarder import Forwarder
from tools.bench import parts, simulators
from tools.bench.measure import BenchError, Progress, Row
from tools.bench.simulators import Remote

CHANGES = 300
WARM_UP = 15
SETTLE_SECONDS = 0.015
POST_SECONDS = 10.0
FIRST_SECONDS = 1000  # of the duration that each change lengthens
HOOK, BARE = "/hook", "/bare"


class _Sent(NamedTuple):
    answered_at: float
    posted_at: float
    synced_ms: float


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Change the document, poll, post the same body barely, and commit it barely; again and again."""
    progress.begin(f"latency: {CHANGES} changes, bare posts and bare commits, in turn")
    with simulators.imds() as imds, simulators.inbox() as inbox:
        sent = _changes(folder, imds, inbox, progress)
        received = _received(inbox)
    pairs = [*zip(sent, received, strict=True)][WARM_UP:]
    ours = 1000 * median(notice_at - one.answered_at for one, (notice_at, _) in pairs)
    bare = 1000 * median(bare_at - one.posted_at for one, (_, bare_at) in pairs)
    return [
        Row(
            "a change to its webhook / a bare requests.post, time",
            ours / bare,
            "x",
            f"medians {ours:.2f} and {bare:.2f} ms, {CHANGES} each, in turn; "
            "from IMDS's answer read to the inbox's receipt",
            limit=3.0,
        ),
        Row(
            "  beside it: a bare synced SQLite commit of the same",
            median(one.synced_ms for one, _ in pairs),
            "ms",
            "WAL, synchronous = FULL, the same file system; one such commit is in each change",
        ),
    ]


def _changes(folder: Path, imds: Remote, inbox: Remote, progress: Progress) -> list[_Sent]:
    """Do each thing in turn; return when, and how long each bare commit took."""
    event_id, base_url = simulators.freeze(imds), inbox("base_url")
    sent: list[_Sent] = []
    with (
        parts.forwarder(folder / "latency", imds("url", simulators.VM), base_url + HOOK) as (
            forwarder,
            client,
        ),
        requests.Session() as session,
    ):
        bodies = _first_bodies(forwarder, inbox)
        database = _bare_database(folder / "bare.db")
        for number in range(CHANGES + WARM_UP):
            imds("update", event_id, DurationInSeconds=FIRST_SECONDS + number)
            time.sleep(SETTLE_SECONDS)
            if forwarder.poll() is not None:
                raise BenchError(f"a poll failed: {forwarder.status().last_error}")
            time.sleep(SETTLE_SECONDS)
            posted_at = time.monotonic()
            session.post(
                base_url + BARE, bodies[0], headers={"Content-Type": CONTENT_TYPE}, timeout=POST_SECONDS
            )
            time.sleep(SETTLE_SECONDS)
            sent.append(_Sent(client.answers[-1], posted_at, _commit_ms(database, bodies)))
            progress.step(f"{number} of {CHANGES}")
        database.close()
        time.sleep(0.2)
    return sent


def _first_bodies(forwarder: Forwarder, inbox: Remote) -> list[bytes]:
    """Return what a change sends: the event, and the document."""
    forwarder.poll()
    time.sleep(0.5)
    bodies = [body for _, body in simulators.bodies(inbox, HOOK)]
    if len(bodies) != 2:
        raise BenchError(f"the first poll brought {len(bodies)} webhooks, not 2")
    return bodies


def _received(inbox: Remote) -> list[tuple[float, float]]:
    """Return when the notice of each change and each bare post was received."""
    notices: dict[int, float] = {}
    for at, body in simulators.bodies(inbox, HOOK)[2:]:
        data = json.loads(body)["data"]
        if "Document" not in data:
            notices.setdefault(data["DurationInSeconds"], at)
    bare = [at for at, _ in simulators.bodies(inbox, BARE)]
    expected = [*range(FIRST_SECONDS, FIRST_SECONDS + CHANGES + WARM_UP)]
    if sorted(notices) != expected or len(bare) != len(expected):
        raise BenchError(f"{len(notices)} of {len(expected)} changes and {len(bare)} posts arrived")
    return [*zip((notices[one] for one in expected), bare, strict=True)]


def _bare_database(path: Path) -> sqlite3.Connection:
    """Open SQLite and nothing else."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE event (body BLOB)")
    return database


def _commit_ms(database: sqlite3.Connection, bodies: list[bytes]) -> float:
    """Commit; return the milliseconds."""
    began = time.monotonic()
    database.execute("BEGIN IMMEDIATE")
    database.executemany("INSERT INTO event VALUES (?)", [(body,) for body in bodies])
    database.execute("COMMIT")
    return (time.monotonic() - began) * 1000
