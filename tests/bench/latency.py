"""From a change in IMDS to the webhook received, without the wait for the next poll."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import requests

from bridge.formats.cloudevents import CONTENT_TYPE
from bridge.service.forwarder import Forwarder
from tests.bench import parts, simulators
from tests.bench.measure import BenchError, Progress, Row
from tests.bench.simulators import Remote

CHANGES = 300
WARM_UP = 15
SETTLE_SECONDS = 0.015
POST_SECONDS = 10.0
FIRST_SECONDS = 1000  # of the duration that each change lengthens
HOOK, BARE = "/hook", "/bare"


class _Sent(NamedTuple):
    asked_at: float
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
    urgent = 1000 * median(notice_at - one.answered_at for one, (notice_at, _) in pairs)
    whole = 1000 * median(notice_at - one.asked_at for one, (notice_at, _) in pairs)
    bare = 1000 * median(bare_at - one.posted_at for one, (_, bare_at) in pairs)
    return [
        Row(
            name="a change to its webhook / a bare requests.post, time",
            measured=urgent / bare,
            unit="x",
            limit=3.0,
            how=f"medians {urgent:.2f} and {bare:.2f} ms, {CHANGES} each, in turn; "
            "from IMDS's answer read to the inbox's receipt",
        ),
        Row(
            name="  the same with the poll's own exchange, time",
            measured=whole / bare,
            unit="x",
            how=f"median {whole:.2f} ms from asking IMDS on: its simulator's time is in it",
        ),
        Row(
            name="  beside it: a bare synced SQLite commit of the same",
            measured=median(one.synced_ms for one, _ in pairs),
            unit="ms",
            how="WAL, synchronous = FULL, the same file system; one such commit is in each change",
        ),
    ]


def _changes(folder: Path, imds: Remote, inbox: Remote, progress: Progress) -> list[_Sent]:
    """Do each thing in turn; return when, and how long each bare commit took."""
    event_id = imds("schedule", event_type="Freeze", resources=[simulators.VM], notice_seconds=86_400)
    bare_url, sent = inbox("hook_url", BARE), []
    with (
        parts.forwarder(folder / "latency", imds("base_url"), inbox("hook_url", HOOK)) as (forwarder, client),
        requests.Session() as session,
    ):
        bodies = _first_bodies(forwarder, inbox)
        commit = _BareCommit(folder / "bare.db")
        for number in range(CHANGES + WARM_UP):
            imds("update", event_id, DurationInSeconds=FIRST_SECONDS + number)
            time.sleep(SETTLE_SECONDS)
            asked_at = time.monotonic()
            if forwarder.poll() is not None:
                raise BenchError(f"a poll failed: {forwarder.status()['last_error']}")
            time.sleep(SETTLE_SECONDS)
            posted_at = time.monotonic()
            session.post(bare_url, bodies[0], headers={"Content-Type": CONTENT_TYPE}, timeout=POST_SECONDS)
            time.sleep(SETTLE_SECONDS)
            sent.append(_Sent(asked_at, client.answers[-1], posted_at, commit(bodies)))
            progress.step(f"{number} of {CHANGES}")
        commit.close()
        time.sleep(0.2)
    return sent


def _first_bodies(forwarder: Forwarder, inbox: Remote) -> list[bytes]:
    """Return what a change sends: the event, and the document."""
    forwarder.poll()
    time.sleep(0.5)
    bodies: list[bytes] = inbox("bodies", HOOK)
    if len(bodies) != 2:
        raise BenchError(f"the first poll brought {len(bodies)} webhooks, not 2")
    return bodies


def _received(inbox: Remote) -> list[tuple[float, float]]:
    """Return when the notice of each change and each bare post was received."""
    notices: dict[int, float] = {}
    for at, event in inbox("arrivals", HOOK)[2:]:
        if "Document" not in event["data"]:
            notices.setdefault(event["data"]["DurationInSeconds"], at)
    bare = [at for at, _ in inbox("arrivals", BARE)]
    if sorted(notices) != [*range(FIRST_SECONDS, FIRST_SECONDS + CHANGES + WARM_UP)] or len(bare) != len(
        notices
    ):
        raise BenchError(f"{len(notices)} of {CHANGES + WARM_UP} changes and {len(bare)} posts arrived")
    return [*zip((notices[one] for one in sorted(notices)), bare, strict=True)]


class _BareCommit:
    """SQLite and nothing else."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("CREATE TABLE event (body BLOB)")

    def __call__(self, bodies: list[bytes]) -> float:
        """Commit; return the milliseconds."""
        began = time.monotonic()
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("INSERT INTO event VALUES (?)", [(body,) for body in bodies])
        self._connection.execute("COMMIT")
        return (time.monotonic() - began) * 1000

    def close(self) -> None:
        self._connection.close()
