"""From a change in IMDS to the webhook received, without the wait for the next poll."""

from __future__ import annotations

import sqlite3
import statistics
import time
from pathlib import Path
from typing import Any

import requests

from bridge.formats.cloudevents import CONTENT_TYPE
from tests.bench import parts, simulators
from tests.bench.measure import BenchError, Progress, Row, ratios, spread
from tests.bench.simulators import Remote

CHANGES = 300
WARM_UP = 15
SETTLE_SECONDS = 0.015
POST_SECONDS = 10.0
HOOK, BARE = "/hook", "/bare"


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Change the document, poll, post the same body barely, and commit it barely; again and again."""
    progress.begin(f"latency: {CHANGES} changes, bare posts and bare commits, in turn")
    with simulators.imds() as imds, simulators.inbox() as inbox:
        run = _Run(folder, imds, inbox)
        run.measure(progress)
    return run.rows()


class _Run:
    def __init__(self, folder: Path, imds: Remote, inbox: Remote) -> None:
        self._folder = folder
        self._imds = imds
        self._inbox = inbox
        self._bare_url = inbox("hook_url", BARE)
        self._asked_at: dict[int, float] = {}
        self._answered_at: dict[int, float] = {}
        self._posted_at: list[float] = []
        self._synced_ms: list[float] = []
        self._urgent_ms: list[float] = []
        self._whole_ms: list[float] = []
        self._last_ms: list[float] = []
        self._bare_ms: list[float] = []

    def measure(self, progress: Progress) -> None:
        imds, inbox = self._imds, self._inbox
        event_id = imds("schedule", event_type="Freeze", resources=[simulators.VM], notice_seconds=86_400)
        with (
            parts.forwarder(self._folder / "latency", imds("base_url"), inbox("hook_url", HOOK)) as (
                forwarder,
                client,
            ),
            requests.Session() as session,
        ):
            bodies = self._first_bodies(forwarder)
            commit = _BareCommit(self._folder / "bare.db")
            for number in range(-WARM_UP, CHANGES):
                imds("update", event_id, DurationInSeconds=1000 + number)
                time.sleep(SETTLE_SECONDS)
                self._asked_at[number] = time.monotonic()
                if forwarder.poll() is not None:
                    raise BenchError(f"a poll failed: {forwarder.status()['last_error']}")
                self._answered_at[number] = client.answers[-1]
                time.sleep(SETTLE_SECONDS)
                self._post(session, bodies[0])
                time.sleep(SETTLE_SECONDS)
                self._synced_ms.append(commit(bodies))
                progress.step(f"{number} of {CHANGES}")
            commit.close()
            time.sleep(0.2)
            self._collect()

    def _first_bodies(self, forwarder: Any) -> list[bytes]:
        """Return what a change sends: the event, and the document."""
        forwarder.poll()
        time.sleep(0.5)
        bodies: list[bytes] = self._inbox("bodies", HOOK)
        if len(bodies) != 2:
            raise BenchError(f"the first poll brought {len(bodies)} webhooks, not 2")
        return bodies

    def _post(self, session: requests.Session, body: bytes) -> None:
        self._posted_at.append(time.monotonic())
        session.post(self._bare_url, data=body, headers={"Content-Type": CONTENT_TYPE}, timeout=POST_SECONDS)

    def _collect(self) -> None:
        """Match what was received with what was sent."""
        urgent: dict[int, float] = {}
        whole: dict[int, float] = {}
        for at, event in self._inbox("arrivals", HOOK)[2:]:
            data = event["data"]
            shown, known = (data["Document"]["Events"][0], whole) if "Document" in data else (data, urgent)
            known.setdefault(shown["DurationInSeconds"] - 1000, at)
        bare = [at for at, _ in self._inbox("arrivals", BARE)]
        if len(urgent) != CHANGES + WARM_UP or urgent.keys() != whole.keys() or len(bare) != len(urgent):
            raise BenchError(f"{len(urgent)} of {CHANGES + WARM_UP} changes and {len(bare)} posts arrived")
        for number in range(CHANGES):
            self._urgent_ms.append((urgent[number] - self._answered_at[number]) * 1000)
            self._whole_ms.append((urgent[number] - self._asked_at[number]) * 1000)
            self._last_ms.append((whole[number] - self._answered_at[number]) * 1000)
        sent = zip(self._posted_at[WARM_UP:], bare[WARM_UP:], strict=True)
        self._bare_ms = [(received_at - posted_at) * 1000 for posted_at, received_at in sent]
        self._synced_ms = self._synced_ms[WARM_UP:]

    def rows(self) -> list[Row]:
        urgent, whole, bare, synced = (
            statistics.median(values)
            for values in (self._urgent_ms, self._whole_ms, self._bare_ms, self._synced_ms)
        )
        return [
            Row(
                name="a change to its webhook / a bare requests.post, time",
                measured=urgent / bare,
                unit="x",
                limit=3.0,
                how=f"medians {urgent:.2f} and {bare:.2f} ms, {CHANGES} each, in turn; "
                "from IMDS's answer read to the inbox's receipt",
                details={
                    "ours_ms": spread(self._urgent_ms),
                    "bare_post_ms": spread(self._bare_ms),
                    "document_event_received_ms": spread(self._last_ms),
                    "ratio_by_block": ratios(self._urgent_ms, self._bare_ms),
                },
            ),
            Row(
                name="  the same with the poll's own exchange, time",
                measured=whole / bare,
                unit="x",
                how=f"median {whole:.2f} ms from asking IMDS on: its simulator's time is in it",
                details={"ours_ms": spread(self._whole_ms)},
            ),
            Row(
                name="  beside it: a bare synced SQLite commit of the same",
                measured=synced,
                unit="ms",
                how="WAL, synchronous = FULL, the same file system; one such commit is in each change",
                details={"commit_ms": spread(self._synced_ms)},
            ),
        ]


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
